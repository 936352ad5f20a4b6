"""Consumer groups: leases and places that outlive a shard."""

from __future__ import annotations

from ringlog.envelope.messages.base import Message
from ringlog.envelope.messages.ranges import U32, U64, Millis, Name, Pid, Seq


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
    """No position from here on was given out."""
    floor: Seq
    """Everything up to here is done."""
    pending: Seq
    """Positions that were given out and are not done."""
    max_deliveries: U32 = 0
    """As it was made; so are the next ones."""
    dead_letter: Name = ""
    pending_max: U32 = 0
    member_max: U32 = 0


class GroupClaim(Message, frozen=True):
    """Lease up to `max` positions of a group to `node`; answered with JobsClaimed. Fields as in JobsClaim."""

    topic: Name
    group: Name
    node: Name
    max: U32 = 1
    lease_ms: Millis = 0
    """0 = the topic's."""
    wait_ms: Millis = 0
    min_idle_ms: Millis = 0
    """Not 0: when nothing else is there, positions that another member did nothing about for so long."""
    call: U64 = 0
    pid: Pid = 0
    born: U64 = 0


class GroupSteal(Message, frozen=True):
    """Lease these positions (8 bytes each, little-endian, at most 1,000) to `node`, whoever holds them, as
    far as they are pending and nothing was done about them for `min_idle_ms`; answered with JobsClaimed."""

    topic: Name
    group: Name
    node: Name
    seqs: bytes
    lease_ms: Millis = 0
    min_idle_ms: Millis = 0
    call: U64 = 0
    pid: Pid = 0
    born: U64 = 0


class GroupAck(Message, frozen=True):
    """These positions are done for the group; answered with JobsAcked. Fields as in JobsAck."""

    topic: Name
    group: Name
    node: Name
    seqs: bytes
    tokens: bytes = b""
    call: U64 = 0


class GroupNack(Message, frozen=True):
    """Give these back, to be ready now or after `delay_ms`, as JobsNack; answered with JobsNacked.
    `undo` as there."""

    topic: Name
    group: Name
    node: Name
    seqs: bytes
    tokens: bytes = b""
    delay_ms: Millis = 0
    call: U64 = 0
    reason: str = ""
    undo: bool = False


class GroupReject(Message, frozen=True):
    """These go to the dead letters, as JobsReject; answered with JobsRejected."""

    topic: Name
    group: Name
    node: Name
    seqs: bytes
    tokens: bytes = b""
    reason: str = ""
    call: U64 = 0


class GroupSpentAsk(Message, frozen=True):
    """Scheduler -> shard: which records of groups are to be moved to dead letters? Of the first group whose
    number is behind `after`; answered with SpentJobs."""

    after: U64 = 0


class GroupSpentMoved(Message, frozen=True):
    """Scheduler -> shard: copies of these records (8 bytes each, little-endian) are durable, so they are done
    for the group, where they are set aside since the lease of this token (8 bytes each): one that came back
    and was given up again needs another copy. Answered with SpentGone."""

    topic: Name
    topic_id: U64
    number: U64
    seqs: bytes
    tokens: bytes


class GroupAgain(Message, frozen=True):
    """Scheduler -> shard: dead letters come back: give these records (8 bytes each, little-endian) out once
    more. `calls` (8 bytes each) name the letters: one that has come back already does not again."""

    topic: Name
    topic_id: U64
    group: Name
    seqs: bytes
    calls: bytes


class GroupReturned(Message, frozen=True):
    """Reply, when that is as durable as the topic's class asks: `repeated` had come back before, `gone` are
    in the topic no longer (8 bytes each)."""

    topic: Name
    repeated: U64
    gone: bytes


class GroupExtend(Message, frozen=True):
    """Hold these up to `lease_ms` from now; answered with JobsExtended."""

    topic: Name
    group: Name
    node: Name
    seqs: bytes
    tokens: bytes = b""
    lease_ms: Millis = 0
    call: U64 = 0


class GroupLeave(Message, frozen=True):
    """`node` leaves the group: what it holds is ready for others at once."""

    topic: Name
    group: Name
    node: Name


class GroupLeft(Message, frozen=True):
    """Reply; so many positions were given back."""

    topic: Name
    released: U64


class GroupPending(Message, frozen=True):
    """Which positions behind `after` were given out and are not done? Of one member, not touched for so long,
    given out so often; at most `limit` runs (1,000)."""

    topic: Name
    group: Name
    node: Name = ""
    idle_ms: Millis = 0
    min_deliveries: U32 = 0
    after: Seq = 0
    limit: U32 = 100


class GroupPendingReply(Message, frozen=True):
    """Reply, ascending: rows [first, count, state, deliveries, first given, last given, until, place of the
    member in `nodes`, token], times in milliseconds. A state is 1 leased, 2 delayed, 3 ready again; `until`
    is when a lease or a delay ends."""

    topic: Name
    rows: list[tuple[Seq, Seq, U32, U64, Millis, Millis, Millis, U32, U64]]
    nodes: list[str]
    more: bool
    now_ms: Millis


class GroupState(Message, frozen=True):
    """How is this group?"""

    topic: Name
    group: Name


class GroupStateReply(Message, frozen=True):
    """Reply. `undelivered` records lie behind the cursor; of a stream group, behind what is committed.
    `leased`, `delayed` and `returned` are pending."""

    info: GroupInfo
    head_seq: Seq
    undelivered: Seq
    leased: U64
    delayed: Seq
    returned: U64
    waiting: U64
    """Claims that wait."""
    members: list[tuple[Name, Millis, Seq]]
    """[name, when it was last heard of (milliseconds), positions it holds]"""
    holder: Name
    """Of a stream group: who reads it."""
    is_holding: bool
    """The topic keeps records beyond its caps or its TTL for this group (retain_until_acked)."""
    set_aside: U64 = 0
    """Pending, too: on their way to the dead letters."""


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
