"""Transfers through a ring: wrap, padding, back-pressure, sizes, settlements."""

from __future__ import annotations

import mmap
from collections.abc import Callable, Iterator

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ringlog.errors import RingError
from ringlog.frame import layout as frame_layout
from ringlog.frame import settle_entry as frame_settle
from ringlog.ring import layout
from ringlog.ring.layout import RingIdentity
from ringlog.ring.memory import RingMemory
from ringlog.ring.ring import RingConsumer, RingProducer, WakeupFlags
from tests.support.ring_frames import frame_of, number_of, push_all, settle, take

Ends = tuple[RingProducer, RingConsumer]


@pytest.fixture
def ends(make_ring: Callable[..., str]) -> Iterator[Ends]:
    path = make_ring()
    producer, consumer = RingProducer.attach(path, engine_id="e"), RingConsumer.attach(path, shard=3)
    yield producer, consumer
    producer.close()
    consumer.detach()


def test_a_frame_is_seen_whole_and_settled_once(ends: Ends) -> None:
    producer, consumer = ends
    assert consumer.pending == 0
    assert consumer.copy_pending(4096) is None
    assert producer.push_one(frame_of(7)) == 0
    assert (consumer.pending, producer.in_flight, producer.free_frames) == (64, 1, 63)
    frames = take(consumer)
    assert [number_of(frame) for _, frame in frames] == [7]
    assert consumer.tail == 0, "reading does not give room back"
    settle(consumer, frames)
    assert consumer.tail == consumer.read_position == 64
    assert producer.take_settlements()[:, 0].tolist() == [0]
    assert producer.take_settlements().shape == (0, 8)
    assert (producer.in_flight, producer.head - consumer.tail) == (0, 0)


def test_frames_never_cross_the_end_of_a_lap_and_padding_is_skipped(ends: Ends) -> None:
    """One pad word fills the rest of a lap if the rest is too short. A rest that fits exactly needs no
    pad."""
    producer, consumer = ends
    size = 16_000
    for number in range(12):
        position = producer.push_one(frame_of(number, size))
        assert position is not None
        assert position % producer.capacity + size <= producer.capacity
        frames = take(consumer) or take(consumer)
        assert [number_of(frame) for _, frame in frames] == [number]
        settle(consumer, frames)
        assert len(producer.take_settlements()) == 1
    assert producer.head > 2 * producer.capacity


def test_a_push_that_crosses_the_lap_is_published_by_one_store(ends: Ends) -> None:
    producer, consumer = ends
    push_all(producer, [frame_of(i, 16_000) for i in range(4)])
    settle(consumer, take(consumer))
    producer.take_settlements()
    positions = push_all(producer, [frame_of(4, 1_000), frame_of(5, 1_000), frame_of(6, 1_000)])
    assert positions == [64_000, 65_536, 66_536]
    assert [number_of(f) for _, f in take(consumer) + take(consumer)] == [4, 5, 6]


def test_a_full_ring_refuses_a_frame_as_a_whole(ends: Ends) -> None:
    """Every push of one frame returns "no room" and changes nothing."""
    producer, consumer = ends
    for number in range(4):
        assert producer.push_one(frame_of(number, 16_384)) is not None
    assert producer.push_one(frame_of(4)) is None
    assert producer.push_run(frame_of(4) * 3, 64)[0] == 0
    assert producer.push_buffer(frame_of(4), np.array([0]))[0] == 0
    settle(consumer, take(consumer, 16_384))
    assert producer.push_one(frame_of(4)) == 65_536


def test_frames_in_flight_are_bounded_by_the_settle_area(ends: Ends) -> None:
    producer, consumer = ends
    count, positions = producer.push_run(frame_of(1) * 100, 64)
    assert (count, list(positions)) == (64, list(range(0, 64 * 64, 64)))
    assert producer.free_frames == 0
    assert producer.push_one(frame_of(1)) is None
    settle(consumer, take(consumer))
    assert producer.push_one(frame_of(1)) is None, "settlements were not taken yet"
    assert len(producer.take_settlements()) == 64
    assert producer.push_one(frame_of(1)) == 64 * 64


def test_settlements_beyond_the_settle_area_are_refused(ends: Ends) -> None:
    producer, consumer = ends
    producer.push_run(frame_of(1) * 64, 64)
    frames = take(consumer)
    settle(consumer, frames[:40])
    assert consumer.settle_free == 24
    with pytest.raises(RingError, match="settle area has 24 free entries, got 25"):
        consumer.settle(np.zeros((25, 8), dtype=np.uint64), 64 * 64)
    settle(consumer, frames[40:])
    assert consumer.settle_free == 0
    assert len(producer.take_settlements()) == 64


