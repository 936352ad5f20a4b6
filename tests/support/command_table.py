"""Every command of the command line, for tests of all of them."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from cyclopts import App

from ringlog.cli.app import build
from ringlog.cli.commands import COMMANDS, Command


def table() -> Iterator[tuple[tuple[str, ...], Command]]:
    """Yield every command of the table with its words."""
    for commands in COMMANDS.values():
        for name, command in commands.items():
            if isinstance(command, Command):
                yield (name,), command
            else:
                yield from (((name, inner), each) for inner, each in command.commands.items())


def resolved(words: tuple[str, ...]) -> App:
    app = build()
    for word in words:
        app = app[word]
    return app


EVERY = pytest.mark.parametrize(
    ("words", "command"), [pytest.param(*row, id=" ".join(row[0])) for row in table()]
)
