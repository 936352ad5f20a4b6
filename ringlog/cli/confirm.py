"""Asking before something is done that cannot be undone."""

from __future__ import annotations

import sys

from ringlog.errors import UsageError


def must_ask(*, yes: bool) -> bool:
    """Whether to ask: on a terminal, unless --yes is given. Raises UsageError where there is no terminal."""
    if yes:
        return False
    if sys.stdin.isatty() and sys.stderr.isatty():
        return True
    raise UsageError("this cannot be undone: without a terminal it needs --yes; nothing was changed")


def ask(question: str) -> None:
    """Ask on the terminal; raises UsageError unless the answer is yes."""
    print(f"{question} [y/N] ", end="", file=sys.stderr, flush=True)
    if sys.stdin.readline().strip().lower() not in {"y", "yes"}:
        raise UsageError("not confirmed; nothing was changed")


def counted(count: int, noun: str) -> str:
    """`1 record`, `1,204 records`."""
    return f"{count:,} {noun}" + ("" if count == 1 else "s")
