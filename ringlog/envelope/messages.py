"""Every message actors and clients say to one another: each request beside its reply.

Each is a msgspec Struct that travels as a MessagePack array of its fields in this order (fields may
be appended, never moved). `KINDS` maps the wire name to the type. docs/protocol.md says who may send
what and which errors come back. An ErrorReply may answer any request.
"""

from __future__ import annotations

from typing import Any

import msgspec


class Message(msgspec.Struct, array_like=True, frozen=True, forbid_unknown_fields=False):
    """Base of all messages."""


class ErrorReply(Message, frozen=True):
    """The request was refused. `status` is an errors.Status; `detail` holds the facts."""

    status: int
    message: str
    detail: dict[str, Any] = {}
    outcome: str = "not_applied"


# -- meeting ------------------------------------------------------------------------------------------


class Hello(Message, frozen=True):
    """First message on a connection; asks who answers."""

    protocol: int
    client: str
    pid: int = 0


class Welcome(Message, frozen=True):
    """Who answers: engine, shard layout and the limits a client should know."""

    protocol: int
    version: str
    engine_id: str
    shards: int
    shard: int
    """This shard's number, or -1 from the supervisor and the gateway."""
    incarnation: int
    limits: dict[str, int] = {}


class Ping(Message, frozen=True):
    """Is anybody there? Answered with Pong by every actor."""


class Pong(Message, frozen=True):
    """I am here and made this many turns."""

    incarnation: int
    turns: int


# -- rings: client -> supervisor ----------------------------------------------------------------------


class RingOpen(Message, frozen=True):
    """Make a ring to `shard` for this client; the supervisor owns its life."""

    client: str
    pid: int
    shard: int
    ring_bytes: int = 0
    """0 = the configured default."""


class RingOpened(Message, frozen=True):
    """The ring is there and its shard knows it. Attach with ring.open_producer(path)."""

    ring: str
    """File name under the shared-memory directory."""
    bell: str
    """Named pipe the client sleeps on, same directory."""


class RingClose(Message, frozen=True):
    """The client is done with this ring: settle what it holds, then remove it."""

    ring: str


class RingClosed(Message, frozen=True):
    """The ring is gone, or will be when it is drained."""

    ring: str


# -- rings: supervisor -> shard -----------------------------------------------------------------------


class RingAttach(Message, frozen=True):
    """Start draining this ring."""

    ring: str
    bell: str
    client: str


class RingAttached(Message, frozen=True):
    """The shard drains it now."""

    ring: str


class RingDetach(Message, frozen=True):
    """The producer is gone: settle what was published, then say RingDetached. `dead` = it died."""

    ring: str
    dead: bool


class RingDetached(Message, frozen=True):
    """The shard let go of the ring; the supervisor may unlink it."""

    ring: str
    settled: int
    """Frames settled since the detach was asked for."""


# -- topics -------------------------------------------------------------------------------------------


class TopicPut(Message, frozen=True):
    """Create or configure a topic (T-1..T-7). `config` holds fields of semantics section 5 by name."""

    topic: str
    config: dict[str, Any] = {}
    mode: str = "upsert"
    """`upsert` = PUT; `create` refuses nothing but leaves an existing topic as it is; `merge` changes
    only the named fields of an existing topic and is topic_not_found for an absent one."""


class TopicInfo(Message, frozen=True):
    """A topic as it stands: identity, place and configuration. Also the reply to TopicPut."""

    topic: str
    topic_id: int
    epoch: int
    shard: int
    slot: int
    """Index of its slot in the shard's topic table on the board."""
    created: bool
    config: dict[str, Any]


class TopicResolve(Message, frozen=True):
    """Who is this topic? Never creates."""

    topic: str


class TopicState(Message, frozen=True):
    """State of a topic (TS-1); never creates. `touch` refreshes last_read_ts."""

    topic: str
    touch: bool = True


class TopicStateReply(Message, frozen=True):
    """Fields of semantics section 6, milliseconds for stamps."""

    topic: str
    topic_id: int
    epoch: int
    shard: int
    type: str
    head_seq: int
    earliest_seq: int
    count: int
    bytes: int
    evict_floor: int
    last_write_ts: int | None
    last_read_ts: int | None
    config: dict[str, Any]


class TopicList(Message, frozen=True):
    """Names after `after`, in byte order, at most `page_size` (T-10..T-14). One shard's share."""

    prefix: str = ""
    after: str = ""
    page_size: int = 100


class TopicListReply(Message, frozen=True):
    """One page of one shard; `more` = further names exist."""

    topics: list[TopicStateReply]
    more: bool


class TopicDelete(Message, frozen=True):
    """Remove a topic and all it holds (T-15..T-18)."""

    topic: str
    if_empty: bool = False


class TopicDeleted(Message, frozen=True):
    """`deleted` is false when there was no such topic."""

    topic: str
    deleted: bool


