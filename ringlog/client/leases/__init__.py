"""Leases: operations of workers and group members on jobs and records."""
