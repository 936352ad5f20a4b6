"""Messages of the event streams and of the WebSocket, for the API documents."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

import msgspec
from msgspec import UNSET, UnsetType


@dataclass(frozen=True, slots=True)
class Channel:
    """One stream: its address, and the messages that the gateway sends and receives, by name."""

    name: str
    address: str
    text: str
    sent: Mapping[str, Any]
    received: Mapping[str, Any] = field(default_factory=dict)
    parameters: Mapping[str, str] = field(default_factory=dict)


class StreamRecord(msgspec.Struct, rename={"seq": "$seq", "ts": "$ts", "node": "$node", "tag": "$tag"}):
    """One record. Bytes are {"$base64": text}, text that is no JSON is {"$text": text}."""

    seq: int
    ts: int
    data: Any
    node: str | UnsetType = UNSET
    tag: str | UnsetType = UNSET
    meta: Any = UNSET


class RecordFrame(msgspec.Struct):
    """Records of one topic, after the cursor `from_seq` and up to `to_seq`."""

    topic: str
    from_seq: int
    to_seq: int
    head_seq: int
    records: list[StreamRecord]


class CaughtUpFrame(msgspec.Struct):
    """The stream has sent all records of the topic so far."""

    topic: str
    head_seq: int


class TombstoneFrame(msgspec.Struct):
    """Records between two positions were removed before they were sent."""

    topic: str
    gap_from: int
    gap_to: int
    reason: str
    missed_estimate: int
    earliest_seq: int
    head_seq: int


class TopicDeletedFrame(msgspec.Struct):
    """The topic was deleted."""

    topic: str
    reason: str


class JobFrame(msgspec.Struct, rename={"seq": "$seq", "ts": "$ts"}):
    """One job, leased to the node of the stream until `deadline` (ms since the epoch)."""

    topic: str
    seq: int
    ts: int
    data: Any
    deadline: int
    deliveries: int
    lease_id: str


class StreamErrorFrame(msgspec.Struct):
    """The last frame of a stream that ends because of an error."""

    code: str
    message: str


class SubscribeMessage(msgspec.Struct):
    """Subscribe to one topic, or to several."""

    op: Literal["subscribe"]
    topic: str | UnsetType = UNSET
    topics: dict[str, Any] | UnsetType = UNSET
    from_seq: int | UnsetType = UNSET
    tail: bool | UnsetType = UNSET
    node: str | list[str] | UnsetType = UNSET
    limit: int | UnsetType = UNSET
    max_batch_bytes: int | UnsetType = UNSET
    include_data: bool = True
    include_tags: bool = False
    include_meta: bool = False
    lenient: bool = False
    request_id: Any = None


class UnsubscribeMessage(msgspec.Struct):
    """End the subscription of a topic."""

    op: Literal["unsubscribe"]
    topic: str
    request_id: Any = None


class PublishMessage(msgspec.Struct):
    """Append records to a topic."""

    op: Literal["publish"]
    topic: str
    records: list[dict[str, Any]]
    node: str | None = None
    idempotency_key: str | None = None
    create: bool | None = None
    config: dict[str, Any] | None = None
    return_seqs: bool = True
    request_id: Any = None


class PingMessage(msgspec.Struct):
    """Ask for a pong."""

    op: Literal["ping"]
    request_id: Any = None


class ReplyMessage(msgspec.Struct):
    """Answer to a message of the client, with its `request_id`."""

    op: Literal["subscribed", "unsubscribed", "ack", "pong"]
    request_id: Any


class ErrorMessage(msgspec.Struct):
    """A message of the client was refused, or the connection ends."""

    op: Literal["error"]
    code: str
    message: str
    request_id: Any


CHANNELS = (
    Channel(
        "watch", "/v0/watch/{wid}", "Event stream of a watch session.",
        {
            "record": RecordFrame, "caught-up": CaughtUpFrame, "tombstone": TombstoneFrame,
            "topic-deleted": TopicDeletedFrame, "error": StreamErrorFrame,
        },
        parameters={"wid": "Session of POST /v0/watch."},
    ),
    Channel(
        "work", "/v0/topics/{topic}/work", "Event stream of the jobs of a queue.",
        {"job": JobFrame, "error": StreamErrorFrame}, parameters={"topic": "Name of the queue."},
    ),
    Channel(
        "webSocket", "/v0/ws", "WebSocket with JSON text. `op` of a message names its kind.",
        {
            "reply": ReplyMessage, "record": RecordFrame, "caught_up": CaughtUpFrame,
            "tombstone": TombstoneFrame, "topic_deleted": TopicDeletedFrame, "error": ErrorMessage,
        },
        {
            "subscribe": SubscribeMessage, "unsubscribe": UnsubscribeMessage, "publish": PublishMessage,
            "ping": PingMessage,
        },
    ),
)  # fmt: skip
"""Streams of the gateway."""
