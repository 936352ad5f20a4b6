"""Independent decoder of snapshots, written from docs/reference/format.md only."""

from __future__ import annotations

import re
import struct
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import msgpack
import xxhash
from pyroaring import BitMap64

from ringlog.verify.findings import FileReport, Range
from ringlog.verify.frame_decoder import VerifyError

HEADER_BYTES = 96
_HEADER = struct.Struct("<8sIIIIQQQQQQQQ")
_NAME = re.compile(r"snapshot-(\d+)\.(\d+)$")
_OF_ONE = re.compile(r"topics/([0-9a-f]{16})/")
"""Start of the stem of a segment with one topic."""
_ROUTER_FIELDS = [int, str, str, int, int, int, str, int, int]
"""Number, name, source, id and epoch of the source, flags, filter, position, number of copies."""


class SnapshotTopicRow(NamedTuple):
    """A snapshot's row of one topic, as far as it can be checked without the engine."""

    topic_id: int
    epoch: int
    name: str
    durability: str
    head: int
    live: int
    """Number of live records."""
    floor: int
    dead: bytes
    lost: list[Range]


@dataclass(frozen=True, slots=True)
class SnapshotFacts:
    """A snapshot's facts about its shard."""

    last_id: int
    """Topics with an id up to this one and without a row are deleted."""
    floor: int
    """The snapshot covers every file of the shard's log below this file id."""
    absorbed: list[int]
    """File ids of further covered files."""
    segments: list[tuple[str, int, int]]
    """(stem, number, tier) of the segments in force; tier 0 hot, 1 both, 2 cold."""

    def absorbs(self, file_id: int) -> bool:
        """Return whether the snapshot covers that file for its shard."""
        return file_id < self.floor or file_id in self.absorbed


def verify_snapshot(path: str, data: bytes) -> FileReport:
    """Check one snapshot by itself and return the report."""
    report = FileReport(path, "snapshot", bytes=len(data))
    report.extra = {"is_valid": False, "topics": [], "facts": SnapshotFacts(0, 0, [], [])}
    try:
        facts, rows = _read(report, data)
        report.extra["topics"] = [decode_topic_row(topic_id, row) for topic_id, row in rows]
        report.extra["facts"] = decode_shard_facts(facts)
        report.extra["is_valid"] = True
    except VerifyError as e:
        report.add_damage(e.message)
    return report


def _read(report: FileReport, data: bytes) -> tuple[bytes, list[tuple[int, bytes]]]:
    if len(data) < HEADER_BYTES or data[:8] != b"RLSNAP1\0":
        raise VerifyError("not a snapshot")
    (_, version, shard, shards, _, number, incarnation, created, body_bytes, facts_bytes, topics, rows_bytes,
     body_xxh3) = _HEADER.unpack_from(data)  # fmt: skip
    (header_xxh3,) = struct.unpack_from("<Q", data, HEADER_BYTES - 8)
    if xxhash.xxh3_64_intdigest(data[: HEADER_BYTES - 8]) != header_xxh3:
        raise VerifyError("snapshot header: checksum mismatch")
    if version != 1:
        raise VerifyError("unknown snapshot version", version=version)
    if shard >= shards:
        raise VerifyError(
            "shard number of the snapshot is not below its number of shards", shard=shard, shards=shards
        )
    report.header = {
        "shard": shard, "shards": shards, "number": number, "incarnation": incarnation, "created_us": created,
        "topics": topics, "facts_bytes": facts_bytes, "rows_bytes": rows_bytes,
    }  # fmt: skip
    name = _NAME.search(report.path)
    if name is None or (int(name[1]), int(name[2])) != (shard, number):
        raise VerifyError("snapshot has the name of another snapshot")
    table = HEADER_BYTES + (facts_bytes + 7) // 8 * 8
    rows_at = table + 8 * (2 * topics + 1)
    if len(data) != HEADER_BYTES + body_bytes or rows_at + rows_bytes != len(data):
        raise VerifyError("snapshot has another size than its header says")
    if xxhash.xxh3_64_intdigest(data[HEADER_BYTES:]) != body_xxh3:
        raise VerifyError("snapshot body: checksum mismatch")
    ids = struct.unpack_from(f"<{topics}Q", data, table)
    starts = struct.unpack_from(f"<{topics + 1}Q", data, table + 8 * topics)
    if sorted(set(ids)) != list(ids) or sorted(starts) != list(starts) or starts[-1] != rows_bytes:
        raise VerifyError("the table of the snapshot is invalid")
    bounds = zip(ids, starts, starts[1:], strict=False)
    rows = [(topic_id, data[rows_at + start : rows_at + stop]) for topic_id, start, stop in bounds]
    return data[HEADER_BYTES : HEADER_BYTES + facts_bytes], rows


