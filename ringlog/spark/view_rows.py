"""Rows of the views as Arrow: frames and segments from indexes, audit from the frames themselves.

All functions run in Spark tasks. If a file is not where it was planned, they raise StaleFileLocation, and the
caller queries the engine for the new location.
"""

from __future__ import annotations

import errno
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from ringlog.client.client import Client
from ringlog.envelope.messages import ColdRead
from ringlog.errors import CorruptData, DiskError
from ringlog.frame import batch as frames
from ringlog.frame import layout
from ringlog.frame.layout import EVENT_TS_NONE, FrameType
from ringlog.segment.index import Table
from ringlog.segment.layout import DATA, DATA_HEADER_BYTES, DEL, FLAG_TAGS, IDX, TAGS
from ringlog.segment.segment import Segment
from ringlog.spark.audit import AuditedFrames, Owners, ReadArray, check_log, check_sealed
from ringlog.spark.file_locations import TIER_COLD, TIER_NAMES, LogFileLocation, Roots, SegmentLocation
from ringlog.storage.real_disk import RealDisk
from ringlog.tags import TagMatch

Columns = dict[str, Any]
"""Column name -> values: a list, a NumPy array, or one value for all rows."""
ROWS_PER_BATCH = 8_192


class StaleFileLocation(Exception):
    """A file is no longer where it was: its records were moved or deleted."""


# -- segments ---------------------------------------------------------------------------------------------


def open_segment(roots: Roots, place: SegmentLocation) -> Segment:
    """Open the index of a segment; raise StaleFileLocation, CorruptData or DiskError."""
    try:
        return Segment.open(RealDisk(), roots.data_dir, place.stem)
    except DiskError as e:
        if e.errno == errno.ENOENT:
            raise StaleFileLocation(place.stem) from None
        raise


def segment_rows(roots: Roots, place: SegmentLocation) -> Columns:
    """Return one row for each topic of a segment."""
    segment = open_segment(roots, place)
    try:
        rows = _rows_of(segment, place)
        facts = segment.topics[rows]
        has_tags = bool(segment.header.flags & FLAG_TAGS)
        ids = [int(topic_id) for topic_id in facts["topic_id"]]
        return {
            **_owner_columns(place, ids),
            "segment": place.number,
            "file": place.stem + DATA,
            "tier": TIER_NAMES[place.tier],
            "first_seq": facts["first_seq"],
            "last_seq": facts["last_seq"],
            "records": facts["records"],
            "deleted": [len(segment.deleted(row)) for row in rows],
            "frames": facts["entry_stop"] - facts["entry_start"],
            "bytes": facts["data_stop"] - facts["data_start"],
            "record_bytes": facts["bytes"],
            "tags": [len(segment.tags_of(one)) if has_tags else 0 for one in ids],
            "ts_min": facts["ts_min"],
            "ts_max": facts["ts_max"],
            "created": segment.header.created_us,
        }
    finally:
        segment.close()


def sealed_frame_rows(roots: Roots, place: SegmentLocation) -> Iterator[Columns]:
    """Yield one row for each frame of these topics in a segment, from its index only."""
    segment = open_segment(roots, place)
    try:
        for row in _rows_of(segment, place):
            start, stop = int(segment.topics["entry_start"][row]), int(segment.topics["entry_stop"][row])
            topic, epoch = place.topics[int(segment.topics["topic_id"][row])]
            for at in range(start, stop, ROWS_PER_BATCH):
                entries = segment.entries[at : min(at + ROWS_PER_BATCH, stop)]
                yield {
                    "topic": topic,
                    "topic_id": _hex(int(segment.topics["topic_id"][row])),
                    "epoch": epoch,
                    **_entry_columns(entries),
                    "file": place.stem + DATA,
                    "tier": TIER_NAMES[place.tier],
                    "segment": place.number,
                }
    finally:
        segment.close()


