"""A Harness with all actors that use one data directory, on a disk that fails.

A disk error in a shard ends its incarnation, and the next one recovers, as the supervisor would arrange. A
disk error in another actor ends its round.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Iterator
from dataclasses import astuple, dataclass
from typing import Any

import msgspec
import xxhash

from chaos.rigs.harness import Harness
from chaos.rigs.model import Model, Removal, TopicChange
from chaos.rigs.storage import (
    COLD,
    asked_by,
    cold_copies,
    counted_salts,
    mover_of,
    reclaimer_numbers,
    reclaimer_of,
)
from ringlog.actors.reclaimer.reclaim_round import Reclaimer
from ringlog.actors.reclaimer.scrub_pass import scrub_items
from ringlog.actors.reclaimer.scrubber import Scrubber
from ringlog.actors.wal_shard import events as ev
from ringlog.config import StorageConfig
from ringlog.envelope import messages as m
from ringlog.errors import ColdUnavailable, DiskError, NotReady, Refused, RequestTimeout, RinglogError
from ringlog.frame.settle_entry import S_TOPIC, entry_error
from ringlog.limits import KIB
from ringlog.storage.layout import META_DIR
from ringlog.testing.disk import FaultyDisk, Monitor, SimulatedDisk
from ringlog.tier.copies import SegmentCopies
from ringlog.types import Durability
from tests.support.shard_world import DATA, ShardRunEnded
from tests.support.world_checkpoints import WorldShardRequests, checkpoint

SETTINGS: dict[str, Any] = {
    "segment_bytes": 64 * KIB,
    "own_segment_bytes": 16 * KIB,
    "segment_records": 10_000,
}
MINUTE_S = 61.0
"""Time (s) between rounds of an actor without new requests of the shards."""
RESTARTS_MAX = 3
VISIBLE = (DiskError, Refused, RequestTimeout, ColdUnavailable, ShardRunEnded)
"""Errors that the caller of an operation may get. Other exceptions are findings."""


class ShardEnded(NotReady):
    """The shard ended during the request. The request may or may not have taken effect."""


class Down(Exception):
    """The shard cannot restart while the fault lasts."""


@dataclass(frozen=True, slots=True)
class Image:
    """A durable disk, and the model of the clients' knowledge."""

    directories: tuple[str, ...]
    files: dict[str, bytes]
    model: Model
    incarnation: int
    now_s: float
    has_rot: bool

    def mount(self) -> SimulatedDisk:
        """Return a new disk with these files."""
        disk = SimulatedDisk(*self.directories)
        for path, data in self.files.items():
            disk.add_file(path, data)
        return disk


class _ShardRequests(WorldShardRequests):
    """Sends requests to the shard of a house, whose disk may fail during the request."""

    def __init__(self, house: FaultyEngine) -> None:
        super().__init__(house.world)
        self._house = house

    def ask(self, shard: int, message: m.Message, wanted: Any, *, attachment: Any = None) -> Any:
        ask = super().ask
        return self._house.shard(lambda: ask(shard, message, wanted, attachment=attachment))


