"""The index part: tables of topics and frames, and the facts that differ between records of a frame. Pure.

The segment writer and the rebuild of an index from its data part share one builder, so both produce the
same bytes (S2).
"""

from __future__ import annotations

from itertools import accumulate
from typing import Any, NamedTuple

import numpy as np
import xxhash
from numpy.typing import NDArray

from ringlog.errors import CorruptData
from ringlog.frame.layout import EVENT_TS_NONE
from ringlog.limits import BATCH_RECORDS_MAX, FRAME_BYTES_MAX, SEQ_MAX
from ringlog.segment.frame_encoder import SealedFrame
from ringlog.segment.layout import (
    BLOCK_HEAD_BYTES,
    DATA_HEADER_BYTES,
    ENTRY_DTYPE,
    HAS_EXPIRES,
    HAS_NOT_BEFORE,
    HAS_PRIORITY,
    HAS_SIZES,
    HAS_STAMPS,
    IDX_HEADER_BYTES,
    TOPIC_DTYPE,
    IndexHeader,
)

I64 = NDArray[np.int64]
Table = NDArray[Any]
_KINDS_KNOWN = HAS_SIZES | HAS_STAMPS | HAS_EXPIRES | HAS_NOT_BEFORE | HAS_PRIORITY


class IndexRecordColumns(NamedTuple):
    """Facts of every record of a frame, (n,) each."""

    sizes: I64
    stamps: I64
    expires: I64
    """Microseconds; 0 for none."""
    not_before: I64 | None = None
    """Microseconds, 0 for none; None if no record has one."""
    priorities: NDArray[np.uint8] | None = None
    """0 for none; None if no record has one."""


class IndexBuilder:
    """Collects topics and frames in the order of the data part."""

    def __init__(self) -> None:
        self._topics: list[tuple[int, ...]] = []
        self._entries: list[tuple[int, ...]] = []
        self._blocks: list[bytes] = []
        self._columns_bytes = 0
        self._topic_start = 0
        self.records: int = 0

    @property
    def topics(self) -> int:
        """Number of topics added."""
        return len(self._topics)

    @property
    def frames(self) -> int:
        """Number of frames added."""
        return len(self._entries)

    @property
    def topic_frames(self) -> int:
        """Number of frames of the current topic."""
        return len(self._entries) - self._topic_start

    @property
    def sole_topic_range(self) -> tuple[int, int, int]:
        """(topic_id, first_seq, last_seq) if there is exactly one topic, else zeros."""
        if len(self._topics) != 1:
            return 0, 0, 0
        topic_id, _, first_seq, last_seq, *_ = self._topics[0]
        return topic_id, first_seq, last_seq

    def add_frame(self, frame: SealedFrame, offset: int) -> None:
        """Add a frame of the current topic that lies at `offset` of the data part."""
        stamps, size = frame.stamps, int(frame.sizes.sum())
        events = None if frame.events is None else frame.events[frame.events != EVENT_TS_NONE]
        has_events = events is not None and len(events)
        expires = None if frame.expires is None or not frame.expires.any() else frame.expires
        block = _block(frame.sizes, stamps, expires, frame.not_before, frame.priorities)
        self._entries.append(
            (
                frame.base_seq, frame.count, offset, frame.length, int(stamps.min()), int(stamps.max()),
                int(events.min()) if events is not None and has_events else EVENT_TS_NONE,
                int(events.max()) if events is not None and has_events else EVENT_TS_NONE,
                0 if expires is None else int(expires[expires != 0].min()), size,
                self._columns_bytes + 1 if block else 0,
            )
        )  # fmt: skip
        if block:
            self._blocks.append(block)
            self._columns_bytes += len(block)
        self.records += frame.count

    def open_topic_seqs(self) -> I64:
        """Return the (n,) seqs of the current topic's records."""
        rows = self._entries[self._topic_start :]
        return np.concatenate([np.arange(row[0], row[0] + row[1], dtype=np.int64) for row in rows])

    def end_topic(self, topic_id: int, epoch: int) -> None:
        """Add a topic with the frames since the previous topic. At least one frame is required."""
        rows = self._entries[self._topic_start :]
        own = [row[8] for row in rows if row[8]]
        self._topics.append(
            (
                topic_id, epoch, rows[0][0], rows[-1][0] + rows[-1][1] - 1, sum(row[1] for row in rows),
                sum(row[9] for row in rows), self._topic_start, len(self._entries), rows[0][2],
                rows[-1][2] + rows[-1][3], min(row[4] for row in rows), max(row[5] for row in rows),
                min(own, default=0),
            )
        )  # fmt: skip
        self._topic_start = len(self._entries)

    def tables(self) -> tuple[Table, Table]:
        """Return the tables of topics and of frames."""
        topics = np.array(self._topics, dtype=TOPIC_DTYPE)
        entries = np.array(self._entries, dtype=ENTRY_DTYPE)
        columns_start = IDX_HEADER_BYTES + topics.nbytes + entries.nbytes
        # Stored as 1 + offset within the columns, because the size of the tables was not known yet.
        has_block = entries["columns_at"] > 0
        entries["columns_at"] += np.where(has_block, columns_start - 1, 0)
        return topics, entries

    def encode(
        self, *, number: int, salt: int, shard: int, shards: int, engine_id: bytes, created_us: int,
        data_bytes: int, flags: int,
    ) -> list[bytes]:  # fmt: skip
        """Return the whole part in pieces."""
        topics, entries = self.tables()
        tables = topics.tobytes() + entries.tobytes()
        header = IndexHeader(
            topics=len(topics), number=number, salt=salt, frames=len(entries), records=self.records,
            data_bytes=data_bytes, columns_bytes=self._columns_bytes,
            tables_xxh3=xxhash.xxh3_64_intdigest(tables), created_us=created_us, shard=shard, shards=shards,
            flags=flags, engine_id=engine_id,
        )  # fmt: skip
        return [header.encode(), tables, b"".join(self._blocks)]


