"""`ringlog status`: how the engine on this host is, once or for as long as one looks."""

from __future__ import annotations

import os
from typing import Annotated, Any

import msgspec
from cyclopts import Parameter

from ringlog.cli.options import Options
from ringlog.cli.outcome import Exit
from ringlog.cli.output import Format, Printer
from ringlog.cli.places import human_bytes
from ringlog.envelope.messages import EngineStatusReply, ProcessStatus
from ringlog.errors import ConnectionTrouble, UsageError
from ringlog.link.address import ENGINE_FILE, parse_url

READY = "ready"
WATCH_EVERY_S = 1.0


def status(
    *,
    watch: Annotated[bool, Parameter(negative=())] = False,
    ready: Annotated[bool, Parameter(negative=())] = False,
    options: Annotated[Options, Parameter(parse=False)],
) -> int:
    """Show the engine's processes, restarts, disk and readiness. Works on the engine's own host.

    Parameters
    ----------
    watch
        Look again every second until interrupted.
    ready
        Print nothing but the state, and fail unless it is ready: for health checks.
    """
    printer = options.printer()
    if ready:
        return _readiness(options, printer)
    if watch:
        _watch(options, printer)
    show(_look(options), printer)
    return Exit.DONE


def _look(options: Options) -> EngineStatusReply:
    from ringlog.supervision import asking

    address = parse_url(options.url)
    if not address.is_local:
        raise UsageError("status works on the engine's own host; give its run directory", url=options.url)
    inner = os.path.join(address.run_dir, "run")
    is_data_dir = not os.path.exists(os.path.join(address.run_dir, ENGINE_FILE)) and os.path.isdir(inner)
    return asking.status(inner if is_data_dir else address.run_dir, options.timeout_s)


def _readiness(options: Options, printer: Printer) -> int:
    state = _look(options).state
    printer.thing({"state": state})
    return Exit.DONE if state == READY else Exit.FAILED


def _watch(options: Options, printer: Printer) -> None:
    """Print once a second; an engine that is away for a while is a fact to show, not an end."""
    while True:
        try:
            found = _look(options)
            printer.home()
            show(found, printer)
        except ConnectionTrouble as e:
            printer.home()
            printer.thing({"state": "away", "reason": str(e)})
        printer.flush()
        options.clock.sleep(WATCH_EVERY_S)


def show(found: EngineStatusReply, printer: Printer) -> None:
    """Print one status: for programs as one object, for people as a summary and a table of processes."""
    if printer.format is not Format.TABLE:
        printer.thing(msgspec.structs.asdict(found) | {"processes": [facts_of(p) for p in found.processes]})
        return
    printer.thing(
        {
            "engine": f"{found.engine_id[:12]}  ringlog {found.version}",
            "state": found.state,
            "up": human_seconds(found.uptime_s),
            "recovery": f"{found.recovery_s:.3f} s",
            "data": found.data_dir,
            "disk free": human_bytes(found.disk_free_bytes),
            "shards": found.shards,
            "rings": found.rings,
        }
    )
    printer.say("")
    printer.rows([row_of(process) for process in found.processes])


def facts_of(process: ProcessStatus) -> dict[str, Any]:
    """One process for programs."""
    return msgspec.structs.asdict(process)


def row_of(process: ProcessStatus) -> dict[str, Any]:
    """One process for people."""
    return {
        "process": process.name,
        "pid": process.pid or None,
        "state": process.state,
        "incarnation": process.incarnation,
        "restarts": process.restarts,
        "up": human_seconds(process.uptime_s),
        "busy": f"{process.busy_ratio:.0%}",
        "memory": human_bytes(process.resident_bytes),
        "beat": f"{process.heartbeat_age_s:.1f} s ago",
        "last exit": process.last_exit or "-",
    }


def human_seconds(seconds: float) -> str:
    """`12.3 s`, `5m 02s`, `3h 07m`, `2d 04h`."""
    whole = int(seconds)
    if whole < 60:
        return f"{seconds:.1f} s"
    if whole < 3600:
        return f"{whole // 60}m {whole % 60:02d}s"
    if whole < 86_400:
        return f"{whole // 3600}h {whole % 3600 // 60:02d}m"
    return f"{whole // 86_400}d {whole % 86_400 // 3600:02d}h"
