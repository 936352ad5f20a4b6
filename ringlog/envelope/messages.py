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
    held_by: str = ""
    """The consumer group for which records stay that caps or TTL would have taken (retain_until_acked)."""


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
    shard fills it in. With `idempotency_key` there is exactly one frame. `disable_backpressure`: pressure
    is no reason to refuse it; limits, caps and an intake that is full are.
    """

    topic: str
    frames: int
    create: bool = False
    config: dict[str, Any] | None = None
    idempotency_key: str = ""
    disable_backpressure: bool = False


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
    segment: int = 0
    """Number of the segment whose data part this is; 0 = a WAL file. Within [start, stop) of a segment lie
    frames of this topic alone, in order."""
    first_seq: int = 0
    last_seq: int = 0
    """Segments only: the numbers that lie in it."""
    entry_start: int = 0
    entry_stop: int = 0
    """Segments only: the rows of its index that lead to this topic's frames."""
    tier: int = 0
    """Segments only: 0 hot, 1 both, 2 cold (the data part is in the cold store; the index part is here)."""


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
    delete_floor: int = 1
    """One past the highest number below which everything was deleted on request."""
    ttl_us: int = 0
    """A record older than this is expired, whether or not a floor says so yet; 0 = never."""
    deleted: bytes = b""
    """Numbers deleted one by one behind `earliest_seq`: a 64-bit roaring bitmap, portable format."""
    deleted_to: int = 0
    """`deleted` is complete up to this number; beyond it locate again. 0 = complete."""
    version: int = 0
    """The topic's version this answer was made from: read the board's before you deliver; when it differs,
    records were deleted or moved, and the place has to be asked for again."""
    is_behind: bool = False
    """The shard serves reads alone, and what is not known to be durable is not shown: a cursor of this life
    above the head is no sign of another one."""
    trimmed: list[int] = []
    """Those of `lost` that a router's source had lost before they were forwarded: [first, last, …]."""


class RecordsDelete(Message, frozen=True):
    """Delete records for good (semantics 15): those below `before_seq`, those whose tag matches, both when
    both are given, or exactly the numbers in `seqs` (a portable 64-bit roaring bitmap; alone).
    """

    topic: str
    before_seq: int = 0
    match: Any = None
    """A tag, a prefix ending in `*`, or ["tag", "Eq", value], ["tag", "Glob", "prefix*"]."""
    seqs: bytes = b""
    epoch: int = 0


class RecordsDeleted(Message, frozen=True):
    """Reply to RecordsDelete: no reader sees the records any more. `deleted` counts live ones."""

    topic: str
    deleted: int
    earliest_seq: int
    head_seq: int
    count: int
    bytes: int


class Read(Message, frozen=True):
    """Read by message, for clients of the gateway: whole frames come back in a further part."""

    topic: str
    after: int
    epoch: int = 0
    limit: int = 256
    max_bytes: int = 1 << 20
    wait_ms: int = 0
    held: int = 0
    """Frames up to here are held from an earlier reply, which said `version`: if nothing was removed since,
    the answer has no frames and `next_after` = `held`. 0 = none."""
    version: int = 0


class SeekTime(Message, frozen=True):
    """Where to start to read from the first live record committed at or after `ts`, microseconds."""

    topic: str
    ts: int


class SeekTimeReply(Message, frozen=True):
    """Position `after`, for the topic's life `epoch`; the head when no record is that young."""

    topic: str
    epoch: int
    after: int


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
    hidden: bytes = b""
    """Numbers in the frames that are to be passed over, deleted or expired ones: a portable 64-bit roaring
    bitmap. Whole frames are sent, and these are still in them."""
    version: int = 0
    """The topic's version that `hidden` was made from."""


# -- delivery: client or gateway -> scheduler -------------------------------------------------------------


class Feed(Message, frozen=True):
    """One topic of a subscription, and how far its reader is."""

    feed: int
    """Number within the subscription, given by the client, below 2**32. The same number again moves it."""
    topic: str
    topic_id: int
    shard: int
    slot: int
    """As in TopicInfo."""
    after: int
    """Position up to which the reader needs no word."""


