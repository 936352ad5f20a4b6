"""A ring file: the drawing, the constants, nothing else knows where anything lies.

One producer, one consumer, one file in shared memory. Three parts, each a multiple of 8 bytes:

byte            part
0               header page, 4096 bytes
4096            data area, `capacity` bytes (a multiple of 4096): frames, back to back
4096+capacity   settle area, `settle_entries + 1` entries of 64 bytes

The header page. The identity is written once, when the ring is made; then come the live words, each
alone on a line of 128 bytes, so that the two sides never share a cache line:

byte   size  field             written by
 0     8     magic             maker      b"RLRING1\\0"
 8     4     version           maker      1
 12    4     shard             maker
 16    8     capacity          maker      bytes of the data area
 24    8     settle_entries    maker      frames that may be in flight
 32    8     engine            maker      XXH3-64 of the engine id
 40    8     client            maker      XXH3-64 of the client id
 48    8     created_us        maker
 56    8     random            maker
 64    8     identity_xxh3     maker      XXH3-64 of bytes 0..63
 128   8     head              producer   position after the last published frame
 256   8     tail              consumer   position after the last settled frame
 384   8     settle_head       consumer   settle entries ever written
 512   8     settle_tail       producer   settle entries ever taken
 640   8     wants             producer   bits: what to wake the client for
 768   8     producer_state    producer   0 new, 1 attached, 2 closed
 896   8     consumer_state    consumer   0 open, 2 closed

A position counts bytes ever written and never wraps; its index is position % capacity. A frame is a
multiple of 8 bytes whose first 4 bytes hold its length less 4, and it never straddles the end of the
data area: what is left there is filled by one word whose low 32 bits are PAD_WORD, the rest of the
lap is skipped. A pad is always published together with the frame after it.

The settle area has one entry more than may be in flight, and the consumer leaves that one free: so
the entry that the producer took last is still there when another producer process attaches, and says
where the first one stopped.

Assumed: aligned 8-byte loads and stores are whole; another processor sees one side's stores in the
order in which they were made (true on x86-64; position.py decides what to do elsewhere).

To change a layout: new version number; a ring never outlives the engine's start, so nobody has to
read two versions, only to refuse the other.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass
from enum import IntEnum

import xxhash

from ringlog.errors import RingError
from ringlog.limits import SETTLE_ENTRY_BYTES

MAGIC = b"RLRING1\0"
VERSION = 1
HEADER_BYTES = 4096
CAPACITY_UNIT = 4096
LINE_BYTES = 128
SETTLE_WORDS = SETTLE_ENTRY_BYTES // 8
PAD_WORD = 0xFFFFFFFF
PAD_BYTES = PAD_WORD.to_bytes(8, "little")
"""Same value as frame.layout.PAD_WORD: a length that no frame can have."""

_IDENTITY = struct.Struct("<8sIIQQQQQQ")
IDENTITY_BYTES = _IDENTITY.size + 8


class RingWord(IntEnum):
    """Live words; the value is the index of the word in the header page seen as 64-bit words."""

    HEAD = 16
    TAIL = 32
    SETTLE_HEAD = 48
    SETTLE_TAIL = 64
    WANTS = 80
    PRODUCER_STATE = 96
    CONSUMER_STATE = 112


class WakeupFlags:
    """Bits of the `wants` word: when the shard is to ring the client's bell, and what else it asks for.

    Plain integers: to combine members of an IntFlag takes a microsecond each time.
    """

    SETTLEMENTS = 1
    PUBLICATION = 2
    NO_BATCH_WINDOW = 4
    """Take my frames without waiting for those of others, whatever the pressure (G-12)."""


class RingProducerState(IntEnum):
    """Life of the producer's side; CLOSED is final."""

    NEW = 0
    ATTACHED = 1
    CLOSED = 2


class RingConsumerState(IntEnum):
    """Life of the consumer's side; CLOSED is final."""

    OPEN = 0
    CLOSED = 2
    """The words or frames in the ring are corrupt: it is read no more."""


@dataclass(frozen=True, slots=True)
class RingIdentity:
    """What a ring is and whose: the part of the header that never changes."""

    shard: int
    capacity: int
    settle_entries: int
    engine: int
    client: int
    created_us: int
    random: int

    @property
    def settle_slots(self) -> int:
        """Entries in the settle area: one more than may be in flight."""
        return self.settle_entries + 1

    @property
    def settle_offset(self) -> int:
        """Where the settle area begins in the file."""
        return HEADER_BYTES + self.capacity

    @property
    def file_bytes(self) -> int:
        """Size of the whole file."""
        return self.settle_offset + self.settle_slots * SETTLE_ENTRY_BYTES

    def encode(self) -> bytes:
        """The first IDENTITY_BYTES bytes of the file."""
        body = _IDENTITY.pack(
            MAGIC, VERSION, self.shard, self.capacity, self.settle_entries, self.engine, self.client,
            self.created_us, self.random,
        )  # fmt: skip
        return body + xxhash.xxh3_64_intdigest(body).to_bytes(8, "little")


def decode_identity(data: bytes, path: str) -> RingIdentity:
    """Decode and verify the first bytes of a ring file; raises RingError naming what differs."""
    if len(data) < IDENTITY_BYTES:
        raise RingError("not a ring: too short", path=path, bytes=len(data))
    magic, version, *rest = _IDENTITY.unpack_from(data)
    if magic != MAGIC:
        raise RingError("not a ring: magic differs", path=path, found=magic, expected=MAGIC)
    if version != VERSION:
        raise RingError("ring of another version", path=path, found=version, expected=VERSION)
    stored = int.from_bytes(data[_IDENTITY.size : IDENTITY_BYTES], "little")
    if xxhash.xxh3_64_intdigest(data[: _IDENTITY.size]) != stored:
        raise RingError("ring identity does not verify", path=path)
    return RingIdentity(*rest)


def hash_id(text: str) -> int:
    """How an engine or client id appears in the identity."""
    return xxhash.xxh3_64_intdigest(text.encode())


assert max(RingWord) * 8 + 8 <= HEADER_BYTES
assert min(RingWord) * 8 >= IDENTITY_BYTES
assert all(word * 8 % LINE_BYTES == 0 for word in RingWord)
