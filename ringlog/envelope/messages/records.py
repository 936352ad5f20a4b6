"""Records: writes by message, reads, deletes."""

from __future__ import annotations

from typing import Any

from ringlog.envelope.messages.base import Message
from ringlog.envelope.messages.ranges import I64, U32, U64, Millis, Name, Place, Seq

# -- writes by message: the frames are one further part ------------------------------------------------


class Append(Message, frozen=True):
    """Client or scheduler to shard, client to gateway: append the attached frames, in order.

    Reply: Appended.

    All frames are for one life of one topic. With `create` the shard first creates the topic (with `config`)
    if it does not exist. The frames then carry topic_id 0, and the shard fills in the id.

    With `idempotency_key` there is exactly one frame. With `ids` as well: these are the digests of the
    records' dedup ids in order, with zeros for a record without one. If any id is known within the window,
    nothing is appended. `window_ms` is a shorter window for this request.

    With `disable_backpressure` the shard does not refuse the request for pressure. Limits, caps and a full
    intake still refuse it.
    """

    topic: Name
    frames: U32
    create: bool | None = False
    """None: as `auto_create` of `config`, whose default is true."""
    config: dict[str, Any] | None = None
    idempotency_key: str = ""
    disable_backpressure: bool = False
    ids: bytes = b""
    window_ms: Millis = 0


class Appended(Message, frozen=True):
    """Reply to Append: `entries` has one settle entry (frame/settle_entry.py) for each frame, in order.

    If `known` is not empty, nothing was appended. It has the seq of each record whose dedup id is known, 0
    for others.
    """

    topic: Name
    topic_id: U64
    epoch: U32
    created: bool
    entries: bytes
    known: bytes = b""


class ProducerState(Message, frozen=True):
    """Client to shard or gateway: query the last settled number of a producer in a topic.

    Reply: ProducerStateReply.

    With an `owner` (a random number) the client claims the producer: from then on the shard accepts frames
    only under this claim. With `claim` as well, the request checks that this claim is the latest. Otherwise
    it fails with ProducerFenced.
    """

    topic: Name
    producer_id: U64
    owner: U64 = 0
    claim: U64 = 0


class ProducerStateReply(Message, frozen=True):
    """Reply to ProducerState: the highest settled number, the seqs of its frame, and the latest claim.

    `producer_seq` 0 = the shard settled no frame of this producer.
    """

    topic: Name
    epoch: U32
    producer_id: U64
    producer_seq: U64
    first_seq: Seq
    count: Seq
    claim: U64 = 0


# -- reading -------------------------------------------------------------------------------------------


class Locate(Message, frozen=True):
    """Reader on the host, scheduler or gateway to shard: find the records after `after`. Reply: Located.

    The sender then reads the files itself. `epoch` 0 = the current one.
    """

    topic: Name
    after: Seq
    epoch: U32 = 0


class Extent(Message, frozen=True):
    """A byte range of one WAL file or segment with frames of the topic.

    Part of Located and CheckpointPlan.

    In a WAL file, frames of other topics can lie between them.
    """

    path: Name
    """Relative to the data directory. With a leading `@`: relative to the shared-memory directory."""
    file_id: U64
    """As in the published mark on the board: (incarnation, n), packed by storage.layout.pack_file."""
    salt: U64
    start: Seq
    stop: Seq
    """0 = open end: up to the published mark of the shard."""
    segment: U64 = 0
    """Number of the segment whose data part this is; 0 = a WAL file. In [start, stop) of a segment there are
    only frames of this topic, in order."""
    first_seq: Seq = 0
    last_seq: Seq = 0
    """Segments only: first and last seq in it."""
    entry_start: Seq = 0
    entry_stop: Seq = 0
    """Segments only: the index rows of this topic's frames."""
    tier: U32 = 0
    """Segments only: 0 hot, 1 both, 2 cold (the data part is in the cold store; the index part is on the
    host)."""


