"""What a snapshot keeps of the shard itself, beside the rows of its topics: encoded and decoded. Pure.

The compactor passes it on as bytes. Which log files a snapshot absorbs is said by number: every file of
the shard below `floor`, and those in `absorbed`. Numbers of files grow over all shards and incarnations,
so that one number says it for files that are long gone (SH-7).
"""

from __future__ import annotations

from typing import Any

import msgspec

from ringlog.envelope.messages import SegmentRef
from ringlog.errors import CorruptData

FACTS_VERSION = 1


class ShardFacts(msgspec.Struct, array_like=True, frozen=True):
    """A MessagePack array; a later version may append to it."""

    version: int
    last_id: int
    last_epoch: int
    """Numbers up to these were taken when the first row was captured: a topic below without a row is gone."""
    floor: int
    absorbed: list[int]
    waiting: list[tuple[int, str]]
    """(file, path) of what this snapshot was the first to absorb: kept as long as the one before it is."""
    segments: list[tuple[Any, ...]]
    """Fields of SegmentRef, in their order."""
    foreign: dict[str, tuple[int, int]] = {}
    """Names that were made elsewhere or under other layouts -> (topic_id, epoch)."""
    adopted: list[str] = []
    """Names homed elsewhere that this shard looks after."""

    def absorbs(self, file_id: int) -> bool:
        """Does the snapshot stand for everything its shard could find in that file?"""
        return file_id < self.floor or file_id in self.absorbed

    def refs(self) -> list[SegmentRef]:
        """The segments that were in force."""
        return [SegmentRef(*fields) for fields in self.segments]


_encode = msgspec.msgpack.Encoder().encode
_decode = msgspec.msgpack.Decoder(ShardFacts).decode


def ref_fields(ref: SegmentRef) -> tuple[Any, ...]:
    """The fields of a segment's reference, as facts keep them."""
    return tuple([getattr(ref, name) for name in SegmentRef.__struct_fields__])


def encode_facts(facts: ShardFacts) -> bytes:
    """The bytes that a snapshot keeps."""
    return _encode(facts)


def decode_facts(data: bytes, path: str) -> ShardFacts:
    """Decode; raises CorruptData naming the snapshot for what no version can have written."""
    try:
        facts = _decode(data)
        facts.refs()
    except (msgspec.MsgspecError, TypeError, RecursionError, UnicodeDecodeError) as e:
        raise CorruptData("a snapshot's facts do not decode", file=path, reason=str(e)) from None
    if facts.version != FACTS_VERSION:
        raise CorruptData(
            "snapshot facts of a version this engine does not know", file=path, version=facts.version
        )
    return facts