class Subscribe(Message, frozen=True):
    """Say when these topics have news (semantics 22, ZC-4, ZC-5); at most FEEDS_PER_MESSAGE_MAX feeds.

    The first one with a number makes the subscription, others add feeds to it. Turns follow (see Turns), in
    order of value, at most `credit` of them unanswered, and at most one for each feed.
    """

    subscription: int
    """Number within the connection, given by the client, below 2**32."""
    feeds: list[Feed]
    credit: int
    strong: bool = False
    """Count only what a device sync covers (SSE-35)."""
    names: bool = False
    """Say TopicsChanged when topics are made or removed."""


class Subscribed(Message, frozen=True):
    """Reply: news of all its feeds will be told from now on, and what they have already was."""

    subscription: int
    scheduler: int
    incarnation: int


class OpenTurns(Message, frozen=True):
    """Give turns to this connection through shared memory from now on; for clients on the host."""

    wanted: bool = True
    """False: by messages again, since the ring cannot be opened. Turns in it are forgotten."""


class TurnsOpened(Message, frozen=True):
    """Reply: the ring's file in the shared-memory directory, its bell beside it; empty = by messages."""

    name: str = ""


class OpenCalls(Message, frozen=True):
    """To a shard: take requests about jobs of this connection from shared memory as well; for clients on the
    host."""


class CallsOpened(Message, frozen=True):
    """Reply: the ring's file in the shared-memory directory, its bell beside it; empty = by messages."""

    name: str = ""


class Unsubscribe(Message, frozen=True):
    """End a subscription, or some of its feeds. Nothing of them is told once Unsubscribed was sent."""

    subscription: int
    feeds: list[int] = []
    """Empty = all, and the subscription itself."""


class Unsubscribed(Message, frozen=True):
    """Reply; also when there was no such thing."""

    subscription: int


class Turns(Message, frozen=True):
    """Unasked, with correlation 0: these feeds may be read. Rows of 8 words in the attached part:
    [subscription, feed, until, first_seq, last_seq, file_id, offset, stop].

    Records up to `until` are published (with `strong`: durable). The rest is a hint where the first of them
    lie, as in a row of news, or zeros: what is read there has to be verified like everything that is read.
    Each turn is answered by a row of Taken.
    """

    turns: int


class Taken(Message, frozen=True):
    """Rows of 4 words in the attached part: [subscription, feed, after, is_consumed]. The turn of the feed is
    over and its reader is at `after`; without `is_consumed` that is no consumption (P-4). No reply, but
    SubscriptionsLost when the scheduler knows nothing of the sender. Without rows: a word of life.
    """

    turns: int


class SubscriptionsLost(Message, frozen=True):
    """Unasked, with correlation 0: the scheduler does not know what was said before. Subscribe anew."""


class TopicsChanged(Message, frozen=True):
    """Unasked, with correlation 0: topics were made or removed; who subscribed to patterns lists again."""


# -- routers ------------------------------------------------------------------------------------------


class RouterCreate(Message, frozen=True):
    """Forward what is published to `source` from here on to `dest` (RT-1, RT-2). The same router again
    changes its other fields and keeps its place."""

    router: str
    source: str
    dest: str
    filter: Any = None
    """A tag, a prefix ending in `*`, or ["tag", "Eq", value], ["tag", "Glob", "prefix*"]."""
    preserve_node: bool = True
    preserve_tag: bool = True
    create_dest: bool = True
    allow_cycle: bool = False
    guarantee: str = "at_least_once"


class RouterInfo(Message, frozen=True):
    """A router as it stands. Reply to RouterCreate and RouterGet."""

    router: str
    source: str
    dest: str
    created: bool = False
    filter: Any = None
    preserve_node: bool = True
    preserve_tag: bool = True
    create_dest: bool = True
    allow_cycle: bool = False
    guarantee: str = "at_least_once"
    cursor: int = 0
    """Position of the source up to which everything was forwarded, or passed over."""
    lag: int = 0
    """Positions of the source behind it."""
    forwarded_total: int = 0


