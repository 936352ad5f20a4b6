"""The client: connect, append, produce, read."""
