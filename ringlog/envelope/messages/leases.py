"""Leases of queues and consumer groups, and the settlement of the leased records.

Queues and consumer groups share these messages. `group` is the key of a consumer group of the topic; "" is
the queue's own group, whose ack deletes the record. `call` is a random number that identifies a request: a
repeated request with the same `call` receives the same reply. 0 = the request has no number.
"""

from __future__ import annotations

from ringlog.envelope.messages.base import Message
from ringlog.envelope.messages.ranges import U32, U64, Millis, MillisOrNone, Name, Pid, Seq
from ringlog.limits import BACKOFF_MAX_MS_DEFAULT


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
    born: U64 = 0
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
    born: U64 = 0
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
    born: U64 = 0
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


class GroupInfo(Message, frozen=True):
    """Reply of the shard to GroupOpen and GroupSeek, and a row of GroupListReply: a consumer group."""

    topic: Name
    group: Name
    """Key of the group: the name, followed by `@` and the tag filter if there is one."""
    name: Name
    mode: U32
    tags: str
    created: bool
    cursor: U64
    """Every position below it was delivered or is not in the topic any more."""
    floor: Seq
    """Every position up to here is acked or not in the topic any more."""
    pending: Seq
    """Number of positions that are delivered and not acked."""
    max_deliveries: U32 = 0
    """This field and the following ones are the settings of the group from its creation."""
    dead_letter: Name = ""
    pending_max: U32 = 0
    member_max: U32 = 0
    backoff_ms: U32 = 0
    backoff_max_ms: U32 = 0


class LeaseStatsReply(Message, frozen=True):
    """Reply to LeaseStats.

    For a queue `ready`, `in_flight` and `delayed` add up to all of its jobs. For a group `in_flight`,
    `returned` and `set_aside` are pending, and so are those of `delayed` that were delivered before."""

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
    set_aside: U64
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


class ListExhausted(Message, frozen=True):
    """Scheduler 0 to shard: list exhausted records. Reply: ExhaustedReply.

    The reply is about the first queue or consumer group after `after`: the id of a topic or the number of a
    group. Group numbers are larger than all topic ids."""

    after: U64 = 0


class ExhaustedReply(Message, frozen=True):
    """Reply to ListExhausted: jobs of one queue or group to move to the topic `dead_letter`.

    A row of `runs` is [first, count, deliveries]. An empty `topic` = no exhausted records."""

    topic: Name = ""
    topic_id: U64 = 0
    epoch: U32 = 0
    dead_letter: Name = ""
    runs: list[tuple[Seq, Seq, U64]] = []
    reasons: dict[Seq, str] = {}
    """Last reason of each record that was rejected or nacked with a reason."""
    group: Name = ""
    """Key of the consumer group, and its number; "" = the records are of a queue."""
    number: U64 = 0
    tokens: list[U64] = []
    """For a group, one token for each run: the lease of the last delivery of its first record. A record can
    be exhausted several times, and each time is a new dead letter."""
    failed: dict[Seq, tuple[Millis, U64]] = {}
    """For the records of `reasons`: the time in milliseconds (0 = unknown), and the number of nacks with a
    reason."""
    keeps_expiry: bool = False
    """True: the copies expire at the time at which the records expire."""


class ConfirmDeadLettered(Message, frozen=True):
    """Scheduler 0 to shard: the copies of these records are durable. Reply: ConfirmReply.

    `seqs` has 8 bytes each, little-endian. The shard deletes the jobs of a queue. With the `number` of a
    consumer group it acks the records for that group, if they are still exhausted since the lease with this
    token (8 bytes each). A record that was redelivered and exhausted again needs another copy."""

    topic: Name
    topic_id: U64
    seqs: bytes
    number: U64 = 0
    tokens: bytes = b""


class ConfirmReply(Message, frozen=True):
    """Reply to ConfirmDeadLettered, after the deletion is durable.

    `moved` counts the records that were still exhausted.
    """

    topic: Name
    moved: U64


class LettersRedrive(Message, frozen=True):
    """Client to scheduler 0 or gateway: redrive these dead letters of `topic`. Reply: LettersRedriven.

    `seqs` are seqs in the dead-letter topic, 8 bytes each, little-endian, at most 256. The scheduler appends
    the letters to their queue, or has their consumer group deliver the records again. Then it deletes the
    letters."""

    topic: Name
    seqs: bytes
    group: Name = ""
    """Key of the consumer group; "" = the letters are of a queue."""


