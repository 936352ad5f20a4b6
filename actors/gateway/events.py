"""What a gateway is told and what it asks for. Read these two lists and you know what the actor is for."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from actors.gateway.auth import KeyRing
from ringlog.envelope.messages import ColdRead, Located, Message, Subscribe, TopicInfo
from ringlog.errors import RinglogError

# -- events ---------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class ClientRequestReceived:
    """A client asks. `client` is an opaque reply address; `user_id` is what ZAP established about it."""

    client: bytes
    user_id: str
    corr: int
    message: Message
    attachment: Any = None


@dataclass(frozen=True, slots=True)
class ShardPressureChanged:
    """The governors of these shards, and of no others, refuse new writes."""

    shards: frozenset[int]


@dataclass(frozen=True, slots=True)
class ShardAnswered:
    """A shard answered what was asked under `ticket`; `error` instead of `message` when it could not."""

    ticket: int
    message: Message | None
    error: RinglogError | None = None


@dataclass(frozen=True, slots=True)
class FramesSettled:
    """Every frame pushed under `ticket` has its fate: settle entries, one a frame, in order."""

    ticket: int
    entries: bytes
    error: RinglogError | None = None


@dataclass(frozen=True, slots=True)
class FramesRead:
    """What reading the files gave. `frames` whole frames sealed under 0, up to `last_seq` (0 = none)."""

    ticket: int
    frames: int
    records: int
    last_seq: int
    examined: int
    """Last position known to hold nothing more to deliver; never above the plan's stop."""
    data: Any = None
    error: RinglogError | None = None
    hidden: bytes = b""
    """Numbers in the frames that are to be passed over: a portable 64-bit roaring bitmap."""
    cold: ColdRead | None = None
    """What has to be read from the cold store before there is anything to tell."""


@dataclass(frozen=True, slots=True)
class ColdReadCompleted:
    """The relocator read what was asked for under `ticket`, or could not."""

    ticket: int
    data: Any = None
    error: RinglogError | None = None


@dataclass(frozen=True, slots=True)
class TimeFound:
    """The position after which records of the time asked for under `ticket` begin."""

    ticket: int
    after: int
    error: RinglogError | None = None


@dataclass(frozen=True, slots=True)
class TopicHeadChanged:
    """The topic watched under `ticket` has a new head, or another life."""

    ticket: int


@dataclass(frozen=True, slots=True)
class SubscribeCompleted:
    """The schedulers know the feeds asked for under `ticket`, or refused them."""

    ticket: int
    error: RinglogError | None = None


@dataclass(frozen=True, slots=True)
class ClientDisconnected:
    """A client cannot be reached any more: forget what it waits for."""

    client: bytes


@dataclass(frozen=True, slots=True)
class KeysLoaded:
    """The keys file was read again."""

    keys: KeyRing


# -- effects --------------------------------------------------------------------------------------------


SCHEDULER = -1
"""In place of a shard: the scheduler that looks after routers."""


@dataclass(frozen=True, slots=True)
class AskShard:
    """Send a request to a shard, or to scheduler 0. Completion: ShardAnswered."""

    ticket: int
    shard: int
    message: Message
    attachment: Any = None


@dataclass(frozen=True, slots=True)
class PushFrames:
    """Push frames into our ring to a shard, as they are. Completion: FramesSettled."""

    ticket: int
    shard: int
    topic: str
    data: Any
    offsets: Any
    """(n + 1,) int64: where each frame begins, and where the last one ends."""


@dataclass(frozen=True, slots=True)
class ReadFiles:
    """Read frames after `after` up to `stop` from the files. Completion: FramesRead."""

    ticket: int
    located: Located
    after: int
    stop: int
    limit: int
    max_bytes: int
    now_us: int = 0
    """Records that have expired by now are hidden."""
    cold: ColdRead | None = None
    """What `cold_data` was read for."""
    cold_data: Any = None


@dataclass(frozen=True, slots=True)
class ReadCold:
    """Have the relocator read this. Completion: ColdReadCompleted."""

    ticket: int
    wanted: ColdRead


@dataclass(frozen=True, slots=True)
class FindTime:
    """Find where records committed at or after `ts_us` begin. Completion: TimeFound."""

    ticket: int
    located: Located
    ts_us: int


@dataclass(frozen=True, slots=True)
class WatchTopic:
    """Say TopicHeadChanged once the topic's slot differs from this: another life, or a head above
    `head_seq`."""

    ticket: int
    shard: int
    slot: int
    topic_id: int
    epoch: int
    head_seq: int


@dataclass(frozen=True, slots=True)
class UnwatchTopic:
    """Forget the watch."""

    ticket: int


@dataclass(frozen=True, slots=True)
class SubscribeFeeds:
    """Have the schedulers tell of these feeds: (the client's number, topic, position). Completion: Followed.

    Feeds in `gone` get a turn at once: there is no such topic, as their reader will find out.
    """

    ticket: int
    client: bytes
    request: Subscribe
    feeds: list[tuple[int, TopicInfo, int]]
    missing_feeds: list[int]


@dataclass(frozen=True, slots=True)
class UnsubscribeFeeds:
    """End a client's subscription, or some of its feeds."""

    client: bytes
    number: int
    feeds: list[int]


@dataclass(frozen=True, slots=True)
class LogRequestFailure:
    """Log an error of ours that a request met; its sender has been told Internal."""

    kind: str
    error: BaseException


@dataclass(frozen=True, slots=True)
class ReturnGrants:
    """A client gives turns back: rows of the message Taken."""

    client: bytes
    rows: Any
