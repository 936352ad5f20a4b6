"""Benchmarks: one file per question, each against a floor or a peer measured in the same run."""
