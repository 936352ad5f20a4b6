"""Torn words (RF-26) and SIGKILL of both sides of a ring, measured on this machine."""

from __future__ import annotations

import mmap
import os
import random
import struct
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from ringlog.ring.memory import AtomicWords
from ringlog.ring.ring import RingConsumer, RingProducer
from tests.support.ring_children import Child, until
from tests.support.ring_frames import frame_of, number_of, push_all, take

READS = 2_000_000
BYTES_ALIKE = 0x0101010101010101


def torn_reads(store: Callable[[mmap.mmap], None], enough: Callable[[int, int], bool]) -> tuple[int, int]:
    """Return (reads, torn reads) of a word that another process keeps storing with eight equal bytes."""
    page = mmap.mmap(-1, 4096)
    child = Child(lambda: store(page))
    words = AtomicWords(memoryview(page))
    until(lambda: words.load(16), "the other process stores")
    reads = torn = 0
    while not enough(reads, torn):
        for _ in range(20_000):
            value = words.load(16)
            if value == 0 or value != (value & 0xFF) * BYTES_ALIKE:
                torn += 1
        reads += 20_000
        assert not child.has_ended()
    child.kill()
    child.wait()
    words.close()
    page.close()
    return reads, torn


def store_through_words(page: mmap.mmap) -> None:
    words = AtomicWords(memoryview(page))
    while True:
        for byte in range(1, 256):
            words.store(16, byte * BYTES_ALIKE)


def store_by_pack_into(page: mmap.mmap) -> None:
    while True:
        for byte in range(1, 256):
            struct.pack_into("<Q", page, 128, byte * BYTES_ALIKE)


@pytest.mark.slow
def test_no_word_is_ever_read_torn() -> None:
    """None of two million racing reads is torn (R1, RF-26)."""
    assert torn_reads(store_through_words, lambda reads, _: reads >= READS) == (READS, 0)


@pytest.mark.slow
def test_the_rig_detects_words_torn_by_pack_into() -> None:
    """Without this check the test above would prove nothing."""
    if len(os.sched_getaffinity(0)) < 2:
        pytest.skip("a torn word is seen only while both processes run")
    _, torn = torn_reads(store_by_pack_into, lambda reads, torn: torn > 0 or reads > 20 * READS)
    assert torn > 0


KILLS = 60
FRAME_BYTES = 136
BATCH = 24


def number_at(producer: RingProducer) -> int:
    """Return the number of frames of FRAME_BYTES that were ever published. A new producer continues there."""
    lap, index = divmod(producer.head, producer.capacity)
    return lap * (producer.capacity // FRAME_BYTES) + index // FRAME_BYTES


def produce(path: str) -> None:
    """Push counters, take settlements and check their order. The full ring pushes back."""
    producer = RingProducer.attach(path)
    assert 0 <= producer.in_flight <= producer.settle_entries
    number, last = number_at(producer), -1
    chance = random.Random(number)
    while True:
        frames = [frame_of(number + i, FRAME_BYTES) for i in range(chance.randrange(1, BATCH))]
        if chance.random() < 0.5:
            number += len(push_all(producer, frames))
        else:
            number += producer.push_run(b"".join(frames), FRAME_BYTES)[0]
        for position in producer.take_settlements()[:, 0].tolist():
            assert position > last, f"settled {position} after {last}"
            last = position


def consume(path: str, log: str) -> None:
    """Verify private copies, append new counters to the log, then settle."""
    fd = os.open(log, os.O_RDWR | os.O_CREAT | os.O_APPEND, 0o600)
    size = os.fstat(fd).st_size & ~7
    os.ftruncate(fd, size)
    done = int.from_bytes(os.pread(fd, 8, size - 8), "little") + 1 if size else 0
    consumer = RingConsumer.attach(path)
    while True:
        frames = take(consumer, 4_096, consumer.settle_free)
        if not frames:
            continue
        numbers = [number_of(frame) for _, frame in frames]
        assert None not in numbers, "a published frame does not verify"
        fresh = [number for number in numbers if number >= done]
        os.write(fd, np.array(fresh, dtype=np.uint64).tobytes())
        done = max([done, *(number + 1 for number in fresh)])
        entries = np.zeros((len(frames), 8), dtype=np.uint64)
        entries[:, 0] = [position for position, _ in frames]
        consumer.settle(entries, frames[-1][0] + FRAME_BYTES)


@pytest.mark.slow
@pytest.mark.parametrize(
    "victims", [(True, False), (False, True), (True, True)], ids=["producer", "consumer", "both"]
)
def test_random_kills_lose_duplicate_and_reorder_no_frame(
    make_ring: Callable[..., str], shm_dir: Path, victims: tuple[bool, bool]
) -> None:
    """The log of counters has no gap and no duplicate, and is in order (RF-1, RF-9)."""
    path, log = make_ring(), str(shm_dir / "log")
    chance = random.Random(20)
    runs = [lambda: produce(path), lambda: consume(path, log)]
    children = [Child(run) for run in runs]
    for _ in range(KILLS // sum(victims)):
        goal = logged(log) + chance.randrange(1, 1_000)
        until(
            lambda goal=goal: logged(log) >= goal or any(c.has_ended() for c in children), "frames are logged"
        )
        for side in (0, 1):
            assert not children[side].has_ended(), f"side {side} failed: {children[side].wait()}"
        struck = [side for side in (0, 1) if victims[side]]
        for side in struck:
            children[side].kill()
        for side in struck:
            children[side].wait()
            children[side] = Child(runs[side])
    until(lambda: logged(log) >= goal + 100, "frames are logged after the last kill")
    for child in children:
        assert not child.has_ended()
        child.kill()
        child.wait()
    counters = np.fromfile(log, dtype=np.uint64, count=logged(log))
    assert len(counters) > 1_000
    assert np.array_equal(counters, np.arange(len(counters), dtype=np.uint64))


def logged(log: str) -> int:
    return os.stat(log).st_size // 8 if os.path.exists(log) else 0
