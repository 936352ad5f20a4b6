"""Shared-memory channels of one client: frames, calls, grants."""
