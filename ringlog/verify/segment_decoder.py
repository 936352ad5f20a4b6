"""The second reader of segments, written from docs/format.md alone (RD-25).

It walks the data part frame by frame and builds from it what the index must say; then it reads the index,
the tags and the deletion marks, and compares. With the data part in the cold tier and that tier out of
reach, the index is believed as far as its checksum goes.
"""

from __future__ import annotations

import re
import struct
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import xxhash

from ringlog.verify.findings import FileReport, extend
from ringlog.verify.frame_decoder import DecodedFrame, VerifyError, check_frame, decode_frame

DATA_HEADER_BYTES = 4096
INDEX_HEADER_BYTES, TAGS_HEADER_BYTES, MARKS_HEADER_BYTES = 128, 88, 48
DELETED = 0xD5
_DATA_HEADER = struct.Struct("<8sIIQQII16sQQQQQQQ")
_INDEX_HEADER = struct.Struct("<8sIIQQQQQQQQIIII16s")
_TAGS_HEADER = struct.Struct("<8sIIQQQQQQQQ")
_MARKS_HEADER = struct.Struct("<8sIIQQQ")
_TOPIC_ROW = struct.Struct("<Qqqqqqqqqqqqq")
_ENTRY_ROW = struct.Struct("<qqqqqqqqqqq")
_STEM = re.compile(r"^(?:topics/([0-9a-f]{16})/seg-(\d{20})-|packs/pack-)([0-9a-f]{16})$")
_APPEND = 1
_NO_TIME = -(1 << 63)


class DataHeader(NamedTuple):
    """First 4096 bytes of a data part, from the version on."""

    version: int
    topics: int
    number: int
    salt: int
    shard: int
    shards: int
    engine_id: bytes
    created_us: int
    records: int
    frames: int
    data_bytes: int
    topic_id: int
    first_seq: int
    last_seq: int

    def facts(self) -> dict[str, Any]:
        """For people and programs."""
        return self._asdict() | {"engine_id": self.engine_id.hex(), "salt": f"{self.salt:016x}"}


class TopicRow(NamedTuple):
    """A row of the index's first table."""

    topic_id: int
    epoch: int
    first_seq: int
    last_seq: int
    records: int
    bytes: int
    entry_start: int
    entry_stop: int
    data_start: int
    data_stop: int
    ts_min: int
    ts_max: int
    expires_min: int


class Entry(NamedTuple):
    """A row of the index's second table."""

    base_seq: int
    records: int
    offset: int
    length: int
    ts_min: int
    ts_max: int
    event_min: int
    event_max: int
    expires_min: int
    bytes: int
    columns_at: int


@dataclass(slots=True)
class Index:
    """An index part: its header and both tables."""

    number: int
    salt: int
    records: int
    data_bytes: int
    has_tags: bool
    topics: list[TopicRow]
    entries: list[Entry]
    header: dict[str, Any]


@dataclass(slots=True)
class _Walked:
    """What the frames of a data part say, to hold the index against."""

    frames: list[tuple[int, DecodedFrame]] = field(default_factory=list)
    """(offset, frame)."""


def verify_segment(root: str, stem: str, *, is_deep: bool = False, cold_dir: str = "") -> FileReport:
    """Verify all parts of one segment and hold them against one another."""
    report = FileReport(stem, "segment")
    name = _STEM.match(stem)
    number = int(name[3], 16) if name else 0
    report.more = {"number": number, "topics": {}, "tier": "hot"}
    index = _index_of(report, Path(root) / f"{stem}.idx")
    data = _data_of(report, root, stem, cold_dir)
    walked = None
    if data is not None:
        walked = _walk(report, data, is_deep)
    elif index is not None:
        report.header = index.header
        report.more["tier"] = "cold"
        report.remark("the data part is in the cold tier: only index, tags and marks were verified")
    else:
        report.damage("there is no data part and no index that says what it held")
    _hold(report, walked, index)
    if index is not None and walked is not None:
        _compare(report, index, walked, is_deep)
    _check_number(report, number, index)
    _tags_of(report, Path(root) / f"{stem}.tags", index)
    _marks_of(report, Path(root) / f"{stem}.del", number)
    return report


