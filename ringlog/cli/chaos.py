"""`ringlog chaos`: kill an engine's processes under load, and see whether it kept its promises."""

from __future__ import annotations

import importlib
import os
import sys
from typing import Annotated, Any

from cyclopts import Parameter

from ringlog import environment
from ringlog.cli.options import Options
from ringlog.cli.outcome import Exit
from ringlog.cli.output import Format, Printer
from ringlog.cli.places import parse_timeout
from ringlog.errors import UsageError

SHOWN_MAX = 20


def chaos(
    *,
    for_: Annotated[str, Parameter(name="--for")] = "30s",
    kill: str = "wal_shard,gateway,scheduler,compactor,reclaimer,relocator",
    every: str = "2s",
    pause: str = "",
    data_dir: str = "",
    restart_command: str = "",
    rate: float = 2_000.0,
    json: Annotated[bool, Parameter(negative=())] = False,
    options: Annotated[Options, Parameter(parse=False)],
) -> int:
    """Write, read and delete while processes of the engine are killed; fails when a promise did not hold.

    Works on the engine of --url, --data-dir or RINGLOG_URL, in topics of its own that are deleted afterwards;
    without any of them on an engine of its own in a temporary directory.

    Parameters
    ----------
    for_
        How long.
    kill
        What to kill, in turn: wal_shard, gateway, scheduler, compactor, reclaimer, relocator, supervisor,
        all.
    every
        Time between two kills.
    pause
        Stop a process for so long, every second time, instead of killing it.
    data_dir
        Data directory of a running engine, instead of --url.
    restart_command
        Starts a running engine again; without it `supervisor` and `all` are only for an engine of its own.
    rate
        Appends a second.
    json
        The verdict as one JSON object.
    """
    live = _harness()
    url = options.url or (f"ringlog://{os.path.abspath(data_dir)}/run" if data_dir else None)
    wish = live.Wish(
        url=url or os.environ.get(environment.URL) or None, seconds=parse_timeout(for_),
        kill=[role.strip() for role in kill.split(",") if role.strip()], every_s=parse_timeout(every),
        pause_s=parse_timeout(pause) if pause else 0.0, restart_command=restart_command, per_s=rate,
    )  # fmt: skip
    verdict = live.drill(wish, _progress if options.shows_progress else lambda _: None)
    printer = Printer(Format.JSON) if json else options.printer()
    printer.thing({"verdict": "broken" if verdict.wrong else "held", **verdict.facts})
    if options.shows_progress:
        sys.stderr.write("\n")
    for line in verdict.wrong[:SHOWN_MAX]:
        print(line, file=sys.stderr)
    return Exit.FAILED if verdict.wrong else Exit.DONE


def _harness() -> Any:
    """The harness, which an installation may lack; raises UsageError."""
    try:
        return importlib.import_module("chaos.kills.live")
    except ModuleNotFoundError as e:
        if not (e.name or "").startswith("chaos"):
            raise
        raise UsageError("this installation of ringlog has no chaos harness", missing=e.name) from None


def _progress(text: str) -> None:
    sys.stderr.write(f"\r\x1b[K{text}")
    sys.stderr.flush()