def _entry_columns(entries: Table) -> Columns:
    return {
        "first_seq": entries["base_seq"],
        "last_seq": entries["base_seq"] + entries["count"] - 1,
        "records": entries["count"],
        "offset": entries["offset"],
        "bytes": entries["length"],
        "record_bytes": entries["bytes"],
        "ts_min": entries["ts_min"],
        "ts_max": entries["ts_max"],
        "event_min": _absent(entries["event_min"], EVENT_TS_NONE),
        "event_max": _absent(entries["event_max"], EVENT_TS_NONE),
        "expires_min": _absent(entries["expires_min"], 0),
    }


def tag_rows(roots: Roots, place: SegmentLocation) -> Columns:
    """Return one row for each tag of each topic of a segment, with its number of stored records."""
    segment = open_segment(roots, place)
    found: list[tuple[str, str, int]] = []
    try:
        for row in _rows_of(segment, place):
            topic_id = int(segment.topics["topic_id"][row])
            for tag in segment.tags_of(topic_id):
                count = len(segment.tagged(topic_id, TagMatch(tag)))
                found.append((place.topics[topic_id][0], tag.decode(), count))
    finally:
        segment.close()
    names = ("topic", "tag", "records")
    return {name: [row[i] for row in found] for i, name in enumerate(names)}


def audit_segment(roots: Roots, place: SegmentLocation, client: Client) -> Iterator[Columns]:
    """Check each frame of these topics and yield its row, and one row per other damaged part.

    Raises StaleFileLocation if the index or the data was moved.
    """
    read = _reader_of(roots, place, client)
    path = place.stem + DATA
    where = {"file": path, "tier": TIER_NAMES[place.tier]}
    try:
        segment = open_segment(roots, place)
    except CorruptData as e:
        yield _part_fault(place.stem + IDX, where, str(e))
        # Without an index, the data part can still be scanned frame by frame.
        for checked in check_log(read, DATA_HEADER_BYTES, _whole(read), place.salt):
            yield _audit_columns(checked, place.topics, where)
        return
    try:
        yield from _part_faults(segment, place, where)
        for row in _rows_of(segment, place):
            start, stop = int(segment.topics["entry_start"][row]), int(segment.topics["entry_stop"][row])
            topic_id, epoch = int(segment.topics["topic_id"][row]), int(segment.topics["epoch"][row])
            owners = Owners(
                np.full(stop - start, topic_id, dtype=np.uint64), np.full(stop - start, epoch, dtype=np.int64)
            )
            entries = segment.entries[start:stop]
            at = 0
            for checked in check_sealed(read, entries, owners, segment.header.salt):
                rows = entries[at : at + len(checked.faults)]
                at += len(rows)
                topic = place.topics[topic_id][0]
                # Use the values of the index: the header of the frame may be damaged.
                yield {
                    "topic": topic, "topic_id": _hex(topic_id), "epoch": epoch, "first_seq": rows["base_seq"],
                    "last_seq": rows["base_seq"] + rows["count"] - 1, "records": rows["count"], **where,
                    "offset": checked.offsets, "bytes": checked.bytes, "kind": FrameType.APPEND.name.lower(),
                    "fault": checked.faults,
                }  # fmt: skip
    finally:
        segment.close()


def _part_faults(segment: Segment, place: SegmentLocation, where: Columns) -> Iterator[Columns]:
    """Yield the faults of tags and deletion marks. Reading them verifies them."""
    for row in _rows_of(segment, place):
        try:
            segment.check_tags(row)
        except CorruptData as e:
            yield _part_fault(place.stem + TAGS, where, str(e))
        try:
            segment.deleted(row)
        except CorruptData as e:
            yield _part_fault(place.stem + DEL, where, str(e))
    if segment.bad_marks:
        yield _part_fault(place.stem + DEL, where, f"{segment.bad_marks} marks have an invalid value")


def _part_fault(path: str, where: Columns, fault: str) -> Columns:
    return {**where, "file": path, "records": 0, "offset": 0, "bytes": 0, "kind": "part", "fault": [fault]}


