"""State of the shard itself in a snapshot, next to the rows of its topics: encoder and decoder. Pure.

The compactor stores this state as opaque bytes. A snapshot *absorbs* a log file if recovery from the snapshot
need not replay the file. Absorbed files are listed by number: every file of the shard below `floor`, and the
files in `absorbed`. File numbers grow across all shards and incarnations, so `floor` also covers files that
were deleted long ago.
"""

from __future__ import annotations

from typing import Any

import msgspec

from ringlog.envelope.messages import SegmentRef
from ringlog.errors import CorruptData

FACTS_VERSION = 1


class ShardFacts(msgspec.Struct, array_like=True, frozen=True):
    """State of a shard in a snapshot, encoded as a MessagePack array. Later versions may append fields."""

    version: int
    last_id: int
    last_epoch: int
    """Highest topic id and epoch that were in use when the first row was captured.
    A topic with a lower or equal id and without a row was deleted."""
    floor: int
    absorbed: list[int]
    waiting: list[tuple[int, str]]
    """(file, path) of files that this snapshot was the first to absorb.
    They are kept as long as the previous snapshot."""
    segments: list[tuple[Any, ...]]
    """Segments in use, each as the fields of SegmentRef in their order."""
    remote_names: dict[str, tuple[int, int]] = {}
    """Names of topics that were created by other shards or under another shard count -> (topic_id, epoch)."""
    adopted: list[str] = []
    """Names whose home shard is another one, but whose topic belongs to this shard."""

    def absorbs(self, file_id: int) -> bool:
        """Return True if the snapshot contains everything that its shard could replay from this file."""
        return file_id < self.floor or file_id in self.absorbed

    def refs(self) -> list[SegmentRef]:
        """Return the segments that were in use."""
        return [SegmentRef(*fields) for fields in self.segments]


_encode = msgspec.msgpack.Encoder().encode
_decode = msgspec.msgpack.Decoder(ShardFacts).decode


def ref_fields(ref: SegmentRef) -> tuple[Any, ...]:
    """Return the fields of a segment reference in the form of `ShardFacts.segments`."""
    return tuple([getattr(ref, name) for name in SegmentRef.__struct_fields__])


def encode_facts(facts: ShardFacts) -> bytes:
    """Encode the facts for a snapshot."""
    return _encode(facts)


def decode_facts(data: bytes, path: str) -> ShardFacts:
    """Decode the facts of the snapshot at `path`.

    Raise CorruptData if they are malformed or of another version.
    """
    try:
        facts = _decode(data)
        facts.refs()
    except (msgspec.MsgspecError, TypeError, RecursionError, UnicodeDecodeError) as e:
        raise CorruptData("cannot decode the shard state of a snapshot", file=path, reason=str(e)) from None
    if facts.version != FACTS_VERSION:
        raise CorruptData(
            f"version of the shard state in a snapshot must be {FACTS_VERSION}, got {facts.version}",
            file=path, version=facts.version,
        )  # fmt: skip
    return facts
