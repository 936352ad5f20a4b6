"""Forwarding: routers, dead letters and their redrive."""
