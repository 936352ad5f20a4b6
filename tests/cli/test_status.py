"""`ringlog status` of a real engine: pressure, delivery, and lagging consumers."""

from __future__ import annotations

import io
import json
import os
import signal
from contextlib import suppress
from pathlib import Path

import pytest
from msgspec import structs

import ringlog
from ringlog.cli.output import Format, Printer
from ringlog.cli.status import problems, readiness, show
from ringlog.envelope import messages as m
from ringlog.errors import RinglogError
from ringlog.supervision import control_client
from ringlog.testing import engine
from ringlog.testing.real_engine import TestEngine, wait_until
from tests.support.engines import engine_fixture
from tests.support.scheduler_link import Link, feed_of, link_fixture
from tests.support.shell import Shell

WAIT_S = 20.0

PROCESS = m.ProcessStatus("wal_shard-00", "wal_shard", 7, "ready", 3, 0, 61.0, 0.1, 0.25, 1 << 20, "")
FOUND = m.EngineStatusReply(
    "e" * 32, "1.0", "ready", 61.0, "/data", 1, 2, 1 << 30, [PROCESS],
    pressure=[
        m.PressureStatus("instance", 0.87, "shed", 0.2, 0.0, 0.4, 0.002, 20, 1.5),
        m.PressureStatus("wal_shard-00", 0.87, "shed", 0.5, 0.87, 0.0, 0.0, 12, 0.25),
    ],
    delivery=m.DeliveryStatus([1, 2, 3, 4, 5], 0, 2, 3, 40, 99, 0.001, 7.5),
    queues=m.QueuesStatus(2, 30, 4, 5, 6, 100, 90, 7, 2, 1),
    groups=m.GroupsStatus(3, 40, 8, 5, 12.0),
)  # fmt: skip
BEHIND = m.Consumer("0a0b", 3, 7_500, 20, 15, 4, 4)


def test_an_engine_with_a_read_only_shard_is_not_ready() -> None:
    assert readiness(FOUND) == "ready"
    shard = structs.replace(PROCESS, state="read_only")
    assert readiness(structs.replace(FOUND, processes=[PROCESS, shard])) == "read_only"
    assert readiness(structs.replace(FOUND, state="starting", processes=[shard])) == "starting"


def test_problems_are_listed_and_a_full_disk_is_not_ready() -> None:
    assert problems(FOUND) == ["a consumer lags by 7.5 s"]
    quiet = structs.replace(FOUND, delivery=m.DeliveryStatus([0, 0, 0, 0, 0], 0, 2, 3, 40, 99, 0.001, 4.9))
    assert problems(quiet) == []
    full = structs.replace(quiet, disk_missing_bytes=3 << 20)
    assert readiness(full) == "disk_full"
    assert problems(full) == ["no disk space: writes are refused until 3.0 MiB more are free"]
    replaying = structs.replace(PROCESS, state="recovering", progress=0.25)
    starting = structs.replace(quiet, state="starting", processes=[replaying])
    assert readiness(starting) == "starting"
    assert problems(starting) == ["wal_shard-00 replays its log, 25.0% done"]
    read_only = structs.replace(quiet, processes=[structs.replace(PROCESS, state="read_only")])
    assert problems(read_only) == ["wal_shard-00 is read-only: its data directory is not writable"]
    assert problems(structs.replace(quiet, live_bytes=89 << 20, max_total_bytes=100 << 20)) == []
    many = structs.replace(quiet, live_bytes=90 << 20, max_total_bytes=100 << 20)
    assert readiness(many) == "ready"
    assert problems(many) == ["limits.max_total_bytes: the records have 90.0 MiB of 100 MiB"]
    rotten = structs.replace(quiet, findings=2, quarantined=1)
    assert readiness(rotten) == "ready"
    assert problems(rotten)[0].startswith("the scrub found 2 faults, 1 segments are damaged")


def state_of(pid: int) -> str:
    """Return the process state as the kernel shows it; T means stopped."""
    return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]


@pytest.mark.slow
def test_status_shows_the_progress_of_a_replay(tmp_path: Path) -> None:
    """Status once reported that no engine is running until the start was complete."""
    with engine(
        wal={"shards": 1}, storage={"enabled": False}, directory=str(tmp_path / "engine"),
        environ={"RINGLOG_TEST_STOP_POINTS": "recovery_mid_replay:1:pause"},
    ) as running:  # fmt: skip
        with ringlog.connect(running.url, wait=10) as client:
            client.topics.create("t", durability="fsync")
            client.append("t", b"x")
        running.crash()
        before = running.begin_start()
        seen: list[m.EngineStatusReply] = []

        def is_replaying() -> bool:
            with suppress(RinglogError):
                seen.append(control_client.fetch_status(running.run_dir, 1.0))
            return bool(seen) and bool(problems(seen[-1]))

        wait_until(is_replaying, 20.0, "a status of the start")
        assert readiness(seen[-1]) == "starting"
        assert "wal_shard-00 replays its log" in problems(seen[-1])[0]
        shard = seen[-1].processes[0].pid
        wait_until(lambda: state_of(shard) == "T", 20.0, "the shard to pause in its replay")
        os.kill(shard, signal.SIGCONT)
        running.end_start(before)
        found = control_client.fetch_status(running.run_dir, 5.0)
        assert (readiness(found), problems(found)) == ("ready", [])


