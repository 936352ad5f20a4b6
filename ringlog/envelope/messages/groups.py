"""Consumer groups: their creation, settings and positions. Members lease records with the messages of
leases.py.

`call` is a number as in leases.py.
"""

from __future__ import annotations

from ringlog.envelope.messages.base import Message
from ringlog.envelope.messages.ranges import U32, U64, Name, Seq
from ringlog.limits import BACKOFF_MAX_MS_DEFAULT


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


class GroupTakeOver(Message, frozen=True):
    """Client to shard or gateway: `node` becomes the reader of a stream group. Reply: GroupTakenOver.

    It reads from the position after the committed one. A commit of the previous reader has no effect from
    then on."""

    topic: Name
    group: Name
    node: Name
    call: U64 = 0


class GroupTakenOver(Message, frozen=True):
    """Reply to GroupTakeOver; `token` fences the previous reader."""

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
