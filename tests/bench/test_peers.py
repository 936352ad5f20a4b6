"""Benchmark rows against peer systems: references, required ratios, and the rotation of systems."""

from __future__ import annotations

import asyncio
import json
import sys
from dataclasses import replace
from pathlib import Path

import psutil
import pytest

from bench import __main__ as program
from bench import peers, peers_busy, peers_more, queue
from bench.peers import PARTS, PEERS, Figure, Found, comparison_rows, figures, rotated
from bench.rows import Row
from bench.systems import programs, registry
from bench.systems.base import Batch, Blocking, Way
from bench.systems.processes import Span, rate

RESULTS = Path(queue.__file__).parent / "results"


def rounds(*values: float, id: str = "figure") -> list[Found]:
    return [{id: value} for value in values]


def table(figure: Figure, **found: list[Found]) -> dict[str, Row]:
    names = [name for name in found if name != "ringlog"]
    return {row["id"]: row for row in comparison_rows([figure], found, names)}


@pytest.mark.parametrize(
    ("reach", "ours", "is_opened"),
    [
        ({"ratio": 1.5}, 150.0, True),
        ({"ratio": 1.5}, 149.0, False),
        ({"ratio_max": 2.0}, 200.0, True),
        ({"ratio_max": 2.0}, 201.0, False),
        ({"max": 80.0}, 80.0, True),
        ({"max": 80.0}, 81.0, False),
        ({}, 1.0, True),
    ],
)
def test_a_row_is_met_if_its_ratio_or_value_reaches_the_target(
    reach: dict[str, float], ours: float, is_opened: bool
) -> None:
    found = table(Figure("figure", "us", "", reach), ringlog=rounds(ours), redis=rounds(100.0))
    assert found["figure"]["met"] is is_opened
    assert found["figure"]["against"] == 100.0


def test_the_ratio_is_the_median_of_the_rounds() -> None:
    found = table(
        Figure("figure", "us", "", {"ratio": 2.0}), ringlog=rounds(2.0, 9.0, 4.0), redis=rounds(1.0, 3.0, 4.0)
    )
    assert found["figure"]["ratio"] == 2.0
    assert found["figure"]["spread"] == [2.0, 9.0]


def test_another_peer_has_its_own_row_and_target() -> None:
    figure = Figure("figure", "cycles/s", "", reach_to={"beanstalkd": {"ratio": 1.0}})
    found = table(figure, ringlog=rounds(5.0), redis=rounds(2.0), beanstalkd=rounds(10.0))
    assert list(found) == ["figure", "figure_to_beanstalkd"]
    assert found["figure"]["met"]
    assert not found["figure_to_beanstalkd"]["met"]
    assert found["figure_to_beanstalkd"]["ratio"] == 0.5


def test_parts_that_were_not_selected_make_no_rows() -> None:
    assert table(Figure("other", "us", ""), ringlog=rounds(1.0), redis=rounds(1.0)) == {}


REACHES = {
    "cycle_1_worker_page": {},
    "cycle_1_worker_synced": {"ratio": 1.5},
    "cycle_16_workers_page": {"ratio": 1.5},
    "cycle_100_a_call_page": {"ratio": 2.0},
    **{f"delivery_{way}_{kind}_p50": {"ratio_max": 1.0} for way in Way for kind in ("page", "synced")},
    **{f"delivery_{way}_{kind}_p99": {"ratio_max": 2.0} for way in Way for kind in ("page", "synced")},
    **{f"append_{kind}_p50": {"ratio_max": 1.0} for kind in ("page", "synced")},
    **{f"append_{kind}_p99": {"ratio_max": 2.0} for kind in ("page", "synced")},
    **{f"in_flight_4x64_{kind}": {"ratio": 2.0} for kind in ("page", "synced")},
    "cycle_client_cpu": {"max": 100.0},
    "cycle_server_cpu": {"max": 60.0},
    "cycle_1_worker_client_cpu": {},
    "cycle_1_worker_server_cpu": {},
    "first_ack": {"max": 6.0},
    "start_to_ready": {"max": 0.5},
    "idle_memory_pss": {"max": 80.0},
}


def test_every_figure_has_its_target() -> None:
    assert {figure.id: figure.reach for figure in figures()} == REACHES
    assert {figure.id: figure.reach_to for figure in figures() if figure.reach_to} == {
        "cycle_1_worker_page": {"beanstalkd": {"ratio": 1.0}}
    }


def test_only_deliveries_have_a_target_on_busy_cpus() -> None:
    found = {figure.id: figure.reach for figure in map(peers_busy.busy, figures()) if figure.reach}
    expected = {
        f"delivery_{way}_{kind}_p50": {"ratio_max": 2.0} for way in Way for kind in ("page", "synced")
    }
    assert found == expected


