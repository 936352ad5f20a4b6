"""`ringlog status`: show the state of the engine on this host, once or continuously."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Sequence
from typing import Annotated, Any

import msgspec
from cyclopts import Parameter

from ringlog.cli.option_parsing import human_bytes
from ringlog.cli.options import Options
from ringlog.cli.outcome import CliExit
from ringlog.cli.output import Format, Printer
from ringlog.envelope.engine_file import ENGINE_FILE
from ringlog.envelope.messages import (
    Consumer,
    DeliveryStatus,
    EngineStatusReply,
    GroupsStatus,
    PressureStatus,
    ProcessStatus,
    QueuesStatus,
)
from ringlog.envelope.status_metrics import READ_ONLY, READY, RECOVERING, readiness
from ringlog.errors import ConnectionTrouble, RinglogError, UsageError
from ringlog.limits import LAG_ANNOUNCED_MS
from ringlog.link.address import parse_url

WATCH_EVERY_S = 1.0
NEARLY_FULL = 0.9
"""Share of `limits.max_total_bytes` from which on the records are reported as a problem."""
CONSUMERS_SHOWN = 8
CONSUMERS_WAIT_S = 1.0
"""Timeout for each scheduler in seconds. If one is busy or being replaced, the rest is shown without it."""


def status(
    *,
    watch: Annotated[bool, Parameter(negative=())] = False,
    ready: Annotated[bool, Parameter(negative=())] = False,
    options: Annotated[Options, Parameter(parse=False)],
) -> int:
    """Show the engine's processes, restarts, disk and readiness.

    Works on the engine's own host.

    Parameters
    ----------
    watch
        Refresh every second until interrupted.
    ready
        Print only the state, and fail unless it is ready. For health checks. An engine with a read-only shard
        is not ready.

    Examples
    --------
    ringlog status
    ringlog status --ready
    """
    printer = options.printer()
    if ready:
        return _readiness(options, printer)
    if watch:
        _watch(options, printer)
    found = _fetch_status(options)
    show(found, printer, _consumers(options, found))
    return CliExit.DONE


def _fetch_status(options: Options) -> EngineStatusReply:
    from ringlog.supervision import control_client

    return control_client.fetch_status(run_dir_of(options), options.timeout_s)


def _consumers(options: Options, found: EngineStatusReply) -> list[Consumer]:
    """Return the consumers with the greatest lag, from the schedulers that reply in time."""
    from ringlog.supervision import control_client

    consumers: list[Consumer] = []
    numbers = [int(each.name[-2:]) for each in found.processes if each.kind == "scheduler" and each.pid]
    for number in numbers:
        with contextlib.suppress(RinglogError):
            asked = control_client.fetch_consumers(
                run_dir_of(options), number, CONSUMERS_SHOWN, CONSUMERS_WAIT_S
            )
            consumers += asked.consumers
    return sorted(consumers, key=lambda each: -each.lag_ms)[:CONSUMERS_SHOWN]


def run_dir_of(options: Options) -> str:
    address = parse_url(options.url)
    if not address.is_local:
        raise UsageError("status works on the engine's own host; give its run directory", url=options.url)
    inner = os.path.join(address.run_dir, "run")
    is_data_dir = not os.path.exists(os.path.join(address.run_dir, ENGINE_FILE)) and os.path.isdir(inner)
    return inner if is_data_dir else address.run_dir


def _readiness(options: Options, printer: Printer) -> int:
    found = _fetch_status(options)
    state = readiness(found)
    printer.item({"state": state, "problems": problems(found)})
    return CliExit.DONE if state == READY else CliExit.FAILED


def problems(found: EngineStatusReply) -> list[str]:
    """Return problems for the operator: recovering shards, a full disk, read-only directories, lagging
    consumers, and damage that the scrub found."""
    texts = [
        f"{each.name} replays its log, {each.progress:.1%} done"
        for each in found.processes
        if each.state == RECOVERING
    ]
    texts += [
        f"{each.name} is read-only: its data directory is not writable"
        for each in found.processes
        if each.state == READ_ONLY
    ]
    if found.disk_missing_bytes:
        texts.append(
            f"no disk space: writes are refused until {human_bytes(found.disk_missing_bytes)} more are free"
        )
    if found.max_total_bytes and found.live_bytes >= found.max_total_bytes * NEARLY_FULL:
        most = human_bytes(found.max_total_bytes)
        texts.append(f"limits.max_total_bytes: the records have {human_bytes(found.live_bytes)} of {most}")
    if found.delivery is not None and found.delivery.lag_s * 1_000 >= LAG_ANNOUNCED_MS:
        texts.append(f"a consumer lags by {human_seconds(found.delivery.lag_s)}")
    if found.findings or found.quarantined:
        texts.append(
            f"the scrub found {found.findings} faults, {found.quarantined} segments are damaged: see the "
            "log, and ringlog verify"
        )
    return texts


def _watch(options: Options, printer: Printer) -> None:
    """Print once per second. An engine that does not reply is shown as such; the command continues."""
    while True:
        try:
            found = _fetch_status(options)
            consumers = _consumers(options, found)
            printer.clear_screen()
            show(found, printer, consumers)
        except ConnectionTrouble as e:
            printer.clear_screen()
            printer.item({"state": "unreachable", "reason": str(e)})
        printer.flush()
        options.clock.sleep(WATCH_EVERY_S)


def show(found: EngineStatusReply, printer: Printer, consumers: Sequence[Consumer] = ()) -> None:
    """Print one status: as one object for programs, or as a summary and tables of processes, pressure and
    delivery."""
    if printer.format is not Format.TABLE:
        more = {"consumers": [_plain(each) for each in consumers], "problems": problems(found)}
        printer.item(_plain(found) | more)
        return
    printer.item(
        {
            "engine": f"{found.engine_id[:12]}  ringlog {found.version}",
            "state": found.state,
            "up": human_seconds(found.uptime_s),
            "recovery": f"{found.recovery_s:.3f} s",
            "data": found.data_dir,
            "disk free": human_bytes(found.disk_free_bytes),
            "shards": found.shards,
            "rings": found.rings,
            "routers": f"{found.routers}, {found.router_lag} behind" if found.routers else found.routers,
        }
    )
    for problem in problems(found):
        printer.caption(f"problem: {problem}")
    printer.caption("")
    printer.rows([row_of(process) for process in found.processes])
    if found.pressure:
        printer.caption("")
        printer.rows([pressure_row(each) for each in found.pressure])
    if found.delivery is not None:
        printer.caption("")
        printer.item(delivery_facts(found.delivery))
    if found.queues is not None and found.queues.queues:
        printer.caption("")
        printer.item(queue_facts(found.queues))
    if found.groups is not None and found.groups.groups:
        printer.caption("")
        printer.item(group_facts(found.groups))
    if consumers:
        printer.caption("")
        printer.rows([consumer_row(each) for each in consumers])


def _plain(message: msgspec.Struct) -> dict[str, Any]:
    """Convert a message and its nested messages to dictionaries."""
    return {name: _by_name(value) for name, value in msgspec.structs.asdict(message).items()}


def _by_name(value: Any) -> Any:
    if isinstance(value, msgspec.Struct):
        return _plain(value)
    return [_by_name(each) for each in value] if isinstance(value, list) else value


def pressure_row(status: PressureStatus) -> dict[str, Any]:
    """Return the table row of one governor."""
    is_shard = status.of != "instance"
    return {
        "pressure of": status.of,
        "pressure": f"{status.pressure:.0%}",
        "step": status.step,
        "busy": f"{status.busy:.0%}",
        "ring fill": f"{status.fill:.0%}" if is_shard else None,
        "delivery": None if is_shard else f"{status.delivery:.0%}",
        "latency": None if is_shard else f"{status.latency_s * 1000:.1f} ms",
        "throttled": status.throttled,
        "waited": human_seconds(status.waited_s),
    }


def delivery_facts(found: DeliveryStatus) -> dict[str, Any]:
    """Return the table fields of all schedulers. Bands are listed in the order of their priority."""
    bands = reversed(list(enumerate(found.ready_by_band)))
    return {
        "watching": f"{found.links} links, {found.subscriptions} subscriptions, {found.feeds} feeds",
        "wait for credit": "  ".join(f"B{band} {many}" for band, many in bands),
        "grants sent": found.grants_sent,
        "delivery lag": f"{human_seconds(found.lag_s)} at most, latency {found.latency_s * 1000:.1f} ms",
    }


def group_facts(found: GroupsStatus) -> dict[str, Any]:
    """Return the table fields of all consumer groups."""
    return {
        "groups": f"{found.groups}, {found.members} members",
        "group lag": f"{found.lag} records, {found.pending} of them pending",
        "floor age": f"{human_seconds(found.floor_age_s)} at most",
    }


def queue_facts(found: QueuesStatus) -> dict[str, Any]:
    """Return the table fields of all queues."""
    return {
        "queues": found.queues,
        "jobs": f"{found.ready} ready, {found.in_flight} in flight, {found.delayed} delayed",
        "claims waiting": found.waiting,
        "since the start": f"{found.claimed} handed out, {found.acked} acked, {found.nacked} given back, "
        f"{found.rejected} rejected, {found.dead_lettered} dead letters",
    }


def consumer_row(consumer: Consumer) -> dict[str, Any]:
    """Return the table row of one subscription."""
    return {
        "consumer": f"{consumer.link}/{consumer.subscription}",
        "lag": human_seconds(consumer.lag_ms / 1000),
        "feeds": consumer.feeds,
        "waiting": consumer.waiting,
        "grants held": f"{consumer.granted} of {consumer.credit}",
    }


def row_of(process: ProcessStatus) -> dict[str, Any]:
    """Return the table row of one process."""
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
    """Format a duration: `12.3 s`, `5m 02s`, `3h 07m`, `2d 04h`."""
    whole = int(seconds)
    if whole < 60:
        return f"{seconds:.1f} s"
    if whole < 3600:
        return f"{whole // 60}m {whole % 60:02d}s"
    if whole < 86_400:
        return f"{whole // 3600}h {whole % 3600 // 60:02d}m"
    return f"{whole // 86_400}d {whole % 86_400 // 3600:02d}h"
