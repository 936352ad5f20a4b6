"""Client processes that a test starts to have them killed, interrupted, or ended in some odd way."""

from __future__ import annotations

import os

from ringlog import cores


def debug_environ() -> dict[str, str]:
    """Their environment: memory that is freed is overwritten, a crash says where it was, and the client is
    compiled where it can be, as users run it."""
    wish = os.environ.get(cores.VARIABLE, cores.ACTORS_ONLY)
    compiled = "1" if wish == cores.ACTORS_ONLY else wish
    return {**os.environ, "PYTHONMALLOC": "debug", "PYTHONFAULTHANDLER": "1", cores.VARIABLE: compiled}