def _block(
    sizes: I64, stamps: I64, expires: I64 | None, not_before: I64 | None, priorities: NDArray[np.uint8] | None
) -> bytes:
    """Return checksum, kinds and columns. Empty if no record of the frame differs from the others."""
    kinds, parts = 0, []
    if (sizes != sizes[0]).any():
        kinds |= HAS_SIZES
        parts.append(_padded(sizes.astype("<u4").tobytes()))
    if (stamps != stamps[0]).any():
        kinds |= HAS_STAMPS
        parts.append(stamps.astype("<i8").tobytes())
    if expires is not None and (expires != expires[0]).any():
        kinds |= HAS_EXPIRES
        parts.append(expires.astype("<i8").tobytes())
    if not_before is not None and not_before.any():
        kinds |= HAS_NOT_BEFORE
        parts.append(not_before.astype("<i8").tobytes())
    if priorities is not None and priorities.any():
        kinds |= HAS_PRIORITY
        parts.append(_padded(priorities.astype("u1").tobytes()))
    if not kinds:
        return b""
    rest = b"".join([kinds.to_bytes(8, "little"), *parts])
    return xxhash.xxh3_64_intdigest(rest).to_bytes(8, "little") + rest


def _padded(data: bytes) -> bytes:
    return data + bytes(-len(data) & 7)


def block_bytes_max(count: int) -> int:
    """Return the maximum size in bytes of a block of `count` records."""
    return BLOCK_HEAD_BYTES + sum(_column_bytes(_KINDS_KNOWN, count))