class RouterGet(Message, frozen=True):
    """How is this router? With `settle_ms` the answer waits so long at most until it has dealt with its
    source up to `until`, or, with 0, up to what is its head when it is asked (RT-20)."""

    router: str
    settle_ms: int = 0
    until: int = 0


class RouterList(Message, frozen=True):
    """Routers by name behind `after`, at most `page_size`; of one source, or one destination, if named."""

    prefix: str = ""
    source: str = ""
    dest: str = ""
    after: str = ""
    page_size: int = 100


class RouterListReply(Message, frozen=True):
    """One page; `more` = further names exist."""

    routers: list[RouterInfo]
    more: bool = False


class RouterDelete(Message, frozen=True):
    """Forward no more. What was copied stays."""

    router: str


class RouterDeleted(Message, frozen=True):
    """No copy appears behind this. `deleted` is false when there was no such router."""

    router: str
    deleted: bool


class RouterFacts(Message, frozen=True):
    """A router as its destination's shard keeps it."""

    router: int
    """Its number, never used twice."""
    name: str
    source: str
    source_id: int
    source_epoch: int
    dest: str
    dest_id: int
    flags: int
    filter: str
    cursor: int
    forwarded: int = 0
    durability: int = 0
    """Class of the destination, at present."""


class RouterPut(Message, frozen=True):
    """Scheduler -> shard of the destination: make the router, or change the one of this number. Answered with
    the RouterFacts in force."""

    facts: RouterFacts


class RouterDrop(Message, frozen=True):
    """Scheduler -> shard of the destination: this router is no more."""

    dest_id: int
    router: int


class RouterDropped(Message, frozen=True):
    """Reply; `dropped` is false when there was none."""

    router: int
    dropped: bool


class RouterTell(Message, frozen=True):
    """Scheduler 0 -> the scheduler of the source: a router was made or changed, or is no more."""

    facts: RouterFacts
    is_gone: bool = False


class RouterTold(Message, frozen=True):
    """Reply."""

    router: int


class RoutersAsk(Message, frozen=True):
    """Scheduler -> shard: which routers lead to topics of yours? By number behind `after`."""

    after: int = 0
    page_size: int = 1_000


class RoutersReply(Message, frozen=True):
    """One page of one shard; `more` = further ones exist."""

    routers: list[RouterFacts]
    more: bool = False


class RouteRow(Message, frozen=True):
    """One router's part in a pass: it is at `start` of its source and will be at `stop`."""

    router: int
    dest_id: int
    start: int
    stop: int
    frame: int = -1
    """Which of the attached frames holds its copies; -1 = there is nothing to copy."""
    lost: int = 0
    """So many positions of the source went before they were forwarded; then there are no copies (RT-23)."""


class Route(Message, frozen=True):
    """Scheduler -> shard of the destinations: append these copies. The attached part holds `frames` appends
    of no topic, each stored once for all rows that name it; their records came through `hops` routers, this
    one counted. A row applies if its router is at `start`, and then wholly."""

    rows: list[RouteRow]
    frames: int
    hops: int = 1


class RoutedRow(Message, frozen=True):
    """What became of a row: 0 done, 1 there is no such router, 2 it is elsewhere, 3 its destination is
    full, 4 its destination takes nothing at present. With 3 there is room for so many records and bytes."""

    fate: int
    cursor: int = 0
    durability: int = -1
    """Class of the destination, at present; -1 = there is none."""
    records: int = 0
    bytes: int = 0


class Routed(Message, frozen=True):
    """Reply to Route, row by row, when the copies are as durable as their destinations ask."""

    rows: list[RoutedRow]


# -- queues ---------------------------------------------------------------------------------------------


