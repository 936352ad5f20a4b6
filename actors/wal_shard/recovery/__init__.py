"""Recovery of a shard from the files of a data directory."""
