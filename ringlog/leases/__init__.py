"""Leases of queues and consumer groups: the exclusive right of one worker to one record until a deadline.

Pure.
"""
