"""Independent decoder of WAL files, written from docs/reference/format.md only.

It reads a file commit batch by commit batch and follows the chain of marks. A file ends after its last frame,
or torn: inside data above everything that was known to be durable, which was never acknowledged. If it ends
inside data that had been synced, it is damaged. ringlog.verify.log_order adds what later files record.
"""

from __future__ import annotations

import re
import struct
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import xxhash

from ringlog.verify.findings import ControlFact, FileReport
from ringlog.verify.frame_decoder import DecodedFrame, VerifyError, check_frame, decode_frame

HEADER_BYTES = 4096
_HEADER = struct.Struct("<8sIIIIQQ16s16sQQQQQQ")
_MAGIC = b"RLOGWAL1"
_APPEND, _MARK, _KEY, _ROUTED = 1, 12, 14, 15
_MEMORY = 1
"""Durability class `memory`: an append that may be lost in a crash."""
_FRAME_HEADER_BYTES = 80
_MARK_FIELDS = 7
_MARK_HEAD = re.compile(rb"\x0c[\x01\x02]\0\0")
"""Type, version and column bytes of a mark."""
_COPIED = 1
_FILE_SHIFT = 24
_ZEROS = bytes(1 << 16)
"""Compared with the end of a file, piece by piece."""


@dataclass(frozen=True, slots=True)
class DecodedWalHeader:
    """First 4096 bytes of a WAL file."""

    shard: int
    shards: int
    n: int
    incarnation: int
    salt: int
    boot_id: bytes
    engine_id: bytes
    created_us: int
    file_bytes: int
    prev_file: int
    prev_stop: int
    prev_seal: int
    flags: int

    @property
    def file_id(self) -> int:
        """File id: incarnation and n in one number."""
        return self.incarnation << _FILE_SHIFT | self.n

    def facts(self) -> dict[str, Any]:
        """Return the fields as plain values."""
        return {
            "shard": self.shard, "shards": self.shards, "incarnation": self.incarnation, "n": self.n,
            "salt": f"{self.salt:016x}", "boot_id": self.boot_id.hex(), "engine_id": self.engine_id.hex(),
            "created_us": self.created_us, "file_bytes": self.file_bytes, "prev_file": self.prev_file,
            "prev_stop": self.prev_stop, "prev_seal": f"{self.prev_seal:016x}",
            "prev_was_orderly": bool(self.flags & 1), "has_register": bool(self.flags & 2),
        }  # fmt: skip


class DecodedMark(NamedTuple):
    """Body of a GROUP_MARK frame, and its offset in the file."""

    offset: int
    group: int
    prev_stop: int
    prev_seal: int
    durable_stop: int
    group_bytes: int
    flags: int
    settled: list[list[int]]
    damaged: list[int]


class DamagedAppend(NamedTuple):
    """A damaged append that an engine gives up: its offset and its seqs (`first` and `last` inclusive)."""

    offset: int
    topic_id: int
    epoch: int
    first: int
    last: int


class DecodedWalFrame(NamedTuple):
    """One valid frame: its offset in the file, its decoded header, and its seal."""

    offset: int
    frame: DecodedFrame
    seal: int


def read_header(data: bytes) -> DecodedWalHeader:
    """Decode the header of a WAL file; raises VerifyError."""
    if len(data) < HEADER_BYTES:
        raise VerifyError("no room for a WAL header")
    magic, version, *rest = _HEADER.unpack_from(data)
    if magic != _MAGIC:
        raise VerifyError("not a WAL file")
    (checksum,) = struct.unpack_from("<Q", data, HEADER_BYTES - 8)
    if xxhash.xxh3_64_intdigest(bytes(data[: HEADER_BYTES - 8])) != checksum:
        raise VerifyError("WAL header: checksum mismatch")
    if version != 1:
        raise VerifyError("unknown WAL version", version=version)
    header = DecodedWalHeader(*rest)
    if header.salt == 0:
        raise VerifyError("WAL salt is 0")
    return header


