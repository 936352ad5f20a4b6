"""Deletion marks in segments: deletions in the log must still apply after the log is deleted."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
from pyroaring import BitMap64

from ringlog.actors.compactor.segment_plan import LiveTopics
from ringlog.actors.compactor.shard_client import CompactorShardClient
from ringlog.envelope import messages as m
from ringlog.segment.layout import parse_stem
from ringlog.segment.segment import Segment

if TYPE_CHECKING:
    from ringlog.actors.compactor.checkpoint import CheckpointContext


def mark_deleted_records(
    ctx: CheckpointContext, shard: CompactorShardClient, topics: set[int], refs: list[m.SegmentRef]
) -> int:
    """Mark the deleted records of `topics` in the segments `refs`, durably; return the number of new marks.

    The shard reports all records that are deleted now, which include all deletions in the absorbed log. A
    mark follows its log record, and marking twice changes nothing. Raises DiskError or CorruptData.
    """
    if not topics:
        return 0
    live = shard.fetch_live_topics(np.array(sorted(topics), dtype=np.uint64))
    made = 0
    for ref in refs if live.deleted else ():
        parsed = parse_stem(ref.stem)
        if parsed is not None and (not parsed[0] or parsed[0] in live.deleted):
            made += _mark_segment(ctx, ref, live)
            ctx.heartbeat()
    return made


def _mark_segment(ctx: CheckpointContext, ref: m.SegmentRef, live: LiveTopics) -> int:
    segment = Segment.open(ctx.disk, ctx.data_dir, ref.stem)
    made = 0
    try:
        for topic_id, deleted in live.deleted.items():
            row = segment.row(topic_id)
            if row is not None and _is_same_epoch(segment, row, live, topic_id):
                made += segment.mark_deleted(row, BitMap64(deleted))
        if made:
            segment.sync_marks()
    finally:
        segment.close()
    return made


def _is_same_epoch(segment: Segment, row: int, live: LiveTopics, topic_id: int) -> bool:
    at = int(np.searchsorted(live.ids, np.uint64(topic_id)))
    return int(live.epochs[at]) == int(segment.topics["epoch"][row])
