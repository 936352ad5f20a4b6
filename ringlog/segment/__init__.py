"""Segments: closed log, sorted by topic, with an index. After creation only deletion marks change (S6)."""
