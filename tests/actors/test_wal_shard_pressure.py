"""A shard under pressure: the batch window, the measurements, and the refusals."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ringlog.actors.wal_shard.commit.batch_window import BatchWindow
from ringlog.actors.wal_shard.io.rings import Rings
from ringlog.actors.wal_shard.metrics.load_monitor import ShardLoadMonitor
from ringlog.board import pressure
from ringlog.board.board import Board
from ringlog.board.layout import GovernorField, ProcessField
from ringlog.envelope import messages as m
from ringlog.errors import Status, Throttled
from ringlog.frame import encode_records, frame
from ringlog.governor import PressureStep
from ringlog.limits import (
    BATCH_WINDOW_RINGS_MIN,
    BATCH_WINDOW_US_MAX,
    DRAIN_BYTES_PER_RING_MAX,
    GOVERNOR_SAMPLE_MS,
    GOVERNOR_STALE_MS,
    PRESSURE_RETRY_MS,
)
from ringlog.ring.doorbell import BellListener, make_bell
from ringlog.ring.layout import WakeupFlags
from ringlog.ring.region import create_ring
from ringlog.ring.ring import RingProducer
from tests.support.shard_world import World
from tests.support.shard_worlds import started

MS = 1_000_000
SAMPLE_NS = GOVERNOR_SAMPLE_MS * MS
ENGINE = "e" * 32


# -- batch window -----------------------------------------------------------------------------------------


def gathering(window_ms: float = 10, rings: int = BATCH_WINDOW_RINGS_MIN) -> BatchWindow:
    """Return a window with a previous batch from this many rings, at time 0."""
    window = BatchWindow()
    window.set_window(round(window_ms * MS))
    window.record_drain(0, rings)
    return window


def test_without_pressure_no_frame_waits() -> None:
    """The window is 0."""
    window = gathering(0)
    assert window.may_drain(1, 1, 100)
    assert (window.is_holding, window.waited_ns) == (False, 0)


def test_a_commit_batch_waits_for_as_many_rings_as_the_previous_one_had() -> None:
    """The waiting time is measured."""
    window = gathering(rings=5)
    assert not window.may_drain(1 * MS, 1, 100)
    assert window.is_holding
    assert not window.may_drain(2 * MS, 4, 200)
    assert window.may_drain(3 * MS, 5, 300)
    assert (window.is_holding, window.waited_ns, window.last_wait_ns) == (False, 2 * MS, 2 * MS)
    assert window.may_drain(4 * MS, 0, 0)
    assert window.last_wait_ns == 2 * MS
    assert window.may_drain(5 * MS, 5, 300)
    assert (window.waited_ns, window.last_wait_ns) == (2 * MS, 0)


def test_a_single_write_never_waits() -> None:
    """This holds even at the highest pressure step (L2)."""
    for few in range(1, BATCH_WINDOW_RINGS_MIN):
        assert gathering(rings=few).may_drain(1, 1, 100)
    quiet = gathering(rings=50)
    assert quiet.may_drain(10 * MS, 1, 100)
    assert quiet.waited_ns == 0


def test_a_commit_batch_waits_no_longer_than_the_window() -> None:
    """Frames wait in rings no longer than the window (L2)."""
    window = gathering(4)
    assert not window.may_drain(4 * MS - 1, 2, 100)
    assert window.may_drain(4 * MS, 2, 100)


def test_a_large_part_of_a_ring_ends_the_wait() -> None:
    assert gathering().may_drain(1, 1, DRAIN_BYTES_PER_RING_MAX)


def test_a_frame_that_must_not_wait_ends_the_wait_of_all_frames() -> None:
    """Its ring has the flag `NO_BATCH_WINDOW`."""
    window = gathering()
    assert not window.may_drain(1, 1, 100)
    assert window.may_drain(2, 1, 100, True)
    assert not window.is_holding


def test_a_new_window_ignores_earlier_batches() -> None:
    window = BatchWindow()
    window.record_drain(0, 2 * BATCH_WINDOW_RINGS_MIN)
    window.set_window(10 * MS)
    assert window.may_drain(1, 1, 100)


LOOKS = st.lists(
    st.tuples(
        st.integers(0, 3 * MS),
        st.integers(0, 3 * BATCH_WINDOW_RINGS_MIN),
        st.integers(0, BATCH_WINDOW_US_MAX * 1_000),
    ),
    max_size=60,
)


@given(LOOKS)
def test_frames_wait_no_longer_than_the_longest_window(looks: list[tuple[int, int, int]]) -> None:
    """This holds for any change of the window and any arrivals (L2)."""
    window, now, since = BatchWindow(), 0, None
    for passed, rings, window_ns in looks:
        now += passed
        window.set_window(window_ns)
        # A poll comes in time: the shell polls several times in the shortest window.
        if window.may_drain(now, rings, rings * 100):
            if rings:
                window.record_drain(now, rings)
            since = None
        else:
            since = now if since is None else since
            assert now - since < BATCH_WINDOW_US_MAX * 1_000
        assert window.is_holding == (since is not None)


# -- measurements -----------------------------------------------------------------------------------------


class Place:
    """A board, rings of 64 KiB, and the load monitor of their shard."""

    def __init__(self, shm_dir: Path) -> None:
        self.dir = str(shm_dir)
        self.board = Board.create(self.dir, 4)
        self.page = self.board.process(1)
        self.rings = Rings(self.dir, 0, ENGINE)
        self.now = 1_000_000 * MS
        self.governing = ShardLoadMonitor(self.page, self.now)
        self.producers: list[RingProducer] = []
        self.bells: list[BellListener] = []

    def ring(self) -> RingProducer:
        """Attach one more producer."""
        name = f"r{len(self.producers)}"
        create_ring(
            f"{self.dir}/{name}", ring_bytes=65_536, settle_entries=1_024, shard=0, engine_id=ENGINE,
            client="c",
        )  # fmt: skip
        make_bell(f"{self.dir}/{name}.bell")
        self.bells.append(BellListener(f"{self.dir}/{name}.bell"))
        self.rings.attach(name, f"{name}.bell")
        self.producers.append(RingProducer.attach(f"{self.dir}/{name}"))
        return self.producers[-1]

    def sample(self, *, idle_ns: int = SAMPLE_NS) -> pressure.Pressure:
        """Take a sample one sample interval later."""
        self.now += SAMPLE_NS
        assert self.now >= self.governing.due_ns
        self.governing.idle_ns = idle_ns
        self.governing.sample(self.now, self.rings, 0)
        self.page.set(ProcessField.HEARTBEAT_NS, self.now)
        return pressure.read(self.page, self.now)

    def close(self) -> None:
        for producer in self.producers:
            producer.close()
        for bell in self.bells:
            bell.close()
        self.rings.close()
        self.board.close()


@pytest.fixture
def place(shm_dir: Path) -> Iterator[Place]:
    place = Place(shm_dir)
    yield place
    place.close()


def one_frame(size: int) -> bytearray:
    return frame(encode_records([bytes(size)]), topic_id=1, producer_id=2, producer_seq=1)


def fill(producer: RingProducer, share: float = 1.0) -> int:
    """Push frames until this share of the ring is full. Return their number."""
    data, count = one_frame(900), 0
    while (count + 1) * len(data) <= share * producer.capacity and producer.push_one(data) is not None:
        count += 1
    return count


def test_the_board_says_how_long_the_last_frames_waited(place: Place) -> None:
    for producer in [place.ring() for _ in range(BATCH_WINDOW_RINGS_MIN)]:
        fill(producer, 0.9)
    place.sample(idle_ns=0)
    window = place.governing.window
    assert window.window_ns > 0
    window.record_drain(place.now, 2 * BATCH_WINDOW_RINGS_MIN)
    place.rings.drain()
    place.producers[0].push_one(one_frame(100))
    assert not place.governing.may_drain(place.now + 1, place.rings)
    assert place.page.get(ProcessField.LAST_WAIT_NS) == 0
    assert place.governing.may_drain(place.now + window.window_ns, place.rings)
    assert place.page.get(ProcessField.LAST_WAIT_NS) == window.window_ns - 1
    place.rings.drain()
    while place.sample().pressure:
        assert place.page.get(ProcessField.LAST_WAIT_NS) > 0 or not window.window_ns
    assert place.page.get(ProcessField.LAST_WAIT_NS) == 0


def test_the_pressure_is_the_fill_of_the_fullest_ring(place: Place) -> None:
    """A quieter ring has no effect."""
    quiet, busy = place.ring(), place.ring()
    assert place.sample().pressure == 0
    fill(quiet, 0.25)
    fill(busy, 0.75)
    seen = place.sample()
    assert 0.7 < seen.fill <= 0.8
    assert (seen.pressure, seen.step) == (seen.fill, PressureStep.WIDEN)
    assert place.governing.window.window_ns > 0


def test_pending_frames_and_the_flag_against_waiting_are_reported(place: Place) -> None:
    """The flag of a ring counts while the ring contains frames."""
    quiet, busy = place.ring(), place.ring()
    busy.set_wakeup_flags(WakeupFlags.SETTLEMENTS)
    quiet.set_wakeup_flags(WakeupFlags.NO_BATCH_WINDOW)
    count = fill(busy, 0.25)
    assert place.rings.pending_totals() == (1, count * len(one_frame(900)), False)
    quiet.push_one(one_frame(900))
    assert place.rings.pending_totals() == (2, (count + 1) * len(one_frame(900)), True)


def test_a_ring_that_accepts_no_more_frames_is_full(place: Place) -> None:
    fill(place.ring())
    seen = place.sample()
    assert (seen.fill, seen.pressure, seen.step) == (1.0, 1.0, PressureStep.REFUSE)
    assert place.governing.is_refusing


def test_pressure_ends_when_the_rings_are_drained(place: Place) -> None:
    """The pressure step and the window end as well."""
    producer = place.ring()
    fill(producer)
    place.sample()
    while events := place.rings.drain():
        for event in events:
            place.rings.settle(event.source, np.zeros((len(event.batch), 8), np.uint64), event.end_position)
    seen = place.sample()
    assert (seen.pressure, seen.step) == (0.0, PressureStep.FREE)
    assert not place.governing.is_refusing
    assert place.governing.window.window_ns == 0


def test_work_is_pressure_and_waiting_for_the_device_is_not(place: Place) -> None:
    """Time in syncs does not count as busy."""
    assert place.sample(idle_ns=0).busy == pytest.approx(0.2)
    place.page.add(ProcessField.SYNC_NS, SAMPLE_NS)
    assert place.sample(idle_ns=0).busy == pytest.approx(0.16)
    assert place.page.get(ProcessField.BUSY_NS) == 2 * SAMPLE_NS


def test_under_pressure_the_shard_wakes_up_for_each_sample(place: Place) -> None:
    """Without pressure it may sleep longer."""
    assert place.governing.wait_ms(1_000) == 1_000
    place.sample(idle_ns=0)
    assert place.governing.wait_ms(1_000) == GOVERNOR_SAMPLE_MS


def test_a_load_monitor_that_must_not_react_still_publishes(place: Place) -> None:
    place.governing = ShardLoadMonitor(place.page, place.now, is_reacting=False)
    fill(place.ring())
    assert place.sample().step is PressureStep.REFUSE
    assert not place.governing.is_refusing
    assert place.governing.window.window_ns == 0


def test_the_last_pressure_of_a_dead_process_expires(place: Place) -> None:
    fill(place.ring())
    place.sample()
    later = place.now + GOVERNOR_STALE_MS * MS
    assert pressure.read(place.page, later - 1).pressure == 1.0
    assert pressure.read(place.page, later).pressure == 0.0
    place.page.set(GovernorField.THROTTLED, 5)
    successor = ShardLoadMonitor(place.page, later)
    assert (place.page.get(GovernorField.PRESSURE), place.page.get(GovernorField.STEP)) == (0, 0)
    successor.sample(later + SAMPLE_NS, place.rings, 2)
    assert place.page.get(GovernorField.THROTTLED) == 7, "counters must continue after a restart"


# -- refusals ---------------------------------------------------------------------------------------------


@pytest.fixture
def world() -> World:
    made = started()
    made.put_topic("a")
    return made


def append(world: World, number: int, topic: str = "a", **options: Any) -> Any:
    data = frame(encode_records([b"x"]), producer_id=9, producer_seq=number, topic_id=0)
    return world.request(m.Append(topic, 1, **options), data)


def test_under_pressure_only_new_writes_are_refused(world: World) -> None:
    """A refusal changes nothing (L5)."""
    append(world, 1)
    run = world.runs[0]
    offset, run.core.requests.is_overloaded = run.core.log.offset, True
    with pytest.raises(Throttled) as refused:
        append(world, 2)
    assert refused.value.detail == {"reason": "pressure", "topic": "a", "retry_after_ms": PRESSURE_RETRY_MS}
    assert (refused.value.http, refused.value.retriable) == (429, True)
    assert run.core.log.offset == offset
    assert world.topic("a").next_seq == 2
    assert world.request(m.TopicState("a")).head_seq == 1
    assert world.put_topic("b").created
    assert world.put_topic("a", ttl_ms=5).config["ttl_ms"] == 5
    assert world.request(m.TopicDelete("b")).deleted
    assert world.request(m.Locate("a", 0)).head_seq == 1
    assert run.core.requests.appends.refused_for_pressure == 1
    run.core.requests.is_overloaded = False
    append(world, 2)
    assert world.topic("a").next_seq == 3


def test_a_refused_append_creates_no_topic(world: World) -> None:
    """A refusal changes nothing (L5)."""
    world.runs[0].core.requests.is_overloaded = True
    with pytest.raises(Throttled):
        append(world, 1, "new", create=True)
    assert world.runs[0].core.directory.find("new") is None


def test_a_repeat_is_answered_under_pressure(world: World) -> None:
    """A producer that receives a refusal would send the frame again under another number (W4)."""
    append(world, 1)
    append(world, 2, idempotency_key="k")
    world.runs[0].core.requests.is_overloaded = True
    for repeat in (append(world, 1), append(world, 3, idempotency_key="k")):
        entry = np.frombuffer(repeat.entries, dtype=np.uint64)
        assert int(entry[3]) >> 32 & 0xFFFF == Status.OK
    assert world.topic("a").next_seq == 3


def test_an_append_with_disable_backpressure_is_not_refused(world: World) -> None:
    """The shard is overloaded."""
    world.runs[0].core.requests.is_overloaded = True
    append(world, 1, disable_backpressure=True)
    assert world.topic("a").next_seq == 2


def test_disable_backpressure_skips_no_cap(world: World) -> None:
    """It skips only the refusal for pressure."""
    world.put_topic("a", cap_records=1, discard="reject")
    append(world, 1, disable_backpressure=True)
    refused = append(world, 2, disable_backpressure=True)
    entry = np.frombuffer(refused.entries, dtype=np.uint64)
    assert int(entry[3]) >> 32 & 0xFFFF == Status.TOPIC_FULL