def test_kafka_has_rows_with_its_name() -> None:
    found = {"ringlog": rounds(1.0, id="first_ack"), "kafka": rounds(2.0, id="first_ack")}
    made = comparison_rows(figures(), found, peers_more.PEERS, is_first_plain=False)
    assert [(row["id"], row["reach"]) for row in made] == [("first_ack_to_kafka", None)]


def test_each_system_is_first_in_one_round() -> None:
    systems = ("ringlog", *PEERS)
    orders = [rotated(systems, turn) for turn in range(len(systems))]
    assert [order[0] for order in orders] == list(systems)
    assert all(sorted(order) == sorted(systems) for order in orders)


def test_every_round_measures_every_system_and_stops_its_servers(monkeypatch: pytest.MonkeyPatch) -> None:
    events: list[tuple[str, ...]] = []

    class Fake:
        def __init__(self, name: str, durability: str) -> None:
            self.name = name
            events.append(("start", name, durability))

        def close(self) -> None:
            events.append(("close", self.name))

    monkeypatch.setattr(registry, "require", lambda *_: None)
    monkeypatch.setattr(registry, "start", lambda name, durability, *_: Fake(name, durability))
    monkeypatch.setattr(peers, "ROUNDS", 2)
    monkeypatch.setattr(peers, "_warm_up", lambda server: events.append(("warm", server.name)))
    part = peers.Part("append", ("page", "synced"), lambda _server, kind: {f"append_{kind}": 1.0})
    monkeypatch.setattr(peers, "PARTS", (part, peers.Part("other", ("page",), lambda *_: {"other": 1.0})))
    found = peers.measured(("redis",), "append")
    assert found == {name: [{"append_page": 1.0, "append_synced": 1.0}] * 2 for name in ("ringlog", "redis")}
    starts = [event[1:] for event in events if event[0] == "start"]
    first = [("ringlog", "page"), ("ringlog", "fsync"), ("redis", "page"), ("redis", "fsync")]
    assert starts == [*first, *first[2:], *first[:2]]
    assert [event[0] for event in events] == ["start", "warm", "close"] * len(starts)


@pytest.mark.parametrize("area", ["peers", "peers-busy", "peers-more", "queue"])
def test_a_missing_peer_is_an_error_that_names_make_peers(
    area: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setattr(programs, "DIRECTORY", tmp_path)
    monkeypatch.setattr(program, "facts", dict)
    monkeypatch.setattr(sys, "argv", ["bench", area, "--scale", "0.01"])
    monkeypatch.setenv("RINGLOG_BENCH_SCALE", "0.01")
    assert program.main() == 1
    said = capsys.readouterr()
    assert "is not installed: run `make peers" in said.err
    assert not said.out


def test_burners_end_with_their_context() -> None:
    with peers_busy.burners(2) as pids:
        assert all(psutil.pid_exists(pid) for pid in pids)
    assert not any(psutil.pid_exists(pid) for pid in pids)


def test_a_blocking_client_runs_coroutines_without_an_event_loop() -> None:
    class Fake(Blocking):
        async def claim(self) -> Batch:
            return Batch((b"a",), ())

    async def work(client: Fake) -> int:
        return len((await client.claim()).payloads) + len((await client.claim()).payloads)

    client = Fake()
    assert client.run(work(client)) == 2
    with pytest.raises(RuntimeError, match="event loop"):
        client.run(asyncio.sleep(0))


def test_a_rate_spans_the_first_start_to_the_last_end() -> None:
    assert rate([Span(10, 0.0, 1.0), Span(30, 0.5, 2.0)]) == 20.0


def test_the_queue_area_keeps_the_ids_of_its_rows() -> None:
    """One function builds the ids with the name of a peer. The test compares them with the stored results."""
    saved = {row["id"] for row in json.loads((RESULTS / "queue.json").read_text())["rows"]}
    found = {"ringlog": [1.0], "redis": [1.0], "beanstalkd": [1.0]}
    for id in ("queue_fair_100_workers", "queue_wake_up_p50", "queue_single_disk_1_worker_apart"):
        made = [row["id"] for row in queue._against_peers(id, "us", found, None, "")]
        assert made == [id, f"{id}_to_beanstalkd"]
        assert saved.issuperset(made)


@pytest.mark.slow
@pytest.mark.timeout(180)
def test_every_part_measures_our_own_engine(monkeypatch: pytest.MonkeyPatch) -> None:
    """The parts run at a small scale. Each returns its values, and no process or ring remains."""
    monkeypatch.setenv("RINGLOG_BENCH_SCALE", "0.01")
    monkeypatch.setattr(peers, "WORKERS", 2)
    monkeypatch.setattr(peers, "UNTIMED", 2)
    found = peers._round("ringlog", [replace(part, kinds=("page",)) for part in PARTS])
    assert set(found) == {figure.id for figure in figures() if "_synced" not in figure.id}
    assert all(value > 0 for value in found.values())
