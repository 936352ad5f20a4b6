"""The shard's files, rings and threads."""