def decode_topic_row(topic_id: int, data: bytes) -> SnapshotTopicRow:
    """Decode one topic's row; raises VerifyError."""
    row = _unpacked(data)
    try:
        _, epoch, name, config, head, _, count, *rest = row
        floors, dead, lost = rest[3:7], rest[10], rest[11]
        pairs = list(zip(lost[::2], lost[1::2], strict=True))
        if dead:
            BitMap64.deserialize(dead)
        _require_unsigned([*row[:3], *row[4:]])
        for router in rest[15] if len(rest) > 15 else ():
            if [type(field) for field in router] != _ROUTER_FIELDS:
                raise ValueError("a router's fields are of other types")
        return SnapshotTopicRow(
            topic_id, epoch, name, config["durability"], head, count, max(floors), dead, pairs
        )
    except (ValueError, TypeError, KeyError, IndexError, RecursionError) as e:
        raise VerifyError("a topic's row is invalid", topic_id=topic_id, reason=str(e)) from None


def _require_unsigned(value: Any) -> None:
    """Raise ValueError for a negative number in a row. Settings are exempt: the caller leaves them out."""
    if isinstance(value, list | tuple):
        for each in value:
            _require_unsigned(each)
    elif isinstance(value, int) and value < 0:
        raise ValueError(f"a number is negative: {value}")


def decode_shard_facts(data: bytes) -> SnapshotFacts:
    """Decode a snapshot's facts about its shard; raises VerifyError."""
    value = _unpacked(data)
    try:
        version, last_id, _, floor, absorbed, _, segments, *_ = value
        if version != 1:
            raise VerifyError("unknown version of a snapshot's facts", version=version)
        listed = [(str(fields[1]), int(fields[0]), int(fields[7])) for fields in segments]
        return SnapshotFacts(int(last_id), int(floor), [int(each) for each in absorbed], listed)
    except (ValueError, TypeError, IndexError) as e:
        raise VerifyError("the facts of the snapshot are invalid", reason=str(e)) from None


def _unpacked(data: bytes) -> Any:
    try:
        return msgpack.unpackb(data, raw=False, strict_map_key=False)
    except (ValueError, msgpack.UnpackException) as e:
        raise VerifyError("a row of the snapshot is no MessagePack value", reason=str(e)) from None


def snapshots_in_force(reports: Sequence[FileReport]) -> list[FileReport]:
    """Return the newest valid snapshot of each shard, under each number of shards. Greatest number first."""
    newest: dict[tuple[int, int], FileReport] = {}
    for report in reports:
        if report.extra["is_valid"]:
            owner = report.header["shards"], report.header["shard"]
            if owner not in newest or newest[owner].header["number"] < report.header["number"]:
                newest[owner] = report
    return sorted(newest.values(), key=lambda report: (-report.header["number"], report.path))


def listed_segments(report: FileReport, snapshots: Sequence[FileReport]) -> list[tuple[str, int, int]]:
    """Return (stem, number, tier) of the segments that must exist according to this one of `snapshots`.

    A snapshot of an earlier number of shards remains until every current shard has written one. For topics
    that newer snapshots are authoritative for, it may list segments that were removed, even in part.
    """
    governs = partial(_governs, report, snapshots)
    has_topics = any(governs(int(row.topic_id)) for row in report.extra["topics"])
    found = []
    for stem, number, tier in report.extra["facts"].segments:
        of_one = _OF_ONE.match(stem)
        if governs(int(of_one[1], 16)) if of_one else has_topics:
            found.append((stem, number, tier))
    return found


def _governs(report: FileReport, snapshots: Sequence[FileReport], topic_id: int) -> bool:
    return authoritative_snapshot(snapshots, topic_id) is report


def authoritative_snapshot(snapshots: Sequence[FileReport], topic_id: int) -> FileReport | None:
    """Return the authoritative snapshot of a topic: the first one whose shard owned the topic, or None.

    `snapshots` must be sorted, greatest number first.
    """
    hashed = xxhash.xxh3_64_intdigest(topic_id.to_bytes(8, "little"))
    for report in snapshots:
        if hashed % report.header["shards"] == report.header["shard"]:
            return report
    return None
