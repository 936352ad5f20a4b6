"""Requests that reach a shard by socket or call ring."""
