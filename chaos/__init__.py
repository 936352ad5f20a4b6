"""Rigs that try to break ringlog: crash states, fuzzing."""

from __future__ import annotations

import os

from ringlog import cores

# What is swept line by line, instrumented or given other parts is the source. Engines run what was compiled
# of it, as they do for everybody, and so do clients in processes of their own (`ringlog.testing.children`).
os.environ.setdefault(cores.VARIABLE, cores.ACTORS_ONLY)
