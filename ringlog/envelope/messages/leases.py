"""Leases of queues and consumer groups, and what becomes of the records under them.

One family for both. `group` is the key of a consumer group of the topic; "" is the queue's own group, whose
ack deletes. A request under the number `call` that comes again gets the reply it had; 0 = it has no number.
"""

from __future__ import annotations

from ringlog.envelope.messages.base import Message
from ringlog.envelope.messages.ranges import U32, U64, Millis, MillisOrNone, Name, Pid, Seq
from ringlog.limits import BACKOFF_MAX_MS_DEFAULT


class Claim(Message, frozen=True):
    """Lease up to `max` records to `node` (semantics 21.2); an empty reply says that there was none within
    `wait_ms`."""

    topic: Name
    node: Name
    max: U32 = 1
    lease_ms: Millis = 0
    """0 = the topic's."""
    wait_ms: Millis = 0
    call: U64 = 0
    pid: Pid = 0
    """The process that claims, and when it began (lives.py): when it dies, its records are ready at once. 0:
    the leases end by themselves. A gateway passes on 0."""
    born: U64 = 0
    by_number: bool = False
    """Where a queue has priorities: the lowest numbers first whatever their priority (L14)."""
    group: Name = ""
    min_idle_ms: Millis = 0
    """Not 0: when nothing else is there, records that another holder did nothing about for so long."""


class ClaimReply(Message, frozen=True):
    """Reply, ascending: rows [first, count, deliveries, token] of records that follow each other, and so do
    their tokens. All are held up to `deadline`, milliseconds. What the records hold comes along where their
    shard has it in memory: `payloads`, ascending, of those that have nothing else, and `frames` with the
    others. Else who can read the files reads them there, and a gateway reads them for the rest."""

    topic: Name
    topic_id: U64
    epoch: U32
    deadline: Seq
    ready: Seq
    """Records that are left."""
    runs: list[tuple[Seq, Seq, U64, U64]]
    frames: U32 = 0
    """So many frames, sealed under seed 0, are attached, or in `data`."""
    lease_ms: Millis = 0
    """How long they are held from when they were given."""
    is_fed: bool = False
    """Routers lead to the topic: who was given nothing has them catch up and asks again (RoutesSettle)."""
    payloads: list[bytes] = []
    stamps: bytes = b""
    """When the records of `payloads` were put, microseconds since the epoch, 8 bytes each, little-endian."""
    data: bytes = b""
    """Frames, through a call ring, which nothing can be attached to."""


class Steal(Message, frozen=True):
    """Lease these records (8 bytes each, little-endian, at most 1,000) to `node`, whoever holds them, as
    far as they are pending and nothing was done about them for `min_idle_ms`; answered with
    ClaimReply. Fields as in Claim."""

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
    """These records are done: of a queue they are deleted (semantics 21.3), for a consumer group they are
    settled. Numbers and tokens are 8 bytes each, little-endian, at most 1,000; without `tokens`, or where one
    is 0, `node` alone decides."""

    topic: Name
    node: Name
    seqs: bytes
    tokens: bytes = b""
    in_time: bool = False
    """It was first sent before the leases ended, as far as their holder knows; this is believed only where a
    restart of the shard forgot them."""
    call: U64 = 0
    group: Name = ""


class AckReply(Message, frozen=True):
    """Reply, when that is as durable as the topic's class asks. `skipped`: numbers that were not held, 8
    bytes each, in the order of the request."""

    topic: Name
    acked: U64
    skipped: bytes
    ready: Seq
    in_flight: Seq


class AckAndClaim(Message, frozen=True):
    """These records are done, and now up to `max` others: Ack and Claim in one, for what usually is so. Of a
    queue they have to be held under one lease, of a consumer group all of them. Fields as there. Answered
    with ClaimReply, which may be empty, when the deletion is as durable as the topic's class asks; or with
    NotCombinable, and then none of it was done."""

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
    """Reply: ack and claim are to be sent one by one, since something has to be looked at first."""

    topic: Name


class Nack(Message, frozen=True):
    """Give these records back, to be ready now or after `delay_ms` (semantics 21.4). Fields as in Ack. A
    `reason` says that they failed: its first line goes with them to the dead letters, if they get there. With
    `has_backoff` each is delayed as the topic says, if it says something, else for `delay_ms`. With `undo`
    their holder has not begun them: they are ready at once, and the delivery does not count. An `undo`
    without numbers is about all that the claim `call` was given; if that claim still waits, it ends."""

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
    """Reply; `skipped` as in AckReply."""

    topic: Name
    nacked: U64
    skipped: bytes
    ready: Seq
    in_flight: Seq


class Extend(Message, frozen=True):
    """Hold these records up to `lease_ms` from now (semantics 21.5). Fields as in Ack."""

    topic: Name
    node: Name
    seqs: bytes
    tokens: bytes = b""
    lease_ms: Millis = 0
    """0 = the topic's."""
    call: U64 = 0
    group: Name = ""


class ExtendReply(Message, frozen=True):
    """Reply: `extended` records are held up to `deadline`, milliseconds; `skipped` as in AckReply."""

    topic: Name
    extended: U64
    skipped: bytes
    deadline: Seq