class LettersRedriven(Message, frozen=True):
    """Reply to LettersRedrive, after the copies are durable and the letters deleted.

    `moved` letters were redriven; `repeated` of them had been copied before. Letters that do not exist or
    have another origin are not counted."""

    topic: Name
    moved: U64
    repeated: U64
    gone: U64 = 0
    """Number of letters whose record is not in the topic of the group any more. These letters stay."""


class GroupOpen(Message, frozen=True):
    """Client to shard or gateway: open a consumer group; create it if it does not exist. Reply: GroupInfo.

    `start` is the first position that a new group delivers, moved to the positions that exist. The request
    changes no existing group."""

    topic: Name
    group: Name
    mode: U32
    """1: members lease records. 2: one member at a time reads the stream."""
    tags: str = ""
    """`=` and a tag, `^` and a tag prefix, or `~` and a pattern of levels: members skip all other records.
    Part of the key."""
    start: Seq = 1
    pending_max: U32 = 0
    """Highest number of pending positions of the group and of one member; 0 = the largest possible."""
    member_max: U32 = 0
    node: Name = ""
    """Node that sends the request; it becomes a member."""
    make: bool = True
    """False: fail with GroupNotFound instead of creating the group."""
    max_deliveries: U32 = 0
    """A record that was delivered so often and returns is moved to the dead-letter topic. 0 = no bound."""
    dead_letter: Name = ""
    """Dead-letter topic; "" = the group has none."""
    backoff_ms: U32 = 0
    """Delay of a returned record. It doubles with each delivery up to `backoff_max_ms`. 0 = no delay."""
    backoff_max_ms: U32 = BACKOFF_MAX_MS_DEFAULT


class Redeliver(Message, frozen=True):
    """Scheduler to shard: deliver these records again, because their dead letters are redriven.

    Reply: Redelivered.

    `seqs` has 8 bytes each, little-endian. `calls` has one number for each letter, 8 bytes each. A letter
    with a known number is not delivered again."""

    topic: Name
    topic_id: U64
    group: Name
    seqs: bytes
    calls: bytes


class Redelivered(Message, frozen=True):
    """Reply to Redeliver, after the change is synced, whatever the class of the topic.

    `repeated` counts letters that were redelivered before. `gone` has the seqs that are not in the topic any
    more, 8 bytes each."""

    topic: Name
    repeated: U64
    gone: bytes


class GroupLeave(Message, frozen=True):
    """Client to shard or gateway: `node` leaves the group. Reply: GroupLeft.

    The records that it holds are ready for other members at once.
    """

    topic: Name
    group: Name
    node: Name


class GroupLeft(Message, frozen=True):
    """Reply to GroupLeave; `released` is the number of returned positions."""

    topic: Name
    released: U64


class GroupList(Message, frozen=True):
    """Client to shard or gateway: list the consumer groups of a topic. Reply: GroupListReply."""

    topic: Name


class GroupListReply(Message, frozen=True):
    """Reply to GroupList, ordered by key."""

    topic: Name
    groups: list[GroupInfo]


class GroupSeek(Message, frozen=True):
    """Client to shard or gateway: continue the group from `cursor`. Reply: GroupInfo.

    The cursor is moved to the positions that exist. All leases end, and nothing is pending any more."""

    topic: Name
    group: Name
    cursor: U64


class GroupTake(Message, frozen=True):
    """Client to shard or gateway: `node` becomes the reader of a stream group. Reply: GroupTaken.

    It reads from the position after the committed one. A commit of the previous reader has no effect from
    then on."""

    topic: Name
    group: Name
    node: Name
    call: U64 = 0


class GroupTaken(Message, frozen=True):
    """Reply to GroupTake; `token` fences the previous reader."""

    topic: Name
    token: U64
    committed: Seq
    epoch: U32


class GroupCommit(Message, frozen=True):
    """Client to shard or gateway: commit a position of a stream group. Reply: GroupCommitted.

    Every record up to `committed` is processed, and every record before `cursor` was delivered.
    """

    topic: Name
    group: Name
    token: U64
    committed: Seq
    cursor: U64


class GroupCommitted(Message, frozen=True):
    """Reply to GroupCommit.

    If `is_holder` is false, nothing was committed: another member reads the group, or the group was moved by
    a seek."""

    topic: Name
    committed: Seq
    cursor: U64
    is_holder: bool


class GroupDelete(Message, frozen=True):
    """Client to shard or gateway: delete a consumer group. Reply: GroupDeleted. The topic stays."""

    topic: Name
    group: Name


class GroupDeleted(Message, frozen=True):
    """Reply to GroupDelete; `deleted` is false if there was no such group."""

    topic: Name
    group: Name
    deleted: bool
