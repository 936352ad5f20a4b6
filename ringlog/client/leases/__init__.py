"""Leases: what workers and group members do with jobs and records."""
