"""A broken or hostile peer, and shared memory with any content: the result is a typed error and a private
copy."""

from __future__ import annotations

import mmap
import os
import resource
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ringlog.errors import RingError
from ringlog.ring.layout import RingIdentity, RingWord
from ringlog.ring.memory import RingMemory
from ringlog.ring.region import create_ring
from ringlog.ring.ring import RingConsumer, RingProducer
from tests.support.ring_children import Child, until
from tests.support.ring_frames import frame_of, number_of, push_all, settle, take

NEAR = st.integers(-80, 80).map(lambda n: 4096 + n)
any_word = st.one_of(st.integers(0, (1 << 64) - 1), st.integers(0, 300), NEAR)
producer_lies = st.lists(
    st.tuples(
        st.sampled_from([RingWord.HEAD, RingWord.SETTLE_TAIL, RingWord.PRODUCER_STATE, RingWord.WANTS]),
        any_word,
    ),
    min_size=1,
)
all_lies = st.lists(st.tuples(st.sampled_from(list(RingWord)), any_word), min_size=1)


def ends() -> tuple[RingMemory, RingProducer, RingConsumer]:
    identity = RingIdentity(0, 4096, 8, 0, 0, 0, 0)
    buffer = mmap.mmap(-1, identity.file_bytes)
    producer = RingProducer(RingMemory(buffer, identity))
    consumer = RingConsumer(RingMemory(buffer, identity))
    push_all(producer, [frame_of(1), frame_of(2), frame_of(3)])
    settle(consumer, take(consumer, frames_max=2))
    return RingMemory(buffer, identity), producer, consumer


def answers(call: Callable[[], object]) -> bool:
    """Return True if the call returns and False if it raises RingError. Any other exception is a bug and
    passes through."""
    try:
        call()
    except RingError:
        return False
    return True


@given(producer_lies)
def test_a_consumer_survives_any_words_of_its_producer(lies: list[tuple[RingWord, int]]) -> None:
    """Each call returns or raises RingError. It never reads settled frames or bytes beyond the ring (RF-25,
    RF-32)."""
    memory, _, consumer = ends()
    for word, value in lies:
        memory.store(word, value)
    tail, read = consumer.tail, consumer.read_position
    answers(lambda: consumer.settle_free)
    if answers(lambda: consumer.pending):
        head = memory.load(RingWord.HEAD)
        assert read <= head <= tail + 4096
        got = consumer.copy_pending(1 << 20)
        assert (0 if got is None else len(got[1])) == min(head - read, 4096 - read % 4096)
    answers(lambda: take(consumer))
    answers(lambda: consumer.settle(np.zeros((1, 8), dtype=np.uint64), consumer.read_position))
    answers(lambda: RingConsumer(memory))
    assert consumer.tail >= tail


@given(all_lies)
def test_a_producer_survives_any_words(lies: list[tuple[RingWord, int]]) -> None:
    """The same holds when a producer attaches to such words (RF-25)."""
    memory, producer, _ = ends()
    for word, value in lies:
        memory.store(word, value)
    answers(producer.take_settlements)
    answers(lambda: producer.push_one(frame_of(4)))
    answers(lambda: producer.push_run(frame_of(4) * 30, 64))
    answers(lambda: producer.is_consumer_closed)
    answers(lambda: push_all(producer, [frame_of(4)] * 3))
    answers(lambda: RingProducer(memory).push_one(frame_of(5)))


@pytest.mark.parametrize(
    ("word", "value"),
    [
        (RingWord.HEAD, 0),
        (RingWord.HEAD, 128),
        (RingWord.HEAD, 4096 + 136),
        (RingWord.HEAD, 196),
        (RingWord.HEAD, 1 << 63),
    ],
    ids=["zero", "backwards", "beyond capacity", "odd", "huge"],
)
def test_an_invalid_head_is_reported_with_its_value(word: RingWord, value: int) -> None:
    """The head is below the tail, beyond the capacity, or no multiple of 8 (RF-32)."""
    memory, _, consumer = ends()
    assert consumer.pending == 64
    memory.store(word, value)
    with pytest.raises(RingError, match=rf"corrupt ring header.*head={value}.*tail=128"):
        _ = consumer.pending


def test_a_settlement_of_a_frame_never_pushed_is_reported() -> None:
    memory, producer, _ = ends()
    assert len(producer.take_settlements()) == 2
    entry = np.zeros((1, 8), dtype=np.uint64)
    entry[0, 0] = 4000
    memory.write_entries(2, entry.tobytes())
    memory.store(RingWord.SETTLE_HEAD, 3)
    with pytest.raises(RingError, match=r"corrupt ring header.*settled_position=4000"):
        producer.take_settlements()


def test_a_consumer_never_reads_back_its_own_words() -> None:
    """A hostile producer that changes the tail or the settle head has no effect."""
    memory, _, consumer = ends()
    memory.store(RingWord.TAIL, 0)
    memory.store(RingWord.SETTLE_HEAD, 77)
    assert (consumer.tail, consumer.settle_free, consumer.pending) == (128, 6, 64)
    settle(consumer, take(consumer))
    assert (memory.load(RingWord.TAIL), memory.load(RingWord.SETTLE_HEAD)) == (192, 3)


