"""What a shard's consumer groups count: how far they are behind, and for how long one has stood still. Pure.

Groups are looked at so many at a time: sums are as old as a round over all of them. Numbers of single groups
are nobody's series, for there may be 64 of them in each of a million topics: who wants those asks for them.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass

from actors.wal_shard.leases.lease_requests import unclaimed_of
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
    """Where it was when it was seen to move; -1 = it was not looked at yet."""
    moved_ms: int = 0
    exhausted: int = 0


class GroupMetrics:
    """The numbers of one shard's groups."""

    def __init__(self) -> None:
        self._known: dict[int, _GroupSample] = {}
        self._round: deque[int] = deque()
        """Numbers of groups, the one looked at longest ago first. May have such as are gone."""
        self._left = 0
        """So many of this round are still to be looked at."""
        self._oldest_ms = self._last_oldest_ms = 0
        self.lag = self.pending = self.members = 0
        self.exhausted_total = 0
        """Grows when something is to be moved to the dead letters: at once where it is rejected, at the next
        look where it had all its deliveries."""
        self._with_dead_letters: dict[int, None] = {}
        """Numbers of groups that have dead letters."""

    def __len__(self) -> int:
        return len(self._known)

    @property
    def floor_age_ms(self) -> int:
        """For how long the floor that has stood longest has not moved, of groups that are behind. It is known
        from when this shard began."""
        return max(self._oldest_ms, self._last_oldest_ms)

    def add_group(self, topic: ShardTopic, group: ConsumerGroup) -> None:
        """There is one more."""
        if group.number in self._known:
            return
        if group.config.dead_letter:
            self._with_dead_letters[group.number] = None
        self._known[group.number] = _GroupSample(topic, group)
        self._round.append(group.number)

    def forget(self, number: int) -> None:
        """It is no more."""
        self._with_dead_letters.pop(number, None)
        known = self._known.pop(number, None)
        if known is not None:
            self._count(known, 0, 0, 0)

    def with_exhausted(self, after: int) -> list[int]:
        """Numbers behind `after` of groups that may have something for the dead letters, ascending."""
        return sorted(number for number in self._with_dead_letters if number > after)

    def sample(self, now_ms: int, steady_ms: int) -> None:
        """Look at the next few groups, at most GROUPS_SAMPLED_MAX. `now_ms` is the time of members' words,
        `steady_ms` never goes back."""
        for _ in range(min(len(self._round), GROUPS_SAMPLED_MAX)):
            if not self._left:
                self._left = len(self._round)
                self._last_oldest_ms, self._oldest_ms = self._oldest_ms, 0
            self._left -= 1
            number = self._round.popleft()
            known = self._known.get(number)
            if known is not None:
                self._look_at(known, now_ms, steady_ms)
                self._round.append(number)
        if not self._round:
            self._oldest_ms = self._last_oldest_ms = self._left = 0

    def _look_at(self, known: _GroupSample, now_ms: int, steady_ms: int) -> None:
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
