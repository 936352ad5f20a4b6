"""Leases of queues and consumer groups: who works on which record, and until when. Pure."""