class Reject(Message, frozen=True):
    """These records are to go to the dead letters at once; refused where there are none. Fields as in Ack."""

    topic: Name
    node: Name
    seqs: bytes
    tokens: bytes = b""
    reason: str = ""
    call: U64 = 0
    group: Name = ""


class RejectReply(Message, frozen=True):
    """Reply; `skipped` as in AckReply. They are moved soon."""

    topic: Name
    rejected: U64
    skipped: bytes


class ListPending(Message, frozen=True):
    """Which records behind `after` were given out and are not done? Of one holder, not touched for so long,
    given out so often; at most `limit` runs (1,000). Asking changes nothing."""

    topic: Name
    after: Seq = 0
    limit: U32 = 100
    node: Name = ""
    idle_ms: Millis = 0
    min_deliveries: U32 = 0
    group: Name = ""


class PendingReply(Message, frozen=True):
    """Reply, ascending: rows [first, count, state, deliveries, first given, last given, until, place of the
    holder in `nodes`, token], times in milliseconds. A state is 1 leased, 2 delayed, 3 ready again, 5
    exhausted: on its way to the dead letters; `until` is when a lease or a delay ends, else 0."""

    topic: Name
    rows: list[tuple[Seq, Seq, U32, U64, Millis, Millis, Millis, U32, U64]]
    nodes: list[str]
    more: bool
    now_ms: Millis
    failures: dict[Seq, tuple[str, Millis, U64]] = {}
    """Of those in the rows that were given back or rejected with a reason: the last one, when that was (0:
    not known), and how often they were given back with one."""


class LeaseStats(Message, frozen=True):
    """How many records are in which state? (QS-1)"""

    topic: Name
    group: Name = ""


class GroupInfo(Message, frozen=True):
    """What a group is, and where."""

    topic: Name
    group: Name
    """Its key: the name, and behind an `@` its filter, if it has one."""
    name: Name
    mode: U32
    tags: str
    created: bool
    cursor: U64
    """Every position below it was given out, or is there no more."""
    floor: Seq
    """Everything up to here is done."""
    pending: Seq
    """Positions that were given out and are not done."""
    max_deliveries: U32 = 0
    """As it was made; so are the next ones."""
    dead_letter: Name = ""
    pending_max: U32 = 0
    member_max: U32 = 0
    backoff_ms: U32 = 0
    backoff_max_ms: U32 = 0


class LeaseStatsReply(Message, frozen=True):
    """Reply. Of a queue `ready`, `in_flight` and `delayed` are all of its jobs; of a group `in_flight`,
    `returned` and `set_aside` are pending, and so are those of `delayed` that were given out before."""

    info: GroupInfo
    """Of a queue that of its own group: its names are empty."""
    head_seq: Seq
    ready: Seq
    """What a claim could be given."""
    in_flight: U64
    delayed: Seq
    """What nobody may be given yet: it was given back with a delay, or its record says so."""
    returned: U64
    """Given out, not done, and ready again."""
    set_aside: U64
    """On their way to the dead letters."""
    undelivered: Seq
    """Records that were never given out; of a stream group, those behind what is committed."""
    waiting: U64
    """Claims that wait."""
    members: list[tuple[Name, Millis, Seq]] = []
    """Of a named group: [name, when it was last heard of (milliseconds), positions it holds]"""
    holder: Name = ""
    """Of a stream group: who reads it."""
    is_holding: bool = False
    """The topic keeps records beyond its caps or its TTL for this group (retain_until_acked)."""
    dead_lettered: Seq = 0
    """Of a queue, as are those below: jobs that were moved to the dead letters."""
    oldest_ready_ms: MillisOrNone = -1
    """How long ago the oldest job was put that is ready; -1 = none is."""
    wait_p99_ms: Millis = 0
    """99 in 100 jobs that were handed out lately had waited no longer than this for the first time."""
    promoted: U64 = 0
    """Jobs that were handed out before more urgent ones, for their long wait."""


class ListExhausted(Message, frozen=True):
    """Scheduler -> shard: which records are to be moved to dead letters (QD-1)? Of the first queue or
    consumer group behind `after`: a topic's id, or the number of a group, which is larger than any of
    these."""

    after: U64 = 0


class ExhaustedReply(Message, frozen=True):
    """Reply: rows [first, count, deliveries] of jobs of one queue that are set aside, to be moved to the
    topic `dead_letter`; no topic = there are none."""

    topic: Name = ""
    topic_id: U64 = 0
    epoch: U32 = 0
    dead_letter: Name = ""
    runs: list[tuple[Seq, Seq, U64]] = []
    reasons: dict[Seq, str] = {}
    """Why those of them were rejected, or given back the last time, of which that was said."""
    group: Name = ""
    """Of a consumer group its key, and its number; "" = of a queue."""
    number: U64 = 0
    tokens: list[U64] = []
    """Of a group: the lease under which the first of each run was given out last. A record may be given up
    more than once, and each time is another letter."""
    failed: dict[Seq, tuple[Millis, U64]] = {}
    """Of those with a reason: when that was, in milliseconds (0: not known), and how often they were given
    back with one."""
    keeps_expiry: bool = False
    """Do their copies end when they would have?"""


