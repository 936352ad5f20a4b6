"""Programs for developers of ringlog."""