@dataclass(slots=True)
class WalFrameWalk:
    """One pass over the frames of a file. The other fields are final when `frames()` is exhausted."""

    data: bytes
    salt: int
    is_deep: bool = False
    """Decode every body, instead of only verifying its checksum."""
    skip_stop: int = 0
    """From this offset on, a damaged append of any class ends the frames; 0 = nowhere."""
    stop: int = HEADER_BYTES
    reason: str = ""
    """Why the frames end at `stop`; empty = zeros follow, or the file ends."""
    durable: int = HEADER_BYTES
    last_seal: int = 0
    marks: list[DecodedMark] = field(default_factory=list)
    damaged_appends: list[DamagedAppend] = field(default_factory=list)
    """Damaged appends of class memory, which an engine gives up and skips."""

    def frames(self) -> Iterator[DecodedWalFrame]:
        """Yield the valid frames in order, up to the first invalid one."""
        size = len(self.data) & ~7
        while self.stop < size and self.data[self.stop : self.stop + 4] != b"\0\0\0\0":
            try:
                seen = frame_at(self.data, self.stop, self.salt, is_deep=self.is_deep)
                if seen.frame.type == _MARK:
                    self._check_mark(seen)
            except VerifyError as e:
                if self._skip_damaged_append():
                    continue
                self.reason = e.message
                return
            self.stop = seen.offset + seen.frame.total
            self.last_seal = seen.seal
            yield seen

    def _skip_damaged_append(self) -> bool:
        """Skip an append of class memory with a valid header and an invalid body. Returns whether it did."""
        at, data = self.stop, self.data
        if at + _FRAME_HEADER_BYTES > len(data):
            return False
        (seal,) = struct.unpack_from("<Q", data, at + 72)
        if xxhash.xxh3_64_intdigest(bytes(data[at : at + 72]), self.salt) != seal:
            return False
        frame_len, kind = struct.unpack_from("<IB", data, at)
        body_sum = struct.unpack_from("<Q", data, at + 64)[0]
        stop = at + 4 + frame_len
        body = bytes(data[at + _FRAME_HEADER_BYTES : stop])
        if kind != _APPEND or data[at + 61] & 3 != _MEMORY or stop > len(data):
            return False
        if xxhash.xxh3_64_intdigest(body) == body_sum or 0 < self.skip_stop <= at:
            return False
        topic_id, base_seq = struct.unpack_from("<QQ", data, at + 8)
        count, epoch = struct.unpack_from("<II", data, at + 32)
        self.damaged_appends.append(DamagedAppend(at, topic_id, epoch, base_seq, base_seq + count - 1))
        self.stop, self.last_seal = stop, seal
        return True

    def _check_mark(self, seen: DecodedWalFrame) -> None:
        mark = mark_of(seen)
        expected = self.last_seal if seen.offset > HEADER_BYTES else 0
        if mark.prev_stop != seen.offset or mark.durable_stop > seen.offset or mark.prev_seal != expected:
            raise VerifyError("the chain of commit batches is broken")
        self.durable = max(self.durable, mark.durable_stop)
        self.marks.append(mark)


def frame_at(data: bytes, offset: int, salt: int, *, is_deep: bool = False) -> DecodedWalFrame:
    """Return the verified frame at `offset`. Control frames are always decoded. Raises VerifyError."""
    frame, _ = check_frame(data, offset, salt)
    if is_deep or frame.type != _APPEND:
        frame = decode_frame(data, offset, salt)
    (seal,) = struct.unpack_from("<Q", data, offset + 72)
    return DecodedWalFrame(offset, frame, seal)


def mark_of(seen: DecodedWalFrame) -> DecodedMark:
    """Decode the body of a mark; raises VerifyError."""
    body = seen.frame.control
    if not isinstance(body, list) or len(body) < _MARK_FIELDS:
        raise VerifyError("mark has too few fields")
    numbers, settled, damaged = body[:6], body[6], body[7] if len(body) > _MARK_FIELDS else []
    if not all(isinstance(number, int) for number in [*numbers, *damaged]):
        raise VerifyError("mark has fields that are not numbers")
    return DecodedMark._make([seen.offset, *numbers, settled, damaged])


def _has_more(data: bytes, start: int) -> bool:
    """Return whether anything but zeros follows from `start` on."""
    pieces = (data[at : at + len(_ZEROS)] for at in range(start, len(data), len(_ZEROS)))
    return any(piece != _ZEROS[: len(piece)] for piece in pieces)


