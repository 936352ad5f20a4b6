"""A shard under pressure: how long a group gathers, what is measured, what is refused."""

from __future__ import annotations

import os
import secrets
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from actors.wal_shard.commit.batch_window import BatchWindow
from actors.wal_shard.io.rings import Rings
from actors.wal_shard.metrics.load_monitor import ShardLoadMonitor
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
from ringlog.testing.disk import SimulatedDisk
from ringlog.testing.shard_world import DATA, World

MS = 1_000_000
SAMPLE_NS = GOVERNOR_SAMPLE_MS * MS
ENGINE = "e" * 32


# -- how long a group gathers -----------------------------------------------------------------------------


def gathering(window_ms: float = 10, rings: int = BATCH_WINDOW_RINGS_MIN) -> BatchWindow:
    """A window whose group before came out of so many rings, at 0."""
    window = BatchWindow()
    window.set_window(round(window_ms * MS))
    window.record_drain(0, rings)
    return window


def test_without_pressure_nothing_waits() -> None:
    """G-7."""
    window = gathering(0)
    assert window.may_drain(1, 1, 100)
    assert (window.is_holding, window.waited_ns) == (False, 0)


def test_a_group_waits_until_as_many_are_back_as_were_in_the_one_before() -> None:
    """G-3, WC-2."""
    window = gathering(rings=5)
    assert not window.may_drain(1 * MS, 1, 100)
    assert window.is_holding
    assert not window.may_drain(2 * MS, 4, 200)
    assert window.may_drain(3 * MS, 5, 300)
    assert (window.is_holding, window.waited_ns) == (False, 2 * MS)


def test_a_lone_write_waits_for_nobody() -> None:
    """G-7, WC-3: not even at the top of the ladder."""
    for few in range(1, BATCH_WINDOW_RINGS_MIN):
        assert gathering(rings=few).may_drain(1, 1, 100)
    quiet = gathering(rings=50)
    assert quiet.may_drain(10 * MS, 1, 100)
    assert quiet.waited_ns == 0


def test_a_group_waits_for_no_longer_than_the_window() -> None:
    """WC-4."""
    window = gathering(4)
    assert not window.may_drain(4 * MS - 1, 2, 100)
    assert window.may_drain(4 * MS, 2, 100)


def test_a_share_of_a_ring_is_reason_enough() -> None:
    assert gathering().may_drain(1, 1, DRAIN_BYTES_PER_RING_MAX)


def test_who_asks_not_to_be_gathered_is_not_and_neither_is_who_waits_beside_it() -> None:
    """G-12."""
    window = gathering()
    assert not window.may_drain(1, 1, 100)
    assert window.may_drain(2, 1, 100, True)
    assert not window.is_holding


def test_a_window_that_opens_knows_nothing_of_what_was_before() -> None:
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
def test_frames_are_held_no_longer_than_the_longest_window(looks: list[tuple[int, int, int]]) -> None:
    """WC-4: whatever the window does meanwhile, and who comes."""
    window, now, since = BatchWindow(), 0, None
    for passed, rings, window_ns in looks:
        now += passed
        window.set_window(window_ns)
        # A look comes in time: the shell looks several times in the shortest window.
        if window.may_drain(now, rings, rings * 100):
            if rings:
                window.record_drain(now, rings)
            since = None
        else:
            since = now if since is None else since
            assert now - since < BATCH_WINDOW_US_MAX * 1_000
        assert window.is_holding == (since is not None)


# -- what is measured -------------------------------------------------------------------------------------


class Place:
    """A board, rings of 64 KiB, and a governor at their shard."""

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
        """One more producer."""
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

    def sample(self, *, rested_ns: int = SAMPLE_NS) -> pressure.Pressure:
        """A tenth of a second later."""
        self.now += SAMPLE_NS
        assert self.now >= self.governing.due_ns
        self.governing.rested_ns = rested_ns
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
def place() -> Iterator[Place]:
    path = Path(f"/dev/shm/ringtest-{os.getuid()}-{secrets.token_hex(4)}")
    path.mkdir(mode=0o700)
    place = Place(path)
    yield place
    place.close()
    shutil.rmtree(path)


def one_frame(size: int) -> bytearray:
    return frame(encode_records([bytes(size)]), topic_id=1, producer_id=2, producer_seq=1)


def fill(producer: RingProducer, share: float = 1.0) -> int:
    """Push frames until the ring is so full; returns how many."""
    data, count = one_frame(900), 0
    while (count + 1) * len(data) <= share * producer.capacity and producer.push_one(data) is not None:
        count += 1
    return count


def test_the_fullest_ring_is_the_pressure(place: Place) -> None:
    """G-2."""
    quiet, busy = place.ring(), place.ring()
    assert place.sample().pressure == 0
    fill(quiet, 0.25)
    fill(busy, 0.75)
    seen = place.sample()
    assert 0.7 < seen.fill <= 0.8
    assert (seen.pressure, seen.step) == (seen.fill, PressureStep.WIDEN)
    assert place.governing.window.window_ns > 0


