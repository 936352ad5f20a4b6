"""Requests about topics and routers, their arguments and their results."""
