"""Health, readiness and metrics.

Probes need no key, and read shared memory only. Metrics need a key with scope `read` if keys are configured.
They are the engine's status, as `ringlog metrics` shows it, with the numbers of shards, of all HTTP gateways
and of single topics.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import msgspec

from ringlog import __version__
from ringlog.actors.http_gateway.api.request import Request, Response
from ringlog.actors.http_gateway.api.route_table import Route
from ringlog.board.board import ProcessSlot
from ringlog.board.layout import HttpGatewayField, ProcessField, ProcessState
from ringlog.board.processes import RECLAIMER, SUPERVISOR_SLOT, shard_name, shard_slot, slot_of
from ringlog.envelope import messages as m
from ringlog.envelope.messages import EngineStatusReply
from ringlog.envelope.status_metrics import Family, Rows, families, gauge
from ringlog.errors import NotReady, Unauthorized

if TYPE_CHECKING:
    from ringlog.actors.http_gateway.gateway import Gateway

_NS_PER_MS = 1_000_000
_NS_PER_S = 1_000_000_000
_RETRY_AFTER_MS = 1_000
_READ = m.TopicList()
"""Request with the rights that metrics need."""
Metric = tuple[str, str, str, tuple[str, ...]]
_TEXT = ("content-type", "text/plain; version=0.0.4; charset=utf-8")
_encode = msgspec.json.Encoder().encode


# -- probes ---------------------------------------------------------------------------------------


class ShardHealth(NamedTuple):
    """State of one shard, from its page of the board."""

    state: ProcessState
    is_read_only: bool = False
    down_ns: int = 0
    """Time since its process ended, while no successor serves."""

    @property
    def serves(self) -> bool:
        """Whether the shard reads and writes."""
        return self.state == ProcessState.READY and not self.is_read_only


async def health(request: Request) -> Response:
    """Report that the gateway answers. It does so during recovery and during a stop as well."""
    return Response(
        200, _encode({"status": "ok", "version": __version__, "uptime_ms": _uptime_ms(request.gateway)})
    )


async def ready(request: Request) -> Response:
    """Report whether the engine serves requests. Raises NotReady or ShuttingDown."""
    gateway = request.gateway
    gateway.require_serving()
    shards = _shards(gateway)
    window_ns = round(gateway.settings.supervisor.restart_window_s * _NS_PER_S)
    degraded = [number for number, shard in enumerate(shards) if not shard.serves]
    reason = "disk_low" if _is_disk_low(gateway) else not_ready_reason(shards, window_ns)
    if reason:
        raise NotReady(
            f"the engine is not ready: {reason}", reason=reason, degraded_shards=degraded,
            retry_after_ms=_RETRY_AFTER_MS,
        )  # fmt: skip
    body = {
        "status": "ready", "wal_replay_complete": True, "topics": _topics(gateway),
        "degraded_shards": degraded,
    }  # fmt: skip
    return Response(200, _encode(body))


def not_ready_reason(shards: Sequence[ShardHealth], window_ns: int) -> str:
    """Return why an engine with these shards is not ready; "" if it is.

    One shard that serves is enough, as long as no other one is down for longer than `window_ns`.
    """
    if not any(shard.serves for shard in shards):
        if all(shard.is_read_only for shard in shards):
            return "read_only"
        is_lost = all(shard.is_read_only or shard.state == ProcessState.GIVEN_UP for shard in shards)
        return "shards_given_up" if is_lost else "shards_down"
    if any(shard.state != ProcessState.READY and shard.down_ns > window_ns for shard in shards):
        return "shard_down_too_long"
    return ""


def _shards(gateway: Gateway) -> list[ShardHealth]:
    now_ns, found = gateway.clock.monotonic_ns(), []
    for page in _shard_pages(gateway):
        ended_ns = page.get(ProcessField.EXIT_NS)
        is_down = page.state != ProcessState.READY and ended_ns
        down_ns = max(now_ns - ended_ns, 0) if is_down else 0
        found.append(ShardHealth(page.state, bool(page.get(ProcessField.READ_ONLY)), down_ns))
    return found


def _shard_pages(gateway: Gateway) -> list[ProcessSlot]:
    return [gateway.board.process(shard_slot(shard)) for shard in range(gateway.settings.wal.shards)]


def _is_disk_low(gateway: Gateway) -> bool:
    """Return what the reclaimer reports. Shards refuse writes while it reports a low disk."""
    page = gateway.board.process(slot_of(RECLAIMER, gateway.settings.wal.shards))
    return page.state == ProcessState.READY and bool(page.get(ProcessField.DISK_LOW))


def _topics(gateway: Gateway) -> int:
    return sum(page.get(ProcessField.TOPICS) for page in _shard_pages(gateway))


def _uptime_ms(gateway: Gateway) -> int:
    started_ns = gateway.board.process(SUPERVISOR_SLOT).get(ProcessField.STARTED_NS)
    return max(gateway.clock.monotonic_ns() - started_ns, 0) // _NS_PER_MS


# -- metrics --------------------------------------------------------------------------------------


async def metrics(request: Request) -> Response:
    """Return the metrics of the engine and of all its HTTP gateways, as Prometheus text or as JSON."""
    gateway = request.gateway
    if not request.principal.scopes:
        raise Unauthorized("metrics need a known key: Authorization: Bearer KEY")
    request.authorise(_READ)
    found = list(all_families(gateway, await gateway.engine_status.read(gateway.client)))
    if gateway.is_serving and (numbers := await gateway.topic_metrics.read(gateway.client)) is not None:
        found += numbers.families(request.principal)
    if "application/json" in request.header("accept").lower():
        return Response(200, _encode(as_json(found)))
    return Response(200, as_text(found), (_TEXT,))


GATEWAY_METRICS: tuple[Metric, ...] = (
    ("counter", "http_requests", "Requests answered by the HTTP gateways.", ("route", "status")),
    ("gauge", "http_requests_in_flight", "Requests without a reply, streams not counted.", ()),
    ("gauge", "sse_connections", "Open event streams, work streams and WebSockets.", ()),
    ("gauge", "http_watch_sessions", "Watch sessions of the HTTP gateways.", ()),
    ("gauge", "uptime_ms", "Time since the start of the engine.", ()),
    ("gauge", "recovery_progress", "Part of the logs that is replayed, 0 to 1.", ()),
)
"""Metrics that the gateway adds, sums over all gateways of the engine: (kind, name without prefix, help text,
labels)."""

SHARD_METRICS: tuple[tuple[Metric, ProcessField], ...] = (
    (("gauge", "topics", "Topics of the shard.", ("shard",)), ProcessField.TOPICS),
    (("gauge", "wal_read_only", "1: the shard serves reads only.", ("shard",)), ProcessField.READ_ONLY),
    (("gauge", "wal_files", "Log files of the shard.", ("shard",)), ProcessField.WAL_FILES),
    (("counter", "wal_frames", "Frames appended by the shard.", ("shard",)), ProcessField.FRAMES),
    (("counter", "wal_records", "Records appended by the shard.", ("shard",)), ProcessField.RECORDS),
    (("counter", "wal_batches", "Commit batches of the shard.", ("shard",)), ProcessField.GROUPS),
    (("counter", "wal_fsyncs", "Syncs of the shard's log.", ("shard",)), ProcessField.SYNCS),
    (("counter", "wal_bytes_written", "Bytes written to the shard's log.", ("shard",)), ProcessField.BYTES),
    (("counter", "wal_refused", "Frames that the shard refused.", ("shard",)), ProcessField.REFUSED),
)
"""Metrics of each shard that the gateway reads from the board."""


def all_families(gateway: Gateway, status: EngineStatusReply | None) -> Iterator[Family]:
    """Yield all metric families. Without a status, only what this process knows and shared memory has."""
    if status is None:
        yield gauge("up", "1: the engine answers.", 0)
    else:
        yield from families(status)
    for metric, found in zip(GATEWAY_METRICS, _numbers(gateway), strict=True):
        yield *metric, found if isinstance(found, list) else [((), float(found))]
    pages = [(shard_name(number), page) for number, page in enumerate(_shard_pages(gateway))]
    for metric, field in SHARD_METRICS:
        yield *metric, [((shard,), float(page.get(field))) for shard, page in pages]


def _numbers(gateway: Gateway) -> tuple[Rows | float, ...]:
    """Return the values of GATEWAY_METRICS, in their order."""
    requests: Rows = [
        ((route, str(status)), float(count)) for (route, status), count in sorted(gateway.answered().items())
    ]
    return (
        requests, gateway.total(HttpGatewayField.IN_FLIGHT), gateway.total(HttpGatewayField.STREAMS),
        gateway.total(HttpGatewayField.SESSIONS), _uptime_ms(gateway), gateway.recovery_progress,
    )  # fmt: skip


def as_text(found: Iterable[Family]) -> bytes:
    """Return the families in the Prometheus text format 0.0.4."""
    lines: list[str] = []
    for kind, name, text, labels, rows in found:
        full = _name(kind, f"ringlog_{name}")
        lines += (f"# HELP {full} {text}", f"# TYPE {full} {kind}")
        for values, number in rows:
            pairs = ",".join(
                f'{label}="{_escaped(value)}"' for label, value in zip(labels, values, strict=True)
            )
            lines.append(f"{full}{{{pairs}}} {_number(number)}" if pairs else f"{full} {_number(number)}")
    return "\n".join([*lines, ""]).encode()


def as_json(found: Iterable[Family]) -> dict[str, Any]:
    """Return the families as an object: a number, or for labels a list of {labels, value}."""
    body: dict[str, Any] = {}
    for kind, name, _, labels, rows in found:
        key = _name(kind, name)
        if not labels:
            body[key] = _plain(rows[0][1])
            continue
        body[key] = [
            {"labels": dict(zip(labels, values, strict=True)), "value": _plain(number)}
            for values, number in rows
        ]
    return body


def _name(kind: str, name: str) -> str:
    return f"{name}_total" if kind == "counter" else name


def _plain(number: float) -> float:
    return int(number) if number == int(number) else number


def _number(number: float) -> str:
    return repr(_plain(number))


def _escaped(value: str) -> str:
    return value.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n")


ROUTES: tuple[Route, ...] = (
    Route("GET", "/v0/health", health, None, "Report that the gateway answers", is_probe=True),
    Route("GET", "/healthz", health, None, "Report that the gateway answers", is_probe=True),
    Route("GET", "/v0/ready", ready, None, "Report whether the engine serves requests", is_probe=True),
    Route("GET", "/readyz", ready, None, "Report whether the engine serves requests", is_probe=True),
    # Served during recovery as probes are. The handler itself asks for a key with scope `read`.
    Route(
        "GET", "/v0/metrics", metrics, lambda: _READ, "Return metrics", is_probe=True, reply_type="text/plain"
    ),
)
