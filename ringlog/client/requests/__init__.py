"""Requests about topics and routers, what they take and what they return."""
