"""Benchmarks: one file per question. Each result is compared with a floor or a peer of the same run."""
