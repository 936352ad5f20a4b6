"""Watches: reading many topics at once."""