def printed(format: Format) -> str:
    out = io.StringIO()
    show(FOUND, Printer(format, out=out), [BEHIND])
    return out.getvalue()


def test_tables_show_pressure_and_delivery() -> None:
    """Absent measurements are shown as `-`."""
    lines = [" ".join(line.split()) for line in printed(Format.TABLE).splitlines()]
    assert "pressure of pressure step busy ring fill delivery latency throttled waited" in lines
    assert "instance 87% shed 20% - 40% 2.0 ms 20 1.5 s" in lines
    assert "wal_shard-00 87% shed 50% 87% - - 12 0.2 s" in lines
    assert "watching 2 links, 3 subscriptions, 40 feeds" in lines
    assert "wait for credit B4 5 B3 4 B2 3 B1 2 B0 1" in lines
    assert "delivery lag 7.5 s at most, latency 1.0 ms" in lines
    assert "groups 3, 5 members" in lines
    assert "group lag 40 records, 8 of them pending" in lines
    assert "floor age 12.0 s at most" in lines
    assert "0a0b/3 7.5 s 20 15 4 of 4" in lines
    assert "jobs 30 ready, 4 in flight, 5 delayed" in lines
    assert "since the start 100 handed out, 90 acked, 7 given back, 2 rejected, 1 dead letters" in lines


@pytest.mark.parametrize("format", [Format.JSON, Format.NDJSON])
def test_json_output_contains_all_numbers(format: Format) -> None:
    facts = json.loads(printed(format))
    assert facts["processes"][0]["name"] == "wal_shard-00"
    assert [each["pressure"] for each in facts["pressure"]] == [0.87, 0.87]
    assert facts["pressure"][1]["throttled"] == 12
    assert facts["delivery"]["ready_by_band"] == [1, 2, 3, 4, 5]
    assert (facts["queues"]["ready"], facts["queues"]["dead_lettered"]) == (30, 1)
    assert facts["consumers"] == [
        {
            "link": "0a0b",
            "subscription": 3,
            "lag_ms": 7_500,
            "feeds": 20,
            "waiting": 15,
            "granted": 4,
            "credit": 4,
        }
    ]


running = engine_fixture(delivery={"schedulers": 1})
link = link_fixture()


@pytest.mark.slow
def test_a_consumer_that_returns_no_grants_lags(running: TestEngine, link: Link) -> None:
    """Its lag appears in the status and is no pressure of the engine."""
    shell = Shell(running.url)
    feeds = [feed_of(running, n, f"t{n}") for n in range(3)]
    link.subscribe(*feeds, credit=1)
    assert link.turn()
    found = wait_for(shell, lambda status: status["delivery"]["lag_s"] >= 1)
    assert found["delivery"]["ready_by_band"] == [0, 2, 0, 0, 0]
    assert (found["delivery"]["links"], found["delivery"]["feeds"]) == (1, 3)
    (consumer,) = found["consumers"]
    assert consumer["lag_ms"] >= 1_000
    assert (consumer["feeds"], consumer["waiting"], consumer["granted"], consumer["credit"]) == (3, 2, 1, 1)
    assert [each["of"] for each in found["pressure"]] == ["instance", "wal_shard-00"]
    found = wait_for(shell, lambda status: not any(each["pressure"] for each in status["pressure"]))
    assert {each["step"] for each in found["pressure"]} == {"free"}
    table = shell.run("status", "--output", "table").stdout.decode()
    assert "pressure of" in table
    assert f"{consumer['link']}/1" in table
    for feed in feeds:
        link.take((1, feed.feed, 1))
    found = wait_for(shell, lambda status: status["delivery"]["lag_s"] == 0)
    assert found["consumers"][0]["lag_ms"] == 0


def wait_for(shell: Shell, holds: object) -> dict:
    """Poll the status until the condition holds."""
    found: list[dict] = []

    def is_so() -> bool:
        found[:] = shell.ok("status")
        return bool(holds(found[0]))  # type: ignore[operator]

    wait_until(is_so, WAIT_S, "the status to be so", lambda: str(found))
    return found[0]


@pytest.mark.slow
def test_status_without_schedulers_shows_only_the_pressure_of_shards() -> None:
    with engine() as alone:
        (found,) = Shell(alone.url).ok("status")
        assert [each["of"] for each in found["pressure"]] == ["wal_shard-00"]
        assert found["delivery"] is None
        assert found["consumers"] == []
        with ringlog.connect(alone.url) as client:
            client.append("t", b"x")
