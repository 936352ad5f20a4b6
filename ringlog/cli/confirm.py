"""Confirmation of operations that cannot be undone."""

from __future__ import annotations

import sys

from ringlog.errors import UsageError


def needs_confirmation(*, yes: bool) -> bool:
    """Return whether to ask: on a terminal without --yes. Raise UsageError without both."""
    if yes:
        return False
    if sys.stdin.isatty() and sys.stderr.isatty():
        return True
    raise UsageError("this cannot be undone: without a terminal it needs --yes; nothing was changed")


def require_confirmation(question: str) -> None:
    """Ask a question on the terminal; raise UsageError unless the answer is yes."""
    print(f"{question} [y/N] ", end="", file=sys.stderr, flush=True)
    if sys.stdin.readline().strip().lower() not in {"y", "yes"}:
        raise UsageError("not confirmed; nothing was changed")


def counted(count: int, noun: str) -> str:
    """Format a count with a noun: `1 record`, `1,204 records`."""
    return f"{count:,} {noun}" + ("" if count == 1 else "s")
