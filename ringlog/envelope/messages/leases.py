"""Leases of queues and consumer groups, and the settlement of the leased records.

Queues and consumer groups share these messages. `group` is the key of a consumer group of the topic; "" is
the queue's own group, whose ack deletes the record. `call` is a random number that identifies a request: a
repeated request with the same `call` receives the same reply. 0 = the request has no number.
"""

from __future__ import annotations

from ringlog.envelope.messages.base import Message
from ringlog.envelope.messages.groups import GroupInfo
from ringlog.envelope.messages.ranges import U32, U64, Millis, MillisOrNone, Name, Pid, Seq


class Claim(Message, frozen=True):
    """Client to shard or gateway: lease up to `max` records to `node`. Reply: ClaimReply.

    If no record is ready within `wait_ms`, the reply has no runs."""

    topic: Name
    node: Name
    max: U32 = 1
    lease_ms: Millis = 0
    """0 = the default of the topic."""
    wait_ms: Millis = 0
    call: U64 = 0
    pid: Pid = 0
    """The process that claims, and its start time (process_id). When it dies, its records are ready at once.
    0: the leases last until they expire. A gateway passes 0."""
    pid_started: U64 = 0
    by_number: bool = False
    """For a queue with priorities: deliver by ascending seq and ignore priorities."""
    group: Name = ""
    min_idle_ms: Millis = 0
    """Not 0: if nothing else is ready, deliver records that their holder left idle for this time."""


class ClaimReply(Message, frozen=True):
    """Reply to Claim, Steal and AckAndClaim: the leased records, ascending by seq.

    A row of `runs` is [first, count, deliveries, token]: consecutive seqs with consecutive tokens. All leases
    end at `deadline` (milliseconds since the epoch, inclusive).

    If the shard has the records in memory, the reply contains them: `payloads`, ascending, for records
    without other fields, and `frames` for the others. Otherwise a client on the host reads them from the
    files, and a gateway reads them for all other clients."""

    topic: Name
    topic_id: U64
    epoch: U32
    deadline: Seq
    ready: Seq
    """Number of ready records that remain."""
    runs: list[tuple[Seq, Seq, U64, U64]]
    frames: U32 = 0
    """Number of frames, sealed under seed 0, in the attachment or in `data`."""
    lease_ms: Millis = 0
    """Duration of the leases from the time of delivery."""
    is_fed: bool = False
    """Routers lead to the topic. A client that received no records sends RoutesSettle and claims again."""
    payloads: list[bytes] = []
    stamps: bytes = b""
    """Write times of the records of `payloads`: microseconds since the epoch, 8 bytes each, little-endian."""
    data: bytes = b""
    """The frames, if the reply goes through a call ring, which has no attachments."""


class Steal(Message, frozen=True):
    """Client to shard or gateway: lease these pending records to `node`, whichever node holds them.

    Reply: ClaimReply.

    `seqs` has 8 bytes each, little-endian, at most 1,000. A record is leased only if it is pending and was
    idle for `min_idle_ms`. Other fields as in Claim."""

    topic: Name
    node: Name
    seqs: bytes
    lease_ms: Millis = 0
    min_idle_ms: Millis = 0
    call: U64 = 0
    pid: Pid = 0
    pid_started: U64 = 0
    group: Name = ""


class Ack(Message, frozen=True):
    """Client to shard or gateway: these records are processed. Reply: AckReply.

    A queue deletes them; a consumer group settles them and the topic keeps them. `seqs` and `tokens` have 8
    bytes each, little-endian, at most 1,000. Without `tokens`, or where a token is 0, only `node` is compared
    with the holder."""

    topic: Name
    node: Name
    seqs: bytes
    tokens: bytes = b""
    in_time: bool = False
    """The client states that it first sent this ack before the leases ended. The shard uses this only for
    leases that it lost in a restart."""
    call: U64 = 0
    group: Name = ""


class AckReply(Message, frozen=True):
    """Reply to Ack, after the ack is as durable as the topic's class requires.

    `skipped`: seqs that the node did not hold, 8 bytes each, in the order of the request."""

    topic: Name
    acked: U64
    skipped: bytes
    ready: Seq
    in_flight: Seq


class AckAndClaim(Message, frozen=True):
    """Client on the host to shard: Ack for these records and Claim for up to `max` others, in one request.

    Reply: ClaimReply, possibly without runs, after the ack is as durable as the topic's class requires.
    Otherwise the reply is NotCombinable and the shard did nothing.

    For a queue all records must be held under one lease. For a consumer group it is enough that all are held.
    Fields as in Ack and Claim."""

    topic: Name
    node: Name
    seqs: bytes
    tokens: bytes
    max: U32 = 1
    lease_ms: Millis = 0
    call: U64 = 0
    pid: Pid = 0
    pid_started: U64 = 0
    group: Name = ""


class NotCombinable(Message, frozen=True):
    """Reply to AckAndClaim: the shard did nothing. The client sends Ack and Claim separately."""

    topic: Name


