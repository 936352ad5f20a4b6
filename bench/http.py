"""The HTTP gateway. `make bench AREA=http`. The floor of a request is GET /v0/health, in the same rounds."""

from __future__ import annotations

import contextlib
import json
import time
from pathlib import Path
from typing import Any

import numpy as np

from bench.host import Host, ran_s
from bench.http_clients import (
    LUA_JOBS,
    LoneClient,
    Receivers,
    h2load,
    lua_post,
    request_of,
    text_frame,
    tool,
    web_socket,
    wrk,
)
from bench.http_floor import FloorHost
from bench.rows import Row, part_of, progress, row, scaled

ROUNDS = 3
SECONDS = 4.0
IDLE_S = 10.0
READY_S = 60.0
CLASSES = ("disk", "fsync")
DATA = {"n": 1, "text": "x" * 80}
PAYLOAD = json.dumps(DATA).encode()
"""About 100 bytes."""
DIFF_RECORDS = 100_000
JOBS = 200_000
FILL = 1_000
WORKERS = 50
ROOM = 30
ROOM_EVERY_S = 0.02
_PASSES_ON = "; against: the same server with an application that only passes on"
ALONE = ("storage.enabled=false", "http.enabled=true", "http.port=0")


class HttpHost(Host):
    """An engine with the HTTP gateway."""

    def __init__(self, *sets: str) -> None:
        super().__init__(2, *ALONE, *sets)
        self.http_url = str(json.loads((self.data_dir / "run" / "engine.json").read_text())["http_url"])
        self.http = LoneClient(self.http_url)
        deadline = time.monotonic() + READY_S
        while not self.http.is_ready() and time.monotonic() < deadline:
            time.sleep(0.01)

    def __enter__(self) -> HttpHost:
        return self

    def create(self, topic: str, **settings: Any) -> None:
        """Create a topic."""
        self.http.json("PUT", f"/v0/topics/{topic}", settings)

    def http_pid(self) -> int:
        """Return the pid of the gateway."""
        found = [each.pid for each in self.processes() if each.name().startswith("http_gateway")]
        return int(found[0])

    def health_rate(self, connections: int) -> float:
        """Return requests/s of the floor."""
        return wrk(f"{self.http_url}/v0/health", "", connections, part_of(SECONDS, 1.0))["requests_per_s"]


def rows(only: str = "") -> list[Row]:
    """Return all rows of the area, or those of parts whose name contains `only`."""
    tool("wrk"), tool("h2load")
    found: list[Row] = []
    for name, build in (
        ("writes", _write_rows),
        ("batches", _batch_rows),
        ("lone", _lone_row),
        ("diff", _diff_row),
        ("sse", _sse_rows),
        ("room", _room_rows),
        ("jobs", _jobs_row),
        ("idle", _idle_rows),
        ("h2", _h2_row),
    ):
        if only in name:
            progress(name)
            built = build()
            found += built if isinstance(built, list) else [built]
    return found


def _body(records: int) -> bytes:
    return json.dumps({"records": [{"data": DATA}] * records}).encode()


def _rates(connections: int, records: int, query: str = "") -> tuple[dict[str, list[float]], list[float]]:
    """Return records/s of writers in each class, and requests/s of the floor, in alternating rounds."""
    found: dict[str, list[float]] = {name: [] for name in CLASSES}
    floors: list[float] = []
    for i in range(ROUNDS):
        progress(f"  round {i + 1}/{ROUNDS}")
        with HttpHost() as host:
            floors.append(host.health_rate(connections))
            for name, rates in found.items():
                host.create(name, durability=name)
                url = f"{host.http_url}/v0/topics/{name}{query}"
                done = wrk(url, lua_post(_body(records)), connections, part_of(SECONDS, 1.0))
                rates.append(done["requests_per_s"] * records)
    return found, floors


def _write_rows() -> list[Row]:
    """Measure 32 connections that write one record each."""
    found, floors = _rates(32, 1)
    note = "32 connections, one record of 100 B a request; against: GET /v0/health"
    return [
        row(f"http_write_{name}", "requests/s", found[name], floors, reach={"min": reach}, note=note)
        for name, reach in zip(CLASSES, (12_000, 8_000), strict=True)
    ]


