"""The schedulers' load monitor: combined pressure of schedulers and shards, and the lag of consumers."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from ringlog.actors.scheduler import events as ev
from ringlog.actors.scheduler.core import Scheduler
from ringlog.actors.scheduler.delivery.lag import Lag, largest_lags
from ringlog.actors.scheduler.delivery.load_monitor import SchedulerLoadMonitor
from ringlog.board import pressure
from ringlog.board.board import Board, ProcessSlot
from ringlog.board.layout import GovernorField, HistogramKind, ProcessField, SchedulerField
from ringlog.board.processes import scheduler_slot, shard_slot
from ringlog.envelope import messages as m
from ringlog.governor import Governor, PressureSample, PressureStep
from ringlog.limits import (
    COALESCE_MS_MAX,
    GOVERNOR_LATENCY_MS,
    GOVERNOR_READY_PER_SCHEDULER,
    GOVERNOR_SAMPLE_MS,
    GOVERNOR_STALE_MS,
    LAGS_PER_MESSAGE_MAX,
)
from tests.support.scheduler_world import MS, A, B, World, publish

SAMPLE_NS = GOVERNOR_SAMPLE_MS * MS
SHARDS = 2


def lags_in(world: World) -> list[Lag]:
    return largest_lags(world.core.subscriptions.links.values(), world.now_ms, 8)


class Engine:
    """A board with the pages of two shards and two schedulers."""

    def __init__(self, directory: Path) -> None:
        self.board = Board.create(str(directory), 16)
        self.now = 1_000_000 * MS
        self.core = Scheduler(0, 7, SHARDS)
        self.shards = [self.board.process(shard_slot(n)) for n in range(SHARDS)]
        self.pages = [self.board.process(scheduler_slot(SHARDS, n)) for n in range(2)]
        self.first, self.second = (self.governing(n) for n in range(2))
        self.breathe()

    def governing(self, number: int, *, is_reacting: bool = True) -> SchedulerLoadMonitor:
        return SchedulerLoadMonitor.from_board(
            self.board, number, SHARDS, 2, self.now, is_reacting=is_reacting
        )

    def breathe(self, *silent: ProcessSlot) -> None:
        """Set the heartbeat of every process except these."""
        for page in (*self.shards, *self.pages):
            if page not in silent:
                page.set(ProcessField.HEARTBEAT_NS, self.now)

    def press(self, shard: int, share: float) -> None:
        """Publish this pressure on the page of a shard."""
        governor = Governor()
        governor.observe(PressureSample(fill=share))
        pressure.publish(self.shards[shard], governor, share, self.now)

    def sample(
        self, governing: SchedulerLoadMonitor, *events: object, rested_ns: int = SAMPLE_NS
    ) -> ev.DeliveryPressureChanged | None:
        """Take a sample one sample interval later."""
        self.now += SAMPLE_NS
        self.breathe()
        governing.idle_ns = rested_ns
        return governing.observe_turn(self.now, events, self.core)

    @property
    def instance(self) -> pressure.Pressure:
        return pressure.read(self.pages[0], self.now)


@pytest.fixture
def running(shm_dir: Path) -> Iterator[Engine]:
    engine = Engine(shm_dir)
    yield engine
    engine.board.close()


def rows(*slots: int) -> ev.NewsRows:
    """Return news of topics in these slots."""
    words = np.zeros((len(slots), 8), dtype=np.uint64)
    words[:, 0] = slots
    return ev.NewsRows(0, words)


def test_without_load_no_change_is_reported_and_no_early_wakeup_is_requested(running: Engine) -> None:
    assert running.sample(running.first) is None
    assert running.instance == pressure.Pressure()
    assert running.first.wait_ms(1_000) == 1_000


def test_sampling_continues_while_shards_commit(running: Engine) -> None:
    """Without commits the scheduler may sleep longer."""
    running.shards[0].add(ProcessField.GROUPS, 1)
    running.sample(running.first)
    assert running.first.wait_ms(1_000) == GOVERNOR_SAMPLE_MS
    running.sample(running.first)
    assert running.first.wait_ms(1_000) == 1_000


def test_the_pressure_of_the_instance_is_that_of_the_most_loaded_shard(running: Engine) -> None:
    """Only wake-ups for topics of that shard are coalesced."""
    running.press(1, 1.0)
    pressed = running.sample(running.first)
    assert pressed == ev.DeliveryPressureChanged((0, COALESCE_MS_MAX * MS), True)
    assert (running.instance.pressure, running.instance.step) == (1.0, PressureStep.REFUSE)
    assert running.instance.fill == 0.0, "delivery itself has no pressure"
    assert running.sample(running.second) == pressed, "all schedulers must use the same pressure"
    running.press(1, 0.0)
    assert running.sample(running.first) == ev.DeliveryPressureChanged((0, 0), False)


def test_pressure_of_delivery_affects_topics_of_all_shards(running: Engine) -> None:
    pressed = None
    for _ in range(30):
        pressed = running.sample(running.first, rested_ns=0) or pressed
    assert pressed is not None
    assert min(pressed.gaps_ns) == max(pressed.gaps_ns) > 0.99 * COALESCE_MS_MAX * MS
    assert running.instance.fill == running.instance.pressure > 0.99
    assert running.pages[0].get(ProcessField.BUSY_NS) == 30 * SAMPLE_NS


def test_the_load_of_another_scheduler_counts(running: Engine) -> None:
    """Only the first scheduler writes the pressure of the instance (L7)."""
    for _ in range(30):
        running.sample(running.second, rested_ns=0)
    running.sample(running.first)
    assert running.instance.pressure > 0.99
    assert running.pages[1].get(GovernorField.PRESSURE) == 0, (
        "only the first scheduler writes the instance's pressure"
    )


def test_latency_covers_the_grants_since_the_previous_sample(running: Engine) -> None:
    """Without grants there is no latency."""
    latency_ns = GOVERNOR_LATENCY_MS * MS
    running.pages[0].histogram(HistogramKind.COMMIT).record(latency_ns, 10)
    running.sample(running.first)
    assert running.instance.pressure == pytest.approx(0.2)
    assert running.instance.latency_ns == pytest.approx(0.2 * latency_ns)
    running.sample(running.first)
    assert running.instance.pressure == pytest.approx(0.16)


def test_topics_in_the_news_of_every_pass_count_as_standing_load(running: Engine) -> None:
    """Work that is done before the next pass causes no pressure. Several rows of one topic count once."""
    many = rows(*range(GOVERNOR_READY_PER_SCHEDULER * 2))
    for events in ((many,), (rows(1, 1, 1, 2),), (many,)):
        running.now += MS
        assert running.first.observe_turn(running.now, events, running.core) is None
    running.sample(running.first, many)
    assert running.pages[0].get(SchedulerField.STANDING) == 2
    assert running.instance.pressure == pytest.approx(2 / (2 * GOVERNOR_READY_PER_SCHEDULER))
    running.first.observe_turn(running.now + 1, (), running.core)
    running.sample(running.first, many)
    assert running.pages[0].get(SchedulerField.STANDING) == 0


def test_a_dead_shard_causes_no_pressure(running: Engine) -> None:
    running.press(0, 1.0)
    running.sample(running.first)
    running.now += GOVERNOR_STALE_MS * MS
    running.breathe(running.shards[0])
    running.first.idle_ns = GOVERNOR_STALE_MS * MS
    pressed = running.first.observe_turn(running.now, (), running.core)
    assert pressed == ev.DeliveryPressureChanged((0, 0), False)
    assert running.instance.pressure == 0.0


def test_a_restarted_scheduler_starts_without_pressure_and_continues_its_counters(running: Engine) -> None:
    running.press(0, 1.0)
    running.sample(running.first)
    running.pages[0].set(GovernorField.WAITED_NS, 5)
    successor = running.governing(0)
    assert running.instance.pressure == 0.0
    running.core.grants.coalesced_ns = 7
    running.sample(successor)
    assert running.pages[0].get(GovernorField.WAITED_NS) == 12


def test_a_scheduler_that_must_not_react_still_publishes_its_pressure(running: Engine) -> None:
    governing = running.governing(0, is_reacting=False)
    running.press(0, 1.0)
    assert running.sample(governing) is None
    assert running.instance.step is PressureStep.REFUSE


# -- lag of consumers -------------------------------------------------------------------------------------


def furthest_ms(world: World) -> int:
    furthest = world.core.furthest_behind()
    return furthest.lag_ms if furthest is not None else 0


def test_lag_is_the_time_for_which_records_have_been_available() -> None:
    world = World()
    told, waiting, quiet = (world.topic(0, slot) for slot in range(3))
    world.subscribe(A, 1, [(1, told, 0), (2, waiting, 0)], credit=1)
    world.subscribe(B, 2, [(1, quiet, 0)])
    publish(world, told)
    world.wait(200)
    publish(world, waiting)
    world.wait(300)
    first, second = lags_in(world)
    assert first == (500, A, 1, 2, 1, 1, 1)
    assert second == (0, B, 2, 1, 0, 0, 32)
    assert furthest_ms(world) == 500
    world.take(A, (1, 1, 1))
    assert furthest_ms(world) == 300
    world.take(A, (1, 2, 1))
    assert furthest_ms(world) == 0


def test_a_reader_that_returns_grants_but_never_catches_up_lags() -> None:
    world = World()
    topic, lagging, keeping = world.topic(0, 0), 0, 0
    world.subscribe(A, 1, [(1, topic, 0)])
    world.subscribe(B, 1, [(1, topic, 0)])
    for _ in range(100):
        publish(world, topic, 10)
        world.wait(100)
        lagging, keeping = lagging + 5, topic.head
        world.take(A, (1, 1, lagging))
        # New records are published before the reader reports that it read all earlier ones.
        publish(world, topic)
        world.take(B, (1, 1, keeping))
    slow, quick = lags_in(world)
    assert (slow.link, quick.link) == (A, B)
    assert 4_000 <= slow.lag_ms <= 10_000
    assert quick.lag_ms <= 200


def test_beyond_the_bound_only_waiting_feeds_are_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("ringlog.actors.scheduler.delivery.lag.LAG_CHECKS_MAX", 2)
    world = World()
    told, waiting = world.topic(0, 0), world.topic(0, 1)
    world.subscribe(A, 1, [(1, told, 0), (2, waiting, 0)], credit=1)
    for topic in (told, waiting):
        publish(world, topic)
        world.wait(100)
    world.subscribe(B, 1, [(1, told, 0), (2, waiting, 0)], credit=1)
    assert [lag.lag_ms for lag in lags_in(world)] == [100, 0]
    monkeypatch.setattr("ringlog.actors.scheduler.delivery.lag.LAG_CHECKS_MAX", 1)
    assert [lag.link for lag in lags_in(world)] == [A]


def test_operators_receive_the_consumers_with_the_largest_lag() -> None:
    world = World()
    for n, link in enumerate((A, B)):
        topic = world.topic(0, n)
        world.subscribe(link, 1, [(1, topic, 0)])
        publish(world, topic)
        world.wait(100)
    asked = world.ask(b"operator", m.ListConsumers(1))
    assert asked == m.ConsumersReply(0, [m.Consumer(A.hex(), 1, 200, 1, 0, 1, 32)])
    everybody = world.ask(b"operator", m.ListConsumers(LAGS_PER_MESSAGE_MAX * 9))
    assert isinstance(everybody, m.ConsumersReply)
    assert [each.link for each in everybody.consumers] == [A.hex(), B.hex()]
    assert world.ask(b"operator", m.ListConsumers(-1)) == m.ConsumersReply(0, [])
    assert b"operator" not in world.core.subscriptions.links, "a request must not create a link"
