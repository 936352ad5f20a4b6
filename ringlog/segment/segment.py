"""Segment: read access to a segment's index, tags and deletion marks.

All queries use the index parts only, so they work for a segment whose data part is in a cold store. The
tables stay in memory (88 bytes per frame, 104 bytes per topic). Other bytes are read on demand.
"""

from __future__ import annotations

import errno
from collections.abc import Iterator, Sequence
from contextlib import suppress
from typing import Any

import numpy as np
from numpy.typing import NDArray
from pyroaring import BitMap64

from ringlog.envelope.messages import SegmentRef
from ringlog.errors import CorruptData, DiskError, RinglogError
from ringlog.segment.deletion_marks import DeletionMarks, bitmap_of, seqs_within
from ringlog.segment.index import (
    IndexRecordColumns,
    Table,
    block_bytes_max,
    read_block,
    read_sizes,
    read_stamps,
    read_tables,
)
from ringlog.segment.layout import (
    DATA,
    DATA_HEADER_BYTES,
    DELETED,
    FLAG_TAGS,
    IDX,
    IDX_HEADER_BYTES,
    POSTINGS_PER_PAGE,
    TAGS,
    TAGS_HEADER_BYTES,
    DeletionMarksHeader,
    IndexHeader,
    SegmentDataHeader,
    TagsHeader,
    parse_stem,
)
from ringlog.segment.parts import part_names
from ringlog.segment.tags import TagsIndex
from ringlog.storage.disk import Disk
from ringlog.tags import TagMatch

U64 = NDArray[np.uint64]
I64 = NDArray[np.int64]


