"""The `ringlog` command. Modules of commands are imported only when their command runs."""

from __future__ import annotations

from collections.abc import Sequence


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command line (default: that of the process) and return its exit code; see cli/outcome.py."""
    from ringlog.cli.app import run

    return run(arguments)


__all__ = ["main"]
