"""Records: writing them by socket, reading, deleting."""

from __future__ import annotations

from typing import Any

from ringlog.envelope.messages.base import Message
from ringlog.envelope.messages.ranges import I64, U32, U64, Millis, Name, Place, Seq

# -- writing by socket: frames follow as one further part ----------------------------------------------


class Append(Message, frozen=True):
    """Append the whole frames in the attached part, in order; all of one topic instance.

    `create` makes an absent topic (with `config`) first; the frames then carry topic_id 0 and the
    shard fills it in. With `idempotency_key` there is exactly one frame; so with `ids`, the digests of its
    records' dedup ids in their order, zeros for those without one, and then nothing is appended if any is
    known within the window. `window_ms` is a shorter window for these. `disable_backpressure`: pressure is
    no reason to refuse it; limits, caps and an intake that is full are.
    """

    topic: Name
    frames: U32
    create: bool | None = False
    """None: as `auto_create` of `config` says, which is true unless it says otherwise (W-5)."""
    config: dict[str, Any] | None = None
    idempotency_key: str = ""
    disable_backpressure: bool = False
    ids: bytes = b""
    window_ms: Millis = 0


class Appended(Message, frozen=True):
    """Reply to Append: `entries` are settle entries (ring/layout.py), one for each frame, in order.

    `known`, if it is not empty, is the number of each record whose dedup id was used before, 0 for the
    others; nothing was appended then.
    """

    topic: Name
    topic_id: U64
    epoch: U32
    created: bool
    entries: bytes
    known: bytes = b""


class ProducerState(Message, frozen=True):
    """What did the shard last settle for this producer on this topic? (I-13, decision 11)

    With an `owner`, a number drawn by chance, the asker claims the producer: from then on frames are taken
    from it alone. `claim` is the one that it has and keeps, unless there is a later one (ProducerFenced).
    """

    topic: Name
    producer_id: U64
    owner: U64 = 0
    claim: U64 = 0


class ProducerStateReply(Message, frozen=True):
    """Highest settled producer_seq (0 = never seen) and the numbers its frame got; the latest claim."""

    topic: Name
    epoch: U32
    producer_id: U64
    producer_seq: U64
    first_seq: Seq
    count: Seq
    claim: U64 = 0


# -- reading -------------------------------------------------------------------------------------------


class Locate(Message, frozen=True):
    """Where do the records after `after` lie? For readers on the same host, which read files themselves.

    `epoch` 0 = whichever is current.
    """

    topic: Name
    after: Seq
    epoch: U32 = 0


class Extent(Message, frozen=True):
    """A stretch of one WAL file in which frames of the topic lie, others' between them."""

    path: Name
    """Relative to the data directory; `@` before it: relative to the shared-memory directory."""
    file_id: U64
    """As in the board's published mark: (incarnation, n) packed by storage.layout.pack_file."""
    salt: U64
    start: Seq
    stop: Seq
    """0 = open end: follow the shard's published mark."""
    segment: U64 = 0
    """Number of the segment whose data part this is; 0 = a WAL file. Within [start, stop) of a segment lie
    frames of this topic alone, in order."""
    first_seq: Seq = 0
    last_seq: Seq = 0
    """Segments only: the numbers that lie in it."""
    entry_start: Seq = 0
    entry_stop: Seq = 0
    """Segments only: the rows of its index that lead to this topic's frames."""
    tier: U32 = 0
    """Segments only: 0 hot, 1 both, 2 cold (the data part is in the cold store; the index part is here)."""


class Located(Message, frozen=True):
    """Facts and extents for one read. `lost` are ranges lost in restarts: [first, last, first, last, …]."""

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
    """The cursor belonged to an earlier life, or lies above the head (E-8, E-11)."""
    extents: list[Extent]
    lost: list[Seq] = []
    delete_floor: U64 = 1
    """One past the highest number below which everything was deleted on request."""
    ttl_us: Seq = 0
    """A record older than this is expired, whether or not a floor says so yet; 0 = never."""
    deleted: bytes = b""
    """Numbers deleted one by one behind `earliest_seq`: a 64-bit roaring bitmap, portable format."""
    deleted_to: Seq = 0
    """`deleted` is complete up to this number; beyond it locate again. 0 = complete."""
    version: U64 = 0
    """The topic's version this answer was made from: read the board's before you deliver; when it differs,
    records were deleted or moved, and the place has to be asked for again."""
    is_behind: bool = False
    """The shard serves reads alone, and what is not known to be durable is not shown: a cursor of this life
    above the head is no sign of another one."""
    trimmed: list[Seq] = []
    """Those of `lost` that a router's source had lost before they were forwarded: [first, last, …]."""
    is_fed: bool = False
    """Routers lead to it: who reads to the head has them catch up first (RoutesSettle, RT-20). When that
    changes, `version` does."""


class RecordsDelete(Message, frozen=True):
    """Delete records for good (semantics 15): those below `before_seq`, those whose tag matches, both when
    both are given, or exactly the numbers in `seqs` (a portable 64-bit roaring bitmap; alone).
    """

    topic: Name
    before_seq: Seq = 0
    match: Any = None
    """A tag, a prefix ending in `*`, or ["tag", "Eq", value], ["tag", "Glob", "prefix*"]."""
    seqs: bytes = b""
    epoch: U32 = 0


class RecordsDeleted(Message, frozen=True):
    """Reply to RecordsDelete: no reader sees the records any more. `deleted` counts live ones."""

    topic: Name
    deleted: Seq
    earliest_seq: U64
    head_seq: Seq
    count: Seq
    bytes: Seq


class Read(Message, frozen=True):
    """Read by message, for clients of the gateway: whole frames come back in a further part."""

    topic: Name
    after: Seq
    epoch: U32 = 0
    limit: U32 = 256
    max_bytes: Seq = 1 << 20
    wait_ms: Millis = 0
    held: Seq = 0
    """Frames up to here are held from an earlier reply, which said `version`: if nothing was removed since,
    the answer has no frames and `next_after` = `held`. 0 = none."""
    version: U64 = 0


class SeekTime(Message, frozen=True):
    """Where to start to read from the first live record committed at or after `ts`, microseconds."""

    topic: Name
    ts: I64


class SeekTimeReply(Message, frozen=True):
    """Position `after`, for the topic's life `epoch`; the head when no record is that young."""

    topic: Name
    epoch: U32
    after: Seq


class ReadReply(Message, frozen=True):
    """Frames holding records after `after` (the first may begin before it), sealed under seed 0."""

    topic: Name
    topic_id: U64
    epoch: U32
    after: Seq
    """Where reading started: the request's cursor, or the resume point after a tombstone."""
    next_after: Seq
    """The cursor for the next read, if every delivered record is taken."""
    head_seq: Seq
    earliest_seq: U64
    caught_up: bool
    frames: U32
    gap_from: Seq = 0
    gap_to: Seq = 0
    reason: str = ""
    """Empty = no tombstone; else cap, ttl, mixed, source_trim, restart_loss or recreated."""
    hidden: bytes = b""
    """Numbers in the frames that are to be passed over, deleted or expired ones: a portable 64-bit roaring
    bitmap. Whole frames are sent, and these are still in them."""
    version: U64 = 0
    """The topic's version that `hidden` was made from."""
    is_fed: bool = False
    """Routers lead to it; see Located."""