class Segment:
    """One open segment. A `row` is an index into `topics`. Not thread-safe."""

    def __init__(
        self, disk: Disk, data_dir: str, stem: str, fd: int, header: IndexHeader, topics: Table,
        entries: Table,
    ) -> None:  # fmt: skip
        self._disk, self._fd = disk, fd
        self._base = f"{data_dir}/{stem}"
        self._tags_fd = -1
        self._tags: TagsIndex | None = None
        self.header = header
        self.topics = topics
        """(topics,) TOPIC_DTYPE, ascending topic_id."""
        self.entries = entries
        """(frames,) ENTRY_DTYPE, grouped by topic."""
        self.ref: SegmentRef = SegmentRef(
            number=header.number, stem=stem, salt=header.salt, data_bytes=header.data_bytes,
            records=header.records, frames=header.frames, topics=header.topics,
            created_us=header.created_us,
        )  # fmt: skip
        self.bad_marks: int = 0
        """Number of bytes read from the `.del` part that are neither 0x00 nor 0xD5."""
        self._first_topic = int(topics["topic_id"][0])
        self._last_seqs: I64 = entries["base_seq"] + entries["count"] - 1
        self._ordinals: I64 = np.concatenate(([0], np.cumsum(entries["count"])))
        self._marks = DeletionMarks(
            disk, data_dir, stem, DeletionMarksHeader(header.number, header.salt, header.records)
        )

    @classmethod
    def open(cls, disk: Disk, data_dir: str, stem: str) -> Segment:
        """Open the index part. The data part is not read.

        Raises CorruptData for a damaged or foreign index (use rebuild_index), and DiskError if the file is
        not readable. errno ENOENT means that it does not exist.
        """
        path = f"{data_dir}/{stem}{IDX}"
        fd = disk.open_read(path)
        try:
            header, topics, entries = _read_index(disk, fd, path)
            _check_name(stem, header, topics, path)
        except BaseException:
            disk.close(fd)
            raise
        return cls(disk, data_dir, stem, fd, header, topics, entries)

    def tags_fault(self) -> str:
        """Return why the required tags part is unusable, judged by header and size; empty if it is usable.

        A missing tags part is such a reason. Raises DiskError for other failures.
        """
        if not self.header.flags & FLAG_TAGS:
            return ""
        try:
            self._open_tags()
        except CorruptData as e:
            return e.message
        return ""

    def close(self) -> None:
        """Close the files."""
        self._marks.close()
        for fd in (self._fd, self._tags_fd):
            if fd >= 0:
                self._disk.close(fd)
        self._fd = self._tags_fd = -1

    def __del__(self) -> None:
        # A reader that was dropped without a close may hold the only reference to these files.
        with suppress(AttributeError, RinglogError):  # AttributeError: the constructor failed half-way.
            self.close()

    # -- places -----------------------------------------------------------------------------------

    def row(self, topic_id: int) -> int | None:
        """Return the row of a topic, or None if the segment has no record of it."""
        if len(self.topics) == 1:
            return 0 if self._first_topic == topic_id else None
        at = int(np.searchsorted(self.topics["topic_id"], np.uint64(topic_id)))
        return at if at < len(self.topics) and int(self.topics["topic_id"][at]) == topic_id else None

    def frame_at(self, row: int, seq: int) -> tuple[int, int] | None:
        """Return (data offset, entry) of the frame with the first stored seq >= `seq`; or None."""
        start, stop = self._entry_range(row)
        at = start + int(np.searchsorted(self._last_seqs[start:stop], seq))
        return (int(self.entries["offset"][at]), at) if at < stop else None

    def seek_time(self, row: int, ts_us: int) -> int | None:
        """Return the first stored seq committed at or after `ts_us`, or None. Stamps never decrease."""
        start, stop = self._entry_range(row)
        late = self.entries["ts_max"][start:stop] >= ts_us
        at = int(late.argmax())
        if not late[at]:
            return None
        at += start
        _, count, place, data = self._block_at(at)
        stamps = read_stamps(data, count, place, self._base + IDX) if place else None
        return int(self.entries["base_seq"][at]) + (0 if stamps is None else int(stamps.searchsorted(ts_us)))

    def positions(self, row: int, first: int, last: int) -> tuple[U64, I64, I64]:
        """Return (seqs, accounted sizes, commit stamps in microseconds) of stored records in [first, last].

        Deleted records are included while they are stored. Raises CorruptData, DiskError.
        """
        seqs, sizes, stamps = [], [], []
        for at, columns in self._columns(*self._entries_within(row, first, last)):
            own, inside = self._seqs_within(at, first, last)
            seqs.append(own)
            sizes.append(columns.sizes[inside])
            stamps.append(columns.stamps[inside])
        if not seqs:
            return np.empty(0, np.uint64), np.empty(0, np.int64), np.empty(0, np.int64)
        return np.concatenate(seqs).astype(np.uint64), np.concatenate(sizes), np.concatenate(stamps)

    def expired(self, row: int, now_us: int) -> U64:
        """Return the ascending seqs whose own `expires_at` is at or before `now_us`."""
        start, stop = self._entry_range(row)
        least = self.entries["expires_min"][start:stop]
        found = [np.empty(0, np.uint64)]
        for place in (np.flatnonzero((least != 0) & (least <= now_us)) + start).tolist():
            for at, columns in self._columns(place, place + 1):
                rows = np.flatnonzero((columns.expires != 0) & (columns.expires <= now_us))
                found.append((rows + int(self.entries["base_seq"][at])).astype(np.uint64))
        return np.concatenate(found)

    def delivery_attributes(
        self, row: int, first: int, last: int
    ) -> list[tuple[I64, IndexRecordColumns, slice]]:
        """Return (seqs, columns, rows) for each frame in first..last with a `not_before` or a priority.

        `seqs` are the frame's seqs within the range, `rows` their rows in the frame's columns. Raises
        CorruptData, DiskError.
        """
        found = []
        start, stop = self._entries_within(row, first, last)
        # A frame without a block has neither of the two columns.
        for place in (np.flatnonzero(self.entries["columns_at"][start:stop]) + start).tolist():
            for at, columns in self._columns(place, place + 1):
                if columns.not_before is not None or columns.priorities is not None:
                    found.append((*self._seqs_within(at, first, last), columns))
        return [(seqs, columns, rows) for seqs, rows, columns in found]

    def sizes_in(self, entries: Sequence[int]) -> Iterator[I64 | None]:
        """Yield for each frame the (count,) accounted sizes of its records, or None if all are equal.

        Raises CorruptData, DiskError.
        """
        counts, places = self.entries["count"].tolist(), [*self.entries["columns_at"].tolist(), 0]
        for at in entries:
            place, count = places[at], counts[at]
            if not place:
                yield None
                continue
            most = block_bytes_max(count)
            length = min(most, places[at + 1] - place) if places[at + 1] > place else most
            data = self._disk.read_at(self._fd, length, place)
            yield read_sizes(data, count, place, self._base + IDX)

    def next_expiry(self, row: int, now_us: int) -> int:
        """Return the earliest own `expires_at` after `now_us` in microseconds; 0 = none."""
        start, stop = self._entry_range(row)
        least = self.entries["expires_min"][start:stop]
        later = least[least > now_us].tolist()
        for place in (np.flatnonzero((least != 0) & (least <= now_us)) + start).tolist():
            for _, columns in self._columns(place, place + 1):
                later += columns.expires[columns.expires > now_us].tolist()
        return int(min(later, default=0))

    def _entry_range(self, row: int) -> tuple[int, int]:
        return int(self.topics["entry_start"][row]), int(self.topics["entry_stop"][row])

    def _entries_within(self, row: int, first: int, last: int) -> tuple[int, int]:
        start, stop = self._entry_range(row)
        low = start + int(np.searchsorted(self._last_seqs[start:stop], first))
        high = start + int(np.searchsorted(self.entries["base_seq"][start:stop], last, side="right"))
        return low, max(low, high)

    def _seqs_within(self, at: int, first: int, last: int) -> tuple[I64, slice]:
        base, count = int(self.entries["base_seq"][at]), int(self.entries["count"][at])
        inside = slice(max(first - base, 0), min(last - base + 1, count))
        return np.arange(base + inside.start, base + inside.stop, dtype=np.int64), inside

    def _columns(self, start: int, stop: int) -> Iterator[tuple[int, IndexRecordColumns]]:
        """Yield (entry number, record columns) of entries [start, stop)."""
        for at in range(start, stop):
            entry, _, _, data = self._block_at(at)
            yield at, read_block(data, entry, self._base + IDX)

    def _block_at(self, at: int) -> tuple[Any, int, int, bytes]:
        """Return (entry, its count, offset of its record columns or 0, their bytes), not verified."""
        entry = self.entries[at]
        count, place, data = int(entry["count"]), int(entry["columns_at"]), b""
        if place:
            # Read up to the next frame's block if there is one: most blocks are smaller than the maximum.
            after = int(self.entries["columns_at"][at + 1]) - place if at + 1 < len(self.entries) else 0
            most = block_bytes_max(count)
            data = self._disk.read_at(self._fd, min(after, most) if after > 0 else most, place)
        return entry, count, place, data

    # -- tags -------------------------------------------------------------------------------------

    def tagged(self, topic_id: int, match: TagMatch) -> U64:
        """Return a topic's ascending seqs whose tag matches. Raise CorruptData, DiskError."""
        row = self.row(topic_id)
        if row is None or not self.header.flags & FLAG_TAGS:
            return np.empty(0, np.uint64)
        index, found = self._tags_index(), [np.empty(0, np.int64)]
        for start, stop in index.postings_of(row, match):
            offset, length, first = index.pages_of(start, stop)
            postings = index.check_pages(self._disk.read_at(self._tags_fd, length, offset), first)
            found.append(postings[start - first : stop - first].astype(np.int64))
        return self._seqs_of(np.sort(np.concatenate(found))).astype(np.uint64)

    def tags_of(self, topic_id: int) -> list[bytes]:
        """Return all tags of a topic in byte order. Raise CorruptData, DiskError."""
        row = self.row(topic_id)
        if row is None or not self.header.flags & FLAG_TAGS:
            return []
        return self._tags_index().tags_of(row)

    def check_tags(self, row: int) -> None:
        """Read and verify the dictionary and every posting of a topic. Raise CorruptData, DiskError."""
        if not self.header.flags & FLAG_TAGS:
            return
        index = self._tags_index()
        for start, stop in index.postings_of(row, TagMatch(b"", is_prefix=True)):
            at = start
            while at < stop:
                offset, length, first = index.pages_of(at, min(at + POSTINGS_PER_PAGE, stop))
                index.check_pages(self._disk.read_at(self._tags_fd, length, offset), first)
                at = first + length // 4

    def _seqs_of(self, ordinals: I64) -> I64:
        at = np.searchsorted(self._ordinals, ordinals, side="right") - 1
        found: I64 = self.entries["base_seq"][at] + ordinals - self._ordinals[at]
        return found

    def _tags_index(self) -> TagsIndex:
        if self._tags is not None:
            return self._tags
        header = self._open_tags()
        contents = self._disk.read_at(self._tags_fd, header.contents_bytes, TAGS_HEADER_BYTES)
        self._tags = TagsIndex(header, contents, self._base + TAGS)
        return self._tags

    def _open_tags(self) -> TagsHeader:
        """Open the tags part and read its header."""
        path = self._base + TAGS
        if self._tags_fd < 0:
            try:
                self._tags_fd = self._disk.open_read(path)
            except DiskError as e:
                if e.errno == errno.ENOENT and self._disk.exists(self._base + IDX):
                    raise CorruptData("tags part is missing", file=path) from None
                raise
        header = TagsHeader.decode(self._disk.read_at(self._tags_fd, TAGS_HEADER_BYTES, 0), path)
        size = self._disk.size(self._tags_fd)
        mine = (self.header.number, self.header.salt, self.header.topics, self.header.records)
        if (header.number, header.salt, header.topics, header.records) != mine:
            raise CorruptData("tags part belongs to another segment", file=path, number=header.number)
        expected = TAGS_HEADER_BYTES + header.contents_bytes + 4 * header.postings
        if size != expected:
            raise CorruptData(f"tags part must have {expected} bytes, got {size}", file=path, bytes=size)
        return header

    # -- deletion marks ---------------------------------------------------------------------------

    def deleted(self, row: int) -> BitMap64:
        """Return the seqs marked as deleted. Bytes other than 0x00 and 0xD5 count in `bad_marks`."""
        start, stop = self._ordinal_range(row)
        marks = self._marks.read(start, stop)
        self.bad_marks += int(((marks != 0) & (marks != DELETED)).sum())
        ordinals = np.flatnonzero(marks == DELETED) + start
        return bitmap_of(self._seqs_of(ordinals))

    def mark_deleted(self, row: int, seqs: BitMap64) -> int:
        """Mark the stored seqs among `seqs`. Return how many were not marked before. No sync.

        The first mark of a segment creates the file durably. Raises DiskError, CorruptData.
        """
        first, last = int(self.topics["first_seq"][row]), int(self.topics["last_seq"][row])
        values = seqs_within(seqs, first, last)
        start, stop = self._entry_range(row)
        at = start + np.searchsorted(self._last_seqs[start:stop], values)
        inside = values >= self.entries["base_seq"][at]
        at, values = at[inside], values[inside]
        return self._marks.write(self._ordinals[at] + values - self.entries["base_seq"][at])

    def sync_marks(self) -> None:
        """Make the marks durable. Raises DiskError."""
        self._marks.sync()

    def _ordinal_range(self, row: int) -> tuple[int, int]:
        start, stop = self._entry_range(row)
        return int(self._ordinals[start]), int(self._ordinals[stop])