class ConfirmDeadLettered(Message, frozen=True):
    """Scheduler -> shard: copies of these records (8 bytes each, little-endian) are durable. Jobs of a queue
    are deleted. With the `number` of a consumer group the records are done for it, where they are exhausted
    since the lease of this token (8 bytes each): one that came back and was given up again needs another
    copy."""

    topic: Name
    topic_id: U64
    seqs: bytes
    number: U64 = 0
    tokens: bytes = b""


class ConfirmReply(Message, frozen=True):
    """Reply, when the deletion is durable; `moved` were still set aside."""

    topic: Name
    moved: U64


class LettersRedrive(Message, frozen=True):
    """Client -> scheduler 0, gateway: put these dead letters (numbers in the dead-letter topic, 8 bytes each,
    little-endian, at most 256) back into the queue they came from, or have their records given out once more
    by the group that gave them up, and delete them there."""

    topic: Name
    seqs: bytes
    group: Name = ""
    """Its key; "" = they are a queue's."""


class LettersRedriven(Message, frozen=True):
    """Reply, when the copies are durable and the letters deleted: `moved` went, `repeated` of them had been
    copied before. Those named that are missing, or came from elsewhere, are none."""

    topic: Name
    moved: U64
    repeated: U64
    gone: U64 = 0
    """Letters of a group whose records are in its topic no longer: they stay."""


class GroupOpen(Message, frozen=True):
    """Make a consumer group of a topic, unless it is there (F25). `start` is the first position that a new
    one gives out, moved to what there is; of one that is there nothing is changed."""

    topic: Name
    group: Name
    mode: U32
    """1 leases records to members, 2 is read by one member at a time."""
    tags: str = ""
    """`=` and a tag, or `^` and how tags begin: members pass over everything else. Part of the key."""
    start: Seq = 1
    pending_max: U32 = 0
    """Most positions given out and not done, of all members and of one; 0 = as many as there may be."""
    member_max: U32 = 0
    node: Name = ""
    """Who asks; a member of it from now on."""
    make: bool = True
    """False: GroupNotFound instead of making it."""
    max_deliveries: U32 = 0
    """What was given out so often and comes back goes to the dead letters; 0 = nothing does by itself."""
    dead_letter: Name = ""
    """The topic where they go; "" = the group has none."""
    backoff_ms: U32 = 0
    """What comes back rests so long, doubled with each delivery up to the other one; 0 = not at all."""
    backoff_max_ms: U32 = BACKOFF_MAX_MS_DEFAULT


class Redeliver(Message, frozen=True):
    """Scheduler -> shard: dead letters come back: give these records (8 bytes each, little-endian) out once
    more. `calls` (8 bytes each) name the letters: one that has come back already does not again."""

    topic: Name
    topic_id: U64
    group: Name
    seqs: bytes
    calls: bytes


class Redelivered(Message, frozen=True):
    """Reply, when that is as durable as the topic's class asks: `repeated` had come back before, `gone` are
    in the topic no longer (8 bytes each)."""

    topic: Name
    repeated: U64
    gone: bytes


class GroupLeave(Message, frozen=True):
    """`node` leaves the group: what it holds is ready for others at once."""

    topic: Name
    group: Name
    node: Name


class GroupLeft(Message, frozen=True):
    """Reply; so many positions were given back."""

    topic: Name
    released: U64


class GroupList(Message, frozen=True):
    """Which groups has this topic?"""

    topic: Name


class GroupListReply(Message, frozen=True):
    """Reply, by key."""

    topic: Name
    groups: list[GroupInfo]


class GroupSeek(Message, frozen=True):
    """Go on from `cursor`, moved to what there is: nothing is pending, every lease has ended. Answered with
    GroupInfo."""

    topic: Name
    group: Name
    cursor: U64


class GroupTake(Message, frozen=True):
    """`node` reads a stream group from now on, behind what is committed; who read it is told when he
    commits."""

    topic: Name
    group: Name
    node: Name
    call: U64 = 0


class GroupTaken(Message, frozen=True):
    """Reply; `token` fences the reader."""

    topic: Name
    token: U64
    committed: Seq
    epoch: U32


class GroupCommit(Message, frozen=True):
    """Everything up to `committed` is done with, everything before `cursor` was delivered (F41, F67)."""

    topic: Name
    group: Name
    token: U64
    committed: Seq
    cursor: U64


class GroupCommitted(Message, frozen=True):
    """Reply. Without `is_holder` nothing was committed: another member reads the group, or it was told to be
    elsewhere."""

    topic: Name
    committed: Seq
    cursor: U64
    is_holder: bool


class GroupDelete(Message, frozen=True):
    """Remove a group. Its topic stays as it is."""

    topic: Name
    group: Name


class GroupDeleted(Message, frozen=True):
    """Reply; was it there?"""

    topic: Name
    group: Name
    deleted: bool
