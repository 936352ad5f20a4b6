"""What the reclaimer reads from indexes of registered segments: tables, live records, ranges of positions."""

from __future__ import annotations

import logging
from collections.abc import Collection
from typing import Any

import numpy as np

from ringlog.actors.reclaimer.plan import Ranges, RegisteredSegment, TopicLiveness
from ringlog.envelope import messages as m
from ringlog.errors import CorruptData, DiskError
from ringlog.logs import log_event
from ringlog.segment.segment import Segment
from ringlog.storage.disk import Disk

log: logging.Logger = logging.getLogger("ringlog.reclaimer")


class SegmentIndexes:
    """Reads indexes, and keeps the results while their segments are registered."""

    def __init__(self, disk: Disk, data_dir: str) -> None:
        self._disk, self._data_dir = disk, data_dir
        self._tables: dict[int, Any] = {}
        self._measured: dict[tuple[int, int], tuple[tuple[Any, ...], tuple[int, int]]] = {}

    def table(self, ref: m.SegmentRef) -> Any:
        """Return the topic table of a segment; None if its index cannot be read."""
        if ref.number not in self._tables:
            try:
                segment = Segment.open(self._disk, self._data_dir, ref.stem)
            except (CorruptData, DiskError) as e:
                # The scrub also finds and reports it. Here the segment is only skipped.
                log_event(log, logging.WARNING, "index not readable", segment=ref.stem, reason=str(e))
                return None
            self._tables[ref.number] = np.array(segment.topics)
            segment.close()
        return self._tables[ref.number]

    def keep(self, numbers: Collection[int]) -> None:
        """Forget the segments that are not registered any more."""
        self._tables = {number: self._tables[number] for number in numbers}
        self._measured = {key: kept for key, kept in self._measured.items() if key[0] in numbers}

    def measure(
        self, registered: RegisteredSegment, at: int, live: TopicLiveness, elsewhere: Ranges
    ) -> tuple[int, int]:
        """Return the result of `count`. It is cached until more of the topic is dead."""
        key, facts = (registered.ref.number, at), (live.earliest_seq, len(live.deleted), tuple(elsewhere))
        kept = self._measured.get(key)
        if kept is None or kept[0] != facts:
            kept = self._measured[key] = (facts, self.count(registered, at, live, elsewhere))
        return kept[1]

    def count(
        self, registered: RegisteredSegment, at: int, live: TopicLiveness, elsewhere: Ranges
    ) -> tuple[int, int]:
        """Return the live records and accounted bytes of one topic of a segment, from its index.

        If the index cannot be read, all records count as alive.
        """
        row = registered.table[at]
        try:
            segment = Segment.open(self._disk, self._data_dir, registered.ref.stem)
            try:
                seqs, sizes, _ = segment.positions(at, live.earliest_seq, int(row["last_seq"]))
            finally:
                segment.close()
        except (CorruptData, DiskError) as e:
            log_event(log, logging.WARNING, "index not readable", segment=registered.ref.stem, reason=str(e))
            return int(row["records"]), int(row["bytes"])
        is_alive = ~np.isin(seqs, np.array(live.deleted.to_array(), dtype=np.uint64), assume_unique=True)
        for first, last in elsewhere:
            is_alive &= (seqs < first) | (seqs > last)
        return int(is_alive.sum()), int(sizes[is_alive].sum())

    def stored_ranges(self, registered: RegisteredSegment, at: int) -> Ranges:
        """Return the ranges of positions in a segment, from its index; [] if it cannot be read."""
        try:
            segment = Segment.open(self._disk, self._data_dir, registered.ref.stem)
        except (CorruptData, DiskError) as e:
            log_event(log, logging.WARNING, "index not readable", segment=registered.ref.stem, reason=str(e))
            return []
        row = segment.topics[at]
        entries = segment.entries[int(row["entry_start"]) : int(row["entry_stop"])]
        segment.close()
        first, after = entries["base_seq"], entries["base_seq"] + entries["count"]
        is_cut = np.append(True, first[1:] != after[:-1])
        starts = np.flatnonzero(is_cut)
        stops = np.append(starts[1:], len(entries)) - 1
        return list(zip(first[starts].tolist(), (after[stops] - 1).tolist(), strict=True))