class JobsClaim(Message, frozen=True):
    """Lease up to `max` jobs to `node` (semantics 21.2); an empty answer says that there was none within
    `wait_ms`. `call` is a number of this request alone (0 = none): sent again, it has the same answer."""

    topic: str
    node: str
    max: int = 1
    lease_ms: int = 0
    """0 = the topic's."""
    wait_ms: int = 0
    call: int = 0
    pid: int = 0
    """The process that claims, and when it began (lives.py): when it dies, its jobs are ready at once. 0: the
    leases end by themselves. A gateway passes on 0."""
    born: int = 0


class JobsClaimed(Message, frozen=True):
    """Reply, ascending: rows [first, count, deliveries, token] of jobs that follow each other, and so do
    their tokens. All are held up to `deadline`, milliseconds. Who can read the files reads the jobs there; a
    gateway attaches `frames` that hold them, sealed under seed 0."""

    topic: str
    topic_id: int
    epoch: int
    deadline: int
    ready: int
    """Jobs that are left."""
    runs: list[tuple[int, int, int, int]]
    frames: int = 0
    lease_ms: int = 0
    """How long they are held from when they were given."""


class JobsAck(Message, frozen=True):
    """These jobs are done: delete them (semantics 21.3). Numbers and tokens are 8 bytes each, little-endian,
    at most 1,000; without `tokens`, or where one is 0, `node` alone decides."""

    topic: str
    node: str
    seqs: bytes
    tokens: bytes = b""
    in_time: bool = False
    """It was first sent before the leases ended, as far as their holder knows; this is believed only where a
    restart of the shard forgot them."""
    call: int = 0


class JobsAcked(Message, frozen=True):
    """Reply, when the deletion is as durable as the topic's class asks. `skipped`: numbers that were not
    held, 8 bytes each, in the order of the request."""

    topic: str
    acked: int
    skipped: bytes
    ready: int
    in_flight: int


class JobsNack(Message, frozen=True):
    """Give these jobs back, to be ready now or after `delay_ms` (semantics 21.4). Fields as in JobsAck."""

    topic: str
    node: str
    seqs: bytes
    tokens: bytes = b""
    delay_ms: int = 0
    call: int = 0


class JobsNacked(Message, frozen=True):
    """Reply; `skipped` as in JobsAcked."""

    topic: str
    nacked: int
    skipped: bytes
    ready: int
    in_flight: int


class JobsExtend(Message, frozen=True):
    """Hold these jobs up to `lease_ms` from now (semantics 21.5). Fields as in JobsAck."""

    topic: str
    node: str
    seqs: bytes
    tokens: bytes = b""
    lease_ms: int = 0
    """0 = the topic's."""
    call: int = 0


class JobsExtended(Message, frozen=True):
    """Reply: `extended` jobs are held up to `deadline`, milliseconds; `skipped` as in JobsAcked."""

    topic: str
    extended: int
    skipped: bytes
    deadline: int


class JobsReject(Message, frozen=True):
    """These jobs are to go to the queue's dead letters at once; refused where there are none. Fields as in
    JobsAck."""

    topic: str
    node: str
    seqs: bytes
    tokens: bytes = b""
    reason: str = ""
    call: int = 0


class JobsRejected(Message, frozen=True):
    """Reply; `skipped` as in JobsAcked. They are moved soon."""

    topic: str
    rejected: int
    skipped: bytes


class QueueStats(Message, frozen=True):
    """How many jobs are in which state? (QS-1)"""

    topic: str


class QueueStatsReply(Message, frozen=True):
    """Reply; `waiting` claims wait for jobs."""

    topic: str
    ready: int
    in_flight: int
    delayed: int
    dead_lettered: int
    waiting: int
    oldest_ready_ms: int = -1
    """How long ago the oldest job was put that is ready; -1 = none is."""
    wait_p99_ms: int = 0
    """99 in 100 jobs that were handed out lately had waited no longer than this for the first time."""
    promoted: int = 0
    """Jobs that were handed out before more urgent ones, for their long wait."""


