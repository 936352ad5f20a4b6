"""Verification of segments: their parts, compared with one another.

It reads the data part frame by frame, derives what the index must contain, and compares that with the index,
the tags and the deletion marks. If the data part is in a cold tier that is unreachable, the index is trusted
after a check of its checksums.
"""

from __future__ import annotations

import os
import re
from dataclasses import dataclass, field

from ringlog.verify.findings import FileReport, extend_ranges
from ringlog.verify.frame_decoder import DecodedFrame, VerifyError, check_frame, decode_frame
from ringlog.verify.segment_columns import expected_columns, read_columns
from ringlog.verify.segment_decoder import (
    APPEND,
    DATA_HEADER_BYTES,
    DELETED,
    DecodedDataHeader,
    DecodedIndex,
    IndexFrameRow,
    IndexTopicRow,
    next_frame,
    read_data_header,
    read_index,
    read_marks,
    read_tags,
)

_STEM = re.compile(r"^(?:topics/([0-9a-f]{16})/seg-(\d{20})-|packs/pack-)([0-9a-f]{16})$")
_NO_TIME = -(1 << 63)


@dataclass(slots=True)
class _WalkedFrames:
    """The frames of a data part, for comparison with the index."""

    frames: list[tuple[int, DecodedFrame]] = field(default_factory=list)
    """(offset in bytes, frame)."""


def verify_segment(root: str, stem: str, *, is_deep: bool = False, cold_dir: str = "") -> FileReport:
    """Verify all parts of one segment and compare them with one another.

    `stem` is the segment's path without suffix, relative to `root`. `is_deep` decodes every record.
    """
    report = FileReport(stem, "segment")
    name = _STEM.match(stem)
    number = int(name[3], 16) if name else 0
    report.extra = {
        "number": number, "topics": {}, "tier": "hot", "is_misplaced": False, "is_copy": False,
        "has_data": False, "is_data_sound": False,
    }  # fmt: skip
    index = _index_of(report, f"{root}/{stem}.idx")
    data = _data_of(report, root, stem, cold_dir)
    report.extra["has_data"] = data is not None
    if data is not None and report.extra["tier"] == "cold":
        report.extra["is_copy"] = not os.path.exists(f"{root}/{stem}.idx")
    walked = None
    if data is not None:
        before = len(report.findings)
        walked = _walk(report, data, is_deep)
        report.extra["is_data_sound"] = walked is not None and len(report.findings) == before
    elif index is not None:
        report.header = index.header
        report.extra["tier"] = "cold"
        # The caller must judge this with the snapshots: the segment may be one that is being removed.
        report.extra["no_data"] = bool(cold_dir) and os.path.isdir(cold_dir)
        report.add_unreachable("the data part is in the cold tier: only index, tags and marks were verified")
    else:
        report.add_damage("data part and index are missing")
    _add_records(report, walked, index)
    if index is not None:
        _check_columns(report, index)
    if index is not None and walked is not None:
        _compare(report, index, walked, is_deep)
    _check_place(report, index)
    _tags_of(report, f"{root}/{stem}.tags", index, walked, is_deep)
    _marks_of(report, f"{root}/{stem}.del", number)
    if cold_dir:
        _compare_cold(report, root, stem, cold_dir)
    return report


def _compare_cold(report: FileReport, root: str, stem: str, cold_dir: str) -> None:
    """Compare index and tags in the cold tier with the host's. Marks there may be older, but must be valid.

    No process reads these copies while the host has its own, so only this check notices damage.
    """
    size = report.bytes
    for suffix in (".idx", ".tags"):
        here, there = (_bytes_of(report, f"{top}/{stem}{suffix}") for top in (root, cold_dir))
        if here is not None and there is not None and here != there:
            report.add_damage(f"the cold copy of {suffix[1:]} differs from the copy on the host")
    marks = _bytes_of(report, f"{cold_dir}/{stem}.del")
    report.bytes = size  # Copies do not count as data.
    if marks is None:
        return
    try:
        found, _, made = read_marks(marks)
        odd = len(made) - made.count(0) - made.count(DELETED)
        if found != report.extra["number"] or odd:
            raise VerifyError("marks of another segment, or that are no marks")
    except VerifyError as e:
        report.add_damage(f"the cold copy of the deletion marks: {e.message}")


def _bytes_of(report: FileReport, path: str) -> bytes | None:
    try:
        with open(path, "rb") as file:
            data = file.read()
    except FileNotFoundError:
        return None
    report.bytes += len(data)
    return data


# -- data -------------------------------------------------------------------------------------------


def _data_of(report: FileReport, root: str, stem: str, cold_dir: str) -> bytes | None:
    data = _bytes_of(report, f"{root}/{stem}.data")
    if data is None and cold_dir:
        data = _bytes_of(report, f"{cold_dir}/{stem}.data")
        report.extra["tier"] = "cold"
    return data


