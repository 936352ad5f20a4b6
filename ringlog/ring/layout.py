"""Format of a ring file, and its constants. No other module computes offsets in a ring.

A ring has one producer, one consumer, and one file in shared memory. It has three parts, each a multiple of 8
bytes:

byte            part
0               header page, 4096 bytes
4096            data area, `capacity` bytes (a multiple of 4096): frames, back to back
4096+capacity   settle area, `settle_entries + 1` entries of 64 bytes

The header page has the identity, written once at creation, and then the live words. Each live word is alone
on a line of 128 bytes, so that the two sides never share a cache line:

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
 384   8     settle_head       consumer   number of settle entries ever written
 512   8     settle_tail       producer   number of settle entries ever taken
 640   8     wants             producer   WakeupFlags
 768   8     producer_state    producer   0 new, 1 attached, 2 closed
 896   8     consumer_state    consumer   0 open, 2 closed

A position counts all bytes ever written and never wraps around. Its index is position % capacity. The size of
a frame is a multiple of 8 bytes. Its first 4 bytes contain its length minus 4. A frame never crosses the end
of the data area: one word whose low 32 bits are PAD_WORD marks the unused rest, and the consumer skips it.
Padding is always published together with the frame after it.

The settle area has one entry more than frames may be in flight, and the consumer keeps that one free. The
last entry that the producer took is therefore still there when another producer process attaches. It shows
where the first producer stopped.

Assumptions: aligned 8-byte loads and stores are atomic, and another processor sees the stores of one side in
program order. This holds on x86-64; memory.py handles other machines.

To change a layout, add a version number. A ring does not survive a restart of the engine, so no process reads
two versions. It only has to refuse the other one.
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
"""Equal to frame.layout.PAD_WORD: a length that no frame can have."""

_IDENTITY = struct.Struct("<8sIIQQQQQQ")
IDENTITY_BYTES = _IDENTITY.size + 8


class RingWord(IntEnum):
    """Live words. The value is the index in the header page, as an array of 64-bit words."""

    HEAD = 16
    TAIL = 32
    SETTLE_HEAD = 48
    SETTLE_TAIL = 64
    WANTS = 80
    PRODUCER_STATE = 96
    CONSUMER_STATE = 112


class WakeupFlags:
    """Bits of the `wants` word: when the shard rings the client's bell, and what else the client requests.

    Plain integers, because combining members of an IntFlag takes about 1 µs.
    """

    SETTLEMENTS = 1
    PUBLICATION = 2
    NO_BATCH_WINDOW = 4
    """Commit this client's frames without a batch window, under any pressure."""


class RingProducerState(IntEnum):
    """State of the producer's side. CLOSED is final."""

    NEW = 0
    ATTACHED = 1
    CLOSED = 2


class RingConsumerState(IntEnum):
    """State of the consumer's side. CLOSED is final."""

    OPEN = 0
    CLOSED = 2
    """Words or frames in the ring are corrupt. The consumer reads nothing more."""


@dataclass(frozen=True, slots=True)
class RingIdentity:
    """Immutable part of the header: size, shard, engine and client of a ring."""

    shard: int
    capacity: int
    settle_entries: int
    engine: int
    client: int
    created_us: int
    random: int

    @property
    def settle_slots(self) -> int:
        """Number of entries in the settle area: one more than frames may be in flight."""
        return self.settle_entries + 1

    @property
    def settle_offset(self) -> int:
        """Offset of the settle area in the file."""
        return HEADER_BYTES + self.capacity

    @property
    def file_bytes(self) -> int:
        """Size of the whole file in bytes."""
        return self.settle_offset + self.settle_slots * SETTLE_ENTRY_BYTES

    def encode(self) -> bytes:
        """Return the first IDENTITY_BYTES bytes of the file."""
        body = _IDENTITY.pack(
            MAGIC, VERSION, self.shard, self.capacity, self.settle_entries, self.engine, self.client,
            self.created_us, self.random,
        )  # fmt: skip
        return body + xxhash.xxh3_64_intdigest(body).to_bytes(8, "little")


def decode_identity(data: bytes, path: str) -> RingIdentity:
    """Decode and verify the first bytes of a ring file. Raise RingError with the difference."""
    if len(data) < IDENTITY_BYTES:
        raise RingError(
            f"ring file must have at least {IDENTITY_BYTES} bytes, got {len(data)}",
            path=path,
            bytes=len(data),
        )
    magic, version, *rest = _IDENTITY.unpack_from(data)
    if magic != MAGIC:
        raise RingError("not a ring file: wrong magic", path=path, found=magic, expected=MAGIC)
    if version != VERSION:
        raise RingError(
            f"ring version must be {VERSION}, got {version}; use one version of ringlog on this host",
            path=path,
            found=version,
            expected=VERSION,
        )
    stored = int.from_bytes(data[_IDENTITY.size : IDENTITY_BYTES], "little")
    if xxhash.xxh3_64_intdigest(data[: _IDENTITY.size]) != stored:
        raise RingError("ring identity: checksum mismatch", path=path)
    return RingIdentity(*rest)


def hash_id(text: str) -> int:
    """Return the hash that represents an engine or client id in the identity."""
    return xxhash.xxh3_64_intdigest(text.encode())


assert max(RingWord) * 8 + 8 <= HEADER_BYTES
assert min(RingWord) * 8 >= IDENTITY_BYTES
assert all(word * 8 % LINE_BYTES == 0 for word in RingWord)
