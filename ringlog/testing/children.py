"""Client processes that a test starts in order to kill or interrupt them, or to end them in unusual ways."""

from __future__ import annotations

import os

from ringlog import cores


def debug_environ() -> dict[str, str]:
    """Return the environment of such a process.

    Freed memory is overwritten, a crash prints a traceback, and the client runs compiled if it can, as for
    users.
    """
    wish = os.environ.get(cores.VARIABLE, cores.ACTORS_ONLY)
    compiled = "1" if wish == cores.ACTORS_ONLY else wish
    return {**os.environ, "PYTHONMALLOC": "debug", "PYTHONFAULTHANDLER": "1", cores.VARIABLE: compiled}
