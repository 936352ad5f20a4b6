"""Metrics of a shard's consumer groups: total lag, and the age of the floor that has not moved for longest.

Pure. Each sample reads a limited number of groups. The sums are therefore as old as one round over all
groups. There are no metrics of single groups, because each of a million topics may have 64 groups; clients
query a single group by request.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass

from ringlog.actors.wal_shard.leases.lease_requests import unclaimed_of
from ringlog.leases.group import ConsumerGroup
from ringlog.limits import GROUPS_SAMPLED_MAX
from ringlog.topic.state import ShardTopic


@dataclass(slots=True)
class _GroupSample:
    topic: ShardTopic
    group: ConsumerGroup
    lag: int = 0
    pending: int = 0
    members: int = 0
    floor: int = -1
    """The group's floor when it last moved; -1 if the group was not sampled yet."""
    moved_ms: int = 0
    exhausted: int = 0


class GroupMetrics:
    """Metrics of one shard's consumer groups."""

    def __init__(self) -> None:
        self._known: dict[int, _GroupSample] = {}
        self._round: deque[int] = deque()
        """Numbers of groups in sampling order. May contain deleted groups."""
        self._left = 0
        """Number of groups that are still to be sampled in this round."""
        self._oldest_ms = self._last_oldest_ms = 0
        self.lag: int = 0
        self.pending: int = 0
        self.members: int = 0
        self.exhausted_total: int = 0
        """Grows when a sample finds newly exhausted records of groups."""
        self._with_dead_letters: dict[int, None] = {}
        """Numbers of groups that have a dead-letter topic."""

    def __len__(self) -> int:
        return len(self._known)

    @property
    def floor_age_ms(self) -> int:
        """Age in milliseconds of the oldest floor of a lagging group, at most the age of the shard."""
        return max(self._oldest_ms, self._last_oldest_ms)

    def add_group(self, topic: ShardTopic, group: ConsumerGroup) -> None:
        """Add a group."""
        if group.number in self._known:
            return
        if group.config.dead_letter:
            self._with_dead_letters[group.number] = None
        self._known[group.number] = _GroupSample(topic, group)
        self._round.append(group.number)

    def forget(self, number: int) -> None:
        """Drop a deleted group."""
        self._with_dead_letters.pop(number, None)
        known = self._known.pop(number, None)
        if known is not None:
            self._count(known, 0, 0, 0)

    def with_exhausted(self, after: int) -> list[int]:
        """Return the numbers above `after` of groups that may have exhausted records, in ascending order."""
        return sorted(number for number in self._with_dead_letters if number > after)

    def sample(self, now_ms: int, steady_ms: int) -> None:
        """Sample the next groups, at most GROUPS_SAMPLED_MAX.

        `now_ms` is the clock of leases, which also times members. `steady_ms` is the monotonic clock.
        """
        for _ in range(min(len(self._round), GROUPS_SAMPLED_MAX)):
            if not self._left:
                self._left = len(self._round)
                self._last_oldest_ms, self._oldest_ms = self._oldest_ms, 0
            self._left -= 1
            number = self._round.popleft()
            known = self._known.get(number)
            if known is not None:
                self._sample_group(known, now_ms, steady_ms)
                self._round.append(number)
        if not self._round:
            self._oldest_ms = self._last_oldest_ms = self._left = 0

    def _sample_group(self, known: _GroupSample, now_ms: int, steady_ms: int) -> None:
        topic, group = known.topic, known.group
        group.holders.sweep(now_ms)
        if group.config.dead_letter:
            group.apply_expirations(now_ms)
            self.exhausted_total += max(group.exhausted - known.exhausted, 0)
            known.exhausted = group.exhausted
        pending = group.pending
        lag = unclaimed_of(topic, group) + pending
        self._count(known, lag, pending, len(group.holders))
        if group.ack_floor != known.floor or not lag:
            known.floor, known.moved_ms = group.ack_floor, steady_ms
        self._oldest_ms = max(self._oldest_ms, steady_ms - known.moved_ms)

    def _count(self, known: _GroupSample, lag: int, pending: int, members: int) -> None:
        self.lag += lag - known.lag
        self.pending += pending - known.pending
        self.members += members - known.members
        known.lag, known.pending, known.members = lag, pending, members