class FaultyEngine(Harness):
    """All actors use the disk `faulty`."""

    def __init__(self, image: Image | None = None, wrap: Callable[[SimulatedDisk], Any] = FaultyDisk) -> None:
        self.base = image.mount() if image else SimulatedDisk(DATA, f"{DATA}/{META_DIR}", COLD)
        self.faulty = wrap(self.base)
        super().__init__(self.faulty, file_bytes=128 * KIB, incarnation=image.incarnation if image else 0)
        self.asking = _ShardRequests(self)
        self.monitor = Monitor()
        self._shown: dict[tuple[int, int], int] = {}
        """(incarnation, topic id) -> last published head."""
        watched: Any = lambda incarnation: self.monitor.watch(self.faulty, incarnation)  # noqa: E731
        self.world.disk_of = watched
        self.now_s = image.now_s if image else 0.0
        self.world.clock.advance(self.now_s)
        if image:
            self.model = image.model.copy()
            self.world._salt = image.incarnation << 10
        self.has_rot = image.has_rot if image else False
        """Whether data is damaged that can be healed from the other tier."""
        self._reclaimer: Reclaimer | None = None
        self._salts: Iterator[int] = iter(self.world.next_salt, 0)
        """Salts of segments. Each run writes the same bytes."""

    def twin(self) -> FaultyEngine:
        """Return a house with a copy of the disk and of the model, in which no actor runs."""
        twin = FaultyEngine()
        twin.base = self.base.copy()
        twin.faulty = FaultyDisk(twin.base)
        twin.model, twin.monitor = self.model.copy(), self.monitor.copy()
        twin._shown, twin.has_rot, twin.now_s = dict(self._shown), self.has_rot, self.now_s
        world, mine = twin.world, self.world
        world.disk, world.clock, world.boot_id = twin.faulty, copy.copy(mine.clock), mine.boot_id
        world.incarnation, world._salt = mine.incarnation, mine._salt
        return twin

    def digest(self) -> bytes:
        """Return a digest of all state that decides later behaviour if no actor runs and power is not lost.

        It covers the contents of the disk, the facts about its files, the model, clocks and counters.
        """
        model, world = self.model, self.world
        told = [
            model.told(), model.made, sorted(self.monitor.made), self.has_rot,
            sorted((path, astuple(facts)) for path, facts in self.monitor.files.items()),
            world.clock.now_us(), world.clock.monotonic_ns(), world.boot_id, world.incarnation, world._salt,
        ]  # fmt: skip
        return self.base.digest() + xxhash.xxh3_128_digest(msgspec.msgpack.encode(told))

    def _watch(self, shard: int, effect: Any) -> None:
        """Check that acknowledged or published data of class `fsync` is covered by a sync at that time."""
        if isinstance(effect, ev.PublishTopics) and shard in self.world.runs:
            self._watch_shown(shard, effect)
        if isinstance(effect, ev.Settle) and shard in self.world.runs:
            run = self.world.runs[shard]
            for entry in effect.entries:
                topic = run.core.directory.by_id.get(int(entry[S_TOPIC]))
                is_synced = topic is not None and topic.config.durability is Durability.FSYNC
                if is_synced and entry_error(entry, "") is None:
                    self.monitor.require_durable(run.writer.path, run.writer.offset)
        super()._watch(shard, effect)

    def _watch_shown(self, shard: int, effect: ev.PublishTopics) -> None:
        run = self.world.runs[shard]
        for topic in effect.topics:
            # The first publication of a topic after a start has old records. Later a greater head means new
            # records.
            before = self._shown.get((self.world.incarnation, topic.topic_id), topic.head_seq)
            self._shown[self.world.incarnation, topic.topic_id] = topic.head_seq
            if topic.head_seq > before and topic.config.durability is Durability.FSYNC:
                self.monitor.require_durable(run.writer.path, run.writer.offset)

    # -- life -----------------------------------------------------------------------------------------

    def start(self, *, is_reboot: bool = False, keeps_board: bool = False) -> None:
        """Start the engine. Raises the errors of recovery."""
        self._reclaimer = None
        super().start(is_reboot=is_reboot, keeps_board=keeps_board)

    def again(self) -> None:
        """Restart the dead shard, at most RESTARTS_MAX times. Raises Down."""
        self.world.runs.pop(0, None)
        for _ in range(RESTARTS_MAX):
            try:
                self.world.start_shard(0)
            except DiskError:
                self.model.failed += 1
                continue
            return
        raise Down

    def shard(self, ask: Callable[[], Any]) -> Any:
        """Call `ask` on the shard. A disk error ends its incarnation and is raised as ShardEnded."""
        if 0 not in self.world.runs:
            self.again()
        try:
            return ask()
        except DiskError as e:
            self.again()
            raise ShardEnded("the shard ended meanwhile", reason=str(e)) from None

    def wait(self, seconds: float) -> None:
        """Advance the time, and let the shard do the work that is due."""
        self.now_s += seconds
        self.try_to(lambda: self.shard(lambda: self.world.tick(seconds)))

    def try_to(self, act: Callable[[], Any]) -> Any:
        """Call `act`; return None if it fails visibly."""
        try:
            return act()
        except VISIBLE:
            self.model.failed += 1
            return None

    def image(self) -> Image:
        """Return the disk after all actors have ended."""
        self.base.process_kill()
        files = self.base.contents()
        directories = {path.rpartition("/")[0] for path in files} | {DATA, f"{DATA}/{META_DIR}", COLD}
        return Image(
            tuple(sorted(directories, key=len)), files, self.model.copy(), self.world.incarnation + 16,
            self.now_s + 1.0, self.has_rot,
        )  # fmt: skip

    # -- clients --------------------------------------------------------------------------------------

    def _ask(self, asked: Removal | TopicChange, request: Any) -> Any:
        ask = super()._ask
        try:
            return self.shard(lambda: ask(asked, request))
        except VISIBLE as e:
            self.model.failed += 1
            if isinstance(asked, TopicChange) and not asked.done_at and not isinstance(e, ShardEnded):
                self.model.withdraw(asked)
            return None

    def send(self, topic: str, *batches: list[bytes]) -> None:
        send = super().send
        self.try_to(lambda: self.shard(lambda: send(topic, *batches)))

    def delete(self, topic: str, seqs: Iterable[int], request: m.RecordsDelete | None = None) -> Any:
        delete = super().delete
        return self.try_to(lambda: delete(topic, seqs, request))

    def submit_removal(self, topic: str, seqs: Iterable[int], *, is_eviction: bool = True) -> Removal:
        """Submit a delete. It is an eviction by default, so it is synced in a topic of any class."""
        return super().submit_removal(topic, seqs, is_eviction=is_eviction)

    def refused(self, error: RinglogError) -> None:
        self.model.failed += 1

    # -- actors ---------------------------------------------------------------------------------------

    def checkpoint(self) -> None:
        """Run a checkpoint by a new compactor."""
        self.try_to(self.checkpoint_or_fail)

    def checkpoint_or_fail(self) -> None:
        """Run a checkpoint by a new compactor; pass its errors on."""
        self.world.incarnation += 1
        with counted_salts(self._salts):
            checkpoint(self.world, asking=self.asking, **SETTINGS)

    def reclaim(self) -> None:
        """Run a round of the reclaimer. A visible error ends its life."""
        try:
            if self._reclaimer is None:
                self._reclaimer = self._new_reclaimer()
            with counted_salts(self._salts):
                self._reclaimer.run_round()
        except VISIBLE:
            self.model.failed += 1
            self._reclaimer = None

    def _new_reclaimer(self) -> Reclaimer:
        self.world.incarnation += 1
        numbers = reclaimer_numbers(self.world.incarnation)
        return reclaimer_of(
            self.faulty,
            asked_by(self.asking),
            StorageConfig(**SETTINGS),
            numbers,
            self.world.clock,
            self.copies(),
        )

    def copies(self) -> SegmentCopies:
        """Return the access to the segment copies in both tiers."""
        return cold_copies(self.faulty)

    def relocate(self, hot_segments: int = 1) -> None:
        """Run a round of a new relocator."""

        def run() -> None:
            mover = mover_of(self.world, self.asking, hot_segments)
            try:
                mover.run_round()
            finally:
                self.model.failed += mover.counts.failed

        self.try_to(run)

    def segments(self) -> list[m.SegmentRef]:
        """Return the segments in force."""
        found: list[m.SegmentRef] = self.asking.ask(0, m.CheckpointOpen(), m.CheckpointPlan).message.segments
        return found

    def scrub(self) -> list[str]:
        """Verify all data and heal damage; return the findings."""
        scrubber = Scrubber(
            self.faulty, DATA, self.copies(), rate_limiter=lambda count: None, is_current=lambda ref: True
        )
        findings: list[str] = []
        refs = self.try_to(self.segments) or []
        for item in scrub_items(refs, self.try_to(scrubber.list_snapshots) or []):
            found = self.try_to(lambda item=item: scrubber.verify_item(item, heals=True))  # type: ignore[misc]
            findings += found or []
        return findings
