"""Segments: closed log, sorted by topic, with an index. Written once; only deletion marks change."""
