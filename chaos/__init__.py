"""Rigs that try to break ringlog: crash states, fuzzing."""