def test_settle_refuses_a_tail_outside_the_frames_read(ends: Ends) -> None:
    producer, consumer = ends
    push_all(producer, [frame_of(1), frame_of(2)])
    take(consumer, 64)
    for tail in (128, 12, -8):
        with pytest.raises(RingError, match="new_tail must be"):
            consumer.settle(np.zeros((1, 8), dtype=np.uint64), tail)
    with pytest.raises(RingError, match="uint64"):
        consumer.settle(np.zeros((1, 8)), 64)
    with pytest.raises(RingError, match="uint64"):
        consumer.settle(np.zeros((1, 7), dtype=np.uint64), 64)


@pytest.mark.parametrize("size", [0, 4, 63, 65])
def test_a_frame_size_that_is_no_multiple_of_8_is_refused(ends: Ends, size: int) -> None:
    producer, _ = ends
    with pytest.raises(RingError, match="multiple of 8"):
        producer.push_one(b"x" * size)


def test_a_frame_too_large_for_the_ring_is_refused_with_the_limit(ends: Ends) -> None:
    """Otherwise the producer would wait forever."""
    producer, _ = ends
    assert producer.frame_bytes_max == 16_384
    big = bytes(16_392)
    with pytest.raises(RingError, match=r"16392.*16384"):
        producer.push_one(big)
    with pytest.raises(RingError, match="must be <= 16384 bytes"):
        producer.push_run(big, len(big))
    with pytest.raises(RingError, match="must be <= 16384 bytes"):
        producer.push_buffer(big, np.array([0]))
    with pytest.raises(RingError, match="must be a multiple of 64, got 100"):
        producer.push_run(bytes(100), 64)
    assert producer.head == 0


@pytest.mark.parametrize("offsets", [[8], [0, 64], [0, 72], [0, 0], [0, 32, 16], []])
def test_offsets_must_divide_the_buffer(ends: Ends, offsets: list[int]) -> None:
    producer, _ = ends
    with pytest.raises(RingError, match="offsets must start at 0, ascend"):
        producer.push_buffer(frame_of(1), np.array(offsets, dtype=np.int64))


def test_a_buffer_with_a_frame_of_odd_size_is_refused(ends: Ends) -> None:
    producer, _ = ends
    with pytest.raises(RingError, match="multiple of 8"):
        producer.push_buffer(bytes(64), np.array([0, 12]))


def test_a_push_of_no_frames_changes_nothing(ends: Ends) -> None:
    producer, _ = ends
    assert producer.push_run(b"", 64)[0] == 0
    assert producer.push_buffer(b"", np.array([], dtype=np.int64))[0] == 0
    assert producer.head == 0


def test_advance_and_skip_stay_within_the_published_bytes(ends: Ends) -> None:
    producer, consumer = ends
    producer.push_one(frame_of(1))
    consumer.copy_pending(4096)
    for nbytes in (72, 4, -8):
        with pytest.raises(RingError, match="nbytes must be"):
            consumer.advance(nbytes)
    with pytest.raises(RingError, match="unexpected ring padding"):
        consumer.skip_padding()
    consumer.advance(64)
    with pytest.raises(RingError, match="unexpected ring padding"):
        consumer.skip_padding()


def test_copy_respects_its_limit_and_is_private(ends: Ends) -> None:
    producer, consumer = ends
    push_all(producer, [frame_of(1), frame_of(2)])
    position, data = consumer.copy_pending(100) or (-1, bytearray())
    assert (position, len(data)) == (0, 96)
    data[:] = bytes(96)
    assert [number_of(f) for _, f in take(consumer)] == [1, 2]


def test_wakeup_flags_and_close_reach_the_other_side(ends: Ends) -> None:
    producer, consumer = ends
    producer.set_wakeup_flags(WakeupFlags.SETTLEMENTS | WakeupFlags.PUBLICATION)
    assert consumer.wakeup_flags == 3
    assert not producer.is_consumer_closed
    producer.push_one(frame_of(1))
    frames = take(consumer)
    consumer.close()
    consumer.close()
    assert producer.is_consumer_closed
    settle(consumer, frames)
    assert len(producer.take_settlements()) == 1, "what was read before is still settled"


