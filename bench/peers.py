"""One message per call, compared with common alternatives: `make bench AREA=peers`, after `make peers`.

In each round every system is started, measured and stopped once for each durability class. The order of the
systems rotates from round to round. All systems are used from Python: over shared memory (ringlog), Unix
sockets or TCP (NATS, Kafka), see bench/systems. Rows without a peer's name in their id are compared with
Redis.

Classes: `page` acks when the page cache has the data (class `disk` of ringlog), `synced` when the disk has
it.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from bench.rows import Row, part_of, progress, row, scaled
from bench.systems import processes, registry
from bench.systems.base import Server, Way

ROUNDS = 5
OURS = "ringlog"
PEERS = ("redis", "beanstalkd", "nats")
WHOLE = ("gateway.enabled=true", "storage.enabled=true")
"""ringlog runs with all its processes, as in production."""
CLASSES = {"page": "page", "synced": "fsync"}
"""Class of a row -> durability with which a server is started."""

CYCLE_S = 1.0
WORKERS = 16
RATE = 200
"""Messages per second that are delivered one at a time."""
DELIVERED = 300
UNTIMED = 20
"""Number of first deliveries that are not timed: they open rings and warm up the processes."""
APPENDS = 600
PRODUCERS = 4
IN_FLIGHT = 64
FIRST_ACKS = 3
IDLE_S = 1.0

Reach = dict[str, float]
Found = dict[str, float]
"""Values by row id, of one system in one round."""


@dataclass(frozen=True)
class Figure:
    """A row: what is measured, and the target of ringlog's ratio to each peer."""

    id: str
    unit: str
    note: str
    reach: Reach = field(default_factory=dict)
    """Target against Redis, or for the value alone."""
    reach_to: dict[str, Reach] = field(default_factory=dict)
    """Targets against other peers."""


def figures() -> list[Figure]:
    """Return all rows, in the order of the table."""
    one_by_one = "put, claim and ack of one job a call, each waited for"
    latency = f"{RATE} a second, from before the put to the message in the waiting consumer's hands"
    found = [
        Figure("cycle_1_worker_page", "cycles/s", f"{one_by_one}; stretch: 1.6 x beanstalkd",
               reach_to={"beanstalkd": {"ratio": 1.0}}),
        Figure("cycle_1_worker_synced", "cycles/s", f"{one_by_one}; stretch: beanstalkd", {"ratio": 1.5}),
        Figure("cycle_16_workers_page", "cycles/s", f"{one_by_one}; stretch: beanstalkd", {"ratio": 1.5}),
        Figure("cycle_100_a_call_page", "jobs/s", "put, claim and ack of 100 jobs a call, 1 worker",
               {"ratio": 2.0}),
    ]  # fmt: skip
    for way in Way:
        for kind in CLASSES:
            id = f"delivery_{way}_{kind}"
            found += [
                Figure(f"{id}_p50", "us", f"{latency}; stretch: beanstalkd", {"ratio_max": 1.0}),
                Figure(f"{id}_p99", "us", latency, {"ratio_max": 2.0}),
            ]
    for kind in CLASSES:
        note = "one append after the other from one process, each waited for"
        found += [
            Figure(f"append_{kind}_p50", "us", note, {"ratio_max": 1.0}),
            Figure(f"append_{kind}_p99", "us", note, {"ratio_max": 2.0}),
        ]
    for kind in CLASSES:
        note = f"{PRODUCERS} producers, {IN_FLIGHT} messages of 100 B in flight each"
        found.append(Figure(f"in_flight_{PRODUCERS}x{IN_FLIGHT}_{kind}", "messages/s", note, {"ratio": 2.0}))
    spent = f"processor time for one cycle of {WORKERS} workers, class page, spinning in waits included"
    return [
        *found,
        Figure("cycle_client_cpu", "us", f"{spent}: clients", {"max": 100.0}),
        Figure("cycle_server_cpu", "us", f"{spent}: our shards, a peer's whole server", {"max": 60.0}),
        Figure("cycle_1_worker_client_cpu", "us", "the same of one worker: client"),
        Figure("cycle_1_worker_server_cpu", "us", "the same of one worker: shards or server"),
        Figure("first_ack", "ms", "from making a client object to its first ack, modules imported before",
               {"max": 6.0}),
        Figure("start_to_ready", "s", "from the command to ready, empty directory", {"max": 0.5}),
        Figure("idle_memory_pss", "MiB", "all processes of the server, idle; shared pages counted once",
               {"max": 80.0}),
    ]  # fmt: skip


# -- what is measured -------------------------------------------------------------------------------------


def _start(server: Server, kind: str) -> Found:
    time.sleep(part_of(IDLE_S, 0.05))
    return {"start_to_ready": server.started_s, "idle_memory_pss": server.memory_bytes() / (1 << 20)}


def _warm_up(server: Server) -> None:
    server.create("warm", Way.QUEUE)
    processes.cycles(server, "warm", 1, 1, part_of(server.warm_s, 0.05))


def _cycle(server: Server, kind: str) -> Found:
    seconds = part_of(CYCLE_S, 0.05)
    server.create("one", Way.QUEUE)
    one = processes.cycles(server, "one", 1, 1, seconds)
    found = {f"cycle_1_worker_{kind}": one.per_s}
    if kind == "page":
        found |= {"cycle_1_worker_client_cpu": one.client_us, "cycle_1_worker_server_cpu": one.server_us}
    return found