def _bytes_of(report: FileReport, path: Path) -> bytes | None:
    if not path.exists():
        return None
    data = path.read_bytes()
    report.bytes += len(data)
    return data


def _checked(data: bytes, size: int, magic: bytes, part: str) -> None:
    if len(data) < size:
        raise VerifyError(f"the {part} is shorter than its header")
    if data[:8] != magic:
        raise VerifyError(f"not a segment's {part}")
    (checksum,) = struct.unpack_from("<Q", data, size - 8)
    if xxhash.xxh3_64_intdigest(data[: size - 8]) != checksum:
        raise VerifyError(f"header checksum of the {part}")
    (version,) = struct.unpack_from("<I", data, 8)
    if version != 1:
        raise VerifyError(f"unknown version of the {part}", version=version)


# -- data ---------------------------------------------------------------------------------------------


def _data_of(report: FileReport, root: str, stem: str, cold_dir: str) -> bytes | None:
    data = _bytes_of(report, Path(root) / f"{stem}.data")
    if data is None and cold_dir:
        data = _bytes_of(report, Path(cold_dir) / f"{stem}.data")
        report.more["tier"] = "cold"
    return data


def read_data_header(data: bytes) -> DataHeader:
    """Decode the header of a data part; raises VerifyError."""
    _checked(data, DATA_HEADER_BYTES, b"RLOGSEG1", "data part")
    return DataHeader(*_DATA_HEADER.unpack_from(data)[1:])


def _walk(report: FileReport, data: bytes, is_deep: bool) -> _Walked | None:
    """Walk the frames; None when not even the header can be read."""
    try:
        header = read_data_header(data)
    except VerifyError as e:
        report.damage(e.message)
        return None
    report.header = header.facts()
    if header.data_bytes != len(data):
        report.damage(f"the data part has {len(data)} bytes, its header says {header.data_bytes}")
    walked, at = _Walked(), DATA_HEADER_BYTES
    decode = decode_frame if is_deep else _checked_frame
    while at < len(data):
        try:
            frame = decode(data, at, header.salt)
            _follows(walked.frames[-1][1] if walked.frames else None, frame)
        except VerifyError as e:
            report.damage(e.message, at)
            at = next_frame(data, at, header.salt)
            continue
        walked.frames.append((at, frame))
        at += frame.total
    _compare_header(report, header, walked)
    return walked


def _checked_frame(data: bytes, offset: int, seed: int | None) -> DecodedFrame:
    return check_frame(data, offset, seed)[0]


def next_frame(data: bytes, offset: int, salt: int) -> int:
    """Offset of the next valid frame behind `offset`, or the end."""
    size = len(data) & ~7
    for at in range(offset + 8, size, 8):
        if data[at + 4 : at + 6] == b"\x01\x01":
            try:
                check_frame(data, at, salt)
            except VerifyError:
                continue
            return at
    return len(data)


def _follows(before: DecodedFrame | None, frame: DecodedFrame) -> None:
    if frame.type != _APPEND:
        raise VerifyError("a frame that is no append")
    if frame.producer_id:
        raise VerifyError("a sealed frame that names a producer")
    if before is None or frame.topic_id > before.topic_id:
        return
    if frame.topic_id < before.topic_id or frame.epoch != before.epoch:
        raise VerifyError("topics are out of order")
    if frame.base_seq < before.base_seq + before.count:
        raise VerifyError("records are out of order")


def _compare_header(report: FileReport, header: DataHeader, walked: _Walked) -> None:
    report.frames = len(walked.frames)
    records = sum(frame.count for _, frame in walked.frames)
    topics = len({frame.topic_id for _, frame in walked.frames})
    for name, said, found in (
        ("frames", header.frames, report.frames),
        ("records", header.records, records),
        ("topics", header.topics, topics),
    ):
        if said != found:
            report.damage(f"{found} {name} in the data part, its header says {said}")


# -- index --------------------------------------------------------------------------------------------


