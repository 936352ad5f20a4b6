"""Identity of a shard, and the state that the parts of its core share. Pure."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from ringlog.actors.wal_shard.commit.commit_batch import CommitBatch
from ringlog.actors.wal_shard.events import QueryStorage
from ringlog.actors.wal_shard.phases import AwaitedCompletion, ShardPhase
from ringlog.actors.wal_shard.retention.storage_query import StorageQuery


@dataclass(frozen=True, slots=True)
class ShardIdentity:
    """Identity of this shard incarnation."""

    engine_id: str
    shard: int
    shards: int
    incarnation: int
    topics_max: int
    time_base_us: int = 0
    """See envelope/boot.py."""


class ShardState:
    """Phase and clocks of one incarnation, the staged commit batch, and the effects to perform."""

    def __init__(self, time_base_us: int) -> None:
        self.phase = ShardPhase.RECOVERING
        self.awaited: AwaitedCompletion = AwaitedCompletion.NOTHING
        self.batch: CommitBatch = CommitBatch()
        self.effects: list[Any] = []
        """Effects that the shell has to perform, in this order."""
        self.now_us: int = 0
        """Wall-clock time in microseconds."""
        self.now_ns: int = 0
        """Monotonic time in nanoseconds."""
        self.lease_clock_us: int = 0
        """Current time on the clock of leases: see Requests.lease_clock_us."""
        self._time_base_us = time_base_us

    def set_time(self, now_us: int, monotonic_ns: int) -> None:
        """Set the current times."""
        self.now_us, self.now_ns = now_us, monotonic_ns
        self._time_base_us = self._time_base_us or now_us - monotonic_ns // 1_000
        self.lease_clock_us = self._time_base_us + monotonic_ns // 1_000

    def is_due(self, at_ns: int | None) -> bool:
        """Return True if this monotonic time is reached."""
        return at_ns is not None and self.now_ns >= at_ns

    def query_storage(self, questions: list[StorageQuery]) -> bool:
        """Query storage if there are questions. Return True if there are."""
        if questions:
            self.effects.append(QueryStorage(questions))
            self.awaited = AwaitedCompletion.STORAGE
        return bool(questions)
