"""The records that segments and the log contain, compared with what the snapshots count. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import numpy as np

from ringlog.actors.wal_shard.recovery.losses import ReplayLosses
from ringlog.actors.wal_shard.recovery.replay_rows import Mask, Rows, RowSource
from ringlog.frame import batch as frames
from ringlog.frame import layout
from ringlog.segment.layout import parse_stem
from ringlog.topic.directory import Halt, TopicDirectory
from ringlog.topic.segment_catalog import MissingSegment, SegmentCatalog
from ringlog.topic.state import ShardTopic


class HeldRecords:
    """Adds the records of the log to the index, and finds the records of snapshot rows that are nowhere."""

    def __init__(self, directory: TopicDirectory, segments: SegmentCatalog, losses: ReplayLosses) -> None:
        self._directory, self._losses = directory, losses
        self.segments = segments
        """Existing segments. Records in segments are not added to the index of the log."""
        self.halts: list[Halt] = []
        """Topics with records in a missing segment."""
        self._held: dict[int, int] = {}
        """Topic -> last seq that segments and the log read so far contain."""
        self._rows: list[ShardTopic] = []
        """Topics that were loaded from snapshot rows."""

    def load(self, topics: Iterable[ShardTopic]) -> None:
        """Add topics from snapshot rows."""
        self._rows += topics

    def first_unheld(self, topic: ShardTopic, first: int) -> int:
        """Return the first seq from `first` on that may be in neither a segment nor the log."""
        held = self._held.get(topic.topic_id, 0)
        return max(first, held + 1, topic.earliest_seq, self.segments.sealed_to(topic.topic_id) + 1)

    def add(self, topic: ShardTopic, source: RowSource, rows: Rows, words: frames.U64, which: Mask) -> None:
        """Add rows that no segment contains to the index, even if the snapshot counts them."""
        held = self._held.get(topic.topic_id)
        if held is None:
            held = self.segments.sealed_to(topic.topic_id) if self.segments.refs else 0
        stops = words[:, layout.W_BASE_SEQ] + frames.counts_of(words)
        which = which & (stops > np.uint64(held + 1))
        if which.any():
            offsets = source.piece.batch.stored_offsets[rows[which]] + source.piece.file_offset
            topic.index.add_run(words[which, layout.W_BASE_SEQ], source.origin.file_id, offsets)
            held = int(stops[which][-1]) - 1
        self._held[topic.topic_id] = held

    def settle_rows(self, missing: Sequence[MissingSegment]) -> None:
        """Compare the snapshot rows with the existing records, after the complete log is applied (C3).

        Every live record of a row must be in a segment or in the log. If a segment is missing, the topic is
        halted, because the segment may come back. With `is_lenient`, the records are given up and reported
        instead, unless they are in the cold tier. If no segment is missing, the log has lost its tail, and
        the records are reported as lost.
        """
        ids = np.fromiter(sorted([topic.topic_id for topic in self._rows]), dtype=np.uint64)
        tails = dict(zip(ids.tolist(), self.segments.sealed_to_many(ids).tolist(), strict=True))
        for topic in self._rows:
            if not topic.count or self._directory.by_id.get(topic.topic_id) is not topic:
                continue
            held = max(self._held.get(topic.topic_id, 0), tails[topic.topic_id])
            holes = self._holes(topic, held) if missing else []
            if held < topic.head_seq and topic.live_within(held + 1, topic.head_seq):
                holes.append((max(held + 1, topic.earliest_seq), topic.head_seq))
            cause = _cause(missing, topic.topic_id, holes[0][0]) if holes else None
            if cause is not None and (cause.is_cold or not self._losses.is_lenient):
                self.halts.append(Halt(topic, cause.part, cause.reason, holes[0][0], holes[-1][1]))
                continue
            for first, last in holes:
                self._losses.lose_below(topic, first, last)
        if self.halts:
            self._keep_missing(missing)
        self._rows.clear()

    def _keep_missing(self, missing: Sequence[MissingSegment]) -> None:
        """Keep missing segments in the next snapshot: those of halted topics, and all shared ones."""
        halted = {halt.topic.topic_id for halt in self.halts}
        for each in missing:
            topic_id, _, _ = parse_stem(each.stem) or (0, 0, 0)
            if each.ref is not None and (not topic_id or topic_id in halted):
                self.segments.missing[each.ref.number] = each.ref

    def _holes(self, topic: ShardTopic, held: int) -> list[tuple[int, int]]:
        """Return ranges up to `held` with live records in neither a segment nor the log."""
        covered = self.segments.covered(topic.topic_id, topic.earliest_seq - 1)
        if topic.has_index:
            covered.append((topic.index.first_seq, held))
        holes, reached = [], topic.earliest_seq - 1
        for first, last in sorted(covered):
            if first > reached + 1 and topic.live_within(reached + 1, first - 1):
                holes.append((reached + 1, first - 1))
            reached = max(reached, last)
        return holes


def _cause(missing: Sequence[MissingSegment], topic_id: int, first_seq: int) -> MissingSegment | None:
    """Return the missing segment to report for a topic's records from `first_seq` on.

    This is the topic's own segment with the greatest start up to `first_seq`, otherwise a shared segment.
    None means that no missing segment can contain these records.
    """
    own: list[tuple[int, MissingSegment]] = []
    shared: list[MissingSegment] = []
    for each in missing:
        of_topic, first, _ = parse_stem(each.stem) or (0, 0, 0)
        if not of_topic:
            shared.append(each)
        elif of_topic == topic_id:
            own.append((first, each))
    before = [each for first, each in sorted(own, key=lambda one: one[0]) if first <= first_seq]
    candidates = before[-1:] or shared or [each for _, each in own]
    return candidates[0] if candidates else None
