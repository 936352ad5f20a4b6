"""From the files of a data directory to a shard that serves."""
