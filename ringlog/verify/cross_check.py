"""What a data directory says about each topic, put together, and whether every number is accounted for.

A number between a topic's earliest and its head lies in a segment or a log file, or was deleted on
request, or is announced as lost. Anything else is a gap, and a gap is damage.
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
    """One topic, for people and programs."""

    topic: str
    topic_id: int
    epoch: int
    earliest: int
    head: int
    records: int
    """Numbers from `earliest` on that are stored and not deleted."""
    deleted: int
    lost: list[Range]
    ranges: list[Range]
    gaps: list[Range]


@dataclass(slots=True)
class TopicHistory:
    """One life of a topic."""

    topic_id: int
    epoch: int
    name: str = ""
    durability: str = ""
    is_known: bool = False
    """Somebody said that it was made; of others there are only records left."""
    is_gone: bool = False
    floor: int = 1
    """One past the highest number that left by a cap, by age or from the front on request."""
    head: int = 0
    removed: BitMap64 = field(default_factory=BitMap64)
    lost: list[Range] = field(default_factory=list)
    stored: list[Range] = field(default_factory=list)

    def coverage(self) -> TopicCoverage:
        """Put it together."""
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
    """All topics of a directory. Feed snapshots first, then files in the order of the log."""

    def __init__(self) -> None:
        self._topics: dict[tuple[int, int], TopicHistory] = {}
        self._current: dict[int, int] = {}

    def topic(self, topic_id: int, epoch: int) -> TopicHistory:
        """This life of a topic, made when it is first heard of. Epoch 0 = the one last heard of."""
        epoch = epoch or self._current.get(topic_id, 0)
        key = (topic_id, epoch)
        if key not in self._topics:
            self._topics[key] = TopicHistory(topic_id, epoch)
        self._current[topic_id] = max(epoch, self._current.get(topic_id, 0))
        return self._topics[key]

    def apply_snapshot_row(self, row: SnapshotTopicRow) -> None:
        """Take what a snapshot says of a topic."""
        topic = self.topic(row.topic_id, row.epoch)
        topic.is_known = True
        topic.name, topic.durability = row.name, row.durability
        topic.head, topic.floor = max(topic.head, row.head), max(topic.floor, row.floor)
        topic.lost += row.lost
        if row.dead:
            topic.removed |= BitMap64.deserialize(row.dead)

    def mark_removed_topics(self, is_gone: Callable[[int], bool]) -> None:
        """Take what snapshots do not say any more, once the log has told what it knows."""
        for topic in self._topics.values():
            topic.is_gone |= is_gone(topic.topic_id)

    def add_stored(self, report: FileReport) -> None:
        """Take what an engine reads of a file."""
        for (topic_id, epoch), ranges in report.served.items():
            self.topic(topic_id, epoch).stored += ranges
        for (topic_id, epoch), ranges in report.marked.items():
            topic = self.topic(topic_id, epoch)
            for first, last in ranges:
                topic.removed.add_range(first, last + 1)

    def add_given_up(self, report: FileReport) -> None:
        """Take what an engine passes over in a log file, and announces as lost, if it lies nowhere else."""
        for _, topic_id, epoch, first, last in report.more["passed"]:
            topic = self.topic(topic_id, epoch)
            topic.lost += subtract_ranges([(first, last)], merge_ranges(topic.stored))
            topic.head = max(topic.head, last)

    def apply_facts(self, facts: Iterable[ControlFact]) -> list[str]:
        """Take what control frames say; returns what makes no sense."""
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
            topic.is_gone = True
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
        """Every topic that is there, by name; of one that was made again, the last life."""
        yield from (topic.coverage() for topic in self.live_topics())

    def live_topics(self) -> list[TopicHistory]:
        """Topics that were not removed or made again, by name."""
        last: dict[str, TopicHistory] = {}
        for topic_id, epoch in self._current.items():
            topic = self._topics[topic_id, epoch]
            name = topic.name or f"topic-{topic_id:x}"
            if name not in last or last[name].epoch < topic.epoch:
                last[name] = topic
        return [last[name] for name in sorted(last) if last[name].is_known and not last[name].is_gone]

    def max_identities(self) -> tuple[int, int]:
        """The greatest topic id and the greatest epoch that anything speaks of; 0 = nothing does."""
        ids = [topic_id for topic_id, _ in self._topics]
        return max(ids, default=0), max([epoch for _, epoch in self._topics], default=0)

    def orphan_topics(self) -> list[TopicHistory]:
        """Topics of which there are records and nothing else: removed before the last snapshot, or lost."""
        return [topic for topic in self._topics.values() if not topic.is_known and topic.stored]


def durability_of(config: bytes) -> str:
    """Class a stored configuration names; empty when it names none."""
    fields: Any = msgpack.unpackb(config, raw=False, strict_map_key=False)
    return str(fields.get("durability", "")) if isinstance(fields, dict) else ""


def bitmap_ranges(numbers: BitMap64) -> list[Range]:
    """Stretches of neighbouring numbers, ascending."""
    if not len(numbers):
        return []
    values = np.asarray(numbers.to_array(), dtype=np.uint64)
    cuts = np.flatnonzero(np.diff(values) != 1)
    firsts = values[np.concatenate([[0], cuts + 1])]
    lasts = values[np.concatenate([cuts, [len(values) - 1]])]
    return list(zip(firsts.tolist(), lasts.tolist(), strict=True))