# -- writing by socket: frames follow as one further part ---------------------------------------------


class Append(Message, frozen=True):
    """Append the whole frames in the attached part, in order; all of one topic instance.

    `create` makes an absent topic (with `config`) first; the frames then carry topic_id 0 and the
    shard fills it in. With `idempotency_key` there is exactly one frame.
    """

    topic: str
    frames: int
    create: bool = False
    config: dict[str, Any] | None = None
    idempotency_key: str = ""


class Appended(Message, frozen=True):
    """Reply to Append: `entries` are settle entries (ring/layout.py), one for each frame, in order."""

    topic: str
    topic_id: int
    epoch: int
    created: bool
    entries: bytes


class ProducerState(Message, frozen=True):
    """What did the shard last settle for this producer on this topic? (I-13, decision 11)"""

    topic: str
    producer_id: int


class ProducerStateReply(Message, frozen=True):
    """Highest settled producer_seq (0 = never seen) and the numbers its frame got."""

    topic: str
    epoch: int
    producer_id: int
    producer_seq: int
    first_seq: int
    count: int


# -- reading ------------------------------------------------------------------------------------------


class Locate(Message, frozen=True):
    """Where do the records after `after` lie? For readers on the same host, which read files themselves.

    `epoch` 0 = whichever is current.
    """

    topic: str
    after: int
    epoch: int = 0


class Extent(Message, frozen=True):
    """A stretch of one WAL file in which frames of the topic lie, others' between them."""

    path: str
    """Relative to the data directory; `@` before it: relative to the shared-memory directory."""
    file_id: int
    """As in the board's published mark: (incarnation, n) packed by storage.layout.pack_file."""
    salt: int
    start: int
    stop: int
    """0 = open end: follow the shard's published mark."""


class Located(Message, frozen=True):
    """Facts and extents for one read. `lost` are ranges lost in restarts: [first, last, first, last, …]."""

    topic: str
    topic_id: int
    epoch: int
    shard: int
    slot: int
    head_seq: int
    earliest_seq: int
    cap_floor: int
    ttl_floor: int
    trim_floor: int
    recreated: bool
    """The cursor belonged to an earlier life, or lies above the head (E-8, E-11)."""
    extents: list[Extent]
    lost: list[int] = []


class Read(Message, frozen=True):
    """Read by message, for clients of the gateway: whole frames come back in a further part."""

    topic: str
    after: int
    epoch: int = 0
    limit: int = 256
    max_bytes: int = 1 << 20
    wait_ms: int = 0


class ReadReply(Message, frozen=True):
    """Frames holding records after `after` (the first may begin before it), sealed under seed 0."""

    topic: str
    topic_id: int
    epoch: int
    after: int
    """Where reading started: the request's cursor, or the resume point after a tombstone."""
    next_after: int
    """The cursor for the next read, if every delivered record is taken."""
    head_seq: int
    earliest_seq: int
    caught_up: bool
    frames: int
    gap_from: int = 0
    gap_to: int = 0
    reason: str = ""
    """Empty = no tombstone; else cap, ttl, mixed, source_trim, restart_loss or recreated."""


# -- operating ----------------------------------------------------------------------------------------


class EngineStatus(Message, frozen=True):
    """How is the engine?"""


class ProcessStatus(Message, frozen=True):
    """One supervised process."""

    name: str
    kind: str
    pid: int
    state: str
    incarnation: int
    restarts: int
    uptime_s: float
    heartbeat_age_s: float
    busy_ratio: float
    resident_bytes: int
    last_exit: str


class EngineStatusReply(Message, frozen=True):
    """The engine at a glance."""

    engine_id: str
    version: str
    state: str
    uptime_s: float
    data_dir: str
    shards: int
    rings: int
    disk_free_bytes: int
    processes: list[ProcessStatus]
    recovery_s: float = 0.0


class Drain(Message, frozen=True):
    """Supervisor -> actor: finish what you hold, then exit. SIGTERM means the same."""


class EngineStop(Message, frozen=True):
    """Operator -> supervisor: stop the engine in good order."""


class EngineStopping(Message, frozen=True):
    """The engine is stopping."""


KINDS: dict[str, type[Message]] = {
    kind.__name__: kind
    for kind in (
        ErrorReply, Hello, Welcome, Ping, Pong, RingOpen, RingOpened, RingClose, RingClosed, RingAttach,
        RingAttached, RingDetach, RingDetached, TopicPut, TopicInfo, TopicResolve, TopicState,
        TopicStateReply, TopicList, TopicListReply, TopicDelete, TopicDeleted, Append, Appended,
        ProducerState, ProducerStateReply, Locate, Located, Read, ReadReply, EngineStatus,
        EngineStatusReply, Drain, EngineStop, EngineStopping,
    )
}  # fmt: skip