def read_block(data: bytes, entry: Any, path: str) -> IndexRecordColumns:
    """Return the columns of the records of one frame.

    `data` are the bytes at `columns_at`: block_bytes_max of them, or up to the end of the part. Raises
    CorruptData.
    """
    count = int(entry["count"])
    at = int(entry["columns_at"])
    kinds = _kinds(data, count, at, path) if at else 0
    # Constant columns are broadcast views of one value, because most callers need only one column.
    sizes = np.broadcast_to(np.int64(int(entry["bytes"]) // count), count)
    stamps = np.broadcast_to(np.int64(entry["ts_min"]), count)
    expires = np.broadcast_to(np.int64(entry["expires_min"]), count)
    if not at:
        return IndexRecordColumns(sizes, stamps, expires)
    places = list(accumulate(_column_bytes(kinds, count), initial=BLOCK_HEAD_BYTES))
    if kinds & HAS_SIZES:
        sizes = np.frombuffer(data, "<u4", count, places[0]).astype(np.int64)
    if kinds & HAS_STAMPS:
        stamps = np.frombuffer(data, "<i8", count, places[1])
    if kinds & HAS_EXPIRES:
        expires = np.frombuffer(data, "<i8", count, places[2])
    not_before = np.frombuffer(data, "<i8", count, places[3]) if kinds & HAS_NOT_BEFORE else None
    priorities = np.frombuffer(data, "u1", count, places[4]) if kinds & HAS_PRIORITY else None
    return IndexRecordColumns(sizes, stamps, expires, not_before, priorities)


def read_sizes(data: bytes, count: int, at: int, path: str) -> I64 | None:
    """Return the (count,) accounted sizes, None if all records have the same. Otherwise as read_block."""
    if not _kinds(data, count, at, path) & HAS_SIZES:
        return None
    return np.frombuffer(data, "<u4", count, BLOCK_HEAD_BYTES).astype(np.int64)


def read_stamps(data: bytes, count: int, at: int, path: str) -> I64 | None:
    """Return the (count,) commit stamps, None if all records have the same. Otherwise as read_block."""
    kinds = _kinds(data, count, at, path)
    if not kinds & HAS_STAMPS:
        return None
    return np.frombuffer(data, "<i8", count, BLOCK_HEAD_BYTES + _column_bytes(kinds, count)[0])


def _column_bytes(kinds: int, count: int) -> tuple[int, ...]:
    """Return the size in bytes of each column, in stored order."""
    return tuple(
        (width * count + 7) & ~7 if kinds & kind else 0
        for kind, width in (
            (HAS_SIZES, 4), (HAS_STAMPS, 8), (HAS_EXPIRES, 8), (HAS_NOT_BEFORE, 8), (HAS_PRIORITY, 1),
        )
    )  # fmt: skip


def _kinds(data: bytes, count: int, at: int, path: str) -> int:
    """Verify a block's checksum and return the bit mask of its columns."""
    kinds = int.from_bytes(data[8:16], "little")
    stop = BLOCK_HEAD_BYTES + sum(_column_bytes(kinds, count))
    stored = int.from_bytes(data[:8], "little")
    if len(data) < stop or kinds & ~_KINDS_KNOWN or xxhash.xxh3_64_intdigest(data[8:stop]) != stored:
        raise CorruptData("index record columns: checksum mismatch", file=path, offset=at)
    return kinds


def read_tables(header: IndexHeader, data: bytes, file_bytes: int, path: str) -> tuple[Table, Table]:
    """Return both tables. Raise CorruptData for a wrong checksum and for impossible numbers."""
    if xxhash.xxh3_64_intdigest(data) != header.tables_xxh3:
        raise CorruptData("index tables: checksum mismatch", file=path, offset=IDX_HEADER_BYTES)
    topics = np.frombuffer(data, TOPIC_DTYPE, header.topics)
    entries = np.frombuffer(data, ENTRY_DTYPE, header.frames, topics.nbytes)
    if not (len(topics) and _is_consistent(header, topics, entries, file_bytes)):
        raise CorruptData("index tables are inconsistent", file=path, offset=IDX_HEADER_BYTES)
    return topics, entries


def _is_consistent(header: IndexHeader, topics: Table, entries: Table, file_bytes: int) -> bool:
    """Return whether the tables are consistent, so that readers need no further bounds checks."""
    counts, base = entries["count"], entries["base_seq"]
    offsets, lengths, places = entries["offset"], entries["length"], entries["columns_at"]
    start, stop = topics["entry_start"], topics["entry_stop"]
    sound = (
        bool((counts > 0).all() and (counts <= BATCH_RECORDS_MAX).all())
        and bool((base >= 0).all() and (base <= SEQ_MAX - counts + 1).all())
        and bool((lengths >= 80).all() and (lengths <= FRAME_BYTES_MAX).all())
        and int(offsets[0]) == DATA_HEADER_BYTES
        and bool((offsets[1:] == (offsets + lengths)[:-1]).all())
        and int(offsets[-1] + lengths[-1]) == header.data_bytes
        and bool(((places == 0) | ((places >= header.tables_stop) & (places <= file_bytes - 16))).all())
        and int(counts.sum()) == header.records
        and int(start[0]) == 0
        and int(stop[-1]) == header.frames
        and bool((start < stop).all() and (start[1:] == stop[:-1]).all())
        and bool((topics["topic_id"][1:] > topics["topic_id"][:-1]).all())
    )
    if not sound:
        return False
    ascends = base[1:] >= (base + counts)[:-1]
    ascends[start[1:] - 1] = True
    return (
        bool(ascends.all())
        and bool((topics["first_seq"] == base[start]).all())
        and bool((topics["last_seq"] == (base + counts)[stop - 1] - 1).all())
        and bool((topics["data_start"] == offsets[start]).all())
        and bool((topics["data_stop"] == (offsets + lengths)[stop - 1]).all())
        and bool((topics["records"] == np.add.reduceat(counts, start)).all())
        and bool((topics["bytes"] == np.add.reduceat(entries["bytes"], start)).all())
    )