def _rows_of(segment: Segment, place: SegmentLocation) -> list[int]:
    """Return the index rows of the subscribed topics, in the subscribed epochs."""
    found = [segment.row(topic_id) for topic_id in sorted(place.topics)]
    return [
        row
        for row in found
        if row is not None
        and int(segment.topics["epoch"][row]) == place.topics[int(segment.topics["topic_id"][row])][1]
    ]


def _owner_columns(place: SegmentLocation, ids: Sequence[int]) -> Columns:
    return {
        "topic": [place.topics[one][0] for one in ids],
        "topic_id": [_hex(one) for one in ids],
        "epoch": [place.topics[one][1] for one in ids],
    }


# -- the log ------------------------------------------------------------------------------------------------


def log_frame_rows(roots: Roots, place: LogFileLocation) -> Iterator[Columns]:
    """Yield one row for each frame of these topics in a log range, from headers only; bodies are not read."""
    for checked in check_log(_file_reader(roots.file(place.path)), place.start, place.stop, place.salt,
                             bodies=False):  # fmt: skip
        mine = _appends_of(checked, place.topics)
        words = checked.words[mine]
        stamps = words[:, layout.W_COMMIT_TS].astype(np.int64)
        yield {
            **_word_columns(words, place.topics),
            "offset": checked.offsets[mine],
            "bytes": checked.bytes[mine],
            "ts_min": stamps,
            "ts_max": stamps,
            "file": place.path,
            "tier": "log",
        }


def audit_log(roots: Roots, place: LogFileLocation) -> Iterator[Columns]:
    """Yield one row for each frame of these topics, and for each damaged frame of any type."""
    where = {"file": place.path, "tier": "log"}
    for checked in check_log(_file_reader(roots.file(place.path)), place.start, place.stop, place.salt):
        yield _audit_columns(checked, place.topics, where)


def _audit_columns(checked: AuditedFrames, topics: Mapping[int, tuple[str, int]], where: Columns) -> Columns:
    is_bad = np.array([fault is not None for fault in checked.faults], dtype=np.bool_)
    mine = np.flatnonzero(is_bad | _is_append_of(checked, topics))
    words = checked.words[mine]
    kinds = [_kind(number) for number in frames.types_of(words).tolist()]
    return {
        **_word_columns(words, topics),
        **where,
        "offset": checked.offsets[mine],
        "bytes": checked.bytes[mine],
        "kind": kinds,
        "fault": [checked.faults[row] for row in mine.tolist()],
    }


def _appends_of(checked: AuditedFrames, topics: Mapping[int, tuple[str, int]]) -> NDArray[np.int64]:
    return np.flatnonzero(_is_append_of(checked, topics))


def _is_append_of(checked: AuditedFrames, topics: Mapping[int, tuple[str, int]]) -> NDArray[np.bool_]:
    words = checked.words
    known = np.array(sorted(topics), dtype=np.uint64)
    found: NDArray[np.bool_] = frames.is_of_type(words, layout.FrameType.APPEND) & np.isin(
        words[:, layout.W_TOPIC], known
    )
    epochs = np.array([topics[int(one)][1] for one in known], dtype=np.int64)
    at = np.minimum(np.searchsorted(known, words[:, layout.W_TOPIC]), max(len(known) - 1, 0))
    return found & (frames.epochs_of(words).astype(np.int64) == epochs[at]) if len(known) else found


def _word_columns(words: NDArray[np.uint64], topics: Mapping[int, tuple[str, int]]) -> Columns:
    ids = [int(one) for one in words[:, layout.W_TOPIC]]
    counts = frames.counts_of(words).astype(np.int64)
    bases = (words[:, layout.W_BASE_SEQ] & np.uint64((1 << 63) - 1)).astype(np.int64)
    return {
        "topic": [topics[one][0] if one in topics else None for one in ids],
        "topic_id": [_hex(one) for one in ids],
        "epoch": frames.epochs_of(words).astype(np.int64),
        "first_seq": bases,
        "last_seq": bases + counts - 1,
        "records": counts,
    }


def _kind(number: int) -> str:
    try:
        return FrameType(number).name.lower()
    except ValueError:
        return "unknown"


