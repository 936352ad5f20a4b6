"""Combine the contents of all files for each topic, and check that every seq is accounted for.

Every seq from a topic's earliest to its head must be stored in a segment or log file, or deleted on request,
or announced as lost. Any other seq is a gap, and a gap is damage.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import msgpack
import numpy as np
from pyroaring import BitMap64

from ringlog.verify.findings import ControlFact, FileReport, Range, count_seqs, merge_ranges, subtract_ranges
from ringlog.verify.snapshot_decoder import SnapshotTopicRow

_CREATE, _DELETE, _REMOVED, _EVICTED, _CONFIG, _HEAD, _LOST = 2, 3, 6, 7, 9, 11, 13
_EPHEMERAL = "ephemeral"


class TopicCoverage(NamedTuple):
    """State of one topic, for the output of a verification."""

    topic: str
    topic_id: int
    epoch: int
    earliest: int
    head: int
    records: int
    """Number of records from `earliest` on that are stored and not deleted."""
    deleted: int
    lost: list[Range]
    ranges: list[Range]
    gaps: list[Range]


@dataclass(slots=True)
class TopicHistory:
    """One epoch of a topic."""

    topic_id: int
    epoch: int
    name: str = ""
    durability: str = ""
    is_known: bool = False
    """A snapshot row or a CREATE frame of the topic was found. Otherwise there are only records."""
    is_deleted: bool = False
    floor: int = 1
    """One more than the highest seq that was evicted, expired, or deleted from the front."""
    head: int = 0
    removed: BitMap64 = field(default_factory=BitMap64)
    lost: list[Range] = field(default_factory=list)
    stored: list[Range] = field(default_factory=list)

    def coverage(self) -> TopicCoverage:
        """Combine the history into the state of the topic."""
        stored = merge_ranges(self.stored)
        head = max(self.head, stored[-1][1] if stored else 0)
        alive = subtract_ranges(stored, merge_ranges([*bitmap_ranges(self.removed), (0, self.floor - 1)]))
        wanted = [(self.floor, head)] if head >= self.floor else []
        lost = [span for span in merge_ranges(self.lost) if span[1] >= self.floor]
        held = subtract_ranges(wanted, merge_ranges([*stored, *bitmap_ranges(self.removed), *lost]))
        gaps = [] if self.durability == _EPHEMERAL else held
        earliest = alive[0][0] if alive else head + 1
        name = self.name or f"topic-{self.topic_id:x}"
        return TopicCoverage(
            name, self.topic_id, self.epoch, earliest, head, count_seqs(alive), len(self.removed), lost,
            alive,
            gaps,
        )  # fmt: skip


class TopicHistories:
    """All topics of a directory. Feed snapshots first, then files in log order."""

    def __init__(self) -> None:
        self._topics: dict[tuple[int, int], TopicHistory] = {}
        self._current: dict[int, int] = {}

    def topic(self, topic_id: int, epoch: int) -> TopicHistory:
        """Return the history of this epoch, which is created if it is new. Epoch 0 = the latest one."""
        epoch = epoch or self._current.get(topic_id, 0)
        key = (topic_id, epoch)
        if key not in self._topics:
            self._topics[key] = TopicHistory(topic_id, epoch)
        self._current[topic_id] = max(epoch, self._current.get(topic_id, 0))
        return self._topics[key]

    def apply_snapshot_row(self, row: SnapshotTopicRow) -> None:
        """Apply a topic's row of a snapshot."""
        topic = self.topic(row.topic_id, row.epoch)
        topic.is_known = True
        topic.name, topic.durability = row.name, row.durability
        topic.head, topic.floor = max(topic.head, row.head), max(topic.floor, row.floor)
        topic.lost += row.lost
        if row.dead:
            topic.removed |= BitMap64.deserialize(row.dead)

    def mark_removed_topics(self, is_deleted: Callable[[int], bool]) -> None:
        """Mark topics as deleted that snapshots no longer list. Call it after all log files were applied."""
        for topic in self._topics.values():
            topic.is_deleted |= is_deleted(topic.topic_id)

    def add_stored(self, report: FileReport) -> None:
        """Add the records that an engine reads from this file."""
        for (topic_id, epoch), ranges in report.served.items():
            self.topic(topic_id, epoch).stored += ranges
        for (topic_id, epoch), ranges in report.marked.items():
            topic = self.topic(topic_id, epoch)
            for first, last in ranges:
                topic.removed.add_range(first, last + 1)

    def add_given_up(self, report: FileReport) -> None:
        """Add the records of a log file that an engine gives up, unless they are stored elsewhere."""
        for _, topic_id, epoch, first, last in report.extra["passed"]:
            topic = self.topic(topic_id, epoch)
            topic.lost += subtract_ranges([(first, last)], merge_ranges(topic.stored))
            topic.head = max(topic.head, last)

    def apply_control_frames(self, facts: Iterable[ControlFact]) -> list[str]:
        """Apply control frames. Returns a description of each one that cannot be applied."""
        wrong = []
        for fact in facts:
            try:
                self._apply_fact(fact)
            except (TypeError, ValueError, IndexError, KeyError) as e:
                wrong.append(f"control frame of type {fact.type} for topic {fact.topic_id:x}: {e}")
        return wrong

    def _apply_fact(self, fact: ControlFact) -> None:
        topic, value = self.topic(fact.topic_id, fact.epoch), fact.value
        if fact.type == _CREATE:
            topic.name, topic.durability, topic.is_known = value[0], durability_of(value[2]), True
        elif fact.type == _CONFIG:
            topic.durability = durability_of(value[1])
        elif fact.type == _DELETE:
            topic.is_deleted = True
        elif fact.type == _EVICTED:
            topic.floor = max(topic.floor, *value[:3])
        elif fact.type == _REMOVED:
            topic.floor = max(topic.floor, value[0])
            if value[1]:
                topic.removed |= BitMap64.deserialize(value[1])
        elif fact.type == _LOST:
            topic.lost.append((value[0], value[1]))
            topic.head = max(topic.head, value[1])
        elif fact.type == _HEAD and value[1]:
            topic.head = max(topic.head, value[0])

    def coverages(self) -> Iterator[TopicCoverage]:
        """Yield the state of every existing topic, by name; for a recreated topic, its last epoch."""
        yield from (topic.coverage() for topic in self.live_topics())

    def live_topics(self) -> list[TopicHistory]:
        """Return the topics that exist, in their last epoch, sorted by name."""
        last: dict[str, TopicHistory] = {}
        for topic_id, epoch in self._current.items():
            topic = self._topics[topic_id, epoch]
            name = topic.name or f"topic-{topic_id:x}"
            if name not in last or last[name].epoch < topic.epoch:
                last[name] = topic
        return [last[name] for name in sorted(last) if last[name].is_known and not last[name].is_deleted]

    def max_identities(self) -> tuple[int, int]:
        """Return the greatest topic id and the greatest epoch that occur anywhere; 0 = none."""
        ids = [topic_id for topic_id, _ in self._topics]
        return max(ids, default=0), max([epoch for _, epoch in self._topics], default=0)

    def orphan_topics(self) -> list[TopicHistory]:
        """Return the topics of which only records exist: deleted before the last snapshot, or lost."""
        return [topic for topic in self._topics.values() if not topic.is_known and topic.stored]


def durability_of(config: bytes) -> str:
    """Return the durability class in a stored configuration; empty if it names none."""
    fields: Any = msgpack.unpackb(config, raw=False, strict_map_key=False)
    return str(fields.get("durability", "")) if isinstance(fields, dict) else ""


def bitmap_ranges(numbers: BitMap64) -> list[Range]:
    """Return the numbers as ascending ranges of adjacent numbers."""
    if not len(numbers):
        return []
    values = np.asarray(numbers.to_array(), dtype=np.uint64)
    cuts = np.flatnonzero(np.diff(values) != 1)
    firsts = values[np.concatenate([[0], cuts + 1])]
    lasts = values[np.concatenate([cuts, [len(values) - 1]])]
    return list(zip(firsts.tolist(), lasts.tolist(), strict=True))
