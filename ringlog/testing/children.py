"""Processes that a test starts: engines, and clients that it kills, interrupts or ends in unusual ways."""

from __future__ import annotations

import os
from collections.abc import Mapping

from ringlog import environment


def package_environ(environ: Mapping[str, str] = os.environ) -> dict[str, str]:
    """Return `environ` for a process that imports the package under test.

    RINGLOG_TEST_PACKAGE names the directory of a compiled build. Without it the process imports what this
    one imports.
    """
    package = os.environ.get(environment.TEST_PACKAGE, "")
    if not package:
        return dict(environ)
    path = os.pathsep.join(filter(None, (package, environ.get("PYTHONPATH", ""))))
    return {**environ, "PYTHONPATH": path, "PYTHONSAFEPATH": "1"}


def debug_environ() -> dict[str, str]:
    """Return the environment of a client process.

    Freed memory is overwritten, a crash prints a traceback, and the client is compiled if the run names a
    compiled build.
    """
    return {**package_environ(), "PYTHONMALLOC": "debug", "PYTHONFAULTHANDLER": "1"}
