"""A file system in memory for one process and its children alone: it vanishes with them, however they end."""

from __future__ import annotations

import functools
import subprocess
import tempfile

_MOUNT = 'mount -t tmpfs -o mode=1777 ringlog-chaos "$0" && exec "$@"'


@functools.cache
def _is_allowed() -> bool:
    with tempfile.TemporaryDirectory(prefix="ringlog-chaos-") as path:
        try:
            done = subprocess.run([*_words(path), "true"], capture_output=True, timeout=60, check=False)
        except (OSError, subprocess.TimeoutExpired):
            return False
    return done.returncode == 0


def in_memory(path: str) -> tuple[str, ...]:
    """Words before a command that put what it has below `path` in memory; none where that is not allowed."""
    return _words(path) if _is_allowed() else ()


def _words(path: str) -> tuple[str, ...]:
    return "unshare", "--mount", "--propagation", "private", "sh", "-c", _MOUNT, path
