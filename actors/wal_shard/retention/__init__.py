"""Deletes, caps, expiry, and the shard's side of checkpoints."""
