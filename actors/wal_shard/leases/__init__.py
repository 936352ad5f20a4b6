"""Leases of queues and consumer groups."""
