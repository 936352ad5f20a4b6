"""Requests of the reclaimer to all shards: registered segments, live records, and changes of segments."""

from __future__ import annotations

import logging
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol

import numpy as np
from pyroaring import BitMap64

from ringlog.actors.reclaimer.plan import RegisteredSegment, TopicLiveness
from ringlog.actors.reclaimer.segment_indexes import SegmentIndexes
from ringlog.envelope import messages as m
from ringlog.errors import Refused, RequestTimeout, ShuttingDown
from ringlog.logs import log_event
from ringlog.placement import shards_of
from ringlog.types import Codec

log: logging.Logger = logging.getLogger("ringlog.reclaimer")
LIVE_TOPICS_PER_ASK = 1_024
"""Topics per request. A shard replies in about 1 ms, and the bitmaps fit into one envelope."""


class ReclaimRequester(Protocol):
    """A request to a shard: (reply, attachment). It raises the errors of link.shard_requests."""

    def __call__(self, shard: int, message: m.Message, attachment: Any = None) -> tuple[Any, Any]: ...


@dataclass(slots=True)
class RegisteredState:
    """Replies of the shards in one round."""

    snapshots: dict[int, int]
    segments: dict[int, RegisteredSegment]
    is_complete: bool
    """Whether every shard replied."""
    unreadable: set[str] = field(default_factory=set)
    """Stems of registered segments with an unreadable index or with missing parts."""
    liveness: dict[int, TopicLiveness] = field(default_factory=dict)

    def undamaged(self, quarantined: Collection[int]) -> list[RegisteredSegment]:
        """Return the segments that may supersede others: those that are not quarantined."""
        return [registered for number, registered in self.segments.items() if number not in quarantined]


class ReclaimerShardClient:
    """Sends the reclaimer's requests. A shard may refuse one, or not reply."""

    def __init__(self, ask: ReclaimRequester, shards: int) -> None:
        self._ask = ask
        self.shards = shards

    def query_segments(self, indexes: SegmentIndexes) -> RegisteredState:
        """Return the registered segments of the shards that replied, with their tables from the indexes."""
        by_number: dict[int, tuple[m.SegmentRef, list[int]]] = {}
        snapshots: dict[int, int] = {}
        missing: set[str] = set()
        for shard in range(self.shards):
            plan = self._try(shard, m.CheckpointOpen())
            if plan is None:
                continue
            snapshots[shard] = plan[0].number
            missing |= {ref.stem for ref in plan[0].missing}
            for ref in plan[0].segments:
                by_number.setdefault(ref.number, (ref, []))[1].append(shard)
        readable, unreadable = {}, missing
        for number, (ref, shards) in by_number.items():
            table = indexes.table(ref)
            if table is None:
                unreadable.add(ref.stem)
            else:
                readable[number] = RegisteredSegment(ref, tuple(shards), table)
        indexes.keep(readable)
        return RegisteredState(snapshots, readable, len(snapshots) == self.shards, unreadable)

    def query_liveness(self, topics: list[Any]) -> dict[int, TopicLiveness]:
        """Return the live state of all these topics. Topics of a shard that did not reply are missing."""
        if not topics:
            return {}
        ids = np.unique(np.concatenate(topics)).astype("<u8")
        owners = shards_of(ids, self.shards)
        found: dict[int, TopicLiveness] = {}
        for shard in range(self.shards):
            own = ids[owners == shard]
            for start in range(0, len(own), LIVE_TOPICS_PER_ASK):
                part = own[start : start + LIVE_TOPICS_PER_ASK]
                answer = self._try(shard, m.ListLiveRecords(len(part)), part.tobytes())
                if answer is not None:
                    found.update(_decode_liveness(*answer))
        return found

    def change_segments(
        self, shards: Collection[int], added: Mapping[int, list[m.SegmentRef]], removed: list[int]
    ) -> str:
        """Send each shard its added segments and the removed ones.

        Returns:
            "" if all shards accepted, "refused" if all refused, else "unknown".
        """
        took = refused = 0
        for shard in sorted({*shards, *added}):
            known = removed if shard in shards else []
            answer = self._try(shard, m.SegmentsChange(added.get(shard, []), known))
            if answer is not None and answer[0].accepted:
                took += 1
            elif answer is not None:
                refused += 1
                log_event(
                    log, logging.WARNING, "shard refused a segment change", shard=shard,
                    reason=answer[0].reason,
                )  # fmt: skip
            else:
                return "unknown"
        return "" if not refused else "unknown" if took else "refused"

    def _try(self, shard: int, message: m.Message, attachment: Any = None) -> tuple[Any, Any] | None:
        """Send a request; return None if the shard refused it or did not reply."""
        try:
            return self._ask(shard, message, attachment)
        except ShuttingDown:
            raise
        except (Refused, RequestTimeout) as e:
            log_event(log, logging.DEBUG, "shard did not answer", shard=shard, reason=str(e))
            return None


def _decode_liveness(reply: m.LiveRecordsReply, attachment: Any) -> dict[int, TopicLiveness]:
    """Decode a LiveRecordsReply: topic id -> live state."""
    rows = np.frombuffer(attachment, dtype="<u8").reshape(-1, 5)
    codecs = reply.codecs or bytes(len(rows))
    return {
        topic_id: TopicLiveness(
            epoch,
            earliest,
            BitMap64.deserialize(reply.deleted[start:stop]) if stop > start else BitMap64(),
            Codec(codec),
        )
        for (topic_id, epoch, earliest, start, stop), codec in zip(rows.tolist(), codecs, strict=True)
    }