def _walk(report: FileReport, data: bytes, is_deep: bool) -> _WalkedFrames | None:
    """Decode the frames of a data part. Returns None if its header cannot be decoded."""
    try:
        header = read_data_header(data)
    except VerifyError as e:
        report.add_damage(e.message)
        return None
    report.header = header.facts()
    if header.data_bytes != len(data):
        report.add_damage(f"the data part has {len(data)} bytes, its header says {header.data_bytes}")
    walked, at = _WalkedFrames(), DATA_HEADER_BYTES
    decode = decode_frame if is_deep else _checked_frame
    while at < len(data):
        try:
            frame = decode(data, at, header.salt)
            _follows(walked.frames[-1][1] if walked.frames else None, frame)
        except VerifyError as e:
            report.add_damage(e.message, at)
            at = next_frame(data, at, header.salt)
            continue
        walked.frames.append((at, frame))
        at += frame.total
    _compare_header(report, header, walked)
    return walked


def _checked_frame(data: bytes, offset: int, seed: int | None) -> DecodedFrame:
    return check_frame(data, offset, seed)[0]


def _follows(before: DecodedFrame | None, frame: DecodedFrame) -> None:
    if frame.type != APPEND:
        raise VerifyError("frame is not an append")
    if frame.producer_id:
        raise VerifyError("a sealed frame that names a producer")
    if before is None or frame.topic_id > before.topic_id:
        return
    if frame.topic_id < before.topic_id or frame.epoch != before.epoch:
        raise VerifyError("topics are out of order")
    if frame.base_seq < before.base_seq + before.count:
        raise VerifyError("records are out of order")


def _compare_header(report: FileReport, header: DecodedDataHeader, walked: _WalkedFrames) -> None:
    report.frames = len(walked.frames)
    records = sum(frame.count for _, frame in walked.frames)
    topics = len({frame.topic_id for _, frame in walked.frames})
    for name, said, found in (
        ("frames", header.frames, report.frames),
        ("records", header.records, records),
        ("topics", header.topics, topics),
    ):
        if said != found:
            report.add_damage(f"{found} {name} in the data part, its header says {said}")


# -- index ------------------------------------------------------------------------------------------


def _index_of(report: FileReport, path: str) -> DecodedIndex | None:
    data = _bytes_of(report, path)
    if data is None:
        report.add_remark("there is no index: it is rebuilt from the data at the next start")
        return None
    try:
        return read_index(data)
    except VerifyError as e:
        report.add_damage(f"{e.message}: it can be rebuilt from the data")
        return None


def _add_records(report: FileReport, walked: _WalkedFrames | None, index: DecodedIndex | None) -> None:
    """Record which seqs the segment contains: by its data, else by its index."""
    if walked is not None:
        for _, frame in walked.frames:
            report.add_records(frame.topic_id, frame.epoch, frame.base_seq, frame.count)
        return
    for row in index.topics if index is not None else ():
        for entry in index.entries[row.entry_start : row.entry_stop] if index is not None else ():
            report.add_records(row.topic_id, row.epoch, entry.base_seq, entry.records)


def _compare(report: FileReport, index: DecodedIndex, walked: _WalkedFrames, is_deep: bool) -> None:
    """Compare the index with the data, frame by frame and topic by topic."""
    if len(index.entries) != len(walked.frames):
        report.add_damage(f"{len(index.entries)} frames in the index, {len(walked.frames)} in the data part")
        return
    for entry, (offset, frame) in zip(index.entries, walked.frames, strict=True):
        said = (entry.base_seq, entry.records, entry.offset, entry.length)
        agree = _times_agree(entry, frame, is_deep) and (not is_deep or _columns_agree(index, entry, frame))
        if said != (frame.base_seq, frame.count, offset, frame.total) or not agree:
            report.add_damage("the index contradicts this frame: it can be rebuilt", offset)
            return
    at = 0
    for row in index.topics:
        frames = walked.frames[row.entry_start : row.entry_stop]
        if row.entry_start != at or not frames or not _row_agrees(row, frames):
            report.add_damage(f"the index contradicts topic {row.topic_id:x}: it can be rebuilt")
            return
        at = row.entry_stop


def _check_columns(report: FileReport, index: DecodedIndex) -> None:
    """Verify the checksums of the record columns. Each frame has its own block in the index."""
    for entry in index.entries:
        try:
            read_columns(index.data, entry)
        except VerifyError as e:
            report.add_damage(f"{e.message} in the index: it can be rebuilt", entry.columns_at)
            return


def _row_agrees(row: IndexTopicRow, frames: list[tuple[int, DecodedFrame]]) -> bool:
    (start, first), (last_at, last) = frames[0], frames[-1]
    return (
        {(frame.topic_id, frame.epoch) for _, frame in frames} == {(row.topic_id, row.epoch)}
        and (row.first_seq, row.last_seq) == (first.base_seq, last.base_seq + last.count - 1)
        and row.records == sum(frame.count for _, frame in frames)
        and (row.data_start, row.data_stop) == (start, last_at + last.total)
    )