class SpentAsk(Message, frozen=True):
    """Scheduler -> shard: which jobs had all their deliveries (QD-1)? Of the first queue behind `after`, a
    topic's id."""

    after: int = 0


class SpentJobs(Message, frozen=True):
    """Reply: rows [first, count, deliveries] of jobs of one queue that are set aside, to be moved to the
    topic `dead_letter`; no topic = there are none."""

    topic: str = ""
    topic_id: int = 0
    epoch: int = 0
    dead_letter: str = ""
    runs: list[tuple[int, int, int]] = []
    reasons: dict[int, str] = {}
    """Why those of them were rejected that were."""


class SpentMoved(Message, frozen=True):
    """Scheduler -> shard: copies of these jobs (8 bytes each, little-endian) are durable, so delete them."""

    topic: str
    topic_id: int
    seqs: bytes


class SpentGone(Message, frozen=True):
    """Reply, when the deletion is durable; `moved` were still set aside."""

    topic: str
    moved: int


class LettersRedrive(Message, frozen=True):
    """Client -> scheduler 0, gateway: put these dead letters (numbers in the dead-letter topic, 8 bytes each,
    little-endian, at most 256) back into the queue they came from, and delete them there."""

    topic: str
    seqs: bytes


class LettersRedriven(Message, frozen=True):
    """Reply, when the copies are durable and the letters deleted: `moved` went, `repeated` of them had been
    copied before. Those named that are missing, or came from elsewhere, are none."""

    topic: str
    moved: int
    repeated: int


# -- consumer groups --------------------------------------------------------------------------------------


class GroupOpen(Message, frozen=True):
    """Make a consumer group of a topic, unless it is there (F25). `start` is the first position that a new
    one gives out, moved to what there is; of one that is there nothing is changed."""

    topic: str
    group: str
    mode: int
    """1 leases records to members, 2 is read by one member at a time."""
    tags: str = ""
    """`=` and a tag, or `^` and how tags begin: members pass over everything else. Part of the key."""
    start: int = 1
    pending_max: int = 0
    """Most positions given out and not done, of all members and of one; 0 = as many as there may be."""
    member_max: int = 0
    node: str = ""
    """Who asks; a member of it from now on."""
    make: bool = True
    """False: GroupNotFound instead of making it."""


class GroupInfo(Message, frozen=True):
    """What a group is, and where."""

    topic: str
    group: str
    """Its key: the name, and behind an `@` its filter, if it has one."""
    name: str
    mode: int
    tags: str
    created: bool
    cursor: int
    """No position from here on was given out."""
    floor: int
    """Everything up to here is done."""
    pending: int
    """Positions that were given out and are not done."""


class GroupClaim(Message, frozen=True):
    """Lease up to `max` positions of a group to `node`; answered with JobsClaimed. Fields as in JobsClaim."""

    topic: str
    group: str
    node: str
    max: int = 1
    lease_ms: int = 0
    """0 = the topic's."""
    wait_ms: int = 0
    min_idle_ms: int = 0
    """Not 0: when nothing else is there, positions that another member did nothing about for so long."""
    call: int = 0


class GroupSteal(Message, frozen=True):
    """Lease these positions (8 bytes each, little-endian, at most 1,000) to `node`, whoever holds them, as
    far as they are pending and nothing was done about them for `min_idle_ms`; answered with JobsClaimed."""

    topic: str
    group: str
    node: str
    seqs: bytes
    lease_ms: int = 0
    min_idle_ms: int = 0
    call: int = 0


class GroupAck(Message, frozen=True):
    """These positions are done for the group; answered with JobsAcked. Fields as in JobsAck."""

    topic: str
    group: str
    node: str
    seqs: bytes
    tokens: bytes = b""
    call: int = 0


class GroupNack(Message, frozen=True):
    """Give these back, to be ready now or after `delay_ms`; answered with JobsNacked."""

    topic: str
    group: str
    node: str
    seqs: bytes
    tokens: bytes = b""
    delay_ms: int = 0
    call: int = 0