@given(st.binary(min_size=8, max_size=400))
def test_a_successor_survives_any_bytes_in_the_data_area(junk: bytes) -> None:
    """The successor counts frames in flight by lengths that another process wrote."""
    memory, _, _ = ends()
    memory.write(128, junk)
    assert 0 <= RingProducer(memory).in_flight <= 8


def test_a_change_after_the_copy_does_not_reach_the_copy(make_ring: Callable[..., str]) -> None:
    """The shard writes exactly the bytes that it verified (R3, RF-33)."""
    path = make_ring()
    producer, consumer = RingProducer.attach(path), RingConsumer.attach(path)
    producer.push_one(frame_of(1))
    _, private = consumer.copy_pending(4096) or (0, bytearray())
    producer._memory.write(16, b"scribble")
    assert number_of(private) == 1
    assert number_of(consumer._memory.read(0, 64)) is None
    producer.close()
    consumer.detach()


@pytest.mark.slow
def test_a_producer_that_changes_published_bytes_gets_no_bad_frame_accepted(
    make_ring: Callable[..., str],
) -> None:
    """Another process changes published bytes all the time, and a verified copy stays valid (RF-33).

    The test must show a real race: verifying in the ring and copying afterwards accepts bad frames.
    """
    path = make_ring()

    def scribble() -> None:
        producer = RingProducer.attach(path)
        frames = [frame_of(i, 8_192) for i in range(8)]
        push_all(producer, frames[:7])
        memory = producer._memory
        while True:
            memory.write(8_192 * 3, frames[3])
            memory.write(8_192 * 3 + 4_096, b"!" * 2_048)

    consumer = RingConsumer.attach(path)
    child = Child(scribble)
    until(lambda: consumer.pending, "frames are published")
    accepted, refused, fooled = 0, 0, 0

    def raced() -> bool:
        nonlocal accepted, refused, fooled
        _, data = consumer.copy_pending(8_192 * 7) or (0, bytearray())
        frames = [memoryview(data)[at : at + 8_192] for at in range(0, len(data), 8_192)]
        good = [frame for frame in frames if number_of(frame) is not None]
        accepted, refused = accepted + len(good), refused + len(frames) - len(good)
        assert all(number_of(frame) is not None for frame in good), "the copy changed after it was verified"
        if number_of(consumer._memory.read(8_192 * 3, 8_192)) is not None:
            os.sched_yield()
            fooled += number_of(consumer._memory.read(8_192 * 3, 8_192)) is None
        return bool(accepted > 100 and refused and fooled)

    until(raced, "the race was seen from both sides")
    child.kill()
    child.wait()
    consumer.detach()


@pytest.mark.slow
def test_a_ring_that_does_not_fit_is_refused_and_leaves_no_file(shm_dir: Path) -> None:
    """RLIMIT_FSIZE makes the allocation fail as a full file system does (RF-28)."""
    path = str(shm_dir / "ring")

    def create() -> None:
        resource.setrlimit(resource.RLIMIT_FSIZE, (50_000, 50_000))
        with pytest.raises(RingError, match=rf"cannot allocate.*{path}.*bytes=\d\d+"):
            create_ring(path, ring_bytes=65_536, settle_entries=8, shard=0, engine_id="e", client="c")

    assert Child(create).wait() == 0
    assert os.listdir(shm_dir) == []


SMALL_TMPFS = """
import os, sys
from ringlog.errors import RingError
from ringlog.ring.region import create_ring
from ringlog.board.board import Board, BoardError
from ringlog.board.topics import TopicTable
from ringlog.ring.ring import RingProducer
where = sys.argv[1]
def ring(name):
    create_ring(f"{where}/{name}", ring_bytes=65_536, settle_entries=64, shard=0, engine_id="e", client="c")
ring("fits")
try:
    ring("does-not")
except RingError as e:
    assert "No space left" in str(e) and "does-not" in str(e), e
else:
    sys.exit("the second ring fitted")
for make in (lambda: Board.create(where), lambda: TopicTable.create(where, 0)):
    try:
        make()
    except BoardError as e:
        assert "No space left" in str(e), e
    else:
        sys.exit("a board fitted")
assert os.listdir(where) == ["fits"], os.listdir(where)
producer = RingProducer.attach(f"{where}/fits")
frames = 0
while producer.push_one((16380).to_bytes(8, "little") + bytes(16376)) is not None:
    frames += 1
assert frames == producer.capacity // 16384, frames
"""


@pytest.mark.slow
def test_a_full_dev_shm_refuses_a_new_ring_and_never_kills_a_writer(tmp_path: Path) -> None:
    """On a file system of 100 KiB, a ring that was created can be filled to its last byte (RF-28)."""
    if os.geteuid() != 0 or shutil.which("unshare") is None:
        pytest.skip("a private mount needs root and unshare")
    mount = f'mount -t tmpfs -o size=100k none {tmp_path} && exec {sys.executable} -c "$0" {tmp_path}'
    done = subprocess.run(
        ["unshare", "-m", "--propagation", "private", "sh", "-c", mount, SMALL_TMPFS],
        capture_output=True, text=True, timeout=30, check=False,
        env={**os.environ, "PYTHONPATH": os.getcwd()},
    )  # fmt: skip
    if "unshare failed" in done.stderr or "mount:" in done.stderr:
        pytest.skip(f"no private mounts here: {done.stderr.strip()}")
    assert done.returncode == 0, done.stderr
