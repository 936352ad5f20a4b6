"""A client whose ring is damaged gets another one and loses nothing (RF-25, RF-29, RF-30)."""

from __future__ import annotations

import struct
import time
from collections.abc import Callable
from pathlib import Path

import pytest

import ringlog
from ringlog.errors import RequestTimeout
from ringlog.ring.layout import RingWord
from tests.support.engines import engine_fixture
from tests.support.machine import suspended
from tests.support.topic_contents import payloads

pytestmark = [pytest.mark.slow, pytest.mark.timeout(120)]
WAIT_S = 20.0

running = engine_fixture(
    "module", wal={"shards": 1}, supervisor={"restart_max": 50}, run={"ring_bytes": 1 << 20}
)


def rings(running) -> set[Path]:
    return set(Path(running.info.shm_dir).glob("*.ring"))


def until(condition: Callable[[], bool], what: str) -> None:
    deadline = time.monotonic() + WAIT_S
    while not condition():
        assert time.monotonic() < deadline, f"waited in vain for {what}"
        time.sleep(0.01)


def put(path: Path, word: RingWord, value: int) -> None:
    with path.open("r+b") as file:
        file.seek(word * 8)
        file.write(struct.pack("<Q", value))


def other_version(path: Path) -> None:
    with path.open("r+b") as file:
        file.seek(8)
        file.write(b"\x07")


@pytest.mark.parametrize(
    "hurt",
    [
        Path.unlink,
        other_version,
        lambda path: put(path, RingWord.TAIL, 12_345),
        lambda path: put(path, RingWord.HEAD, 8),
    ],
    ids=["unlinked", "version", "tail", "head"],
)
def test_an_unusable_ring_after_a_shard_restart_loses_no_record(running, hurt):
    before = rings(running)
    topic = f"hurt-{time.monotonic_ns()}"
    with ringlog.connect(running.url, timeout_ms=15_000) as client:
        client.append(topic, b"0")
        [ring] = rings(running) - before
        hurt(ring)
        running.kill("wal_shard")
        for n in range(1, 5):
            client.append(topic, b"%d" % n)
        found = payloads(client, topic)
        assert found == [b"0", b"1", b"2", b"3", b"4"]
    until(lambda: rings(running) <= before, "the rings to go")


@pytest.mark.parametrize(
    ("word", "value"),
    [
        (RingWord.TAIL, 1 << 40), (RingWord.SETTLE_HEAD, 1 << 40), (RingWord.HEAD, 1 << 40),
        (RingWord.CONSUMER_STATE, 1), (RingWord.CONSUMER_STATE, 2), (RingWord.CONSUMER_STATE, 77),
    ],
)  # fmt: skip
def test_corrupt_ring_words_lead_to_another_ring_and_fail_no_append(running, word, value):
    before = rings(running)
    topic = f"nonsense-{time.monotonic_ns()}"
    with ringlog.connect(running.url, timeout_ms=15_000) as client:
        client.append(topic, b"0")
        [ring] = rings(running) - before
        put(ring, word, value)
        for n in range(1, 5):
            client.append(topic, b"%d" % n)
        found = payloads(client, topic)
        assert found == [b"0", b"1", b"2", b"3", b"4"]


def test_a_closed_client_leaves_no_ring_while_its_process_lives(running):
    before = rings(running)
    for _ in range(3):
        with ringlog.connect(running.url) as client:
            client.append("closed", b"x")
    until(lambda: rings(running) <= before, "the rings to go")


def test_a_frame_in_an_abandoned_ring_has_an_unknown_outcome_at_the_timeout(running):
    """The shard still reads the frame from the first ring, although the client uses another one."""
    before = rings(running)
    topic = f"doubt-{time.monotonic_ns()}"
    with ringlog.connect(running.url, timeout_ms=3_000) as client:
        client.append(topic, b"0")
        [ring] = rings(running) - before
        with suspended(running.pid_of("wal_shard")):
            ring.unlink()
            with pytest.raises(RequestTimeout) as caught:
                client.append(topic, b"1")
        assert caught.value.outcome == "unknown"
        until(lambda: client.topics.state(topic).head_seq == 2, "the record nobody waits for")
