"""Rigs that try to break ringlog: crash states, fuzzing."""

from __future__ import annotations

import os

from ringlog import cores

# What is swept line by line, instrumented or given other parts is the source. Engines run what was compiled
# of it, as they do for everybody, and so do clients in processes of their own (`as_users_run`).
os.environ.setdefault(cores.VARIABLE, cores.ACTORS_ONLY)


def as_users_run() -> dict[str, str]:
    """The environment for a process that is a client like any other."""
    wish = os.environ[cores.VARIABLE]
    return {**os.environ, cores.VARIABLE: "1" if wish == cores.ACTORS_ONLY else wish}