# -- bytes --------------------------------------------------------------------------------------------------


def _reader_of(roots: Roots, place: SegmentLocation, client: Client) -> ReadArray:
    """Return a reader of a data part: local, in a cold directory of this host, or through the engine."""
    path = place.stem + DATA
    if place.tier == TIER_COLD and not roots.cold_dir:
        return _asking_reader(path, client)
    return _file_reader(roots.file(path, place.tier))


def _file_reader(path: str) -> ReadArray:
    """Return a reader that uses pread into one reused buffer: a disk error is an exception, not a signal."""
    disk = RealDisk()
    try:
        fd = disk.open_read(path)
    except DiskError as e:
        if e.errno == errno.ENOENT:
            raise StaleFileLocation(path) from None
        raise
    return _OpenFile(disk, fd)


class _OpenFile:
    """A file that is closed when its last reference is deleted."""

    def __init__(self, disk: RealDisk, fd: int) -> None:
        self._disk, self._fd = disk, fd
        self._buffer = np.empty(0, dtype=np.uint8)

    def __call__(self, start: int, stop: int) -> NDArray[np.uint8]:
        stop = min(stop, max(self._disk.size(self._fd), start))
        if len(self._buffer) < stop - start:
            self._buffer = np.empty(stop - start, dtype=np.uint8)
        view = self._buffer[: stop - start]
        return view[: self._disk.read_into(self._fd, view, start)]

    def __del__(self) -> None:
        self._disk.close(self._fd)


def _asking_reader(path: str, client: Client) -> ReadArray:
    """Return a reader that reads through the relocator.

    An unavailable store raises NotReady; it is no loss.
    """

    def read(start: int, stop: int) -> NDArray[np.uint8]:
        data = client.run(_cold_steps(client, ColdRead(path, start, stop)))
        return np.frombuffer(bytes(data), dtype=np.uint8)

    return read


def _cold_steps(client: Client, request: ColdRead) -> Any:
    return (yield client.connection.cold_read(request))


def _whole(read: ReadArray) -> int:
    """Return the size of the file, as its header states it."""
    return int(read(0, DATA_HEADER_BYTES).view("<u8")[_DATA_BYTES_WORD])


_DATA_BYTES_WORD = 10
"""Index of the header word with `data_bytes`; see segment.layout.DataHeader."""


# -- Arrow --------------------------------------------------------------------------------------------------


def record_batch(columns: Columns, schema: pa.Schema) -> pa.RecordBatch:
    """Return the columns as a batch of exactly this schema. A missing column is null in every row."""
    count = _length(columns)
    return pa.RecordBatch.from_arrays(
        [_array(columns.get(field.name), field.type, count) for field in schema], schema=schema
    )


def _length(columns: Columns) -> int:
    sized = (
        len(value) for value in columns.values() if not isinstance(value, str) and hasattr(value, "__len__")
    )
    return next(sized, 1)


def _array(value: Any, kind: pa.DataType, count: int) -> pa.Array:
    if value is None:
        return pa.nulls(count, kind)
    if isinstance(value, str) or not hasattr(value, "__len__"):
        return pa.repeat(pa.scalar(_plain(value, kind), kind), count)
    if isinstance(value, np.ma.MaskedArray):
        mask, value = np.ma.getmaskarray(value), np.asarray(value.data)
    else:
        mask = None
    if isinstance(value, np.ndarray):
        found = pa.array(np.ascontiguousarray(value), mask=mask)
        return found.cast(pa.int64()).cast(kind) if pa.types.is_timestamp(kind) else found.cast(kind)
    return pa.array(value, kind)


def _plain(value: Any, kind: pa.DataType) -> Any:
    return int(value) if pa.types.is_timestamp(kind) or pa.types.is_integer(kind) else value


def _absent(values: NDArray[np.int64], sentinel: int) -> Any:
    return np.ma.masked_equal(values, sentinel, copy=False)


def _hex(topic_id: int) -> str:
    return f"{topic_id:016x}"
