"""Checkpoints, segments, cold data and the scrub: messages between actors and shards."""

from __future__ import annotations

from ringlog.envelope.messages.base import Message
from ringlog.envelope.messages.ranges import U32, U64, Name, Seq
from ringlog.envelope.messages.records import Extent

TIER_HOT, TIER_BOTH, TIER_COLD = 0, 1, 2


class SegmentRef(Message, frozen=True):
    """One segment: a data part, its index and, with tags, its dictionary; each part is named `stem` +
    suffix."""

    number: U64
    """Unique in the data directory and growing. If two segments have the same records, the greater number is
    in force."""
    stem: Name
    """Path relative to the data directory, without suffix; the same path in a cold directory."""
    salt: U64
    data_bytes: Seq
    records: Seq
    frames: Seq
    topics: Seq
    """1 for a segment of one topic, more for a segment that small topics share."""
    tier: U32 = 0
    """0 hot, 1 both, 2 cold."""
    created_us: Seq = 0


class CheckpointOpen(Message, frozen=True):
    """Compactor, reclaimer or relocator to shard: query the log files to absorb and the segments.

    Reply: CheckpointPlan.

    `roll` first closes the current file, if it has records.
    """

    roll: bool = False
    segments: bool = True
    """Include the segments. There may be many; a sender that needs only the files sets it to false."""


class CheckpointPlan(Message, frozen=True):
    """Reply to CheckpointOpen: log files that are closed, durable and not absorbed, in replay order."""

    shard: U32
    shards: U32
    incarnation: U64
    files: list[Extent]
    log_bytes: Seq
    """Bytes of log that no snapshot covers, including the current file."""
    number: U64
    """Number of the last snapshot that the shard knows."""
    segments: list[SegmentRef]
    """All segments in force; empty if the request did not ask for them."""
    missing: list[SegmentRef] = []
    """Segments that halted topics need and that are missing or incomplete. No process deletes their remaining
    parts."""


class ListLiveRecords(Message, frozen=True):
    """Compactor or reclaimer to shard: query the live records of topics. Reply: LiveRecordsReply.

    The attachment has their ids, 8 bytes each, at most 65,536.
    """

    topics: U32


class LiveRecordsReply(Message, frozen=True):
    """Reply to ListLiveRecords, with one attachment: `topics` rows of 5 words.

    A row is [topic_id, epoch (0 = deleted), earliest_seq, start and stop of its deleted seqs in
    `deleted`]."""

    topics: U32
    deleted: bytes = b""
    """Portable 64-bit roaring bitmaps of seqs that were deleted one by one, concatenated."""
    codecs: bytes = b""
    """Codec of each topic (types.Codec), one byte each; 0 = storage.compression decides. Empty: all are 0."""


class SegmentsChange(Message, frozen=True):
    """Compactor or reclaimer to shard: replace the segments `removed` by `added` in one step.

    Reply: SegmentsChanged.

    The segments of `added` are complete and synced.
    """

    added: list[SegmentRef]
    removed: list[U64]


class SegmentsChanged(Message, frozen=True):
    """Reply to SegmentsChange and SegmentTier: all or nothing.

    `reason` states why the shard refused: an unknown number in `removed`, a part that does not verify, an
    overlap. After a refusal the sender deletes the files of `added`."""

    accepted: bool
    reason: str = ""


class SegmentTier(Message, frozen=True):
    """Relocator to shard: the segment is in this tier now. Reply: SegmentsChanged."""

    number: U64
    tier: U32


class CheckpointRows(Message, frozen=True):
    """Compactor to shard: read the next topics that changed since the last finished checkpoint.

    Reply: CheckpointRowsReply; the compactor repeats the request until `done`. `begin` starts from the first
    topic. `everything` (with `begin`): all topics, because the snapshot that the changes build on is invalid
    or does not exist.
    """

    begin: bool = False
    everything: bool = False
    absorbed: list[U64] | None = None
    """With `begin`: the log files whose records are all in segments now; None = all files of the last plan.
    The facts, and the snapshot with them, state that these are absorbed. CheckpointDone must name the same
    files."""


class CheckpointRowsReply(Message, frozen=True):
    """Reply to CheckpointRows, with one attachment of topic rows.

    The attachment has `topics` pairs of words [topic_id, length] and then bytes of the rows. Length 0 = the
    topic is deleted. The rows of all replies follow each other without a gap: a row may begin in one reply
    and end in a later one. `done`: these were the last topics, and `facts` has what a snapshot stores of the
    shard itself. `everything` repeats the value of the request with `begin`."""

    topics: U32
    done: bool
    facts: bytes = b""
    everything: bool = False


class CheckpointDone(Message, frozen=True):
    """Compactor to shard: snapshot `number` is durable and was read back; it absorbs these log files.

    Reply: CheckpointClosed.
    """

    number: U64
    absorbed: list[U64]


class CheckpointClosed(Message, frozen=True):
    """Reply to CheckpointDone: readers are not directed to the absorbed files any more.

    `unlink` are the paths of the files that no retained snapshot needs.
    """

    unlink: list[str]


class ColdRead(Message, frozen=True):
    """Reader on the host or gateway to relocator: read bytes [start, stop) of a part of a cold segment.

    Reply: ColdBytes, with the bytes in a further part.
    """

    path: Name
    start: Seq
    stop: Seq


class ColdBytes(Message, frozen=True):
    """Reply to ColdRead."""

    bytes: Seq


class CheckpointNow(Message, frozen=True):
    """Operator or reclaimer to compactor: make a checkpoint of every shard now. Reply: CheckpointMade."""


class CheckpointMade(Message, frozen=True):
    """Reply to CheckpointNow, after all snapshots are durable: the files of a consistent copy.

    Paths are relative to the data directory.
    """

    files: list[str]


class ScrubNow(Message, frozen=True):
    """Operator to reclaimer: verify every segment and snapshot once, now. Reply: ScrubReport.

    One pass answers all requests that arrived before it began."""


class ScrubReport(Message, frozen=True):
    """Reply to ScrubNow: the amount of verified data, and the faults as "path: reason"."""

    files: U64
    bytes: Seq
    findings: list[str]