def _many(server: Server, kind: str) -> Found:
    server.create("many", Way.QUEUE, WORKERS)
    found = processes.cycles(server, "many", WORKERS, 1, part_of(CYCLE_S, 0.05))
    return {
        f"cycle_16_workers_{kind}": found.per_s,
        "cycle_client_cpu": found.client_us,
        "cycle_server_cpu": found.server_us,
    }


def _hundred(server: Server, kind: str) -> Found:
    server.create("hundred", Way.QUEUE)
    found = processes.cycles(server, "hundred", 1, 100, part_of(CYCLE_S, 0.05))
    return {f"cycle_100_a_call_{kind}": found.per_s}


def _delivery(server: Server, kind: str) -> Found:
    """Measure deliveries. A peer has one way of delivery, with which all ways of ringlog are compared."""
    found: Found = {}
    for way in Way if server.name == OURS else (Way.QUEUE,):
        topic = f"delivery-{way}"
        server.create(topic, way)
        times, _ = processes.deliveries(server, topic, way, UNTIMED + scaled(DELIVERED, 20), 1 / RATE)
        found |= _percentiles(f"delivery_{way}_{kind}", times[UNTIMED:])
    if server.name != OURS:
        for way in Way:
            for part in ("p50", "p99"):
                found[f"delivery_{way}_{kind}_{part}"] = found[f"delivery_{Way.QUEUE}_{kind}_{part}"]
    return found


def _append(server: Server, kind: str) -> Found:
    server.create("append", Way.WATCH)
    return _percentiles(f"append_{kind}", processes.appends(server, "append", scaled(APPENDS, 20)))


def _in_flight(server: Server, kind: str) -> Found:
    topics = server.spread(PRODUCERS)
    for topic in topics:
        server.create(topic, Way.WATCH)
    rate = processes.windows(server, topics, IN_FLIGHT, part_of(CYCLE_S, 0.05))
    return {f"in_flight_{PRODUCERS}x{IN_FLIGHT}_{kind}": rate}


def _first(server: Server, kind: str) -> Found:
    server.create("first", Way.WATCH)
    times = processes.first_acks(server, "first", scaled(FIRST_ACKS))
    return {"first_ack": statistics.median(times) * 1e3}


def _percentiles(id: str, times: np.ndarray[Any, Any]) -> Found:
    return {f"{id}_p{part}": float(np.percentile(times, part)) / 1e3 for part in (50, 99)}


@dataclass(frozen=True)
class Part:
    """A part that can be measured separately, in some classes."""

    name: str
    kinds: Sequence[str]
    measure: Callable[[Server, str], Found]


PARTS = (
    Part("start", ("page",), _start),
    Part("first", ("page",), _first),
    Part("cycle", ("page", "synced"), _cycle),
    Part("many", ("page",), _many),
    Part("hundred", ("page",), _hundred),
    Part("delivery", ("page", "synced"), _delivery),
    Part("append", ("page", "synced"), _append),
    Part("in_flight", ("page", "synced"), _in_flight),
)


# -- rounds -----------------------------------------------------------------------------------------------


def rows(only: str = "") -> list[Row]:
    """Return all rows of the area, or those of parts whose name contains `only`."""
    return comparison_rows(figures(), measured(PEERS, only), PEERS)


def measured(peers: Sequence[str], only: str) -> dict[str, list[Found]]:
    """Measure all systems.

    Returns one entry per round by system. Raises PeerMissing before any measurement.
    """
    registry.require(*peers)
    systems = (OURS, *peers)
    parts = [part for part in PARTS if only in part.name]
    found: dict[str, list[Found]] = {name: [] for name in systems}
    rounds = scaled(ROUNDS)
    for i in range(rounds):
        for name in rotated(systems, i):
            progress(f"{name}, round {i + 1}/{rounds}")
            found[name].append(_round(name, parts))
    return found


def rotated(systems: Sequence[str], turn: int) -> list[str]:
    """Return the systems in a rotated order, so that each is first equally often."""
    at = turn % len(systems)
    return [*systems[at:], *systems[:at]]


def _round(name: str, parts: Sequence[Part]) -> Found:
    """Measure one system in both classes, each with a new server."""
    found: Found = {}
    for kind, durability in CLASSES.items():
        chosen = [part for part in parts if kind in part.kinds]
        if not chosen:
            continue
        server = registry.start(name, durability, *WHOLE)
        try:
            is_warm = False
            for part in chosen:
                if part.measure is not _start and not is_warm:
                    _warm_up(server)
                    is_warm = True
                found |= part.measure(server, kind)
        finally:
            server.close()
    return found


def comparison_rows(
    wanted: Sequence[Figure],
    found: dict[str, list[Found]],
    peers: Sequence[str],
    *,
    is_first_plain: bool = True,
) -> list[Row]:
    """Return rows that compare ringlog with each peer.

    `is_first_plain`: the id of a row against the first peer does not contain the peer's name.
    """
    made: list[Row] = []
    for figure in wanted:
        ours = _values(found[OURS], figure.id)
        if not ours:
            continue
        for at, peer in enumerate(peers):
            is_plain = is_first_plain and at == 0
            reach = figure.reach if is_plain else figure.reach_to.get(peer, {})
            id = figure.id if is_plain else f"{figure.id}_to_{peer}"
            theirs = _values(found[peer], figure.id)
            made.append(
                row(id, figure.unit, ours, theirs, reach=reach or None, note=f"{figure.note}; against {peer}")
            )
    return made


def _values(rounds: Sequence[Found], id: str) -> list[float]:
    return [found[id] for found in rounds if id in found]
