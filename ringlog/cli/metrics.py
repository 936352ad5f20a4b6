"""`ringlog metrics`: the content of `ringlog status` in the Prometheus text format, printed once or served.

Names use the prefix `ringlog_` and base units. Counters come from the board: they survive the replacement of
a process and restart with the engine. Labels (processes, bands) are bounded by the configuration. There are
no series per topic; use `ringlog queue stats` and `ringlog group list` for these.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Iterator
from contextlib import closing
from typing import TYPE_CHECKING, Annotated, Any

from cyclopts import Parameter

from ringlog.cli.options import Options
from ringlog.cli.outcome import CliExit
from ringlog.cli.status import READ_ONLY, READY, RECOVERING, readiness, run_dir_of
from ringlog.envelope.messages import EngineStatusReply
from ringlog.errors import RinglogError, UsageError
from ringlog.governor import PressureStep

if TYPE_CHECKING:
    from prometheus_client.core import Metric

PORT_MAX = 65_535
POLL_INTERVAL_S = 1.0
"""Interval at which a server checks whether it was stopped."""
Rows = list[tuple[tuple[str, ...], float]]
Family = tuple[str, str, str, tuple[str, ...], Rows]
"""(kind, name without prefix, help text, labels, rows of label values and a number)."""


def metrics(
    *,
    listen: Annotated[str, Parameter(negative=())] = "",
    options: Annotated[Options, Parameter(parse=False)],
) -> int:
    """Print or serve the engine's metrics in the Prometheus text format.

    Works on the engine's own host. Needs `pip install 'ringlog[metrics]'`.

    Parameters
    ----------
    listen
        Serve the metrics at http://HOST:PORT/metrics until interrupted. Every client that reaches this
        address can read them: use an address of this host (127.0.0.1).

    Examples
    --------
    ringlog metrics
    ringlog metrics --listen 127.0.0.1:9464
    """
    place = address_of(listen) if listen else None
    exposition = _library()
    sampled = StatusCollector(lambda: _status(options))
    if place is None:
        found = _status(options)  # Printed once: an engine that does not run is an error.
        options.printer().text(exposition.generate_latest(StatusCollector(lambda: found)).decode())
        return CliExit.DONE
    host, port = place
    try:
        server, thread = exposition.start_http_server(port, host, registry=sampled)
    except OSError as e:
        raise UsageError("cannot listen on the address of --listen", address=listen, why=e.strerror) from None
    with closing(_MetricsServer(server, thread)):
        printer = options.printer()
        printer.item({"metrics": f"http://{host}:{server.server_port}/metrics"})
        printer.flush()
        while thread.is_alive():
            options.clock.sleep(POLL_INTERVAL_S)
    return CliExit.DONE


class _MetricsServer:
    """Adapter that closes a running metrics server."""

    def __init__(self, server: Any, thread: threading.Thread) -> None:
        self._server, self._thread = server, thread

    def close(self) -> None:
        """Stop the server, even if a request is active."""
        self._server.shutdown()
        self._server.server_close()
        self._thread.join(POLL_INTERVAL_S)


def _library() -> Any:
    try:
        import prometheus_client
    except ImportError:
        raise UsageError("metrics need a library: pip install 'ringlog[metrics]'") from None
    return prometheus_client


def _status(options: Options) -> EngineStatusReply:
    from ringlog.supervision import control_client

    return control_client.fetch_status(run_dir_of(options), options.timeout_s)


def address_of(text: str) -> tuple[str, int]:
    """Parse HOST:PORT, or :PORT for 127.0.0.1; raise UsageError."""
    host, _, port = text.rpartition(":")
    if not port.isascii() or not port.isdigit() or int(port) > PORT_MAX:
        raise UsageError(f"--listen must be HOST:PORT with a port up to {PORT_MAX}, got {text!r}")
    return host.strip("[]") or "127.0.0.1", int(port)


class StatusCollector:
    """Fetches the status at each collection, one at a time.

    Every collection returns metrics: if the engine does not reply, `ringlog_up` is 0."""

    def __init__(self, ask: Callable[[], EngineStatusReply]) -> None:
        self._ask = ask
        self._asking = threading.Lock()

    def collect(self) -> Iterator[Metric]:
        """Yield the metric families; called by prometheus_client."""
        from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily

        kinds = {"gauge": GaugeMetricFamily, "counter": CounterMetricFamily}
        with self._asking:
            try:
                found = list(families(self._ask()))
            except RinglogError:
                found = [_gauge("up", "1: the engine answers.", 0)]
        for kind, name, text, labels, rows in found:
            family = kinds[kind](f"ringlog_{name}", text, labels=labels)
            for values, number in rows:
                family.add_metric(list(values), number)
            yield family


def _gauge(name: str, text: str, number: float) -> Family:
    return "gauge", name, text, (), [((), float(number))]


def _counter(name: str, text: str, number: float) -> Family:
    return "counter", name, text, (), [((), float(number))]


def families(status: EngineStatusReply) -> Iterator[Family]:
    """Yield all metric families of one status."""
    yield _gauge("up", "1: the engine answers.", 1)
    yield _gauge("ready", "1: every process serves.", readiness(status) == READY)
    labels = ("version", "engine_id", "state")
    info: Rows = [((status.version, status.engine_id, status.state), 1.0)]
    yield "gauge", "engine_info", "Version, id and state of the engine.", labels, info
    yield _gauge("uptime_seconds", "Time since the start.", status.uptime_s)
    yield _gauge("recovery_seconds", "Duration of the recovery at the start.", status.recovery_s)
    yield _gauge("disk_free_bytes", "Free in the data directory's file system.", status.disk_free_bytes)
    missing = "Bytes that must become free before the engine accepts records; 0: it accepts them."
    yield _gauge("disk_missing_bytes", missing, status.disk_missing_bytes)
    yield _gauge("read_only_shards", "Read-only shards.", _in_state(status, READ_ONLY))
    yield _gauge("recovering_shards", "Shards that replay their logs.", _in_state(status, RECOVERING))
    done = min((each.progress for each in status.processes), default=1.0)
    yield _gauge("recovery_ratio", "Progress of the slowest recovering shard, 0 to 1.", done)
    yield _counter("scrub_findings", "Faults that the scrub found.", status.findings)
    yield _gauge("quarantined_segments", "Segments whose data part is damaged.", status.quarantined)
    yield _gauge("shards", "Shards of the engine.", status.shards)
    yield _gauge("rings", "Rings of clients.", status.rings)
    yield _gauge("routers", "Routers.", status.routers)
    yield _gauge("router_lag", "Positions of sources not forwarded yet, of all routers.", status.router_lag)
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
    yield _gauge("delivery_standing", standing, found.standing)
    yield _gauge("delivery_links", "Connections.", found.links)
    yield _gauge("watch_sessions", "Subscriptions.", found.subscriptions)
    yield _gauge("delivery_feeds", "Topics of all subscriptions.", found.feeds)
    yield _counter("delivery_turns", "Grants sent.", found.turns_told)
    yield _gauge("delivery_latency_seconds", "Average time from news to grant.", found.latency_s)
    yield _gauge("delivery_lag_seconds", "Lag of the slowest consumer.", found.lag_s)


def _of_jobs(status: EngineStatusReply) -> Iterator[Family]:
    queues, groups = status.queues, status.groups
    if queues is not None:
        yield _gauge("queue_topics", "Queues that were used since the start of their shard.", queues.queues)
        yield _gauge("queue_ready", "Jobs that are ready.", queues.ready)
        yield _gauge("queue_leases_in_flight", "Jobs that are leased.", queues.in_flight)
        yield _gauge("queue_delayed", "Jobs delayed until their not_before time.", queues.delayed)
        yield _gauge("queue_claims_waiting", "Claims that wait for jobs.", queues.waiting)
        for name in ("claimed", "acked", "nacked", "rejected", "dead_lettered"):
            text = f"Jobs {name.replace('_', '-')} since the engine's start."
            yield _counter(f"queue_{name}", text, getattr(queues, name))
    if groups is not None:
        yield _gauge("groups", "Consumer groups.", groups.groups)
        yield _gauge("group_lag", "Undelivered and pending records of all groups.", groups.lag)
        yield _gauge("group_pending", "Pending records of all groups.", groups.pending)
        yield _gauge("group_members", "Members of groups.", groups.members)
        yield _gauge(
            "group_floor_age_seconds", "How long the oldest floor has not moved.", groups.floor_age_s
        )
