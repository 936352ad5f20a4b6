"""Log files: recovery and the offline verifier read the same bytes.

The first byte selects the corrections. Bit 0: the file header. Bit 1: seals and body checksums of frames.
Bit 2: the input has frames only, and a valid header is put before them.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import msgpack
import xxhash

from ringlog.errors import CorruptData, FrameInvalid
from ringlog.frame import layout, open_frame
from ringlog.frame.layout import Column, FrameType
from ringlog.limits import WAL_HEADER_BYTES
from ringlog.storage.layout import WalHeader, decode_wal_header
from ringlog.storage.recovery import (
    FileScan,
    WalScanChunk,
    classify_tail,
    copied_mark,
    frames_after_damage,
    holds_marks,
    scan_trailing_data,
)
from ringlog.verify.directory import DECODE_ERRORS
from ringlog.verify.wal_decoder import verify_wal
from tests.support.log_file import sealed_frame

MAX_LEN = 2_048
SHARE = 2.0
SALT = 7
FRAMES_MAX = 64
PATH = "wal/shard-00/wal-1-0.log"
HEADER = WalHeader(0, 1, 0, 1, SALT, b"b" * 16, b"e" * 16, 1, 1 << 20, 0, 0, 0, 0).encode()
MEND_HEADER, MEND_FRAMES, ONLY_FRAMES = 1, 2, 4
GOLDEN = Path(__file__).parents[2] / "tests" / "golden"


def check(data: bytes) -> None:
    """Read one file with both.

    Errors must be typed, and the verifier must find every frame that recovery accepts.
    """
    whole = prepared(data)
    try:
        header = decode_wal_header(whole[:WAL_HEADER_BYTES], PATH)
    except CorruptData:
        holds_marks(lambda at, size: whole[at : at + size], len(whole))
        header = None
    believed = 0 if header is None else _recover(header, whole)
    try:
        report = verify_wal(PATH, whole, is_deep=True)
    except DECODE_ERRORS:
        return
    if header is not None and believed > report.frames and not report.is_damaged:
        raise AssertionError(
            f"recovery believes {believed} frames, the verifier saw {report.frames} and no damage"
        )


def _recover(header: WalHeader, whole: bytes) -> int:
    def read(at: int, size: int) -> bytes:
        return whole[at : at + size]

    scan = FileScan(header, len(whole), read)
    found = sum(_readable(piece, header.salt) for piece in scan.iter_chunks())
    if scan.stop > max(len(whole), WAL_HEADER_BYTES):
        raise AssertionError("frames end behind the end of the file")
    classify_tail(scan, 0)
    scan_trailing_data(scan)
    for _ in frames_after_damage(scan):
        continue
    copied_mark(header, len(whole), read)
    return found


def _readable(piece: WalScanChunk, salt: int) -> int:
    """Return the number of frames before the first with an invalid body.

    Replay ends there with a typed error.
    """
    for number, offset in enumerate(piece.batch.offsets.tolist()):
        try:
            view = open_frame(piece.buffer, offset, seed=salt)
            view.records() if view.columns else view.control()
        except FrameInvalid:
            return number
    return len(piece.batch)


def prepared(data: bytes) -> bytes:
    """Return the file that the input describes."""
    how, rest = (data[0], data[1:]) if data else (0, b"")
    whole = HEADER + rest if how & ONLY_FRAMES else rest
    if how & MEND_HEADER and len(whole) >= WAL_HEADER_BYTES:
        head = whole[: WAL_HEADER_BYTES - 8]
        whole = head + xxhash.xxh3_64_intdigest(head).to_bytes(8, "little") + whole[WAL_HEADER_BYTES:]
    return mended(whole) if how & MEND_FRAMES else whole


def mended(whole: bytes, start: int = WAL_HEADER_BYTES, salt: int = SALT) -> bytes:
    """Return the file as a sequence of frames with valid lengths, body checksums and seals."""
    made = bytearray(whole)
    at = start
    for _ in range(FRAMES_MAX):
        left = len(made) - at
        if left < layout.HEADER_BYTES:
            break
        total = int.from_bytes(made[at : at + 4], "little") + 4 & ~7
        total = total if layout.HEADER_BYTES <= total <= left else left & ~7
        made[at : at + 4] = (total - 4).to_bytes(4, "little")
        made[at + 64 : at + 72] = xxhash.xxh3_64_intdigest(bytes(made[at + 80 : at + total])).to_bytes(
            8, "little"
        )
        made[at + 72 : at + 80] = xxhash.xxh3_64_intdigest(bytes(made[at : at + 72]), salt).to_bytes(
            8, "little"
        )
        at += total
    return bytes(made)


def control(kind: int, body: object, *, topic_id: int = 0, epoch: int = 0, salt: int = SALT) -> bytes:
    """Return a sealed control frame."""
    packed: bytes = msgpack.packb(body)
    return sealed_frame(
        {}, topic_id=topic_id, base_seq=0, salt=salt, epoch=epoch, commit_ts=0, kind=kind, control=packed
    )


def seeds() -> Iterator[bytes]:
    """Yield commit batches of an append and its mark, every kind of control frame, and golden frames."""
    append = sealed_frame(
        {Column.PAYLOAD: [b"a", b"bc"], Column.TAG: [b"t", b""]}, topic_id=1, base_seq=1, salt=SALT
    )
    mark = control(FrameType.GROUP_MARK, [1, WAL_HEADER_BYTES, 0, WAL_HEADER_BYTES, len(append), 0, [], []])
    for how in (0, MEND_FRAMES, MEND_HEADER | MEND_FRAMES):
        yield bytes([how | ONLY_FRAMES]) + append + mark + append
    yield bytes([ONLY_FRAMES]) + append + mark + bytes(64) + b"torn"
    for kind in FrameType:
        for body in ([], [1], {"name": "t"}, [1, 2, 3, 4, 5, 6, [[1, 2]], [1]], ["t", 1, b""], b""):
            yield bytes([ONLY_FRAMES | MEND_FRAMES]) + control(kind, body, topic_id=1, epoch=1)
    for path in sorted(GOLDEN.glob("**/frames/*.hex")):
        yield bytes([ONLY_FRAMES | MEND_FRAMES]) + bytes.fromhex(path.read_text())