def find_segments(disk: Disk, data_dir: str) -> list[str]:
    """Return the stems of segments with a data part here, ascending. Their index may need a rebuild."""
    names = [name.removesuffix(DATA) for name in part_names(disk, data_dir) if name.endswith(DATA)]
    return [stem for stem in names if parse_stem(stem) is not None]


def read_data_header(disk: Disk, data_dir: str, stem: str) -> SegmentDataHeader:
    """Return the header of a data part after a check of its size and its name.

    Raises CorruptData, DiskError.
    """
    path = f"{data_dir}/{stem}{DATA}"
    fd = disk.open_read(path)
    try:
        header = SegmentDataHeader.decode(disk.read_at(fd, DATA_HEADER_BYTES, 0), path)
        size = disk.size(fd)
    finally:
        disk.close(fd)
    if size != header.data_bytes:
        raise CorruptData(
            f"data part must have {header.data_bytes} bytes, got {size}",
            file=path,
            bytes=size,
            said=header.data_bytes,
        )
    named = parse_stem(stem)
    expected = (header.topic_id, header.first_seq, header.number)
    if named != (expected if header.topics == 1 else (0, 0, header.number)):
        raise CorruptData("data part: file name does not match its header", file=path, number=header.number)
    return header


def check_data(disk: Disk, data_dir: str, segment: Segment) -> None:
    """Check that a data part of the right size exists and belongs to this index.

    Raises CorruptData, DiskError. The check reads no frames. verify_segment reads everything.
    """
    header = read_data_header(disk, data_dir, segment.ref.stem)
    mine = segment.header
    if (header.number, header.salt, header.records, header.frames, header.data_bytes) != (
        mine.number, mine.salt, mine.records, mine.frames, mine.data_bytes,
    ):  # fmt: skip
        path = f"{data_dir}/{segment.ref.stem}{DATA}"
        raise CorruptData("data part and index part belong to different segments", file=path)


def _read_index(disk: Disk, fd: int, path: str) -> tuple[IndexHeader, Table, Table]:
    header = IndexHeader.decode(disk.read_at(fd, IDX_HEADER_BYTES, 0), path)
    size = disk.size(fd)
    # Check before anything is allocated by these numbers.
    expected = header.tables_stop + header.columns_bytes
    if size != expected:
        raise CorruptData(f"index part must have {expected} bytes, got {size}", file=path, bytes=size)
    data = disk.read_at(fd, header.tables_stop - IDX_HEADER_BYTES, IDX_HEADER_BYTES)
    topics, entries = read_tables(header, data, size, path)
    return header, topics, entries


def _check_name(stem: str, header: IndexHeader, topics: Any, path: str) -> None:
    named = parse_stem(stem)
    single_topic = (int(topics["topic_id"][0]), int(topics["first_seq"][0]), header.number)
    if named != (single_topic if header.topics == 1 else (0, 0, header.number)):
        raise CorruptData("index part: file name does not match its header", file=path, number=header.number)
