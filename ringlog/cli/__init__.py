"""The `ringlog` command. Nothing is loaded before it is known which command is wanted."""

from __future__ import annotations

from collections.abc import Sequence


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command line (default: the process's own) and return its exit code; see cli/outcome.py."""
    from ringlog.cli.app import run

    return run(arguments)


__all__ = ["main"]
