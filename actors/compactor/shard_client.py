"""What the compactor asks a shard, as calls."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple, Protocol, TypeVar

import numpy as np

from actors.compactor.segment_plan import LIVE_WORDS, U64, LiveTopics, decode_live, merge_live_topics
from ringlog.envelope import messages as m
from ringlog.errors import CorruptData

LIVE_TOPICS_MAX = 4_096
M = TypeVar("M", bound=m.Message)


class CheckpointRequester(Protocol):
    """link.shard_requests.ShardRequests, or a shard of a test."""

    def ask(self, shard: int, message: m.Message, wanted: type[M], *, attachment: Any = None) -> Any:
        """Send a request; returns something with `message` and `attachment`."""
        ...


class SnapshotRows(NamedTuple):
    """Rows of topics that changed, and what a snapshot keeps of the shard itself."""

    ids: U64
    lengths: U64
    rows: bytes
    facts: bytes
    is_everything: bool
    """Every topic there is, whatever was asked for: one without a row is gone."""


class CompactorShardClient:
    """One shard, asked. Every method raises what link.shard_requests.Requester.ask raises."""

    def __init__(self, asking: CheckpointRequester, shard: int) -> None:
        self._asking, self.number = asking, shard

    def fetch_plan(self, *, roll: bool = False) -> m.CheckpointPlan:
        """What is there to absorb, and which segments are in force?"""
        plan: m.CheckpointPlan = self._ask(m.CheckpointOpen(roll), m.CheckpointPlan).message
        return plan

    def fetch_plan_summary(self, *, roll: bool) -> m.CheckpointPlan:
        """As `plan`, without the segments: often asked, and short however many there are."""
        plan: m.CheckpointPlan = self._ask(m.CheckpointOpen(roll, False), m.CheckpointPlan).message
        return plan

    def fetch_live_topics(self, ids: U64) -> LiveTopics:
        """What is alive of these topics, whose ids ascend? Raises CorruptData for an answer about others."""
        parts = []
        for start in range(0, len(ids), LIVE_TOPICS_MAX):
            asked = ids[start : start + LIVE_TOPICS_MAX]
            answer = self._ask(m.LiveAsk(len(asked)), m.LiveReply, attachment=asked.astype("<u8").tobytes())
            if len(answer.attachment) != len(asked) * LIVE_WORDS * 8:
                raise CorruptData("a shard spoke of other topics than it was asked of", shard=self.number)
            live = decode_live(answer.attachment, answer.message.deleted, answer.message.codecs)
            if not np.array_equal(live.ids, asked):
                raise CorruptData("a shard spoke of other topics than it was asked of", shard=self.number)
            parts.append(live)
        return merge_live_topics(parts)

    def register(self, added: list[m.SegmentRef], removed: list[int]) -> m.SegmentsChanged:
        """Put segments in force."""
        changed: m.SegmentsChanged = self._ask(m.SegmentsChange(added, removed), m.SegmentsChanged).message
        return changed

    def fetch_snapshot_rows(self, absorbed: list[int], *, everything: bool) -> SnapshotRows:
        """Rows of the topics that changed since the last finished checkpoint, or of all.

        All records of the log files `absorbed` lie in segments that the shard knows.
        """
        ids, lengths, rows, facts, is_everything = [], [], [], b"", everything
        for page in self._pages(absorbed, everything):
            count = page.message.topics
            words = np.frombuffer(page.attachment[: 16 * count], dtype="<u8").reshape(-1, 2)
            body = bytes(page.attachment[16 * count :])
            if len(words) != count or int(words[:, 1].sum()) != len(body):
                raise CorruptData("rows of topics do not fit their lengths", shard=self.number)
            ids.append(words[:, 0])
            lengths.append(words[:, 1])
            rows.append(body)
            facts, is_everything = page.message.facts, page.message.everything
        return SnapshotRows(
            np.concatenate(ids), np.concatenate(lengths), b"".join(rows), facts, is_everything
        )

    def _pages(self, absorbed: list[int], everything: bool) -> Iterator[Any]:
        begin, done = True, False
        while not done:
            page = self._ask(m.CheckpointRows(begin, everything, absorbed), m.CheckpointRowsReply)
            if everything and not page.message.everything:
                raise CorruptData("a shard gave changes where every row was asked for", shard=self.number)
            begin, done = False, page.message.done
            yield page

    def confirm_snapshot(self, number: int, absorbed: list[int]) -> list[str]:
        """Say that a snapshot is durable; returns paths of log files that nobody needs any more."""
        reply: m.CheckpointClosed = self._ask(m.CheckpointDone(number, absorbed), m.CheckpointClosed).message
        return reply.unlink

    def _ask(self, message: m.Message, wanted: type[M], attachment: Any = None) -> Any:
        return self._asking.ask(self.number, message, wanted, attachment=attachment)