class GroupExtend(Message, frozen=True):
    """Hold these up to `lease_ms` from now; answered with JobsExtended."""

    topic: str
    group: str
    node: str
    seqs: bytes
    tokens: bytes = b""
    lease_ms: int = 0
    call: int = 0


class GroupLeave(Message, frozen=True):
    """`node` leaves the group: what it holds is ready for others at once."""

    topic: str
    group: str
    node: str


class GroupLeft(Message, frozen=True):
    """Reply; so many positions were given back."""

    topic: str
    released: int


class GroupPending(Message, frozen=True):
    """Which positions behind `after` were given out and are not done? Of one member, not touched for so long,
    given out so often; at most `limit` runs (1,000)."""

    topic: str
    group: str
    node: str = ""
    idle_ms: int = 0
    min_deliveries: int = 0
    after: int = 0
    limit: int = 100


class GroupPendingReply(Message, frozen=True):
    """Reply, ascending: rows [first, count, state, deliveries, first given, last given, until, place of the
    member in `nodes`, token], times in milliseconds. A state is 1 leased, 2 delayed, 3 ready again; `until`
    is when a lease or a delay ends."""

    topic: str
    rows: list[tuple[int, int, int, int, int, int, int, int, int]]
    nodes: list[str]
    more: bool
    now_ms: int


class GroupState(Message, frozen=True):
    """How is this group?"""

    topic: str
    group: str


class GroupStateReply(Message, frozen=True):
    """Reply. `undelivered` records lie behind the cursor; of a stream group, behind what is committed.
    `leased`, `delayed` and `returned` are pending."""

    info: GroupInfo
    head_seq: int
    undelivered: int
    leased: int
    delayed: int
    returned: int
    waiting: int
    """Claims that wait."""
    members: list[tuple[str, int, int]]
    """[name, when it was last heard of (milliseconds), positions it holds]"""
    holder: str
    """Of a stream group: who reads it."""
    is_holding: bool
    """The topic keeps records beyond its caps or its TTL for this group (retain_until_acked)."""


class GroupList(Message, frozen=True):
    """Which groups has this topic?"""

    topic: str


class GroupListReply(Message, frozen=True):
    """Reply, by key."""

    topic: str
    groups: list[GroupInfo]


class GroupSeek(Message, frozen=True):
    """Go on from `cursor`, moved to what there is: nothing is pending, every lease has ended. Answered with
    GroupInfo."""

    topic: str
    group: str
    cursor: int


class GroupTake(Message, frozen=True):
    """`node` reads a stream group from now on, behind what is committed; who read it is told when he
    commits."""

    topic: str
    group: str
    node: str
    call: int = 0


class GroupTaken(Message, frozen=True):
    """Reply; `token` fences the reader."""

    topic: str
    token: int
    committed: int
    epoch: int


class GroupCommit(Message, frozen=True):
    """Everything up to `committed` is done with, everything before `cursor` was delivered (F41, F67)."""

    topic: str
    group: str
    token: int
    committed: int
    cursor: int


class GroupCommitted(Message, frozen=True):
    """Reply. Without `is_holder` nothing was committed: another member reads the group, or it was told to be
    elsewhere."""

    topic: str
    committed: int
    cursor: int
    is_holder: bool


class GroupDelete(Message, frozen=True):
    """Remove a group. Its topic stays as it is."""

    topic: str
    group: str


class GroupDeleted(Message, frozen=True):
    """Reply; was it there?"""

    topic: str
    group: str
    deleted: bool


# -- segments: compactor, reclaimer and relocator -> shard -------------------------------------------------


TIER_HOT, TIER_BOTH, TIER_COLD = 0, 1, 2


class SegmentRef(Message, frozen=True):
    """One segment: a data part, its index and, with tags, its dictionary; named by `stem` + suffix."""

    number: int
    """Unique in the data directory and growing: of two that hold the same records the greater is in force."""
    stem: str
    """Path relative to the data directory, without suffix; the same below a cold directory."""
    salt: int
    data_bytes: int
    records: int
    frames: int
    topics: int
    """1 for a segment of its own topic, more for one that small topics share."""
    tier: int = 0
    """0 hot, 1 both, 2 cold."""
    created_us: int = 0


