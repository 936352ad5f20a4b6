"""Shared parts of classes `jobs` and `groups`: clients that lease records, kills, and the lease checker."""
