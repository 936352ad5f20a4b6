"""Which segments move to the cold tier, and when a failed move is retried. Pure.

- The newest `hot_segments` segments of a topic stay hot, up to `hot_bytes`. The stricter limit applies.
- A segment that several shards know is cold only after all of them were informed. Packs therefore stay
  where they are while a shard does not reply.
- A damaged segment is not moved. A failed move is retried with exponential backoff. If the store does not
  respond, all moves wait, but nothing else.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field

from ringlog.envelope.messages import TIER_COLD, SegmentRef
from ringlog.limits import MOVE_BACKOFF_S_MAX
from ringlog.segment.layout import parse_stem

_NS = 1_000_000_000


@dataclass(frozen=True, slots=True)
class SegmentPlacement:
    """One segment, the shards that know it, and the hottest tier in which one of them registers it."""

    ref: SegmentRef
    shards: tuple[int, ...]
    tier: int

    @property
    def is_pack(self) -> bool:
        """Whether it may contain several topics, of several shards."""
        parsed = parse_stem(self.ref.stem)
        return parsed is None or parsed[0] == 0


def placements(by_shard: Mapping[int, Iterable[SegmentRef]]) -> dict[int, SegmentPlacement]:
    """Return all segments by number."""
    found: dict[int, SegmentPlacement] = {}
    for shard, refs in by_shard.items():
        for ref in refs:
            known = found.get(ref.number)
            shards, tier = ((*known.shards, shard), known.tier) if known else ((shard,), ref.tier)
            found[ref.number] = SegmentPlacement(ref, shards, min(tier, ref.tier))
    return found


def segments_due(
    candidates: Iterable[SegmentPlacement], hot_segments: int, hot_bytes: int
) -> list[SegmentPlacement]:
    """Return the segments that must become cold, oldest first. Packs count as one topic of their own."""
    families: dict[int, list[SegmentPlacement]] = {}
    for placement in candidates:
        parsed = parse_stem(placement.ref.stem)
        if parsed is not None:
            families.setdefault(parsed[0], []).append(placement)
    found = []
    for topic_id, family in families.items():
        family.sort(key=_age_of_pack if topic_id == 0 else _age_of_own)
        found += _over_hot_limits(family, hot_segments, hot_bytes)
    return sorted(found, key=_age_of_pack)


def _over_hot_limits(
    family: list[SegmentPlacement], hot_segments: int, hot_bytes: int
) -> list[SegmentPlacement]:
    """Return the segments over the limits. `family` is sorted, oldest first."""
    found, total_bytes = [], 0
    for rank, placement in enumerate(reversed(family)):
        total_bytes += placement.ref.data_bytes
        if placement.tier != TIER_COLD and (rank >= hot_segments or (hot_bytes and total_bytes > hot_bytes)):
            found.append(placement)
    return found


def _age_of_own(placement: SegmentPlacement) -> tuple[int, int]:
    parsed = parse_stem(placement.ref.stem)
    assert parsed is not None
    return parsed[1], parsed[2]


def _age_of_pack(placement: SegmentPlacement) -> tuple[int, int]:
    return placement.ref.created_us, placement.ref.number


@dataclass(slots=True)
class _RetryState:
    failures: int = 0
    until_ns: int = 0


@dataclass(slots=True)
class MoveBackoff:
    """Backoff of moves: damaged segments, failed segments, and all segments while the store is unavailable.

    A quarantined segment is not tried again by this incarnation. `jitter()` returns a random number in [0,
    1).
    """

    base_s: float
    jitter: Callable[[], float]
    quarantined: set[int] = field(default_factory=set)
    _waits: dict[int, _RetryState] = field(default_factory=dict)
    _store: _RetryState = field(default_factory=_RetryState)

    def may_try(self, number: int, now_ns: int) -> bool:
        """Return whether a move of this segment may be tried now."""
        wait = self._waits.get(number)
        is_waiting = wait is not None and now_ns < wait.until_ns
        return self.store_is_due(now_ns) and number not in self.quarantined and not is_waiting

    def store_is_due(self, now_ns: int) -> bool:
        """Return whether the store is available, or its retry time has come."""
        return now_ns >= self._store.until_ns

    def record_success(self, number: int) -> None:
        """Record a successful move, which also proves that the store is available."""
        self._waits.pop(number, None)
        self._store = _RetryState()
        self.quarantined.discard(number)

    def record_failure(self, number: int, now_ns: int) -> None:
        """Record a failed move and extend the backoff of this segment."""
        self._extend(self._waits.setdefault(number, _RetryState()), now_ns)

    def record_store_failure(self, now_ns: int) -> None:
        """Record that the store did not respond, and extend its backoff."""
        self._extend(self._store, now_ns)

    def retain_only(self, numbers: Iterable[int]) -> None:
        """Forget segments that no longer exist."""
        known = set(numbers)
        self.quarantined &= known
        self._waits = {number: wait for number, wait in self._waits.items() if number in known}

    def _extend(self, wait: _RetryState, now_ns: int) -> None:
        pause_s = min(self.base_s * 2.0**wait.failures, MOVE_BACKOFF_S_MAX)
        wait.failures = min(wait.failures + 1, 32)
        wait.until_ns = now_ns + round(pause_s * (0.5 + self.jitter() / 2) * _NS)