def test_calls_of_a_detached_consumer_raise_ring_error(ends: Ends) -> None:
    _, consumer = ends
    consumer.detach()
    consumer.detach()
    for call in (
        lambda: consumer.pending,
        lambda: consumer.wakeup_flags,
        lambda: consumer.copy_pending(8),
        consumer.close,
    ):
        with pytest.raises(RingError, match="ring is closed"):
            call()


def test_a_closed_producer_refuses_pushes(ends: Ends) -> None:
    producer, consumer = ends
    producer.push_one(frame_of(1))
    producer.close()
    producer.close()
    assert [number_of(f) for _, f in take(consumer)] == [1], "what was published stays"
    with pytest.raises(RingError, match="closed"):
        producer.push_one(frame_of(2))


def test_constants_agree_with_the_frame_format() -> None:
    """`ring` does not import `frame`, but both must use the same values."""
    assert layout.PAD_WORD == frame_layout.PAD_WORD
    assert layout.SETTLE_WORDS == frame_settle.WORDS


sizes = st.integers(min_value=3, max_value=128).map(lambda n: n * 8)
actions = st.lists(
    st.one_of(
        st.tuples(st.just("one"), sizes),
        st.tuples(st.just("buffer"), st.lists(sizes, min_size=1, max_size=9)),
        st.tuples(st.just("run"), st.tuples(sizes, st.integers(1, 12))),
        st.tuples(st.just("take"), st.integers(8, 8192)),
        st.tuples(st.just("settled"), st.none()),
        st.tuples(st.just("restart consumer"), st.none()),
        st.tuples(st.just("restart producer"), st.none()),
    ),
    max_size=60,
)


class Pair:
    """Both ends over plain memory, and the list of frames that the ring represents."""

    def __init__(self) -> None:
        self.identity = RingIdentity(0, 4096, 8, 0, 0, 0, 0)
        self.buffer = mmap.mmap(-1, self.identity.file_bytes)
        self.producer = RingProducer(RingMemory(self.buffer, self.identity))
        self.consumer = RingConsumer(RingMemory(self.buffer, self.identity))
        self.pushed: list[tuple[int, bytes]] = []
        self.taken: list[tuple[int, bytes]] = []
        self.told: list[int] = []

    def made(self, lengths: list[int]) -> list[bytes]:
        return [frame_of(len(self.pushed) + i, length) for i, length in enumerate(lengths)]

    def one(self, length: int) -> None:
        (frame,) = self.made([length])
        position = self.producer.push_one(frame)
        if position is not None:
            self.pushed.append((position, frame))

    def buffer_(self, lengths: list[int]) -> None:
        frames = self.made(lengths)
        offsets = np.cumsum([0, *lengths[:-1]])
        count, positions = self.producer.push_buffer(b"".join(frames), offsets)
        self.pushed += list(zip(positions.tolist(), frames[:count], strict=True))

    def run(self, of: tuple[int, int]) -> None:
        frames = self.made([of[0]] * of[1])
        count, positions = self.producer.push_run(b"".join(frames), of[0])
        self.pushed += list(zip(list(positions), frames[:count], strict=True))

    def take(self, limit: int) -> None:
        if frames := take(self.consumer, limit, self.consumer.settle_free):
            settle(self.consumer, frames)
            self.taken += frames

    def settled(self, _: None) -> None:
        self.told += self.producer.take_settlements()[:, 0].tolist()

    def restart_consumer(self, _: None) -> None:
        self.consumer = RingConsumer(RingMemory(self.buffer, self.identity))

    def restart_producer(self, _: None) -> None:
        in_flight = self.producer.in_flight
        self.producer = RingProducer(RingMemory(self.buffer, self.identity))
        assert self.producer.in_flight == in_flight


@settings(max_examples=300)
@given(actions)
def test_any_mix_of_calls_transfers_the_pushed_frames(todo: list[tuple]) -> None:
    """The frames, positions and order are the same, and each frame is settled once. No call crashes."""
    pair = Pair()
    names = {
        "buffer": "buffer_",
        "restart consumer": "restart_consumer",
        "restart producer": "restart_producer",
    }
    for name, argument in todo:
        getattr(pair, names.get(name, name))(argument)
        assert pair.taken == pair.pushed[: len(pair.taken)]
        assert pair.producer.in_flight == len(pair.pushed) - len(pair.told)
    for _ in range(200):
        pair.take(8192)
        pair.settled(None)
    assert pair.taken == pair.pushed
    assert pair.told == [position for position, _ in pair.pushed]
