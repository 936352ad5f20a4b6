"""Runs one command line. The table of commands is in commands.py.

A command is a function in its own module, which is imported when the command runs. It receives `Options` in
addition to its own arguments, prints its result and returns an exit code (None: success). This module catches
all exceptions and prints each as one line.
"""

from __future__ import annotations

import inspect
import os
import re
import sys
import textwrap
from collections.abc import Callable, Sequence
from typing import Annotated, Any

from cyclopts import App, CycloptsError, Parameter
from cyclopts import Group as CliGroup
from cyclopts.command_spec import CommandSpec

from ringlog import __version__
from ringlog.cli.commands import COMMANDS, Command, CommandGroup
from ringlog.cli.option_parsing import check_argument, parse_timeout
from ringlog.cli.options import Options, choose_format, wants_color
from ringlog.cli.outcome import CliExit, cli_exit_code, error_line
from ringlog.descriptors import open_standard_descriptors
from ringlog.errors import UsageError

_EXAMPLES = re.compile(r"^ *Examples\n *-+\n", re.MULTILINE)
"""Heading of the docstring section that help shows at its end."""
_GLOBAL = CliGroup("Global options", sort_key=100)


class LazyCommand(CommandSpec):
    """A command that is imported when it runs. Until then its help is the line in the table."""

    def resolve(self, parent_app: App) -> App:
        """Import the command. From then on its help is its complete docstring."""
        if self.is_resolved:
            return super().resolve(parent_app)
        app = super().resolve(parent_app)
        text, *examples = _EXAMPLES.split(inspect.getdoc(app.default_command) or "", maxsplit=1)
        app.help = text.rstrip()
        if examples:
            app.help_epilogue = "Examples:\n" + textwrap.indent(examples[0].rstrip(), "  ")
        return app


def build() -> App:
    """Build the command line parser without importing modules of commands."""
    app = _app("ringlog", "A durable event log and job queue on one host.")
    for place, (section, commands) in enumerate(COMMANDS.items()):
        group = CliGroup(section, sort_key=place)
        for at, (name, command) in enumerate(commands.items()):
            if isinstance(command, Command):
                _register(app, name, command, at, group)
                continue
            app.command(_app_of(command, name, sort_key=at, group=group))
            if command.alias:
                app.command(_app_of(command, command.alias, show=False))
    for flag in (*app.help_flags, *app.version_flags):
        app[flag].group = _GLOBAL
    app.meta.default(_launcher(app))
    return app


def _app(name: str, help_text: str, **more: Any) -> App:
    return App(
        name=name, help=help_text, help_format="plaintext", result_action="return_value",
        suppress_keyboard_interrupt=False, version=__version__, version_flags=["--version", "-V"],
        default_parameter=Parameter(show_default=_shown_default, validator=check_argument), **more,
    )  # fmt: skip


def _app_of(commands: CommandGroup, name: str, **more: Any) -> App:
    app = _app(name, commands.help, **more)
    for at, (inner, command) in enumerate(commands.commands.items()):
        _register(app, inner, command, at)
    return app


def _shown_default(value: Any) -> Any:
    """Return the default for the help text; None hides an empty default."""
    return None if value is False or value in (None, "", ()) else str(value)


def _register(app: App, name: str, command: Command, place: int, group: CliGroup | None = None) -> None:
    def spec(name: str, *, show: bool) -> LazyCommand:
        return LazyCommand(
            command.import_path, name, help=command.help, sort_key=place, group=group, show=show
        )

    # cyclopts replaces the docstring of a lazy command by the line in the table. LazyCommand keeps it.
    app._commands[name] = spec(name, show=True)
    if command.alias:
        app._commands[command.alias] = spec(command.alias, show=False)


def run(arguments: Sequence[str] | None = None) -> int:
    """Run one command line, print its results and errors, and return its exit code."""
    open_standard_descriptors()
    try:
        code = _run(sys.argv[1:] if arguments is None else list(arguments))
        sys.stdout.flush()
        return code
    except BrokenPipeError:
        # The reader of the pipe has exited, as `head` does. The interpreter's last flush must not fail.
        os.dup2(os.open(os.devnull, os.O_RDONLY), sys.stdout.fileno())
        return CliExit.DONE
    except CycloptsError as e:
        return _fail(UsageError(" ".join(str(e).split())))
    except KeyboardInterrupt as e:
        return _fail(e)
    except Exception as e:  # noqa: BLE001  whatever it was, a person gets one line and a script a code
        return _fail(e)


def _fail(error: BaseException) -> int:
    if not isinstance(error, KeyboardInterrupt):
        print(error_line(error), file=sys.stderr)
    return cli_exit_code(error)


def _run(tokens: list[str]) -> int:
    found = build().meta(tokens, exit_on_error=False, print_error=False, result_action="return_value")
    return found if isinstance(found, int) else CliExit.DONE


def _launcher(app: App) -> Callable[..., Any]:
    """Return a function that parses the global options, at any position, and runs the command."""

    def launch(
        *tokens: Annotated[str, Parameter(show=False, allow_leading_hyphen=True, validator=())],
        url: Annotated[str | None, Parameter(group=_GLOBAL)] = None,
        key_file: Annotated[str | None, Parameter(group=_GLOBAL)] = None,
        timeout: Annotated[str, Parameter(group=_GLOBAL)] = "10s",
        output: Annotated[str | None, Parameter(group=_GLOBAL)] = None,
        quiet: Annotated[bool, Parameter(group=_GLOBAL, negative=())] = False,
        no_color: Annotated[bool, Parameter(group=_GLOBAL, negative=())] = False,
    ) -> int:
        """Options of every command.

        Parameters
        ----------
        url
            URL of the engine: ringlog:///run/directory or ringlog://host:port (default: RINGLOG_URL).
        key_file
            Key file of this client, for engines reached by TCP.
        timeout
            Maximum time to wait for a reply: 10s, 500ms.
        output
            Output format: table, json, ndjson or raw (default: table on a terminal, else ndjson).
        quiet
            Suppress progress and warnings.
        no_color
            Print plain text without colors.
        """
        is_colored = wants_color(no_color=no_color)
        options = Options(
            url, key_file, parse_timeout(timeout, "--timeout"), choose_format(output), quiet, is_colored
        )
        return int(_dispatch(app, tokens, options) or 0)

    return launch


def _dispatch(app: App, tokens: Sequence[str], options: Options) -> Any:
    command, bound, ignored = app.parse_args(list(tokens), exit_on_error=False, print_error=False)
    given = {"options": options} if "options" in ignored else {}
    return command(*bound.args, **bound.kwargs, **given)
