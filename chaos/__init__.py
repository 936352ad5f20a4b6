"""Fault injection: fault classes, the plans that run them, and the checkers that judge the results."""

from __future__ import annotations

import os

from ringlog import cores

# The harness sweeps, instruments and replaces parts of the Python source, so it imports the source. Engines,
# and clients in their own processes (`ringlog.testing.children`), run the compiled modules as in production.
os.environ.setdefault(cores.VARIABLE, cores.ACTORS_ONLY)
