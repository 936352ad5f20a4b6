"""`ringlog chaos`: kill processes of an engine under load, and check its guarantees."""

from __future__ import annotations

import os
import sys
from typing import Annotated

from cyclopts import Parameter

from ringlog import environment
from ringlog.cli.option_parsing import parse_timeout, within
from ringlog.cli.options import Options
from ringlog.cli.outcome import CliExit
from ringlog.cli.output import Format, Printer

SHOWN_MAX = 20


def chaos(
    *,
    for_: Annotated[str, Parameter(name="--for")] = "30s",
    kill: str = "wal_shard,gateway,scheduler,compactor,reclaimer,relocator",
    every: str = "2s",
    pause: str = "",
    data_dir: str = "",
    restart_command: str = "",
    rate: Annotated[float, Parameter(validator=within(1, 1_000_000))] = 2_000.0,
    json: Annotated[bool, Parameter(negative=())] = False,
    options: Annotated[Options, Parameter(parse=False)],
) -> int:
    """Kill processes of an engine under load and check its promises.

    Writes, reads and deletes in its own topics, which are deleted afterwards. Uses the engine of --url,
    --data-dir or RINGLOG_URL; without them, a temporary engine. Fails if a guarantee is violated.

    Parameters
    ----------
    for_
        Duration: 30s, 5m.
    kill
        Processes to kill in rotation: wal_shard, gateway, scheduler, compactor, reclaimer, relocator,
        supervisor, all.
    every
        Time between two kills.
    pause
        Instead of every second kill, pause the process for this long.
    data_dir
        Data directory of a running engine, instead of --url.
    restart_command
        Command that restarts a running engine. Without it, supervisor and all need the command's temporary
        engine.
    rate
        Appends per second.
    json
        Print the verdict as one JSON object.

    Examples
    --------
    ringlog chaos --for 60s --kill wal_shard,compactor
    """
    # Loaded when the command runs: it imports the test engine.
    from ringlog.drill.drill import DrillOptions, run_drill

    url = options.url or (f"ringlog://{os.path.abspath(data_dir)}/run" if data_dir else None)
    drill_options = DrillOptions(
        url=url or os.environ.get(environment.URL) or None, seconds=parse_timeout(for_, "--for"),
        kill=[role.strip() for role in kill.split(",") if role.strip()],
        every_s=parse_timeout(every, "--every"), pause_s=parse_timeout(pause, "--pause") if pause else 0.0,
        restart_command=restart_command, per_s=rate,
    )  # fmt: skip
    verdict = run_drill(drill_options, _progress if options.shows_progress else lambda _: None)
    printer = Printer(Format.JSON) if json else options.printer()
    printer.item({"verdict": "broken" if verdict.wrong else "held", **verdict.facts})
    if options.shows_progress:
        sys.stderr.write("\n")
    for line in verdict.wrong[:SHOWN_MAX]:
        print(line, file=sys.stderr)
    return CliExit.FAILED if verdict.wrong else CliExit.DONE


def _progress(text: str) -> None:
    sys.stderr.write(f"\r\x1b[K{text}")
    sys.stderr.flush()
