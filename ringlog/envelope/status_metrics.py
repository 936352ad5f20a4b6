"""Metrics of an engine, made from its status. Pure.

Names use the prefix `ringlog_` and base units. Counters come from the board: they survive the replacement of
a process and restart with the engine.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import Any

from ringlog.envelope.messages import EngineStatusReply
from ringlog.governor import PressureStep

READY = "ready"
DISK_FULL = "disk_full"
RECOVERING = "recovering"
READ_ONLY = "read_only"
"""State of a shard whose directory is not writable: it serves only reads."""
Rows = list[tuple[tuple[str, ...], float]]
Family = tuple[str, str, str, tuple[str, ...], Rows]
"""(kind, name without prefix, help text, labels, rows of label values and a number)."""


def readiness(found: EngineStatusReply) -> str:
    """Return the state for health checks.

    An engine is not ready while it, or one of its shards, refuses writes.
    """
    is_read_only = any(each.state == READ_ONLY for each in found.processes)
    if found.state != READY:
        return found.state
    if is_read_only:
        return READ_ONLY
    return DISK_FULL if found.disk_missing_bytes else READY


def gauge(name: str, text: str, number: float) -> Family:
    """Return a gauge without labels."""
    return "gauge", name, text, (), [((), float(number))]


def counter(name: str, text: str, number: float) -> Family:
    """Return a counter without labels."""
    return "counter", name, text, (), [((), float(number))]


def families(status: EngineStatusReply) -> Iterator[Family]:
    """Yield all metric families of one status."""
    yield gauge("up", "1: the engine answers.", 1)
    yield gauge("ready", "1: every process serves.", readiness(status) == READY)
    labels = ("version", "engine_id", "state")
    info: Rows = [((status.version, status.engine_id, status.state), 1.0)]
    yield "gauge", "engine_info", "Version, id and state of the engine.", labels, info
    yield gauge("uptime_seconds", "Time since the start.", status.uptime_s)
    yield gauge("recovery_seconds", "Duration of the recovery at the start.", status.recovery_s)
    yield gauge("disk_free_bytes", "Free in the data directory's file system.", status.disk_free_bytes)
    missing = "Bytes that must become free before the engine accepts records; 0: it accepts them."
    yield gauge("disk_missing_bytes", missing, status.disk_missing_bytes)
    yield gauge("live_bytes", "Payload and metadata of all records.", status.live_bytes)
    most = "Limit of the live bytes, limits.max_total_bytes; 0: none."
    yield gauge("max_total_bytes", most, status.max_total_bytes)
    yield gauge("read_only_shards", "Read-only shards.", _in_state(status, READ_ONLY))
    yield gauge("recovering_shards", "Shards that replay their logs.", _in_state(status, RECOVERING))
    done = min((each.progress for each in status.processes), default=1.0)
    yield gauge("recovery_ratio", "Progress of the slowest recovering shard, 0 to 1.", done)
    yield counter("scrub_findings", "Faults that the scrub found.", status.findings)
    yield gauge("quarantined_segments", "Segments whose data part is damaged.", status.quarantined)
    yield gauge("shards", "Shards of the engine.", status.shards)
    yield gauge("rings", "Rings of clients.", status.rings)
    yield gauge("routers", "Routers.", status.routers)
    yield gauge("router_lag", "Positions of sources not forwarded yet, of all routers.", status.router_lag)
    yield from _of_processes(status)
    yield from _of_pressure(status)
    yield from _of_delivery(status)
    yield from _of_jobs(status)


def _in_state(status: EngineStatusReply, state: str) -> int:
    return sum(each.state == state for each in status.processes)


def _of_processes(status: EngineStatusReply) -> Iterable[Family]:
    def rows(number: Callable[[Any], float]) -> Rows:
        return [((each.name, each.kind), float(number(each))) for each in status.processes]

    labels = ("actor", "kind")
    table: tuple[tuple[str, str, str, Callable[[Any], float]], ...] = (
        ("gauge", "actor_up", "1: the process runs.", lambda each: bool(each.pid)),
        ("counter", "actor_restarts", "Restarts of the process.", lambda each: each.restarts),
        ("gauge", "actor_uptime_seconds", "Time since the start.", lambda each: each.uptime_s),
        ("gauge", "actor_busy_ratio", "Busy part of its time, 0 to 1.", lambda each: each.busy_ratio),
        ("gauge", "actor_resident_bytes", "Its resident memory.", lambda each: each.resident_bytes),
        ("gauge", "actor_heartbeat_age_seconds", "Age of its heartbeat.", lambda each: each.heartbeat_age_s),
    )
    return [(kind, name, text, labels, rows(number)) for kind, name, text, number in table]


def _of_pressure(status: EngineStatusReply) -> Iterable[Family]:
    def rows(number: Callable[[Any], float]) -> Rows:
        return [((each.of,), float(number(each))) for each in status.pressure]

    steps = {step.name.lower(): float(step) for step in PressureStep}
    table: tuple[tuple[str, str, str, Callable[[Any], float]], ...] = (
        ("gauge", "governor_pressure", "Pressure, 0 to 1.", lambda each: each.pressure),
        ("gauge", "governor_step", "Its step: 0 free, up to refusing.", lambda each: steps.get(each.step, 0)),
        ("gauge", "ring_fill_ratio", "Fill ratio of the fullest intake ring.", lambda each: each.fill),
        ("counter", "throttled", "Writes refused for pressure.", lambda each: each.throttled),
        ("counter", "governor_waited_seconds", "Time that writes were delayed.", lambda each: each.waited_s),
    )
    return [(kind, name, text, ("of",), rows(number)) for kind, name, text, number in table]


def _of_delivery(status: EngineStatusReply) -> Iterator[Family]:
    found = status.delivery
    if found is None:
        return
    bands: Rows = [((str(band),), float(many)) for band, many in enumerate(found.ready_by_band)]
    yield "gauge", "delivery_ready", "Feeds that wait for credit, by band.", ("band",), bands
    standing = "Topics with new records and free credit that received no grant since the last sample."
    yield gauge("delivery_standing", standing, found.standing)
    yield gauge("delivery_links", "Connections.", found.links)
    yield gauge("watch_sessions", "Subscriptions.", found.subscriptions)
    yield gauge("delivery_feeds", "Topics of all subscriptions.", found.feeds)
    yield counter("delivery_grants", "Grants sent.", found.grants_sent)
    yield gauge("delivery_latency_seconds", "Average time from news to grant.", found.latency_s)
    yield gauge("delivery_lag_seconds", "Lag of the slowest consumer.", found.lag_s)


def _of_jobs(status: EngineStatusReply) -> Iterator[Family]:
    queues, groups = status.queues, status.groups
    if queues is not None:
        yield gauge("queue_topics", "Queues that were used since the start of their shard.", queues.queues)
        yield gauge("queue_ready", "Jobs that are ready.", queues.ready)
        yield gauge("queue_leases_in_flight", "Jobs that are leased.", queues.in_flight)
        yield gauge("queue_delayed", "Jobs delayed until their not_before time.", queues.delayed)
        yield gauge("queue_claims_waiting", "Claims that wait for jobs.", queues.waiting)
        for name in ("claimed", "acked", "nacked", "rejected", "dead_lettered"):
            text = f"Jobs {name.replace('_', '-')} since the engine's start."
            yield counter(f"queue_{name}", text, getattr(queues, name))
    if groups is not None:
        yield gauge("groups", "Consumer groups.", groups.groups)
        yield gauge("group_lag", "Undelivered and pending records of all groups.", groups.lag)
        yield gauge("group_pending", "Pending records of all groups.", groups.pending)
        yield gauge("group_members", "Members of groups.", groups.members)
        yield gauge("group_floor_age_seconds", "How long the oldest floor has not moved.", groups.floor_age_s)
