"""What a shard counts and publishes about its queues, groups and load."""
