"""The command table, and how one command line is run.

A command is a function in a module of its own, loaded when it is called. It gets `Options` besides its
own arguments, prints its result and returns an exit code (None = done). Errors end here, as one line.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from typing import Annotated, Any

from cyclopts import App, CycloptsError, Parameter

from ringlog import __version__
from ringlog.cli.options import Options, choose_format, wants_color
from ringlog.cli.outcome import Exit, exit_for, line_for
from ringlog.cli.places import parse_timeout
from ringlog.descriptors import open_standard_descriptors
from ringlog.errors import UsageError

_COMMANDS: dict[str, str] = {
    "serve": "ringlog.cli.serve:serve",
    "status": "ringlog.cli.status:status",
    "metrics": "ringlog.cli.metrics:metrics",
    "write": "ringlog.cli.write:write",
    "read": "ringlog.cli.read:read",
    "tail": "ringlog.cli.read:tail",
    "delete": "ringlog.cli.delete:delete",
    "worker": "ringlog.cli.worker:worker",
    "put": "ringlog.cli.jobs:put",
    "claim": "ringlog.cli.jobs:claim",
    "ack": "ringlog.cli.jobs:ack",
    "nack": "ringlog.cli.jobs:nack",
    "extend": "ringlog.cli.jobs:extend",
    "reject": "ringlog.cli.jobs:reject",
    "peek": "ringlog.cli.jobs:peek",
    "verify": "ringlog.cli.verify:verify",
    "inspect": "ringlog.cli.inspect:inspect",
    "repair": "ringlog.cli.repair:repair",
    "backup": "ringlog.cli.backup:backup",
    "restore": "ringlog.cli.restore:restore",
    "checkpoint": "ringlog.cli.passes:checkpoint",
    "scrub": "ringlog.cli.passes:scrub",
    "chaos": "ringlog.cli.chaos:chaos",
    "doctor": "ringlog.cli.doctor:doctor",
    "version": "ringlog.cli.version:version",
}
_GROUPS: dict[str, tuple[str, dict[str, str]]] = {
    "topic": (
        "List, make, show, change and delete topics.",
        {
            "list": "ringlog.cli.topic:list_topics",
            "create": "ringlog.cli.topic:create",
            "show": "ringlog.cli.topic:show",
            "set": "ringlog.cli.topic:configure",
            "delete": "ringlog.cli.topic:delete",
        },
    ),
    "queue": (
        "How queues stand, and emptying them.",
        {
            "stats": "ringlog.cli.queue:stats",
            "pending": "ringlog.cli.queue:pending",
            "purge": "ringlog.cli.queue:purge",
        },
    ),
    "dead": (
        "Dead letters: jobs that were given up.",
        {
            "list": "ringlog.cli.dead:list_letters",
            "show": "ringlog.cli.dead:show",
            "redrive": "ringlog.cli.dead:redrive",
            "purge": "ringlog.cli.dead:purge",
        },
    ),
    "group": (
        "Consumer groups: how far they are, and moving them.",
        {
            "list": "ringlog.cli.group:list_groups",
            "show": "ringlog.cli.group:show",
            "lag": "ringlog.cli.group:lag",
            "pending": "ringlog.cli.group:pending",
            "seek": "ringlog.cli.group:seek",
            "reset": "ringlog.cli.group:reset",
            "delete": "ringlog.cli.group:delete",
        },
    ),
    "router": (
        "List, make, show and delete routers.",
        {
            "list": "ringlog.cli.router:list_routers",
            "create": "ringlog.cli.router:create",
            "get": "ringlog.cli.router:show",
            "delete": "ringlog.cli.router:delete",
        },
    ),
    "bench": (
        "Measure an engine through the public client, and this machine beside it.",
        {
            "append": "ringlog.cli.bench:append",
            "read": "ringlog.cli.bench:read",
            "ring": "ringlog.cli.bench:ring",
            "sync": "ringlog.cli.bench:sync",
        },
    ),
    "spark": (
        "Jobs on Spark: archive, verify and move whole topics (extra `spark`).",
        {
            name: f"ringlog.cli.spark:{name}"
            for name in (
                "archive",
                "verify",
                "replay",
                "backfill",
                "compact",
                "stats",
                "mirror",
                "recover",
            )
        },
    ),
    "config": (
        "Show and check settings.",
        {
            "show": "ringlog.cli.settings:show",
            "check": "ringlog.cli.settings:check",
            "env": "ringlog.cli.settings:env",
        },
    ),
}


def build() -> App:
    """The command line as data; modules of commands are not loaded by this."""
    app = _group("ringlog", "A durable event log on one host.")
    app.version = __version__
    for name, target in _COMMANDS.items():
        app.command(target, name=name)
    for name, (help_text, commands) in _GROUPS.items():
        group = _group(name, help_text)
        for inner, target in commands.items():
            group.command(target, name=inner)
        app.command(group)
    return app


def _group(name: str, help_text: str) -> App:
    return App(
        name=name, help=help_text, help_format="plaintext", result_action="return_value",
        suppress_keyboard_interrupt=False,
    )  # fmt: skip


def run(arguments: Sequence[str] | None = None) -> int:
    """Run one command line; returns the exit code and has printed everything, errors included."""
    open_standard_descriptors()
    try:
        code = _run(sys.argv[1:] if arguments is None else list(arguments))
        sys.stdout.flush()
        return code
    except BrokenPipeError:
        # Whoever read us has gone, as `head` does; the interpreter must not fail on its last flush.
        os.dup2(os.open(os.devnull, os.O_RDONLY), sys.stdout.fileno())
        return Exit.DONE
    except CycloptsError as e:
        return _fail(UsageError(" ".join(str(e).split())))
    except KeyboardInterrupt as e:
        return _fail(e)
    except Exception as e:  # noqa: BLE001  whatever it was, a person gets one line and a script a code
        return _fail(e)


def _fail(error: BaseException) -> int:
    if not isinstance(error, KeyboardInterrupt):
        print(line_for(error), file=sys.stderr)
    return exit_for(error)


def _run(tokens: list[str]) -> int:
    app = build()
    result: list[Any] = []

    def launch(
        *tokens: Annotated[str, Parameter(show=False, allow_leading_hyphen=True)],
        url: str | None = None,
        key_file: str | None = None,
        timeout: str = "10s",
        output: str | None = None,
        quiet: Annotated[bool, Parameter(negative=())] = False,
        no_color: Annotated[bool, Parameter(negative=())] = False,
    ) -> None:
        """Options of every command.

        Parameters
        ----------
        url
            Engine to talk to: ringlog:///run/directory or ringlog://host:port (default: RINGLOG_URL).
        key_file
            Key file of this client, for engines reached by TCP.
        timeout
            How long to wait for an answer.
        output
            table, json, ndjson or raw (default: table on a terminal, else ndjson).
        quiet
            No progress and no remarks.
        no_color
            Plain text.
        """
        is_colored = wants_color(no_color=no_color)
        options = Options(url, key_file, parse_timeout(timeout), choose_format(output), quiet, is_colored)
        result.append(_dispatch(app, tokens, options))

    app.meta.default(launch)
    app.meta(tokens, exit_on_error=False, print_error=False, result_action="return_value")
    return int(result[0] or 0) if result else Exit.DONE


def _dispatch(app: App, tokens: Sequence[str], options: Options) -> Any:
    command, bound, ignored = app.parse_args(list(tokens), exit_on_error=False, print_error=False)
    given = {"options": options} if "options" in ignored else {}
    return command(*bound.args, **bound.kwargs, **given)
