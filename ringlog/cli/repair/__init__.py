"""`ringlog repair`: build a repaired copy of a damaged data directory."""