def verify_wal(path: str, data: bytes, *, is_deep: bool = False) -> FileReport:
    """Check one file by itself. `extra` of the report has what other files need to judge its end."""
    report = FileReport(path, "wal", bytes=len(data))
    try:
        header = read_header(data)
    except VerifyError as e:
        _without_header(report, data, e)
        return report
    report.header = header.facts()
    durable = _fill(report, header, WalFrameWalk(data, header.salt, is_deep))
    if any(given_up[0] >= durable for given_up in report.extra["passed"]):
        # A torn end, unless other files record that these bytes were durable.
        torn = report.extra["torn"] = FileReport(path, "wal", bytes=len(data), header=report.header)
        _fill(torn, header, WalFrameWalk(data, header.salt, is_deep, skip_stop=durable))
    return report


def _fill(report: FileReport, header: DecodedWalHeader, walk: WalFrameWalk) -> int:
    """Add the frames of a walk to the report. Returns the durable offset according to the file itself."""
    data = walk.data
    for seen in walk.frames():
        _add_frame(report, seen)
    for given_up in walk.damaged_appends:
        text = f"records {given_up.first}..{given_up.last} of topic {given_up.topic_id:x} are damaged"
        report.add_remark(f"{text}: of class memory, an engine gives them up", given_up.offset)
    later_marks = trailing_marks(data, walk.stop, header.salt)
    durable = max([walk.durable, *(mark.durable_stop for mark in later_marks)])
    report.extra = {
        "file_id": header.file_id,
        "prev": (header.prev_file, header.prev_stop, header.prev_seal),
        "stop": walk.stop,
        "last_seal": walk.last_seal,
        "reason": walk.reason or ("bytes follow the last frame" if _has_more(data, walk.stop) else ""),
        "durable": durable,
        "ends": {mark.offset: mark.prev_seal for mark in walk.marks} | {walk.stop: walk.last_seal},
        "groups": len(walk.marks),
        "passed": [tuple(given_up) for given_up in walk.damaged_appends],
        "copied": [mark._asdict() for mark in walk.marks[:2] if mark.flags & _COPIED],
    }
    return durable


def _without_header(report: FileReport, data: bytes, error: VerifyError) -> None:
    """Report a file without a valid header: created in advance if it has no commit batch, else damaged."""
    report.extra = {"file_id": 0, "stop": 0, "copied": []}
    report.header = {"state": "never used"}
    if any(_is_mark_head(data, at) and _body_verifies(data, at) for at in _mark_heads(data, 0)):
        report.add_damage(f"has commit batches, but {error.message}")
    elif _has_more(data, 0):
        report.add_remark(f"never used: {error.message}, and it contains no commit batch")


def _add_frame(report: FileReport, seen: DecodedWalFrame) -> None:
    frame = seen.frame
    report.frames += 1
    if frame.type == _APPEND:
        report.add_records(frame.topic_id, frame.epoch, frame.base_seq, frame.count)
    elif frame.type == _ROUTED:
        for copy in frame.copies:
            report.add_records(copy.topic_id, copy.epoch, copy.base_seq, copy.records)
    elif frame.type not in {_MARK, _KEY}:
        report.control_frames.append(ControlFact(frame.topic_id, frame.epoch, frame.type, frame.control))


def trailing_marks(data: bytes, start: int, salt: int) -> list[DecodedMark]:
    """Return the valid marks after the offset at which the frames end."""
    found = []
    for at in _mark_heads(data, start):
        try:
            found.append(mark_of(frame_at(data, at, salt)))
        except VerifyError:
            continue
    return found


def _mark_heads(data: bytes, start: int) -> Iterator[int]:
    """Yield the offsets, multiples of 8, at which a mark may begin."""
    for found in _MARK_HEAD.finditer(data, start):
        at = found.start() - 4
        if at % 8 == 0 and at >= start:
            yield at


def _is_mark_head(data: bytes, at: int) -> bool:
    return at + _FRAME_HEADER_BYTES <= len(data)


def _body_verifies(data: bytes, at: int) -> bool:
    try:
        check_frame(data, at)
    except VerifyError:
        return False
    return True