class Located(Message, frozen=True):
    """Reply to Locate: facts and extents for one read.

    `lost` are ranges that were lost in restarts: [first, last, first, last, …].
    """

    topic: Name
    topic_id: U64
    epoch: U32
    shard: U32
    slot: Place
    head_seq: Seq
    earliest_seq: U64
    cap_floor: U64
    ttl_floor: U64
    trim_floor: U64
    recreated: bool
    """The cursor has an earlier epoch, or is above the head."""
    extents: list[Extent]
    lost: list[Seq] = []
    delete_floor: U64 = 1
    """One above the highest seq below which every record was deleted by a request."""
    ttl_us: Seq = 0
    """A record older than this is expired, even if no floor covers it yet; 0 = records never expire."""
    deleted: bytes = b""
    """Seqs above `earliest_seq` that were deleted one by one: a 64-bit roaring bitmap, portable format."""
    deleted_to: Seq = 0
    """`deleted` is complete up to this seq. Beyond it the reader sends Locate again. 0 = complete."""
    version: U64 = 0
    """Version of the topic that this reply describes. A reader compares it with the version on the board
    before it delivers records. If they differ, records were deleted or moved, and the reader sends Locate
    again."""
    is_behind: bool = False
    """The shard is read-only and shows only records that are known to be durable. A cursor of this epoch
    above the head then does not mean that the topic was recreated."""
    trimmed: list[Seq] = []
    """Those of `lost` that a router's source lost before they were forwarded: [first, last, …]."""
    is_fed: bool = False
    """Routers lead to the topic. A reader that reads to the head sends RoutesSettle first. When this value
    changes, `version` changes, too."""


class RecordsDelete(Message, frozen=True):
    """Client or scheduler to shard, client to gateway: delete records permanently. Reply: RecordsDeleted.

    The request deletes the records below `before_seq`, or the records whose tag matches. If both are given, a
    record must satisfy both. `seqs` (a portable 64-bit roaring bitmap) names the records exactly and stands
    alone.
    """

    topic: Name
    before_seq: Seq = 0
    match: Any = None
    """A tag, a prefix that ends in `*`, or ["tag", "Eq", value], ["tag", "Glob", "prefix*"]."""
    seqs: bytes = b""
    epoch: U32 = 0


class RecordsDeleted(Message, frozen=True):
    """Reply to RecordsDelete: no reader sees the records any more.

    `deleted` counts records that were live.
    """

    topic: Name
    deleted: Seq
    earliest_seq: U64
    head_seq: Seq
    count: Seq
    bytes: Seq


class Read(Message, frozen=True):
    """Client to gateway: read records by message. Reply: ReadReply, with whole frames in a further part."""

    topic: Name
    after: Seq
    epoch: U32 = 0
    limit: U32 = 256
    max_bytes: Seq = 1 << 20
    wait_ms: Millis = 0
    held: Seq = 0
    """The client has frames up to here from an earlier reply with `version`. If nothing was removed since,
    the reply has no frames and `next_after` = `held`. 0 = none."""
    version: U64 = 0


class SeekTime(Message, frozen=True):
    """Client to gateway: find the first live record that was committed at or after `ts` (microseconds).

    Reply: SeekTimeReply.
    """

    topic: Name
    ts: I64


class SeekTimeReply(Message, frozen=True):
    """Reply to SeekTime: a read from `after`, in the life `epoch`, begins with that record.

    If there is none, the head.
    """

    topic: Name
    epoch: U32
    after: Seq


class ReadReply(Message, frozen=True):
    """Reply to Read: frames with records above `after`, sealed under seed 0.

    The first frame may begin before `after`.
    """

    topic: Name
    topic_id: U64
    epoch: U32
    after: Seq
    """Start of the read: the cursor of the request, or the position after a tombstone."""
    next_after: Seq
    """Cursor for the next read, after all records of this reply."""
    head_seq: Seq
    earliest_seq: U64
    caught_up: bool
    frames: U32
    gap_from: Seq = 0
    gap_to: Seq = 0
    reason: str = ""
    """Reason of the tombstone: cap, ttl, mixed, source_trim, restart_loss or recreated. "" = no tombstone."""
    hidden: bytes = b""
    """Seqs in the frames that the client skips, because they are deleted or expired: a portable 64-bit
    roaring bitmap. The frames are sent whole and still contain these records."""
    version: U64 = 0
    """Version of the topic that `hidden` describes."""
    is_fed: bool = False
    """Routers lead to the topic; see Located."""