def _batch_rows() -> list[Row]:
    """Measure 16 connections that write 100 records a request."""
    found, floors = _rates(16, 100)
    note = "16 connections, 100 records of 100 B a request; against: GET /v0/health, requests/s"
    return [
        row(f"http_write_100_{name}", "records/s", found[name], floors, reach={"min": reach}, note=note)
        for name, reach in zip(CLASSES, (400_000, 300_000), strict=True)
    ]


def _lone_row() -> Row:
    """Measure one client that waits for each synced write."""
    times, floors = [], []
    for _ in range(ROUNDS):
        with HttpHost() as host:
            host.create("t", durability="fsync")
            write = request_of("POST", "/v0/topics/t", {"records": [{"data": DATA}]})
            host.http.p50_us(write, scaled(100, 10))
            floors.append(host.http.p50_us(request_of("GET", "/v0/health"), scaled(500, 20)))
            times.append(host.http.p50_us(write, scaled(500, 20)))
    note = "one client on a raw socket, one record a request; against: GET /v0/health"
    return row("http_lone_write_fsync_p50", "us", times, floors, reach={"max": 450}, note=note)


def _diff_row() -> Row:
    """Measure diffs of 1,000 records from anywhere in a topic."""
    count = scaled(DIFF_RECORDS, 5_000)
    script = (
        lua_post(b"{}")
        + f"""
function request()
  local from = math.random(0, {count - 1_000})
  return wrk.format(nil, nil, nil, string.format('{{"from_seq":%d,"limit":1000}}', from))
end
"""
    )
    rates, floors = [], []
    for _ in range(ROUNDS):
        with HttpHost() as host:
            _fill(host, "t", count)
            floors.append(host.health_rate(4))
            done = wrk(f"{host.http_url}/v0/topics/t/diff", script, 4, part_of(SECONDS, 1.0))
            rates.append(done["requests_per_s"] * 1_000)
    note = "4 connections, limit 1,000, records of 100 B; against: GET /v0/health, requests/s"
    return row("http_diff_1000", "records/s", rates, floors, reach={"min": 400_000}, note=note)


def _fill(host: HttpHost, topic: str, count: int) -> None:
    for _ in range(0, count, FILL):
        host.client.append_many(topic, [PAYLOAD] * FILL)


def _sse_rows() -> list[Row]:
    """Measure from before each write to the frame in the watcher's process."""
    found = []
    for watchers, writes, percent, reach in ((1, 300, 50, 0.5), (100, 200, 50, 1.5), (1_000, 60, 99, 20.0)):
        times: list[float] = []
        floors: list[float] = []
        count = scaled(writes, 10)
        every_s = 0.004 if watchers < 1_000 else 0.1
        for i in range(ROUNDS):
            progress(f"  {watchers} watchers, round {i + 1}/{ROUNDS}")
            for make, kept in ((FloorHost, floors), (HttpHost, times)):
                with make() as host:
                    came = _watched(host, watchers, count, every_s)
                kept.append(float(np.percentile(came, percent)) / 1e6)
        note = f"{watchers} watchers in one process, a write every {every_s * 1e3:g} ms or later; none lost"
        name = f"http_sse_{watchers}_p{percent}"
        found.append(row(name, "ms", times, floors, reach={"max": reach}, note=note + _PASSES_ON))
    return found


def _watched(host: HttpHost | FloorHost, watchers: int, count: int, every_s: float) -> list[int]:
    """Write `count` records one by one. Return the nanoseconds until each watcher had each of them."""
    host.create("t")
    receivers = Receivers(host.http_url, "t", watchers, expected=watchers * count)
    for _ in range(count):
        host.http.json("POST", "/v0/topics/t", {"records": [{"data": {"at": time.monotonic_ns()}}]})
        time.sleep(every_s)
    came = receivers.end()
    if len(came) != watchers * count:
        raise RuntimeError(f"{watchers * count - len(came)} deliveries are lost")
    return came