class CheckpointOpen(Message, frozen=True):
    """Compactor: what is there to absorb? `roll` closes the current file first, if it holds records."""

    roll: bool = False
    segments: bool = True
    """Name the segments too; there may be many, and who only looks does without."""


class CheckpointPlan(Message, frozen=True):
    """Reply: files of the log that are closed, durable and not absorbed, in the order to replay them."""

    shard: int
    shards: int
    incarnation: int
    files: list[Extent]
    log_bytes: int
    """Bytes in the log that no snapshot covers, the current file included."""
    number: int
    """Number of the last snapshot the shard knows of."""
    segments: list[SegmentRef]
    """Everything registered at present; empty when it was not asked for."""


class LiveAsk(Message, frozen=True):
    """What is alive of these topics? The attached part holds their ids, 8 bytes each, at most 65,536."""

    topics: int


class LiveReply(Message, frozen=True):
    """Reply, with one attached part: `topics` rows of 5 words [topic_id, epoch (0 = gone), earliest_seq,
    start and stop of its deleted numbers in `deleted`]."""

    topics: int
    deleted: bytes = b""
    """Portable 64-bit roaring bitmaps of numbers deleted one by one, one behind the other."""


class SegmentsChange(Message, frozen=True):
    """Segments were made (`added`, complete and synced) and take the place of `removed`, in one step."""

    added: list[SegmentRef]
    removed: list[int]


class SegmentsChanged(Message, frozen=True):
    """Reply: done, all or nothing. `reason` says why not: an unknown number in `removed`, a part that does
    not verify, an overlap. After a refusal the files of `added` are the sender's to remove."""

    accepted: bool
    reason: str = ""


class SegmentTier(Message, frozen=True):
    """Relocator: the segment lies in this tier now. Replied to with SegmentsChanged."""

    number: int
    tier: int


class CheckpointRows(Message, frozen=True):
    """Compactor: the next topics that changed since the last finished checkpoint. `begin` starts over.

    `everything` (with `begin`): all topics, since the snapshot that the changes build on is not valid any
    more, or there is none.
    """

    begin: bool = False
    everything: bool = False
    absorbed: list[int] | None = None
    """With `begin`: the log files whose records all lie in segments now; None = all of the last plan. The
    facts, and so the snapshot, say that they are absorbed: CheckpointDone must name the same."""


class CheckpointRowsReply(Message, frozen=True):
    """Reply, with one attached part: `topics` x [topic_id, length] words, then the rows, one after another.

    A length of 0 says that the topic is gone. `done`: these were the last; `facts` then holds what a
    snapshot keeps of the shard itself. `everything` repeats the request's of the page that began."""

    topics: int
    done: bool
    facts: bytes = b""
    everything: bool = False


class CheckpointDone(Message, frozen=True):
    """Compactor: snapshot `number` is durable and was read back; the log files named are absorbed by it."""

    number: int
    absorbed: list[int]


class CheckpointClosed(Message, frozen=True):
    """Reply: nobody is led to these files any more. `unlink` are those that no snapshot kept needs."""

    unlink: list[str]


class ColdRead(Message, frozen=True):
    """To the relocator: bytes [start, stop) of a part of a cold segment; they come in a further part."""

    path: str
    start: int
    stop: int


class ColdBytes(Message, frozen=True):
    """Reply to ColdRead."""

    bytes: int


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

    files: int
    bytes: int
    findings: list[str]


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


class PressureStatus(Message, frozen=True):
    """What a governor said last. Shares are in [0, 1]."""

    of: str
    """`instance`, or the shard's name."""
    pressure: float
    step: str
    """`free`, `coalesce`, `widen`, `shed` or `refuse`."""
    busy: float
    fill: float
    """Of the shard's fullest intake ring."""
    delivery: float
    """Of the instance: its pressure without that of the shards."""
    latency_s: float
    """Of the instance: from news to turn, averaged."""
    throttled: int
    """Writes that were refused for pressure, by the shard; of the instance: by gateways and shards."""
    waited_s: float
    """Time that pressure made groups or wake-ups wait, in all."""


