"""Deletes, caps, expiry, and the shard's part of checkpoints."""
