"""Requests that arrive by socket or call ring."""