def _columns_agree(index: DecodedIndex, entry: IndexFrameRow, frame: DecodedFrame) -> bool:
    try:
        found = read_columns(index.data, entry)
    except VerifyError:
        return False
    return found == expected_columns(frame) and entry.bytes == sum(found.sizes)


def _times_agree(entry: IndexFrameRow, frame: DecodedFrame, is_deep: bool) -> bool:
    if not is_deep:
        return True
    stamps = frame.columns.get("commit_ts") or [frame.commit_ts]
    events = [stamp for stamp in frame.columns.get("event_ts", []) if stamp != _NO_TIME]
    expiries = [stamp for stamp in frame.columns.get("expires_at", []) if stamp != 0]
    return (
        (entry.ts_min, entry.ts_max) == (min(stamps), max(stamps))
        and (entry.event_min, entry.event_max)
        == (min(events, default=_NO_TIME), max(events, default=_NO_TIME))
        and entry.expires_min == min(expiries, default=0)
    )


def _check_place(report: FileReport, index: DecodedIndex | None) -> None:
    """Check that all parts belong to one segment, and that its name matches their headers."""
    said = report.header.get("number", report.extra["number"])
    name = _STEM.match(report.path)
    single_topic = (int(name[1], 16), int(name[2])) if name and name[1] else (0, 0)
    wrong = said != report.extra["number"] or (index is not None and index.number != said)
    if "topic_id" in report.header:  # Only a data part has it. An index has it in its first row.
        wrong = wrong or (report.header["topic_id"], report.header["first_seq"]) != single_topic
    if index is not None and len(index.topics) == 1:
        wrong = wrong or (index.topics[0].topic_id, index.topics[0].first_seq) != single_topic
    if wrong:
        report.extra["is_misplaced"] = True
        report.add_damage("has the name of another segment")
    elif index is not None and f"{index.salt:016x}" != report.header.get("salt", f"{index.salt:016x}"):
        report.add_damage("data and index belong to different segments")


# -- tags and marks ---------------------------------------------------------------------------------


def _tags_of(
    report: FileReport, path: str, index: DecodedIndex | None, walked: _WalkedFrames | None, is_deep: bool
) -> None:
    data = _bytes_of(report, path)
    if data is None:
        if index is not None and index.has_tags and walked is not None:
            report.add_damage("the tags part is missing: it can be rebuilt from the data")
        elif index is not None and index.has_tags:
            # A removal deletes the index last. The caller must judge this with the snapshots.
            report.extra["only_index"] = True
            report.add_remark("neither data nor tags are there: it is being removed, or its tags are missing")
        return
    try:
        tags = read_tags(data)
        if tags.number != report.extra["number"] or tags.records != report.records:
            raise VerifyError("the tags part is of another segment")
        if is_deep and walked is not None and sorted(tags.dictionary) != _tags_in(walked):
            raise VerifyError("the tags part contradicts the records")
    except VerifyError as e:
        report.add_damage(f"{e.message}: it can be rebuilt from the data")


def _tags_in(walked: _WalkedFrames) -> list[tuple[int, str, list[int]]]:
    """Return the dictionary that the tags part must contain, sorted."""
    found: dict[tuple[int, str], list[int]] = {}
    row, ordinal, last = -1, 0, -1
    for _, frame in walked.frames:
        row, last = row + (frame.topic_id != last), frame.topic_id
        for tag in frame.columns.get("tag", ()):
            if tag:
                found.setdefault((row, tag), []).append(ordinal)
            ordinal += 1
        ordinal += frame.count if "tag" not in frame.columns else 0
    return sorted((row, tag, ordinals) for (row, tag), ordinals in found.items())


def _marks_of(report: FileReport, path: str, number: int) -> None:
    """Verify the deletion marks: one byte for each record, in the order of the data."""
    data = _bytes_of(report, path)
    if data is None:
        return
    try:
        found, _, marks = read_marks(data)
        if found != number:
            raise VerifyError("the deletion marks are of another segment")
        if len(marks) != report.records:
            raise VerifyError("there is not one deletion mark for each record")
    except VerifyError as e:
        report.add_damage(e.message)
        report.extra["has_bad_marks"] = True
        return
    report.extra["deleted"] = marks.count(DELETED)
    odd = len(marks) - marks.count(0) - report.extra["deleted"]
    if odd:
        report.add_damage(f"{odd} deletion marks have an invalid value")
        report.extra["has_bad_marks"] = True
    place = 0
    for key, ranges in report.stored.items():
        for first, last in ranges:
            _take_marks(report, key, first, marks[place : place + last - first + 1])
            place += last - first + 1


def _take_marks(report: FileReport, key: tuple[int, int], first: int, marks: bytes) -> None:
    """Record which seqs, counted from `first`, are marked as deleted."""
    at = marks.find(DELETED)
    while at >= 0:
        extend_ranges(report.marked.setdefault(key, []), first + at, first + at)
        at = marks.find(DELETED, at + 1)
