"""Events and effects of the gateway's core. These two lists define what the actor does."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from ringlog.access.key_ring import KeyRing
from ringlog.access.keys import Principal
from ringlog.envelope.messages import ColdRead, Located, Message, Subscribe, TopicInfo
from ringlog.errors import RinglogError

# -- events ---------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class ClientRequestReceived:
    """A client sent a request.

    `client` is an opaque reply address, `user_id` the identity that ZAP established.
    """

    client: bytes
    user_id: str
    corr: int
    message: Message
    attachment: Any = None


@dataclass(frozen=True, slots=True)
class ShardPressureChanged:
    """The governors of exactly these shards refuse new writes."""

    shards: frozenset[int]


@dataclass(frozen=True, slots=True)
class ShardAnswered:
    """A shard replied to the request with this `ticket`. On failure `error` is set instead of `message`."""

    ticket: int
    message: Message | None
    error: RinglogError | None = None


@dataclass(frozen=True, slots=True)
class FramesSettled:
    """All frames pushed under `ticket` are settled: one settle entry per frame, in order."""

    ticket: int
    entries: bytes
    error: RinglogError | None = None


@dataclass(frozen=True, slots=True)
class FramesRead:
    """Result of reading files: `frames` whole frames, sealed with seed 0, up to `last_seq` (0 = none)."""

    ticket: int
    frames: int
    records: int
    last_seq: int
    examined: int
    """Seq up to which no more records are to be delivered; never above the plan's stop."""
    data: Any = None
    error: RinglogError | None = None
    hidden: bytes = b""
    """Seqs in the frames that the client must skip: a portable 64-bit roaring bitmap."""
    cold: ColdRead | None = None
    """Bytes of the cold store that must be read first; there are no frames then."""


@dataclass(frozen=True, slots=True)
class ColdReadCompleted:
    """The relocator read the requested bytes, or failed with `error`."""

    ticket: int
    data: Any = None
    error: RinglogError | None = None


@dataclass(frozen=True, slots=True)
class TimeFound:
    """Seq after which the records of the requested time begin."""

    ticket: int
    after: int
    error: RinglogError | None = None


@dataclass(frozen=True, slots=True)
class TopicHeadChanged:
    """The topic watched under `ticket` has a new head, or another epoch."""

    ticket: int


@dataclass(frozen=True, slots=True)
class SubscribeCompleted:
    """The schedulers accepted the feeds requested under `ticket`, or refused them."""

    ticket: int
    error: RinglogError | None = None


@dataclass(frozen=True, slots=True)
class ClientDisconnected:
    """A client can no longer be reached. Its waiting requests are dropped."""

    client: bytes


@dataclass(frozen=True, slots=True)
class KeysLoaded:
    """The keys file was read again."""

    keys: KeyRing


# -- effects --------------------------------------------------------------------------------------------


SCHEDULER = -1
"""Value of `shard` for requests to scheduler 0, which serves router requests."""


@dataclass(frozen=True, slots=True)
class AskShard:
    """Send a request to a shard, or to scheduler 0. Completion: ShardAnswered."""

    ticket: int
    shard: int
    message: Message
    attachment: Any = None


@dataclass(frozen=True, slots=True)
class PushFrames:
    """Push frames unchanged into the gateway's ring to a shard. Completion: FramesSettled."""

    ticket: int
    shard: int
    topic: str
    data: Any
    offsets: Any
    """(n + 1,) int64: start of each frame, and end of the last one."""


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
    """Records that expire at or before this time are hidden, in µs."""
    cold: ColdRead | None = None
    """Range that `cold_data` contains."""
    cold_data: Any = None


@dataclass(frozen=True, slots=True)
class ReadCold:
    """Have the relocator read a range of the cold store. Completion: ColdReadCompleted."""

    ticket: int
    wanted: ColdRead


@dataclass(frozen=True, slots=True)
class FindTime:
    """Find the first record that was committed at or after `ts_us`. Completion: TimeFound."""

    ticket: int
    located: Located
    ts_us: int


@dataclass(frozen=True, slots=True)
class WatchTopic:
    """Report TopicHeadChanged once the topic has another epoch, or another head than `head_seq`."""

    ticket: int
    shard: int
    slot: int
    topic_id: int
    epoch: int
    head_seq: int


@dataclass(frozen=True, slots=True)
class UnwatchTopic:
    """End a watch."""

    ticket: int


@dataclass(frozen=True, slots=True)
class SubscribeFeeds:
    """Subscribe to these feeds at the schedulers: (the client's number, topic, position).

    Completion: SubscribeCompleted. Feeds in `missing_feeds` get a recheck grant at once: their topic does not
    exist, which the client then finds out.
    """

    ticket: int
    client: bytes
    user_id: str
    principal: Principal
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
class EndChangedSubscriptions:
    """End the subscriptions of clients whose keys are not in this ring with the same rights."""

    keys: KeyRing


@dataclass(frozen=True, slots=True)
class LogRequestFailure:
    """Log an unexpected error of a request. The client has received Internal."""

    kind: str
    error: BaseException


@dataclass(frozen=True, slots=True)
class ReturnGrants:
    """Return a client's grants: at most GRANTS_PER_MESSAGE_MAX rows of the message GrantsReturned."""

    client: bytes
    rows: list[list[int]]
