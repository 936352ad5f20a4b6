"""Writing: from records to frames, and from frames to acknowledgements."""