def _room_rows() -> list[Row]:
    """Measure participants that all publish and all receive, over WebSocket."""
    each = round(part_of(5.0, 1.0) / ROOM_EVERY_S)
    p99s: list[float] = []
    floors: list[float] = []
    lost: list[float] = []
    for _ in range(ROUNDS):
        for make, kept in ((FloorHost, floors), (HttpHost, p99s)):
            with make() as host:
                came = _in_room(host, each)
            kept.append(float(np.percentile(came, 99)) / 1e6)
        lost.append(float(ROOM * ROOM * each - len(came)))
    note = f"{ROOM} participants, each publishes every {ROOM_EVERY_S * 1e3:g} ms, and receives all"
    return [
        row(f"http_room_{ROOM}_p99", "ms", p99s, floors, reach={"max": 30}, note=note + _PASSES_ON),
        row(f"http_room_{ROOM}_lost", "deliveries", lost, reach={"max": 0}, note=note),
    ]


def _in_room(host: HttpHost | FloorHost, each: int) -> list[int]:
    """Have each participant publish `each` times. Return the nanoseconds of each delivery."""
    host.create("room", durability="ephemeral")
    receivers = Receivers(host.http_url, "room", ROOM, is_web_socket=True, expected=ROOM * ROOM * each)
    speakers = [web_socket(host.http_url) for _ in range(ROOM)]
    for speaker in speakers:
        speaker.setblocking(False)
    begun = time.monotonic()
    for n in range(each * ROOM):
        ahead = begun + n * ROOM_EVERY_S / ROOM - time.monotonic()
        if ahead > 0:
            time.sleep(ahead)
        said = {"op": "publish", "topic": "room", "records": [{"data": {"at": time.monotonic_ns()}}]}
        speaker = speakers[n % ROOM]
        speaker.send(text_frame(json.dumps(said).encode()))
        with contextlib.suppress(BlockingIOError):
            speaker.recv(1 << 16)
    came = receivers.end()
    for speaker in speakers:
        speaker.close()
    return came


def _jobs_row() -> Row:
    """Measure workers that claim eight jobs and ack them."""
    rates, floors = [], []
    for _ in range(ROUNDS):
        with HttpHost("delivery.schedulers=1") as host:
            host.create("jobs", type="queue")
            _fill(host, "jobs", scaled(JOBS, 10_000))
            floors.append(host.health_rate(WORKERS))
            done = wrk(host.http_url, LUA_JOBS, WORKERS, part_of(SECONDS, 1.0))
            rates.append(done["counted_per_s"])
    note = f"{WORKERS} connections, claim 8 and ack; against: GET /v0/health, requests/s"
    return row("http_jobs_8", "jobs/s", rates, floors, reach={"min": 20_000}, note=note)


def _idle_rows() -> list[Row]:
    """Measure what an idle engine with the gateway costs beyond one without it."""
    memory, cpu = [], []
    for _ in range(ROUNDS):
        with Host(2, "storage.enabled=false") as without:
            before = _pss(without)
        with HttpHost() as host:
            host.http.close()
            memory.append((_pss(host) - before) / 2**20)
            pid = host.http_pid()
            begun, used = time.monotonic(), ran_s(pid)
            time.sleep(part_of(IDLE_S, 2.0))
            cpu.append((ran_s(pid) - used) / (time.monotonic() - begun) * 100)
    return [
        row(
            "http_idle_memory",
            "MiB",
            memory,
            reach={"max": 15},
            note="Pss of all processes, with and without",
        ),
        row("http_idle_cpu", "%", cpu, reach={"max": 0.1}, note="of one core, the gateway's process"),
    ]


def _pss(host: Host) -> int:
    time.sleep(1.0)  # Until the processes have done what they do after a start.
    total = 0
    for process in host.processes():
        for line in Path(f"/proc/{process.pid}/smaps_rollup").read_text().splitlines():
            if line.startswith("Pss:"):
                total += int(line.split()[1]) * 1024
    return total


def _h2_row() -> Row:
    """Measure writes over HTTP/2."""
    rates, floors = [], []
    for _ in range(ROUNDS):
        with HttpHost() as host:
            host.create("t", durability="disk")
            floors.append(host.health_rate(32))
            rates.append(h2load(f"{host.http_url}/v0/topics/t", _body(1), 4, 32, scaled(40_000, 1_000)))
    note = (
        "HTTP/2, 4 connections with 32 streams, one record a request; against: GET /v0/health over HTTP/1.1"
    )
    return row("http2_write_disk", "requests/s", rates, floors, note=note)