def read_index(data: bytes) -> Index:
    """Decode an index part's header and tables; raises VerifyError."""
    _checked(data, INDEX_HEADER_BYTES, b"RLOGIDX1", "index")
    (_, _, topics, number, salt, frames, records, data_bytes, columns_bytes, tables, created, shard, shards,
     flags, _, engine_id) = _INDEX_HEADER.unpack_from(data)  # fmt: skip
    middle = INDEX_HEADER_BYTES + topics * _TOPIC_ROW.size
    stop = middle + frames * _ENTRY_ROW.size
    if stop + columns_bytes != len(data):
        raise VerifyError("the index has another size than its header says")
    if xxhash.xxh3_64_intdigest(data[INDEX_HEADER_BYTES:stop]) != tables:
        raise VerifyError("checksum of the index's tables")
    header = {
        "topics": topics, "number": number, "salt": f"{salt:016x}", "frames": frames, "records": records,
        "data_bytes": data_bytes, "created_us": created, "shard": shard, "shards": shards,
        "engine_id": engine_id.hex(),
    }  # fmt: skip
    rows = [TopicRow(*row) for row in _TOPIC_ROW.iter_unpack(data[INDEX_HEADER_BYTES:middle])]
    entries = [Entry(*row) for row in _ENTRY_ROW.iter_unpack(data[middle:stop])]
    return Index(number, salt, records, data_bytes, bool(flags & 1), rows, entries, header)


def _index_of(report: FileReport, path: Path) -> Index | None:
    data = _bytes_of(report, path)
    if data is None:
        report.remark("there is no index: it is rebuilt from the data at the next start")
        return None
    try:
        return read_index(data)
    except VerifyError as e:
        report.damage(f"{e.message}: it can be rebuilt from the data")
        return None


def _hold(report: FileReport, walked: _Walked | None, index: Index | None) -> None:
    """Note which numbers lie here: by the data, else by the index."""
    if walked is not None:
        for _, frame in walked.frames:
            report.hold(frame.topic_id, frame.epoch, frame.base_seq, frame.count)
        return
    for row in index.topics if index is not None else ():
        for entry in index.entries[row.entry_start : row.entry_stop] if index is not None else ():
            report.hold(row.topic_id, row.epoch, entry.base_seq, entry.records)


def _compare(report: FileReport, index: Index, walked: _Walked, is_deep: bool) -> None:
    """Hold the index against the data, frame by frame and topic by topic."""
    if len(index.entries) != len(walked.frames):
        report.damage(f"{len(index.entries)} frames in the index, {len(walked.frames)} in the data part")
        return
    for entry, (offset, frame) in zip(index.entries, walked.frames, strict=True):
        said = (entry.base_seq, entry.records, entry.offset, entry.length)
        if said != (frame.base_seq, frame.count, offset, frame.total) or not _times_agree(
            entry, frame, is_deep
        ):
            report.damage("the index says something else of this frame: it can be rebuilt", offset)
            return
    at = 0
    for row in index.topics:
        frames = walked.frames[row.entry_start : row.entry_stop]
        if row.entry_start != at or not frames or not _row_agrees(row, frames):
            report.damage(f"the index says something else of topic {row.topic_id:x}: it can be rebuilt")
            return
        at = row.entry_stop


def _row_agrees(row: TopicRow, frames: list[tuple[int, DecodedFrame]]) -> bool:
    (start, first), (last_at, last) = frames[0], frames[-1]
    return (
        {(frame.topic_id, frame.epoch) for _, frame in frames} == {(row.topic_id, row.epoch)}
        and (row.first_seq, row.last_seq) == (first.base_seq, last.base_seq + last.count - 1)
        and row.records == sum(frame.count for _, frame in frames)
        and (row.data_start, row.data_stop) == (start, last_at + last.total)
    )


def _times_agree(entry: Entry, frame: DecodedFrame, is_deep: bool) -> bool:
    if not is_deep:
        return True
    stamps = frame.columns.get("commit_ts") or [frame.commit_ts]
    events = [stamp for stamp in frame.columns.get("event_ts", []) if stamp != _NO_TIME]
    expiries = [stamp for stamp in frame.columns.get("expires_at", []) if stamp > 0]
    return (
        (entry.ts_min, entry.ts_max) == (min(stamps), max(stamps))
        and (entry.event_min, entry.event_max)
        == (min(events, default=_NO_TIME), max(events, default=_NO_TIME))
        and entry.expires_min == min(expiries, default=0)
    )


