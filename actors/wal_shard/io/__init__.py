"""I/O of the shard: log files, rings and helper threads."""
