"""Bodies of control frames, with their encoder and decoder (docs/reference/format.md).

Every body is a MessagePack array. Readers ignore additional elements, so new fields may be appended.
"""

from __future__ import annotations

import builtins
from typing import Any

import msgspec

from ringlog.errors import CorruptData
from ringlog.frame.codec import control_frame
from ringlog.frame.layout import FrameType
from ringlog.leases.change import LeaseChange, decode_change
from ringlog.topic.state import ShardTopic

Bitmap = bytes
"""Alias of `bytes`, because RecordsRemoved has a field named `bytes`."""

_encode = msgspec.msgpack.Encoder().encode


class ControlRecord(msgspec.Struct, array_like=True, frozen=True):
    """Base class of all bodies. A body is encoded as an array of its fields in their order."""


class TopicCreated(ControlRecord, frozen=True):
    """A topic was created."""

    name: str
    epoch: int
    config: bytes


class TopicRemoved(ControlRecord, frozen=True):
    """The topic with this topic id and epoch was deleted."""

    epoch: int


class ConfigChanged(ControlRecord, frozen=True):
    """The topic's complete new config."""

    epoch: int
    config: bytes


class HeadReserved(ControlRecord, frozen=True):
    """Seqs up to `reserved` may have been acknowledged. With `settled`, no higher seq was acknowledged."""

    reserved: int
    settled: bool


class FloorsRaised(ControlRecord, frozen=True):
    """The topic's floors after a removal. Floors only rise.

    `records` and `bytes` count the live records that were removed.
    """

    cap_floor: int
    ttl_floor: int
    trim_floor: int
    records: int
    bytes: int
    version: int = 0
    """The topic's version after the removal. A state with this version already includes the removal."""


class RecordsRemoved(ControlRecord, frozen=True):
    """Records that were deleted on request or expired one by one: all below `delete_floor`, and `seqs`.

    It contains the selected seqs instead of the request's conditions. Replay therefore needs no index, and
    removes no record that was appended later."""

    delete_floor: int
    seqs: Bitmap
    """Portable serialization of a 64-bit roaring bitmap. Empty bytes mean no seqs."""
    records: int
    bytes: int
    version: int


class RangeLost(ControlRecord, frozen=True):
    """Seqs first..last were skipped at a restart. They may have belonged to acknowledged records."""

    first: int
    last: int
    is_trim: bool | Bitmap = False
    """True if this topic lost nothing: its router's source lost these records before forwarding.

    In a repaired file this field contains padding bytes."""


class RouterCreated(ControlRecord, frozen=True):
    """A router into this topic was created. It starts at `cursor` of its source; the topic's head is `base`.

    For an existing router, the record contains its new flags and filter."""

    router: int
    name: str
    source: str
    source_id: int
    source_epoch: int
    flags: int
    filter: str
    cursor: int
    base: int


class RouterRemoved(ControlRecord, frozen=True):
    """The router was deleted."""

    router: int


class RouterMoved(ControlRecord, frozen=True):
    """The router processed its source up to `cursor`. `copies` of its copies are not in the log."""

    router: int
    cursor: int
    copies: int


class KeyUsed(ControlRecord, frozen=True):
    """The idempotency key or the dedup ids of the append frame that follows directly.

    `ids` contains the digests of the dedup ids of the frame's records, in their order. A digest of zeros is a
    record without dedup id."""

    key: str
    first_seq: int
    records: int
    commit_ts: int
    created_us: int
    window_ms: int = 0
    """Deduplication window of this entry if it is shorter than the topic's; 0 means the topic's window."""
    ids: builtins.bytes = b""


class ProducerClaimed(ControlRecord, frozen=True):
    """A named producer was claimed.

    Only frames under `claim` are accepted; its highest number is `settled`.
    """

    producer_id: int
    claim: int
    settled: int


class CheckpointPassed(ControlRecord, frozen=True):
    """A checkpoint passed here: all earlier log was synced for the snapshot after snapshot `number`."""

    number: int


class ChainMarkRecord(ControlRecord, frozen=True):
    """The chain mark at the start of a commit batch. The fields are described in storage/layout.py."""

    group: int
    prev_stop: int
    prev_seal: int
    durable_stop: int
    group_bytes: int
    flags: int
    settled: list[list[int]]
    damaged: list[int] = []


Body = (
    TopicCreated
    | TopicRemoved
    | ConfigChanged
    | HeadReserved
    | FloorsRaised
    | RecordsRemoved
    | RangeLost
    | RouterCreated
    | RouterRemoved
    | RouterMoved
    | LeaseChange
    | KeyUsed
    | ProducerClaimed
    | CheckpointPassed
    | ChainMarkRecord
)

_KINDS: dict[int, Any] = {
    FrameType.TOPIC_CREATE: TopicCreated,
    FrameType.TOPIC_DELETE: TopicRemoved,
    FrameType.CONFIG_UPDATE: ConfigChanged,
    FrameType.HEAD_WATERMARK: HeadReserved,
    FrameType.EVICT_WATERMARK: FloorsRaised,
    FrameType.DELETE: RecordsRemoved,
    FrameType.LOST_RANGE: RangeLost,
    FrameType.ROUTER_CREATE: RouterCreated,
    FrameType.ROUTER_DELETE: RouterRemoved,
    FrameType.ROUTER_CURSOR: RouterMoved,
    FrameType.LEASE: LeaseChange,
    FrameType.IDEMPOTENCY_KEY: KeyUsed,
    FrameType.PRODUCER_CLAIM: ProducerClaimed,
    FrameType.CHECKPOINT_MARK: CheckpointPassed,
    FrameType.GROUP_MARK: ChainMarkRecord,
}
_TYPES = {kind: number for number, kind in _KINDS.items()}
_FRAME_TYPES = {kind: FrameType(number) for kind, number in _TYPES.items()}
_DECODERS = {number: msgspec.msgpack.Decoder(kind) for number, kind in _KINDS.items()}


def frame_of(body: Body, topic_id: int, epoch: int = 0) -> bytearray:
    """Build the control frame of a topic with this body."""
    return control_frame(_FRAME_TYPES[type(body)], topic_id, _encode(body), epoch=epoch, is_known=True)


def create_frame(topic: ShardTopic) -> bytearray:
    """Build the frame that creates a topic."""
    return frame_of(
        TopicCreated(topic.name, topic.epoch, topic.config.to_bytes()), topic.topic_id, topic.epoch
    )


def config_frame(topic: ShardTopic) -> bytearray:
    """Build the frame with a topic's complete config."""
    return frame_of(ConfigChanged(topic.epoch, topic.config.to_bytes()), topic.topic_id, topic.epoch)


def decode_body(frame_type: int, body: Any) -> Body:
    """Decode the body of a control frame. Raise CorruptData for an unknown type or a malformed body."""
    decoder = _DECODERS.get(frame_type)
    if decoder is None:
        raise CorruptData(f"unknown type of control frame: {frame_type}", type=frame_type)
    try:
        if frame_type == FrameType.LEASE:
            return decode_change(body)
        return decoder.decode(body)  # type: ignore[no-any-return]
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as e:
        raise CorruptData("cannot decode control frame", type=frame_type, reason=str(e)) from None