def test_what_waits_in_rings_and_who_asks_not_to_be_gathered(place: Place) -> None:
    """G-12: it counts while something of theirs waits."""
    quiet, busy = place.ring(), place.ring()
    busy.set_wakeup_flags(WakeupFlags.SETTLEMENTS)
    quiet.set_wakeup_flags(WakeupFlags.NO_BATCH_WINDOW)
    count = fill(busy, 0.25)
    assert place.rings.pending_totals() == (1, count * len(one_frame(900)), False)
    quiet.push_one(one_frame(900))
    assert place.rings.pending_totals() == (2, (count + 1) * len(one_frame(900)), True)


def test_a_ring_that_takes_no_more_is_full(place: Place) -> None:
    fill(place.ring())
    seen = place.sample()
    assert (seen.fill, seen.pressure, seen.step) == (1.0, 1.0, PressureStep.REFUSE)
    assert place.governing.is_refusing


def test_pressure_goes_when_the_rings_are_drained(place: Place) -> None:
    """G-4: and the steps with it."""
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


def test_work_is_pressure_and_waiting_for_the_device_is_none(place: Place) -> None:
    """G-2."""
    assert place.sample(rested_ns=0).busy == pytest.approx(0.2)
    place.page.add(ProcessField.SYNC_NS, SAMPLE_NS)
    assert place.sample(rested_ns=0).busy == pytest.approx(0.16)
    assert place.page.get(ProcessField.BUSY_NS) == 2 * SAMPLE_NS


def test_while_there_is_pressure_it_wakes_for_each_sample(place: Place) -> None:
    """G-1: and sleeps on when there is none."""
    assert place.governing.wait_ms(1_000) == 1_000
    place.sample(rested_ns=0)
    assert place.governing.wait_ms(1_000) == GOVERNOR_SAMPLE_MS


def test_a_governor_that_may_not_react_says_how_it_is_all_the_same(place: Place) -> None:
    place.governing = ShardLoadMonitor(place.page, place.now, is_reacting=False)
    fill(place.ring())
    assert place.sample().step is PressureStep.REFUSE
    assert not place.governing.is_refusing
    assert place.governing.window.window_ns == 0


def test_what_a_dead_process_said_last_does_not_hold(place: Place) -> None:
    fill(place.ring())
    place.sample()
    later = place.now + GOVERNOR_STALE_MS * MS
    assert pressure.read(place.page, later - 1).pressure == 1.0
    assert pressure.read(place.page, later).pressure == 0.0
    place.page.set(GovernorField.THROTTLED, 5)
    successor = ShardLoadMonitor(place.page, later)
    assert (place.page.get(GovernorField.PRESSURE), place.page.get(GovernorField.STEP)) == (0, 0)
    successor.sample(later + SAMPLE_NS, place.rings, 2)
    assert place.page.get(GovernorField.THROTTLED) == 7, "counters go on (M-10)"


# -- what is refused --------------------------------------------------------------------------------------


@pytest.fixture
def world() -> World:
    made = World(SimulatedDisk(DATA))
    made.start()
    made.put_topic("a")
    return made


def append(world: World, number: int, topic: str = "a", **options: Any) -> Any:
    data = frame(encode_records([b"x"]), producer_id=9, producer_seq=number, topic_id=0)
    return world.request(m.Append(topic, 1, **options), data)


def test_new_writes_are_refused_and_nothing_else(world: World) -> None:
    """G-3, G-6, G-8, ERR-4, WC-12."""
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
    assert run.core.requests.refused_for_pressure == 1
    run.core.requests.is_overloaded = False
    append(world, 2)
    assert world.topic("a").next_seq == 3


def test_a_refused_write_makes_no_topic(world: World) -> None:
    """ERR-4, W-7."""
    world.runs[0].core.requests.is_overloaded = True
    with pytest.raises(Throttled):
        append(world, 1, "new", create=True)
    assert world.runs[0].core.directory.find("new") is None


def test_a_repeat_is_answered_under_pressure_too(world: World) -> None:
    """W4: who was told that it was refused would send it again under another number."""
    append(world, 1)
    append(world, 2, idempotency_key="k")
    world.runs[0].core.requests.is_overloaded = True
    for repeat in (append(world, 1), append(world, 3, idempotency_key="k")):
        entry = np.frombuffer(repeat.entries, dtype=np.uint64)
        assert int(entry[3]) >> 32 & 0xFFFF == Status.OK
    assert world.topic("a").next_seq == 3


def test_who_asks_for_no_backpressure_gets_none(world: World) -> None:
    """G-12."""
    world.runs[0].core.requests.is_overloaded = True
    append(world, 1, disable_backpressure=True)
    assert world.topic("a").next_seq == 2


def test_it_skips_no_limit(world: World) -> None:
    """G-12: caps hold."""
    world.put_topic("a", cap_records=1, discard="reject")
    append(world, 1, disable_backpressure=True)
    refused = append(world, 2, disable_backpressure=True)
    entry = np.frombuffer(refused.entries, dtype=np.uint64)
    assert int(entry[3]) >> 32 & 0xFFFF == Status.TOPIC_FULL
