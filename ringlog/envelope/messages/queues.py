"""Jobs of queues, their leases, and what becomes of them."""

from __future__ import annotations

from ringlog.envelope.messages.base import Message
from ringlog.envelope.messages.ranges import U32, U64, Millis, MillisOrNone, Name, Pid, Seq


class JobsClaim(Message, frozen=True):
    """Lease up to `max` jobs to `node` (semantics 21.2); an empty answer says that there was none within
    `wait_ms`. `call` is a number of this request alone (0 = none): sent again, it has the same answer."""

    topic: Name
    node: Name
    max: U32 = 1
    lease_ms: Millis = 0
    """0 = the topic's."""
    wait_ms: Millis = 0
    call: U64 = 0
    pid: Pid = 0
    """The process that claims, and when it began (lives.py): when it dies, its jobs are ready at once. 0: the
    leases end by themselves. A gateway passes on 0."""
    born: U64 = 0
    by_number: bool = False
    """Where a queue has priorities: the lowest numbers first whatever their priority (L14)."""


class JobsClaimed(Message, frozen=True):
    """Reply, ascending: rows [first, count, deliveries, token] of jobs that follow each other, and so do
    their tokens. All are held up to `deadline`, milliseconds. What the jobs hold comes along where their
    shard has it in memory: `payloads`, ascending, of those that have nothing else, and `frames` with the
    others. Else who can read the files reads the jobs there, and a gateway reads them for the rest."""

    topic: Name
    topic_id: U64
    epoch: U32
    deadline: Seq
    ready: Seq
    """Jobs that are left."""
    runs: list[tuple[Seq, Seq, U64, U64]]
    frames: U32 = 0
    """So many frames, sealed under seed 0, are attached, or in `data`."""
    lease_ms: Millis = 0
    """How long they are held from when they were given."""
    is_fed: bool = False
    """Routers lead to the topic: who was given nothing has them catch up and asks again (RoutesSettle)."""
    payloads: list[bytes] = []
    stamps: bytes = b""
    """When the jobs of `payloads` were put, microseconds since the epoch, 8 bytes each, little-endian."""
    data: bytes = b""
    """Frames, through a call ring, which nothing can be attached to."""


class JobsAck(Message, frozen=True):
    """These jobs are done: delete them (semantics 21.3). Numbers and tokens are 8 bytes each, little-endian,
    at most 1,000; without `tokens`, or where one is 0, `node` alone decides."""

    topic: Name
    node: Name
    seqs: bytes
    tokens: bytes = b""
    in_time: bool = False
    """It was first sent before the leases ended, as far as their holder knows; this is believed only where a
    restart of the shard forgot them."""
    call: U64 = 0


class JobsAcked(Message, frozen=True):
    """Reply, when the deletion is as durable as the topic's class asks. `skipped`: numbers that were not
    held, 8 bytes each, in the order of the request."""

    topic: Name
    acked: U64
    skipped: bytes
    ready: Seq
    in_flight: Seq


class JobsNext(Message, frozen=True):
    """These jobs are done, and now up to `max` others: JobsAck and JobsClaim in one, for what usually is so.
    Fields as there. Answered with JobsClaimed, which may be empty, when the deletion is as durable as the
    topic's class asks; or with JobsApart, and then none of it was done."""

    topic: Name
    node: Name
    seqs: bytes
    tokens: bytes
    max: U32 = 1
    lease_ms: Millis = 0
    call: U64 = 0
    pid: Pid = 0
    born: U64 = 0


class JobsApart(Message, frozen=True):
    """Reply: ack and claim are to be asked for one by one, since something has to be looked at first."""

    topic: Name


class JobsNack(Message, frozen=True):
    """Give these jobs back, to be ready now or after `delay_ms` (semantics 21.4). Fields as in JobsAck. A
    `reason` says that they failed: its first line goes with them to the dead letters, if they get there. With
    `has_backoff` each rests as the topic says, if it says something, else for `delay_ms`. With `undo` nobody
    has begun them: they are ready at once, and the delivery does not count. An `undo` without numbers is
    about all that the claim `call` was given; if that claim still waits, it ends."""

    topic: Name
    node: Name
    seqs: bytes
    tokens: bytes = b""
    delay_ms: Millis = 0
    call: U64 = 0
    reason: str = ""
    has_backoff: bool = False
    undo: bool = False


class JobsNacked(Message, frozen=True):
    """Reply; `skipped` as in JobsAcked."""

    topic: Name
    nacked: U64
    skipped: bytes
    ready: Seq
    in_flight: Seq


class JobsExtend(Message, frozen=True):
    """Hold these jobs up to `lease_ms` from now (semantics 21.5). Fields as in JobsAck."""

    topic: Name
    node: Name
    seqs: bytes
    tokens: bytes = b""
    lease_ms: Millis = 0
    """0 = the topic's."""
    call: U64 = 0


class JobsExtended(Message, frozen=True):
    """Reply: `extended` jobs are held up to `deadline`, milliseconds; `skipped` as in JobsAcked."""

    topic: Name
    extended: U64
    skipped: bytes
    deadline: Seq


class JobsReject(Message, frozen=True):
    """These jobs are to go to the queue's dead letters at once; refused where there are none. Fields as in
    JobsAck."""

    topic: Name
    node: Name
    seqs: bytes
    tokens: bytes = b""
    reason: str = ""
    call: U64 = 0


class JobsRejected(Message, frozen=True):
    """Reply; `skipped` as in JobsAcked. They are moved soon."""

    topic: Name
    rejected: U64
    skipped: bytes


class JobsPending(Message, frozen=True):
    """Who has which jobs? Of those that were handed out and are not done the first behind `after`, at most
    `limit`; asking changes nothing."""

    topic: Name
    after: Seq = 0
    limit: U32 = 100


class JobsPendingReply(Message, frozen=True):
    """Reply: [number, state, node, until_ms, deliveries, nacks, failed_ms, reason] of each, ascending. States
    are leased, delayed, returned and set aside; `until_ms` is the end of a lease or a delay, else 0; the last
    three are as in SpentJobs."""

    topic: Name
    jobs: list[tuple[Seq, str, Name, Millis, U64, U64, Millis, str]]
    more: bool


class QueueStats(Message, frozen=True):
    """How many jobs are in which state? (QS-1)"""

    topic: Name


class QueueStatsReply(Message, frozen=True):
    """Reply; `waiting` claims wait for jobs."""

    topic: Name
    ready: Seq
    in_flight: Seq
    delayed: Seq
    dead_lettered: Seq
    waiting: U64
    oldest_ready_ms: MillisOrNone = -1
    """How long ago the oldest job was put that is ready; -1 = none is."""
    wait_p99_ms: Millis = 0
    """99 in 100 jobs that were handed out lately had waited no longer than this for the first time."""
    promoted: U64 = 0
    """Jobs that were handed out before more urgent ones, for their long wait."""


class SpentAsk(Message, frozen=True):
    """Scheduler -> shard: which jobs had all their deliveries (QD-1)? Of the first queue behind `after`, a
    topic's id."""

    after: U64 = 0


class SpentJobs(Message, frozen=True):
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


class SpentMoved(Message, frozen=True):
    """Scheduler -> shard: copies of these jobs (8 bytes each, little-endian) are durable, so delete them."""

    topic: Name
    topic_id: U64
    seqs: bytes


class SpentGone(Message, frozen=True):
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
