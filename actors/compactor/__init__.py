"""The compactor: turns closed log files into segments, and writes the snapshots of the shards."""
