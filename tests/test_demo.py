"""The demo: its judges on synthetic outcomes, and a small run of the whole demo."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import xxhash

from demo import copies
from demo.judge import Counts, Ledger, Verdict, judge
from demo.source import Source, events_of, id_of, load, prepare, share, tag_of
from demo.words import SharedCounters
from ringlog.testing.real_engine import wait_until

ROOT = Path(__file__).parent.parent
PRODUCERS = 2
PAYLOADS = [b'{"id":%d,"x":%d}' % (i, i * i) for i in range(10)]


@pytest.fixture
def events() -> Source:
    """Ten events: the even ones in topic a, the odd ones in topic b."""
    digests = np.array([xxhash.xxh3_64_intdigest(p) for p in PAYLOADS], dtype=np.uint64)
    return Source(("a", "b"), digests, np.array([i % 2 for i in range(10)], dtype=np.uint8))


def verdict_of(events: Source, a: list[bytes], b: list[bytes], first_of_b: int = 1) -> Verdict:
    ledger = Ledger(events, PRODUCERS)
    ledger.take("a", 1, a)
    ledger.take("b", first_of_b, b)
    acked = np.array([i // 2 + 1 for i in range(10)], dtype=np.uint64)
    return judge(acked, ledger.seen, ledger.seqs, ledger.counts)


EVEN, ODD = PAYLOADS[::2], PAYLOADS[1::2]


@pytest.mark.parametrize(
    ("found", "others", "flaws"),
    [
        ([3, 1, 5], 0, (3, 3, 0, 0, 0, 0)),
        ([3, 5], 0, (3, 2, 1, 0, 0, 0)),
        ([3, 1, 1, 5], 0, (3, 4, 0, 1, 0, 0)),
        ([1, 3, 5], 0, (3, 3, 0, 0, 1, 0)),
        ([3, 1, 5, 7], 1, (3, 5, 0, 0, 0, 2)),
    ],
)
def test_every_flaw_of_copies_is_found(found: list[int], others: int, flaws: tuple[int, ...]) -> None:
    """The expected copies are 3, 1, 5 in this order, which is the order of their seqs in the source."""
    assert copies.judge([3, 1, 5], found, others) == flaws


def test_the_expected_copies_follow_the_source_and_the_acks(tmp_path: Path) -> None:
    events = prepare(tmp_path, limit=300)
    acked = np.arange(len(events), 0, -1, dtype=np.uint64)
    acked[::3] = 0
    wanted = copies.wanted_of(tmp_path, events, acked)
    found = {i: payload for topic in events.topics for i, payload in events_of(tmp_path, topic)}
    assert sorted(i for ids in wanted.values() for i in ids) == [
        i for i in sorted(found) if i % 3 and json.loads(found[i])["origin"] == copies.AIRPORT
    ]
    assert all(ids == sorted(ids, reverse=True) for ids in wanted.values())


def test_a_run_without_flaws_is_good(events: Source) -> None:
    verdict = verdict_of(events, EVEN, ODD)
    assert verdict.is_good
    assert (verdict.acked, verdict.read) == (10, 10)


@pytest.mark.parametrize(
    ("a", "b", "flaws"),
    [
        (EVEN[:-1], ODD, {"lost": 1}),
        ([*EVEN, EVEN[-1]], ODD, {"doubled": 1, "out_of_order": 0}),
        ([*EVEN, EVEN[0]], ODD, {"doubled": 1, "out_of_order": 1}),
        ([EVEN[1], EVEN[0], *EVEN[2:]], ODD, {"out_of_order": 1, "moved": 2}),
        ([EVEN[0][:-1] + b" ", *EVEN[1:]], ODD, {"lost": 1, "others": 1}),
        (EVEN, [*ODD, EVEN[0]], {"others": 1, "read": 11}),
        (EVEN, [*ODD, b"\xff", b'{"id":99,', b'{"id":-1,'], {"others": 3}),
    ],
)
def test_every_flaw_is_found(events: Source, a: list[bytes], b: list[bytes], flaws: dict[str, int]) -> None:
    verdict = verdict_of(events, a, b)
    assert not verdict.is_good
    assert {name: getattr(verdict, name) for name in flaws} == flaws


def test_a_gap_in_the_seqs_and_an_announced_loss_are_flaws(events: Source) -> None:
    assert verdict_of(events, EVEN, ODD, first_of_b=2).others == 1
    none = np.zeros(10, dtype=np.uint64)
    assert judge(none, none.astype(np.uint32), none, Counts(announced=1)).others == 1


def test_an_unacknowledged_record_is_not_lost() -> None:
    none = np.zeros(10, dtype=np.uint64)
    assert judge(none, none.astype(np.uint32), none, Counts()).lost == 0


def test_the_source_is_divided_among_producers_completely_and_in_order(tmp_path: Path) -> None:
    source = prepare(tmp_path, limit=101)
    again = load(tmp_path)
    assert (again.topics, len(again)) == (source.topics, 101)
    assert sum(source.expected().values()) == 101
    shares = [list(share(tmp_path, number, 4)) for number in range(4)]
    assert sorted(i for events in shares for i, _, _ in events) == list(range(101))
    for i, topic, payload in shares[1]:
        assert id_of(payload) == i == json.loads(payload)["id"]
        assert topic == f"flights.{json.loads(payload)['carrier']}" == source.topics[source.topic_of[i]]
        assert xxhash.xxh3_64_intdigest(payload) == source.digests[i]


def test_events_of_one_topic_are_found_with_their_tags(tmp_path: Path) -> None:
    source = prepare(tmp_path, limit=200)
    found = [(i, payload) for topic in source.topics for i, payload in events_of(tmp_path, topic)]
    assert sorted(i for i, _ in found) == list(range(200))
    assert all(tag_of(payload) == json.loads(payload)["origin"] for _, payload in found)
    assert tag_of(b"{}") == ""


def test_shared_words_are_visible_to_each_other(tmp_path: Path) -> None:
    one, other = SharedCounters(tmp_path), SharedCounters(tmp_path)
    one[3] = (1 << 64) - 1
    one[4] = 5
    assert (other[3], other.total(4, 2)) == ((1 << 64) - 1, 5)


PROGRAM = """
import runpy, signal
signal.signal(signal.SIGINT, signal.default_int_handler)  # Whoever runs the tests may ignore it.
runpy.run_module("demo", run_name="__main__", alter_sys=True)
"""


def start(tmp_path: Path, *arguments: str) -> subprocess.Popen[str]:
    command = [sys.executable, "-c", PROGRAM, "--dir", str(tmp_path / "work")]
    command += ["--out", str(tmp_path / "demo.json"), *arguments]
    (tmp_path / "temporary").mkdir()
    return subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, cwd=ROOT,
        env=os.environ | {"PYTHONPATH": str(ROOT), "TMPDIR": str(tmp_path / "temporary")},
    )  # fmt: skip


@pytest.mark.slow
@pytest.mark.timeout(180)
def test_a_small_run_with_a_kill_loses_duplicates_and_reorders_no_record(tmp_path: Path) -> None:
    child = start(tmp_path, "--limit", "8000", "--producers", "2", "--kills", "1")
    out, err = child.communicate(timeout=170)
    assert child.returncode == 0, out + err
    found = json.loads((tmp_path / "demo.json").read_text())
    assert [found[key] for key in ("acked", "read", "lost", "doubled", "out_of_order")] == [
        8000,
        8000,
        0,
        0,
        0,
    ]
    assert (found["kills"], found["restarts"]) == (["scheduler-00", "wal_shard-00"], 2)
    assert {"records_per_s", "ack_p50_ms", "ack_p99_ms", "pause_max_ms"} <= set(found)
    assert 0 < found["live_p50_ms"] <= found["live_p99_ms"]
    copied = found["copies"]
    assert 0 < copied["wanted"] == copied["read"] < 8000
    assert "each once and in order" in out
    assert "longest producer pause" in out
    stage = found["stage"]
    assert found["deleted"] > 0 < found["evicted"]
    assert (found["tombstone"]["reason"], found["tombstone"]["gap_from"]) == ("cap", 1)
    assert 0 < found["cold_segments"] == found["segments"]
    assert stage["left"]["read"] == stage["left"]["acked"] > 0
    assert stage["left"]["read"] + stage["rest"]["read"] + found["deleted"] + found["evicted"] == 8000
    assert "reason cap" in out
    assert not (tmp_path / "work").exists()
    assert not os.listdir(tmp_path / "temporary")


@pytest.mark.slow
def test_an_interrupt_ends_all_processes_of_the_demo(tmp_path: Path, data_dir: Path) -> None:
    """The fixtures check that no process and no shared memory remain."""
    child = start(tmp_path, "--limit", "50000")
    engine_json = tmp_path / "work" / "data" / "run" / "engine.json"
    wait_until(engine_json.exists, 30, "the demo's engine to be ready")
    child.send_signal(signal.SIGINT)
    _, err = child.communicate(timeout=40)
    assert child.returncode == 130, err
    assert not (tmp_path / "work").exists()
    assert not os.listdir(tmp_path / "temporary")
