"""Which segments go to the cold tier, and when what failed is tried again. Pure.

R1  a topic's newest `hot_segments` stay, and no more than `hot_bytes` of it; the stricter one decides (TI-2).
R2  a segment that several shards know is cold only when all of them were told: packs stay where they are
    while a shard does not answer.
R3  what is damaged is not moved (SG-10); what failed waits longer each time, and a store that does not
    answer holds up all moves and nothing else (TI-7, TI-9).
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
    """One segment, the shards that know it, and the hottest tier any of them leads readers to."""

    ref: SegmentRef
    shards: tuple[int, ...]
    tier: int

    @property
    def is_pack(self) -> bool:
        """It holds segments of several topics, which several shards may look after."""
        parsed = parse_stem(self.ref.stem)
        return parsed is None or parsed[0] == 0


def placements(by_shard: Mapping[int, Iterable[SegmentRef]]) -> dict[int, SegmentPlacement]:
    """All segments by number."""
    found: dict[int, SegmentPlacement] = {}
    for shard, refs in by_shard.items():
        for ref in refs:
            known = found.get(ref.number)
            shards, tier = ((*known.shards, shard), known.tier) if known else ((shard,), ref.tier)
            found[ref.number] = SegmentPlacement(ref, shards, min(tier, ref.tier))
    return found


def segments_due(
    placed: Iterable[SegmentPlacement], hot_segments: int, hot_bytes: int
) -> list[SegmentPlacement]:
    """Segments that are to be cold and are not, oldest first (R1). Packs count as one topic of their own."""
    families: dict[int, list[SegmentPlacement]] = {}
    for each in placed:
        parsed = parse_stem(each.ref.stem)
        if parsed is not None:
            families.setdefault(parsed[0], []).append(each)
    found = []
    for topic_id, family in families.items():
        family.sort(key=_age_of_pack if topic_id == 0 else _age_of_own)
        found += _over_hot_limits(family, hot_segments, hot_bytes)
    return sorted(found, key=_age_of_pack)


def _over_hot_limits(
    family: list[SegmentPlacement], hot_segments: int, hot_bytes: int
) -> list[SegmentPlacement]:
    """`family` is sorted, oldest first."""
    found, held = [], 0
    for rank, each in enumerate(reversed(family)):
        held += each.ref.data_bytes
        if each.tier != TIER_COLD and (rank >= hot_segments or (hot_bytes and held > hot_bytes)):
            found.append(each)
    return found


def _age_of_own(each: SegmentPlacement) -> tuple[int, int]:
    parsed = parse_stem(each.ref.stem)
    assert parsed is not None
    return parsed[1], parsed[2]


def _age_of_pack(each: SegmentPlacement) -> tuple[int, int]:
    return each.ref.created_us, each.ref.number


@dataclass(slots=True)
class _RetryState:
    failures: int = 0
    until_ns: int = 0


@dataclass(slots=True)
class MoveBackoff:
    """What is not tried now: damaged segments, failed ones that wait, and everything while the store is down.

    `jitter()` is a number in [0, 1) from outside.
    """

    base_s: float
    jitter: Callable[[], float]
    quarantined: set[int] = field(default_factory=set)
    _waits: dict[int, _RetryState] = field(default_factory=dict)
    _store: _RetryState = field(default_factory=_RetryState)

    def may_try(self, number: int, now_ns: int) -> bool:
        """Is this segment to be moved now?"""
        wait = self._waits.get(number)
        is_waiting = wait is not None and now_ns < wait.until_ns
        return self.store_is_due(now_ns) and number not in self.quarantined and not is_waiting

    def store_is_due(self, now_ns: int) -> bool:
        """Is the store believed to answer, or is it time to ask again?"""
        return now_ns >= self._store.until_ns

    def record_success(self, number: int) -> None:
        """It was moved; so the store works."""
        self._waits.pop(number, None)
        self._store = _RetryState()
        self.quarantined.discard(number)

    def record_failure(self, number: int, now_ns: int) -> None:
        """This one did not go."""
        self._longer(self._waits.setdefault(number, _RetryState()), now_ns)

    def record_store_failure(self, now_ns: int) -> None:
        """The store did not answer."""
        self._longer(self._store, now_ns)

    def retain_only(self, numbers: Iterable[int]) -> None:
        """Segments that are gone are no longer waited for."""
        known = set(numbers)
        self.quarantined &= known
        self._waits = {number: wait for number, wait in self._waits.items() if number in known}

    def _longer(self, wait: _RetryState, now_ns: int) -> None:
        pause_s = min(self.base_s * 2.0**wait.failures, MOVE_BACKOFF_S_MAX)
        wait.failures = min(wait.failures + 1, 32)
        wait.until_ns = now_ns + round(pause_s * (0.5 + self.jitter() / 2) * _NS)
