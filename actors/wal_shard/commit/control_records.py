"""Bodies of control frames: what they say, encoded and decoded in one place (docs/reference/format.md).

Every body is a MessagePack array; a reader ignores further elements, so fields may be appended.
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
"""Under a name of its own: within RecordsRemoved `bytes` is a field."""

_encode = msgspec.msgpack.Encoder().encode


class ControlRecord(msgspec.Struct, array_like=True, frozen=True):
    """Base of all bodies: an array of the fields in their order."""


class TopicCreated(ControlRecord, frozen=True):
    """A topic instance begins."""

    name: str
    epoch: int
    config: bytes


class TopicRemoved(ControlRecord, frozen=True):
    """The instance (topic id, epoch) ends."""

    epoch: int


class ConfigChanged(ControlRecord, frozen=True):
    """The instance's full config from here on."""

    epoch: int
    config: bytes


class HeadReserved(ControlRecord, frozen=True):
    """Numbers up to `reserved` may have been acknowledged; with `settled` none above it were."""

    reserved: int
    settled: bool


class FloorsRaised(ControlRecord, frozen=True):
    """Resulting floors; they only ever grow. `records` and `bytes` are live ones that left by it."""

    cap_floor: int
    ttl_floor: int
    trim_floor: int
    records: int
    bytes: int
    version: int = 0
    """The topic's version from here on: a state that has it already has this."""


class RecordsRemoved(ControlRecord, frozen=True):
    """Records deleted on request or expired one by one: everything below `delete_floor`, and `seqs`.

    It holds the numbers it selected, not what it was asked for, so that replay needs no index and nothing
    that came later is touched (DL-11)."""

    delete_floor: int
    seqs: Bitmap
    """A portable 64-bit roaring bitmap; empty = none."""
    records: int
    bytes: int
    version: int


class RangeLost(ControlRecord, frozen=True):
    """Numbers first..last were skipped in a restart and may have held acknowledged records."""

    first: int
    last: int
    is_trim: bool | Bitmap = False
    """Nothing was lost here: they stand for records that a router's source lost before they were
    forwarded. In a file that was
    mended bytes are here, to fill room."""


class RouterCreated(ControlRecord, frozen=True):
    """A router that leads to this topic begins at `cursor` of its source, the topic's head being `base`. Of
    one that is known flags and filter are from here on."""

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
    """The router is no more."""

    router: int


class RouterMoved(ControlRecord, frozen=True):
    """The router dealt with its source up to `cursor`; `copies` that were made of it are not in the log."""

    router: int
    cursor: int
    copies: int


class KeyUsed(ControlRecord, frozen=True):
    """The append frame right behind this one was sent under this idempotency key, or its records, in their
    order, with the dedup ids whose digests are `ids` (zeros: without one). `window_ms` as in Remembered."""

    key: str
    first_seq: int
    records: int
    commit_ts: int
    created_us: int
    window_ms: int = 0
    ids: builtins.bytes = b""


class ProducerClaimed(ControlRecord, frozen=True):
    """The producer's frames are taken under this claim from here on; its highest number is `settled`."""

    producer_id: int
    claim: int
    settled: int


class CheckpointPassed(ControlRecord, frozen=True):
    """Everything before this was made durable for the snapshot that follows this one."""

    number: int


class GroupMark(ControlRecord, frozen=True):
    """See storage/layout.py."""

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
    | GroupMark
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
    FrameType.GROUP_MARK: GroupMark,
}
_TYPES = {kind: number for number, kind in _KINDS.items()}
_FRAME_TYPES = {kind: FrameType(number) for kind, number in _TYPES.items()}
_DECODERS = {number: msgspec.msgpack.Decoder(kind) for number, kind in _KINDS.items()}


def frame_of(body: Body, topic_id: int, epoch: int = 0) -> bytearray:
    """Build the control frame that says `body` about a topic."""
    return control_frame(_FRAME_TYPES[type(body)], topic_id, _encode(body), epoch=epoch, is_known=True)


def create_frame(topic: ShardTopic) -> bytearray:
    """The frame that begins a topic instance."""
    return frame_of(
        TopicCreated(topic.name, topic.epoch, topic.config.to_bytes()), topic.topic_id, topic.epoch
    )


def config_frame(topic: ShardTopic) -> bytearray:
    """The frame that carries a topic's full config."""
    return frame_of(ConfigChanged(topic.epoch, topic.config.to_bytes()), topic.topic_id, topic.epoch)


def decode_body(frame_type: int, body: Any) -> Body:
    """Decode a control frame's exact body; raises CorruptData for one that no version wrote."""
    decoder = _DECODERS.get(frame_type)
    if decoder is None:
        raise CorruptData("control frame of a kind this engine does not know", type=frame_type)
    try:
        if frame_type == FrameType.LEASE:
            return decode_change(body)
        return decoder.decode(body)  # type: ignore[no-any-return]
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as e:
        raise CorruptData("control frame does not decode", type=frame_type, reason=str(e)) from None
