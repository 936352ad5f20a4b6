"""Messages of the event streams and of the WebSocket, for the API documents."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

import msgspec
from msgspec import UNSET, UnsetType

from ringlog.actors.http_gateway.records.writes import WriteBody, WriteReply
from ringlog.actors.http_gateway.streams.web_socket import Subscribe, Unsubscribe


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
    data: Any = UNSET
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
    cause: str | UnsetType = UNSET
    """Why they were removed, if `reason` is from_seq_too_old: at the begin of a stream."""


class TopicDeletedFrame(msgspec.Struct):
    """The topic was deleted, or deleted and created again. The stream sends nothing more of it."""

    topic: str
    head_seq: int
    reason: Literal["deleted", "recreated"]


class WatchErrorFrame(msgspec.Struct):
    """An error of one topic, of which nothing more is sent; without `topic`, the last frame of the stream."""

    code: int
    """HTTP status."""
    error: str
    """Code of the error: what clients branch on."""
    message: str
    topic: str | UnsetType = UNSET


class JobFrame(msgspec.Struct, rename={"seq": "$seq", "ts": "$ts", "node": "$node", "tag": "$tag"}):
    """One job, leased to the node of the stream until `deadline` (ms since the epoch)."""

    topic: str
    seq: int
    ts: int
    data: Any
    deadline: int
    deliveries: int
    lease_id: str
    node: str | UnsetType = UNSET
    """Node of the record."""
    tag: str | UnsetType = UNSET
    meta: Any = UNSET


class WorkErrorFrame(msgspec.Struct):
    """The last frame of a stream that ends because of an error. Its details are further fields."""

    code: int
    """HTTP status."""
    error: str
    """Code of the error: what clients branch on."""
    message: str


# -- WebSocket: commands ------------------------------------------------------------------------------


class SubscribeMessage(Subscribe, kw_only=True):
    """Subscribe to one topic, or to several."""

    op: Literal["subscribe"]
    request_id: Any = None


class UnsubscribeMessage(Unsubscribe, kw_only=True):
    """End the subscriptions of topics."""

    op: Literal["unsubscribe"]
    request_id: Any = None


class PublishMessage(WriteBody, kw_only=True):
    """Append records to a topic."""

    op: Literal["publish"]
    topic: str
    request_id: Any = None


class PingMessage(msgspec.Struct):
    """Ask for a pong."""

    op: Literal["ping"]
    request_id: Any = None


# -- WebSocket: answers, with the `request_id` of the command ------------------------------------------


class TopicStart(msgspec.Struct):
    """Where the subscription of a topic begins, and the state of the topic."""

    from_seq: int
    head_seq: int
    earliest_seq: int
    epoch: int


class SubscribedMessage(msgspec.Struct):
    """Answer to `subscribe`. If the command has `topic` alone, the fields of the topic are outside, too."""

    op: Literal["subscribed"]
    request_id: Any
    topics: dict[str, TopicStart]
    topic: str | UnsetType = UNSET
    from_seq: int | UnsetType = UNSET
    head_seq: int | UnsetType = UNSET
    earliest_seq: int | UnsetType = UNSET
    epoch: int | UnsetType = UNSET


class UnsubscribedMessage(msgspec.Struct):
    """Answer to `unsubscribe`."""

    op: Literal["unsubscribed"]
    request_id: Any
    topics: list[str]
    topic: str | UnsetType = UNSET


class AckMessage(WriteReply, kw_only=True):
    """Answer to `publish`: the records are written."""

    op: Literal["ack"]
    request_id: Any
    seqs: list[int] | UnsetType = UNSET


class PongMessage(msgspec.Struct):
    """Answer to `ping`."""

    op: Literal["pong"]
    request_id: Any


class ErrorMessage(msgspec.Struct):
    """A command was refused; or an error of one topic, of which nothing more is sent; or, with neither a
    `request_id` nor a `topic`, the connection ends or had a message that is no command."""

    op: Literal["error"]
    code: str
    message: str
    request_id: Any
    detail: dict[str, Any] | UnsetType = UNSET
    topic: str | UnsetType = UNSET


# -- WebSocket: events --------------------------------------------------------------------------------


class RecordMessage(RecordFrame, kw_only=True):
    """Records of one topic, after the cursor `from_seq` and up to `to_seq`."""

    op: Literal["record"]


class CaughtUpMessage(CaughtUpFrame, kw_only=True):
    """The connection has sent all records of the topic so far."""

    op: Literal["caught_up"]


class TombstoneMessage(TombstoneFrame, kw_only=True):
    """Records between two positions were removed before they were sent."""

    op: Literal["tombstone"]


class TopicDeletedMessage(TopicDeletedFrame, kw_only=True):
    """The topic was deleted, or deleted and created again. Its subscription has ended."""

    op: Literal["topic_deleted"]


CHANNELS = (
    Channel(
        "watch", "/v0/watch/{wid}", "Event stream of a watch session.",
        {
            "record": RecordFrame, "caught-up": CaughtUpFrame, "tombstone": TombstoneFrame,
            "topic-deleted": TopicDeletedFrame, "error": WatchErrorFrame,
        },
        parameters={"wid": "Session of POST /v0/watch."},
    ),
    Channel(
        "work", "/v0/topics/{topic}/work", "Event stream of the jobs of a queue.",
        {"job": JobFrame, "error": WorkErrorFrame}, parameters={"topic": "Name of the queue."},
    ),
    Channel(
        "webSocket", "/v0/ws", "WebSocket with JSON text. `op` of a message names its kind.",
        {
            "subscribed": SubscribedMessage, "unsubscribed": UnsubscribedMessage, "ack": AckMessage,
            "pong": PongMessage, "record": RecordMessage, "caught_up": CaughtUpMessage,
            "tombstone": TombstoneMessage, "topic_deleted": TopicDeletedMessage, "error": ErrorMessage,
        },
        {
            "subscribe": SubscribeMessage, "unsubscribe": UnsubscribeMessage, "publish": PublishMessage,
            "ping": PingMessage,
        },
    ),
)  # fmt: skip
"""Streams of the gateway."""