class Nack(Message, frozen=True):
    """Client to shard or gateway: return these records, ready at once or after `delay_ms`.

    Reply: NackReply.

    Fields as in Ack. A `reason` states that the records failed: if they become dead letters, its first line
    goes with them. With `has_backoff` the delay is the backoff of the topic or group, or `delay_ms` if it has
    none.

    With `undo` the holder did not start the records: they are ready at once and the delivery does not count.
    `undo` without `seqs` reverts the claim with the number `call`. If that claim still waits, it ends without
    records."""

    topic: Name
    node: Name
    seqs: bytes
    tokens: bytes = b""
    delay_ms: Millis = 0
    call: U64 = 0
    reason: str = ""
    has_backoff: bool = False
    undo: bool = False
    group: Name = ""


class NackReply(Message, frozen=True):
    """Reply to Nack; `skipped` as in AckReply."""

    topic: Name
    nacked: U64
    skipped: bytes
    ready: Seq
    in_flight: Seq


class Extend(Message, frozen=True):
    """Client to shard or gateway: hold these records until `lease_ms` from now. Reply: ExtendReply.

    The new deadline may be earlier than the old one. Fields as in Ack.
    """

    topic: Name
    node: Name
    seqs: bytes
    tokens: bytes = b""
    lease_ms: Millis = 0
    """0 = the default of the topic."""
    call: U64 = 0
    group: Name = ""


class ExtendReply(Message, frozen=True):
    """Reply to Extend: `extended` records are held until `deadline` (milliseconds); `skipped` as in
    AckReply."""

    topic: Name
    extended: U64
    skipped: bytes
    deadline: Seq


class Reject(Message, frozen=True):
    """Client to shard or gateway: move these records to the dead-letter topic. Reply: RejectReply.

    Refused if the queue or group has no dead-letter topic. Fields as in Ack.
    """

    topic: Name
    node: Name
    seqs: bytes
    tokens: bytes = b""
    reason: str = ""
    call: U64 = 0
    group: Name = ""


class RejectReply(Message, frozen=True):
    """Reply to Reject; `skipped` as in AckReply. A scheduler moves the records soon after."""

    topic: Name
    rejected: U64
    skipped: bytes


class ListPending(Message, frozen=True):
    """Client to shard or gateway: list records after `after` that are delivered and not settled.

    Reply: PendingReply.

    `node`, `idle_ms` and `min_deliveries` restrict the list. At most `limit` runs (1,000). The request
    changes nothing."""

    topic: Name
    after: Seq = 0
    limit: U32 = 100
    node: Name = ""
    idle_ms: Millis = 0
    min_deliveries: U32 = 0
    group: Name = ""


class PendingReply(Message, frozen=True):
    """Reply to ListPending, ascending by seq; times in milliseconds.

    A row is [first, count, state, deliveries, first delivered, last delivered, until, index of the holder in
    `nodes`, token]. States: 1 leased, 2 delayed, 3 returned and ready, 5 exhausted (waits for its move to the
    dead-letter topic). `until` is the end of the lease or the delay, else 0."""

    topic: Name
    rows: list[tuple[Seq, Seq, U32, U64, Millis, Millis, Millis, U32, U64]]
    nodes: list[str]
    more: bool
    now_ms: Millis
    failures: dict[Seq, tuple[str, Millis, U64]] = {}
    """For records in the rows that were nacked or rejected with a reason: the last reason, its time (0 =
    unknown), and the number of nacks with a reason."""


class LeaseStats(Message, frozen=True):
    """Client to shard or gateway: count the records in each state. Reply: LeaseStatsReply."""

    topic: Name
    group: Name = ""


class LeaseStatsReply(Message, frozen=True):
    """Reply to LeaseStats.

    For a queue `ready`, `in_flight` and `delayed` add up to all of its jobs. For a group `in_flight`,
    `returned` and `exhausted` are pending, and so are those of `delayed` that were delivered before."""

    info: GroupInfo
    """For a queue: its own group, whose names are empty."""
    head_seq: Seq
    ready: Seq
    """Records that a claim can lease now."""
    in_flight: U64
    delayed: Seq
    """Records that wait for their time: they were nacked with a delay, or have a `not_before`."""
    returned: U64
    """Records that were delivered, returned, and are ready again."""
    exhausted: U64
    """Exhausted records that wait for their move to the dead-letter topic."""
    undelivered: Seq
    """Records that were never delivered. For a stream group: records after the committed position."""
    waiting: U64
    """Waiting claims."""
    members: list[tuple[Name, Millis, Seq]] = []
    """For a named group: [name, time of the last request (milliseconds), number of positions held]."""
    holder: Name = ""
    """For a stream group: the member that reads it."""
    is_holding: bool = False
    """The topic keeps records beyond its caps or TTL for this group (retain_until_acked)."""
    dead_lettered: Seq = 0
    """Number of jobs that were moved to the dead-letter topic. This field and the following ones are set for
    queues only."""
    oldest_ready_ms: MillisOrNone = -1
    """Time since the oldest ready job was written; -1 = no job is ready."""
    wait_p99_ms: Millis = 0
    """99th percentile of the wait before the first delivery, over recent jobs."""
    promoted: U64 = 0
    """Number of jobs that were delivered before more urgent ones because they had waited too long."""
