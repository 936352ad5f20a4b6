"""Frame format, version 2, and its constants. No other module computes an offset in a header.

A frame is one atomic append of `count` records of one topic. All numbers are little-endian. The total size is
a multiple of 8, and the frame starts at a multiple of 8 in every buffer, ring and file. The header is ten
64-bit words, so NumPy processes the headers of many frames as one (n, 10) matrix:

word  bytes   field
 0    0..3    frame_len     bytes that follow this field (total size - 4)
      4       type          FrameType
      5       version       2; version 1 is readable and has no validity bitmaps
      6..7    columns       bitmap, bit i = Column i is present
 1    8..15   topic_id
 2    16..23  base_seq      set by the shard; record i has base_seq + i. On the way to a shard: the claim
                            number under which a named producer sends, 0 = none
 3    24..31  commit_ts     set by the shard; microseconds since the epoch
 4    32..35  count         records in the frame
      36..39  epoch         producer: the epoch it expects, 0 = the current one; shard: the epoch
 5    40..47  producer_id   0 = none
 6    48..55  producer_seq
 7    56..59  raw_len       body bytes before compression
      60      codec         0 none, 1 LZ4 block, 2 Zstandard
      61      flags         bits 0-1 durability class, bits 4-5 payload kind, bit 7 only on the way to a
                            shard: FOLLOWS; others zero
      62      hops          in a stored append: number of routers that its records passed
      63      reserved      zero
 8    64..71  body_xxh3     XXH3-64 of the body as stored, by the producer
 9    72..79  seal_xxh3     XXH3-64 of bytes 0..71, seeded with the salt of the frame's file (0 on the wire),
                            by the shard
10..  80..    body          the columns in bit order, each padded with zeros to a multiple of 8

A bytes column is `count + 1` int32 offsets (the first is 0) padded to 8, then the bytes, padded to 8. Headers
are three parts: `count + 1` int32 list offsets, then a bytes column of all keys, then a bytes column of all
values, with `list_offsets[count]` entries each. A fixed column is `count` values. This is Arrow's memory
layout. After the columns come validity bitmaps, for each column among payload, key, tag and node that has a
null: one bit per record, lowest first, 1 = the record has a value. A null has no bytes. Without a bitmap all
values are valid, and an empty value is a value. In the other columns, and in key, tag and node of version 1,
a special value means that the record has none:

  meta                   an empty value means that the record has none
  event_ts               -2**63 means none
  expires_at, not_before 0 means none
  priority               0 is the default
  commit_ts              none: with the column every record has one

Only frames of segments have the column commit_ts, because they contain records of several commits. Without
it, the header's commit_ts applies to every record. With it, the header has the stamp of the first record. A
producer must not send this column.

The seed of the seal binds a frame to one file of one incarnation. Stale bytes of an earlier use of the file,
or a frame written into the wrong file, therefore never verify. Type 0 is invalid, so that unwritten space
cannot look like a frame.

To change this layout, add a version number, teach every decoder both versions, and only then let encoders
write the new one. A reader refuses an unknown version.
"""

from __future__ import annotations

from enum import IntEnum

VERSION = 2
VERSION_FIRST = 1
"""Oldest readable version. It has no validity bitmaps: an empty key, tag or node means that there is none."""
HEADER_BYTES = 80
HEADER_WORDS = 10
SEALED_BYTES = 72
LEN_FIELD_BYTES = 4
FRAME_LEN_MIN = HEADER_BYTES - LEN_FIELD_BYTES

# Word numbers of the header matrix.
W_HEAD = 0
W_TOPIC = 1
W_BASE_SEQ = 2
W_COMMIT_TS = 3
W_COUNT_EPOCH = 4
W_PRODUCER_ID = 5
W_PRODUCER_SEQ = 6
W_TAIL = 7
W_BODY_XXH3 = 8
W_SEAL_XXH3 = 9

WIRE_SEED = 0
"""Seed of the seals of frames in transit. Frames in a file use the file's salt, which is never 0."""

# Shifts inside words 0, 4 and 7.
TYPE_SHIFT = 32
VERSION_SHIFT = 40
COLUMNS_SHIFT = 48
EPOCH_SHIFT = 32
CODEC_SHIFT = 32
FLAGS_SHIFT = 40
HOPS_SHIFT = 48

LEN_MASK = 0xFFFFFFFF
PAD_WORD = 0xFFFFFFFF
"""First word of the padding at the end of a ring: a frame_len that no frame can have."""


class FrameType(IntEnum):
    """Kind of a frame. Control frames have a MessagePack body and no columns."""

    APPEND = 1
    TOPIC_CREATE = 2
    TOPIC_DELETE = 3
    ROUTER_CREATE = 4
    ROUTER_DELETE = 5
    DELETE = 6
    EVICT_WATERMARK = 7
    CHECKPOINT_MARK = 8
    CONFIG_UPDATE = 9
    LEASE = 10
    HEAD_WATERMARK = 11
    GROUP_MARK = 12
    LOST_RANGE = 13
    IDEMPOTENCY_KEY = 14
    ROUTED = 15
    ROUTER_CURSOR = 16
    PRODUCER_CLAIM = 17


FRAME_TYPE_MAX = max(FrameType)
TYPES_WITH_COLUMNS = frozenset({FrameType.APPEND})


class Column(IntEnum):
    """Bit number of each column. Bodies contain columns in this order."""

    PAYLOAD = 0
    KEY = 1
    TAG = 2
    NODE = 3
    HEADERS = 4
    META = 5
    EVENT_TS = 6
    EXPIRES_AT = 7
    NOT_BEFORE = 8
    PRIORITY = 9
    COMMIT_TS = 10


VALID_SHIFT = 11
"""Bit VALID_SHIFT + c means that column c has a validity bitmap."""
NULLABLE = (Column.PAYLOAD, Column.KEY, Column.TAG, Column.NODE)
COLUMNS_KNOWN = (1 << (VALID_SHIFT + len(NULLABLE))) - 1
PRODUCER_COLUMNS = COLUMNS_KNOWN & ~(1 << Column.COMMIT_TS)
"""Columns that a producer may send and of which a record consists. The engine adds the others."""
TIME_COLUMNS = (Column.EVENT_TS, Column.EXPIRES_AT, Column.NOT_BEFORE)
EVENT_TS_NONE = -(1 << 63)

HOPS_MASK = 0xFFFF
"""Hops and the reserved byte after them. A value above ROUTER_HOPS_MAX makes the frame invalid."""

DURABILITY_MASK = 0x03
PAYLOAD_KIND_SHIFT = 4
PAYLOAD_KIND_MASK = 0x30
FLAGS_KNOWN = DURABILITY_MASK | PAYLOAD_KIND_MASK
FLAG_FOLLOWS = 0x80
"""Set only in a frame on its way to a shard, never in a stored one. The shard appends such a frame only
directly after the producer's frame with the previous producer_seq."""

assert HEADER_BYTES == HEADER_WORDS * 8
assert SEALED_BYTES == W_SEAL_XXH3 * 8
assert max(Column) < VALID_SHIFT
assert COLUMNS_KNOWN < 1 << 16


def padded(length: int) -> int:
    """Round a length in bytes up to a multiple of 8."""
    return (length + 7) & ~7
