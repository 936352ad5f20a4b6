"""The compactor's requests to a shard, as methods."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple, Protocol, TypeVar

import numpy as np

from ringlog.actors.compactor.segment_plan import LIVE_WORDS, U64, LiveTopics, decode_live, merge_live_topics
from ringlog.envelope import messages as m
from ringlog.errors import CorruptData

LIVE_TOPICS_MAX = 4_096
M = TypeVar("M", bound=m.Message)


class CheckpointRequester(Protocol):
    """Interface of link.shard_requests.ShardRequests; tests use fakes."""

    def ask(self, shard: int, message: m.Message, wanted: type[M], *, attachment: Any = None) -> Any:
        """Send a request and return the reply, which has `message` and `attachment`."""
        ...


class SnapshotRows(NamedTuple):
    """Rows of changed topics, and the shard's own facts for the snapshot."""

    ids: U64
    lengths: U64
    rows: bytes
    facts: bytes
    is_everything: bool
    """Whether the rows are those of all topics. A topic without a row is then deleted."""


class CompactorShardClient:
    """Requests to one shard. Every method raises the errors of link.shard_requests.Requester.ask."""

    def __init__(self, requester: CheckpointRequester, shard: int) -> None:
        self._requester = requester
        self.number: int = shard

    def fetch_plan(self, *, roll: bool = False) -> m.CheckpointPlan:
        """Request the log files to absorb and the registered segments."""
        plan: m.CheckpointPlan = self._ask(m.CheckpointOpen(roll), m.CheckpointPlan).message
        return plan

    def fetch_plan_summary(self, *, roll: bool) -> m.CheckpointPlan:
        """Request the plan without its segments.

        It is short for any number of segments, so it suits polling.
        """
        plan: m.CheckpointPlan = self._ask(m.CheckpointOpen(roll, False), m.CheckpointPlan).message
        return plan

    def fetch_live_topics(self, ids: U64) -> LiveTopics:
        """Request the live state of topics; `ids` ascend.

        Raises CorruptData if the reply has other topics.
        """
        parts = []
        for start in range(0, len(ids), LIVE_TOPICS_MAX):
            requested_ids = ids[start : start + LIVE_TOPICS_MAX]
            answer = self._ask(
                m.ListLiveRecords(len(requested_ids)),
                m.LiveRecordsReply,
                attachment=requested_ids.astype("<u8").tobytes(),
            )
            if len(answer.attachment) != len(requested_ids) * LIVE_WORDS * 8:
                raise CorruptData(
                    "LiveRecordsReply of a shard has other topics than requested", shard=self.number
                )
            live = decode_live(answer.attachment, answer.message.deleted, answer.message.codecs)
            if not np.array_equal(live.ids, requested_ids):
                raise CorruptData(
                    "LiveRecordsReply of a shard has other topics than requested", shard=self.number
                )
            parts.append(live)
        return merge_live_topics(parts)

    def register(self, added: list[m.SegmentRef], removed: list[int]) -> m.SegmentsChanged:
        """Register and deregister segments."""
        changed: m.SegmentsChanged = self._ask(m.SegmentsChange(added, removed), m.SegmentsChanged).message
        return changed

    def fetch_snapshot_rows(self, absorbed: list[int], *, everything: bool) -> SnapshotRows:
        """Request the rows of topics that changed since the last finished checkpoint, or of all topics.

        The caller has registered segments with all records of the log files `absorbed`.
        """
        ids, lengths, rows, facts, is_everything = [], [], [], b"", everything
        for page in self._pages(absorbed, everything):
            count = page.message.topics
            words = np.frombuffer(page.attachment[: 16 * count], dtype="<u8").reshape(-1, 2)
            if len(words) != count:
                raise CorruptData("corrupt snapshot rows of a shard: a page is too short", shard=self.number)
            ids.append(words[:, 0])
            lengths.append(words[:, 1])
            rows.append(bytes(page.attachment[16 * count :]))
            facts, is_everything = page.message.facts, page.message.everything
        found = SnapshotRows(
            np.concatenate(ids), np.concatenate(lengths), b"".join(rows), facts, is_everything
        )
        if int(found.lengths.sum()) != len(found.rows):
            raise CorruptData("corrupt snapshot rows of a shard: total length differs", shard=self.number)
        return found

    def _pages(self, absorbed: list[int], everything: bool) -> Iterator[Any]:
        begin, done = True, False
        while not done:
            page = self._ask(m.CheckpointRows(begin, everything, absorbed), m.CheckpointRowsReply)
            if everything and not page.message.everything:
                raise CorruptData("a shard sent only changed rows, expected all rows", shard=self.number)
            begin, done = False, page.message.done
            yield page

    def confirm_snapshot(self, number: int, absorbed: list[int]) -> list[str]:
        """Report a durable snapshot; return the paths of log files that are no longer needed."""
        reply: m.CheckpointClosed = self._ask(m.CheckpointDone(number, absorbed), m.CheckpointClosed).message
        return reply.unlink

    def _ask(self, message: m.Message, wanted: type[M], attachment: Any = None) -> Any:
        return self._requester.ask(self.number, message, wanted, attachment=attachment)
