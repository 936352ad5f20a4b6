"""Checkpoints, segments, cold data and the scrub, between actors and shards."""

from __future__ import annotations

from ringlog.envelope.messages.base import Message
from ringlog.envelope.messages.ranges import U32, U64, Name, Seq
from ringlog.envelope.messages.records import Extent

TIER_HOT, TIER_BOTH, TIER_COLD = 0, 1, 2


class SegmentRef(Message, frozen=True):
    """One segment: a data part, its index and, with tags, its dictionary; named by `stem` + suffix."""

    number: U64
    """Unique in the data directory and growing: of two that hold the same records the greater is in force."""
    stem: Name
    """Path relative to the data directory, without suffix; the same below a cold directory."""
    salt: U64
    data_bytes: Seq
    records: Seq
    frames: Seq
    topics: Seq
    """1 for a segment of its own topic, more for one that small topics share."""
    tier: U32 = 0
    """0 hot, 1 both, 2 cold."""
    created_us: Seq = 0


class CheckpointOpen(Message, frozen=True):
    """Compactor: what is there to absorb? `roll` closes the current file first, if it holds records."""

    roll: bool = False
    segments: bool = True
    """Name the segments too; there may be many, and who only looks does without."""


class CheckpointPlan(Message, frozen=True):
    """Reply: files of the log that are closed, durable and not absorbed, in the order to replay them."""

    shard: U32
    shards: U32
    incarnation: U64
    files: list[Extent]
    log_bytes: Seq
    """Bytes in the log that no snapshot covers, the current file included."""
    number: U64
    """Number of the last snapshot the shard knows of."""
    segments: list[SegmentRef]
    """Everything registered at present; empty when it was not asked for."""
    missing: list[SegmentRef] = []
    """Segments that halted topics need and that are not there, at least not whole: nobody touches what is
    left of them."""


class LiveAsk(Message, frozen=True):
    """What is alive of these topics? The attached part holds their ids, 8 bytes each, at most 65,536."""

    topics: U32


class LiveReply(Message, frozen=True):
    """Reply, with one attached part: `topics` rows of 5 words [topic_id, epoch (0 = gone), earliest_seq,
    start and stop of its deleted numbers in `deleted`]."""

    topics: U32
    deleted: bytes = b""
    """Portable 64-bit roaring bitmaps of numbers deleted one by one, one behind the other."""
    codecs: bytes = b""
    """The codec in which each topic wants its records kept (types.Codec), a byte each; 0 = as
    storage.compression says. Empty: all of them are 0."""


class SegmentsChange(Message, frozen=True):
    """Segments were made (`added`, complete and synced) and take the place of `removed`, in one step."""

    added: list[SegmentRef]
    removed: list[U64]


class SegmentsChanged(Message, frozen=True):
    """Reply: done, all or nothing. `reason` says why not: an unknown number in `removed`, a part that does
    not verify, an overlap. After a refusal the files of `added` are the sender's to remove."""

    accepted: bool
    reason: str = ""


class SegmentTier(Message, frozen=True):
    """Relocator: the segment lies in this tier now. Replied to with SegmentsChanged."""

    number: U64
    tier: U32


class CheckpointRows(Message, frozen=True):
    """Compactor: the next topics that changed since the last finished checkpoint. `begin` starts over.

    `everything` (with `begin`): all topics, since the snapshot that the changes build on is not valid any
    more, or there is none.
    """

    begin: bool = False
    everything: bool = False
    absorbed: list[U64] | None = None
    """With `begin`: the log files whose records all lie in segments now; None = all of the last plan. The
    facts, and so the snapshot, say that they are absorbed: CheckpointDone must name the same."""


class CheckpointRowsReply(Message, frozen=True):
    """Reply, with one attached part: `topics` x [topic_id, length] words, then the rows, one after another.

    A length of 0 says that the topic is gone. `done`: these were the last; `facts` then holds what a
    snapshot keeps of the shard itself. `everything` repeats the request's of the page that began."""

    topics: U32
    done: bool
    facts: bytes = b""
    everything: bool = False


class CheckpointDone(Message, frozen=True):
    """Compactor: snapshot `number` is durable and was read back; the log files named are absorbed by it."""

    number: U64
    absorbed: list[U64]


class CheckpointClosed(Message, frozen=True):
    """Reply: nobody is led to these files any more. `unlink` are those that no snapshot kept needs."""

    unlink: list[str]


class ColdRead(Message, frozen=True):
    """To the relocator: bytes [start, stop) of a part of a cold segment; they come in a further part."""

    path: Name
    start: Seq
    stop: Seq


class ColdBytes(Message, frozen=True):
    """Reply to ColdRead."""

    bytes: Seq


class CheckpointNow(Message, frozen=True):
    """Operator -> compactor: make a checkpoint of every shard now (SN-12)."""


class CheckpointMade(Message, frozen=True):
    """Reply, when all are durable: the files of a consistent copy, relative to the data directory."""

    files: list[str]


class ScrubNow(Message, frozen=True):
    """Operator -> reclaimer: verify every segment and snapshot once, now (SG-15). One pass answers all who
    asked before it began."""


class ScrubReport(Message, frozen=True):
    """Reply: what was looked at and what is wrong: "path: reason"."""

    files: U64
    bytes: Seq
    findings: list[str]
