"""Metrics of a shard: its queues, consumer groups and load."""
