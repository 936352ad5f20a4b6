"""Asking before something is done that has no way back."""

from __future__ import annotations

import sys


def is_confirmed(question: str) -> bool:
    """Ask on a terminal; elsewhere whoever wrote the command line meant it."""
    if not (sys.stdin.isatty() and sys.stderr.isatty()):
        return True
    print(f"{question} [y/N] ", end="", file=sys.stderr, flush=True)
    return sys.stdin.readline().strip().lower() in {"y", "yes"}