class DeliveryStatus(Message, frozen=True):
    """All schedulers together."""

    ready_by_band: list[int]
    """Feeds that wait for credit, by the band of their topic's value, the lowest first."""
    standing: int
    """Topics that could be told of and are not."""
    links: int
    subscriptions: int
    feeds: int
    turns_told: int
    latency_s: float
    lag_s: float
    """For how long the consumer that is furthest behind has had something to take."""


class ConsumersAsk(Message, frozen=True):
    """Operator -> scheduler: who is behind? At most `most` of them, the furthest first."""

    most: int = 16


class Consumer(Message, frozen=True):
    """One subscription at a scheduler."""

    link: str
    """Its connection, in hexadecimal digits."""
    subscription: int
    lag_ms: int
    """For how long it has had something to take."""
    feeds: int
    waiting: int
    """Feeds that wait for credit."""
    told: int
    """Turns that were not given back."""
    credit: int


class ConsumersReply(Message, frozen=True):
    """Reply to ConsumersAsk."""

    scheduler: int
    consumers: list[Consumer]


class QueuesStatus(Message, frozen=True):
    """The queues of all shards together, as far as somebody asked them for something since their shard began;
    what became of jobs is counted since the engine's start."""

    queues: int
    ready: int
    in_flight: int
    delayed: int
    waiting: int
    """Claims that wait for jobs."""
    claimed: int
    acked: int
    nacked: int
    rejected: int
    dead_lettered: int


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
    pressure: list[PressureStatus] = []
    """Of the instance, unless nobody schedules, then of each shard."""
    delivery: DeliveryStatus | None = None
    """None: nobody schedules."""
    routers: int = 0
    router_lag: int = 0
    """Positions of sources that are not forwarded yet, summed over routers."""
    queues: QueuesStatus | None = None


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
        EngineStatusReply, Drain, EngineStop, EngineStopping, RecordsDelete, RecordsDeleted, SeekTime,
        SeekTimeReply, SegmentRef, CheckpointOpen, CheckpointPlan, LiveAsk, LiveReply, SegmentsChange,
        SegmentsChanged, SegmentTier, CheckpointRows, CheckpointRowsReply, CheckpointDone, CheckpointClosed,
        ColdRead, ColdBytes, CheckpointNow, CheckpointMade, ScrubNow, ScrubReport, Feed, Subscribe,
        Subscribed, Unsubscribe, Unsubscribed, Turns, Taken, SubscriptionsLost, TopicsChanged, OpenTurns,
        TurnsOpened, OpenCalls, CallsOpened, ConsumersAsk, ConsumersReply,
        RouterCreate, RouterInfo, RouterGet, RouterList, RouterListReply, RouterDelete, RouterDeleted,
        RouterFacts, RouterPut, RouterDrop, RouterDropped, RouterTell, RouterTold, RoutersAsk, RoutersReply,
        RouteRow, Route, RoutedRow, Routed,
        JobsClaim, JobsClaimed, JobsAck, JobsAcked, JobsNack, JobsNacked, JobsExtend, JobsExtended,
        JobsReject, JobsRejected, QueueStats, QueueStatsReply, SpentAsk, SpentJobs, SpentMoved, SpentGone,
        LettersRedrive, LettersRedriven,


        GroupOpen, GroupInfo, GroupClaim, GroupSteal, GroupAck, GroupNack, GroupExtend, GroupLeave, GroupLeft,
        GroupPending, GroupPendingReply, GroupState, GroupStateReply, GroupList, GroupListReply, GroupSeek,
        GroupTake, GroupTaken, GroupCommit, GroupCommitted, GroupDelete, GroupDeleted,
    )
}  # fmt: skip