def _check_number(report: FileReport, number: int, index: Index | None) -> None:
    """All parts are of one segment, and lie under its name."""
    said = report.header.get("number", number)
    if said != number or (index is not None and index.number != number):
        report.damage("lies under another segment's name")
    elif index is not None and f"{index.salt:016x}" != report.header.get("salt", f"{index.salt:016x}"):
        report.damage("data and index are of two segments")


# -- tags and marks -----------------------------------------------------------------------------------


def _tags_of(report: FileReport, path: Path, index: Index | None) -> None:
    data = _bytes_of(report, path)
    if data is None:
        if index is not None and index.has_tags:
            report.damage("the tags part is missing: it can be rebuilt from the data")
        return
    try:
        _checked(data, TAGS_HEADER_BYTES, b"RLOGTAG1", "tags part")
        (_, _, topics, number, _, tags, postings, text_bytes, _, checksum, _) = _TAGS_HEADER.unpack_from(data)
        pages = -(-postings // 16_384)
        contents = 8 * ((topics + 1) + 2 * (tags + 1) + pages) + ((text_bytes + 7) & ~7)
        stop = TAGS_HEADER_BYTES + contents
        if number != report.more["number"]:
            raise VerifyError("the tags part is of another segment")
        if xxhash.xxh3_64_intdigest(data[TAGS_HEADER_BYTES:stop]) != checksum:
            raise VerifyError("checksum of the tags part")
        _check_postings(data, stop, pages, postings)
    except VerifyError as e:
        report.damage(f"{e.message}: it can be rebuilt from the data")


def _check_postings(data: bytes, stop: int, pages: int, postings: int) -> None:
    """Postings follow in pages, each with a checksum of its own in the words before them."""
    width, left = divmod(len(data) - stop, postings) if postings else (0, len(data) - stop)
    if left or (postings and width not in {4, 8}):
        raise VerifyError("the tags part has another size than its header says")
    checks = struct.unpack_from(f"<{pages}Q", data, stop - 8 * pages)
    for page, check in enumerate(checks):
        start = stop + page * 16_384 * width
        if xxhash.xxh3_64_intdigest(data[start : min(start + 16_384 * width, len(data))]) != check:
            raise VerifyError("checksum of postings")


def _marks_of(report: FileReport, path: Path, number: int) -> None:
    """Deletion marks: one byte a record, in the order of the data."""
    data = _bytes_of(report, path)
    if data is None:
        return
    try:
        _checked(data, MARKS_HEADER_BYTES, b"RLOGDEL1", "deletion marks")
        (_, _, _, found, _, records) = _MARKS_HEADER.unpack_from(data)
        marks = data[MARKS_HEADER_BYTES : MARKS_HEADER_BYTES + records]
        if found != number:
            raise VerifyError("the deletion marks are of another segment")
        if len(data) < MARKS_HEADER_BYTES + records or records != report.records:
            raise VerifyError("there is not one deletion mark for each record")
    except VerifyError as e:
        report.damage(e.message)
        return
    odd = len(marks) - marks.count(0) - marks.count(DELETED)
    if odd:
        report.damage(f"{odd} deletion marks are neither set nor unset")
    at = marks.find(DELETED)
    places = _places(report)
    while at >= 0:
        key, seq = places(at)
        extend(report.marked.setdefault(key, []), seq, seq)
        at = marks.find(DELETED, at + 1)
    report.more["deleted"] = marks.count(DELETED)


def _places(report: FileReport) -> Any:
    """Function from a record's place in the segment to ((topic_id, epoch), seq); asked in rising order."""
    runs = [(key, first, last) for key, ranges in report.stored.items() for first, last in ranges]
    begins, total = [], 0
    for _, first, last in runs:
        begins.append(total)
        total += last - first + 1
    at = 0

    def place(record: int) -> tuple[tuple[int, int], int]:
        nonlocal at
        while at + 1 < len(begins) and begins[at + 1] <= record:
            at += 1
        key, first, _ = runs[at]
        return key, first + record - begins[at]

    return place
