"""Dead letters: records that are exhausted, their move to the dead-letter topic, and their redrive."""

from __future__ import annotations

from ringlog.envelope.messages.base import Message
from ringlog.envelope.messages.ranges import U32, U64, Millis, Name, Seq


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


class RedriveDeadLetters(Message, frozen=True):
    """Client to scheduler 0 or gateway: redrive these dead letters of `topic`. Reply: DeadLettersRedriven.

    `seqs` are seqs in the dead-letter topic, 8 bytes each, little-endian, at most 256. The scheduler appends
    the letters to their queue, or has their consumer group deliver the records again. Then it deletes the
    letters."""

    topic: Name
    seqs: bytes
    group: Name = ""
    """Key of the consumer group; "" = the letters are of a queue."""


class DeadLettersRedriven(Message, frozen=True):
    """Reply to RedriveDeadLetters, after the copies are durable and the letters deleted.

    `moved` letters were redriven; `repeated` of them had been copied before. Letters that do not exist or
    have another origin are not counted."""

    topic: Name
    moved: U64
    repeated: U64
    gone: U64 = 0
    """Number of letters whose record is not in the topic of the group any more. These letters stay."""


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
