"""From frames that came in to batches that are committed."""
