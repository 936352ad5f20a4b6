"""Recovery of one WAL file: which bytes are valid, where the log ends, and whether the end is damaged."""

from __future__ import annotations

import random

import msgspec
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ringlog.actors.wal_shard.commit.commit_batch import CommitBatch, ControlPart, LogPosition, lay_out
from ringlog.frame import control_frame
from ringlog.frame.batch import body_hashes, types_of
from ringlog.frame.batch import scan as scan_frames
from ringlog.frame.layout import W_BODY_XXH3, FrameType
from ringlog.limits import WAL_HEADER_BYTES
from ringlog.storage import recovery
from ringlog.storage.layout import MARK_COPIED, MARK_ORDERLY, WalHeader
from ringlog.storage.recovery import (
    ChainMark,
    FileScan,
    WalTailState,
    classify_tail,
    copied_mark,
    frames_after_damage,
    holds_marks,
    mark_at,
    scan_trailing_data,
)

SALT = 77
SIZE = 64 << 10
HEADER = WalHeader(0, 1, 0, 1, SALT, b"b" * 16, b"e" * 16, 1, SIZE, 0, 0, 0, 0)


class Log:
    """A file built batch by batch. Each commit batch is one control frame with a body of the given length."""

    def __init__(self) -> None:
        self.at = LogPosition()
        self.at.start_file(HEADER.file_id, SALT, WAL_HEADER_BYTES, SIZE)
        self.data = bytearray(SIZE)
        self.stops: list[int] = []

    def group(self, length: int = 40, *, synced: bool = True, flags: int = 0, word: object = ((), ())) -> Log:
        group, start = CommitBatch(), self.at.offset
        if length:
            body = b"\xc4" + bytes([length]) + b"x" * length
            group.parts.append(ControlPart(control_frame(FrameType.TOPIC_DELETE, 5, body)))
            group.bytes = len(group.parts[0].frame)
        content = b"".join(bytes(each) for each in lay_out(group, self.at, flags, word))  # type: ignore[arg-type]
        self.data[start : start + len(content)] = content
        self.stops.append(self.at.offset)
        if synced:
            self.at.durable = self.at.offset
        return self

    def scanned(self, data: bytes | None = None, size: int = 0) -> FileScan:
        content = bytes(self.data if data is None else data)
        scan = FileScan(HEADER, size or len(content), lambda at, length: content[at : at + length])
        self.frames = sum(len(piece.batch) for piece in scan.iter_chunks())
        return scan


def test_an_intact_log_is_clean_and_reports_its_durable_end():
    log = Log().group(40).group(50).group(60)
    scan = log.scanned()
    assert (scan.stop, scan.durable, scan.reason) == (log.stops[-1], log.stops[-2], "")
    assert log.frames == 6
    assert classify_tail(scan, 0) is WalTailState.CLEAN
    assert scan.seal_at(scan.stop) == scan.last_seal != 0
    assert scan.seal_at(scan.durable) not in (0, scan.last_seal)


def test_flags_of_chain_marks_are_found():
    log = Log().group().group(0, flags=MARK_COPIED, word=([(9, 8)], [9])).group(0, flags=MARK_ORDERLY)
    scan = log.scanned()
    assert scan.orderly
    assert scan.copied is not None
    assert (scan.copied.settled, scan.copied.damaged) == ([(9, 8)], [9])
    data = bytes(log.data)
    assert copied_mark(HEADER, SIZE, lambda at, n: data[at : at + n]) == scan.copied
    log.group()
    assert not log.scanned().orderly, "only the last mark speaks of the end"


def test_the_copied_flag_is_read_from_the_first_two_batches_only():
    log = Log().group().group().group(0, flags=MARK_COPIED)
    data = bytes(log.data)
    assert copied_mark(HEADER, SIZE, lambda at, n: data[at : at + n]) is None


@pytest.mark.parametrize("size", range(WAL_HEADER_BYTES, WAL_HEADER_BYTES + 420, 3))
def test_a_scan_ends_for_any_file_length(size):
    """Lengths that are no multiple of 8 are included."""
    log = Log().group().group()
    scan = log.scanned(bytes(log.data[:size]))
    assert scan.stop <= size
    assert scan.stop in {WAL_HEADER_BYTES, *log.stops} or log.frames % 2


def test_damage_below_a_later_chain_mark_is_corruption_and_above_it_a_torn_end():
    """A later chain mark proves that the bytes below it were synced."""
    log = Log().group().group().group(synced=False)
    for at, tail in ((log.stops[0] + 90, WalTailState.CORRUPT), (log.stops[1] + 90, WalTailState.TORN)):
        data = bytearray(log.data)
        data[at] ^= 1
        scan = log.scanned(bytes(data))
        assert classify_tail(scan, 0) is tail
        assert scan.reason


def test_a_durable_position_from_elsewhere_makes_a_torn_end_corrupt():
    """Such a position comes from the board's mark or from the next file's header."""
    log = Log().group().group()
    data = bytearray(log.data)
    data[log.stops[0] + 90] ^= 1
    scan = log.scanned(bytes(data))
    assert classify_tail(scan, log.stops[0]) is WalTailState.TORN
    assert classify_tail(scan, log.stops[1]) is WalTailState.CORRUPT


def test_unsynced_batches_written_out_of_order_are_a_torn_end():
    """The second batch reached the device, the first did not. The second batch's chain mark claims only what
    was synced."""
    log = Log().group().group(synced=False).group(synced=False)
    data = bytearray(log.data)
    data[log.stops[0] : log.stops[1]] = bytes(log.stops[1] - log.stops[0])
    scan = log.scanned(bytes(data))
    assert scan.stop == log.stops[0]
    assert classify_tail(scan, 0) is WalTailState.TORN


def test_zeros_in_a_durable_range_are_corruption():
    """A lost block inside the durable part of the log is damage (RF-73)."""
    log = Log().group().group().group()
    data = bytearray(log.data)
    data[log.stops[0] : log.stops[1]] = bytes(log.stops[1] - log.stops[0])
    assert classify_tail(log.scanned(bytes(data)), 0) is WalTailState.CORRUPT


def test_nonzero_bytes_after_the_end_are_a_torn_end():
    """Only a log that ends with a whole frame proves that no record was lost."""
    log = Log().group()
    data = bytearray(log.data)
    data[-1] = 1
    assert classify_tail(log.scanned(bytes(data)), 0) is WalTailState.TORN


def test_chain_marks_after_damage_are_found(monkeypatch):
    """They are found across the edges of read buffers, and only if body and seal match."""
    log = Log().group().group().group()
    for step in (512, 520, 1 << 20):
        monkeypatch.setattr(recovery, "RECOVERY_READ_BYTES", step)
        data = bytearray(log.data)
        data[WAL_HEADER_BYTES + 100] ^= 1
        scan = log.scanned(bytes(data))
        assert scan_trailing_data(scan).durable == log.stops[1]
        data[log.stops[1] + 100] ^= 1
        assert scan_trailing_data(log.scanned(bytes(data))).durable == log.stops[0]


def test_commit_batches_are_recognised_without_the_file_header():
    log = Log().group()
    data = bytes(log.data)
    assert holds_marks(lambda at, n: data[at : at + n], SIZE)
    noise = bytes(WAL_HEADER_BYTES) + random.Random(1).randbytes(SIZE - WAL_HEADER_BYTES)
    assert not holds_marks(lambda at, n: noise[at : at + n], SIZE)
    assert not holds_marks(lambda at, n: bytes(SIZE)[at : at + n], SIZE)


@pytest.mark.parametrize("length", [200, SIZE - WAL_HEADER_BYTES - 2_000])
def test_payload_that_looks_like_marks_is_read_once_or_twice(length):
    """A client can write a payload of words like the first of a mark. They may state any length."""
    word = (length - 4).to_bytes(4, "little") + bytes([FrameType.GROUP_MARK, 2, 0, 0])
    log = Log().group()
    data = bytearray(log.data)
    data[log.stops[0] : -8] = word * ((SIZE - log.stops[0] - 8) // 8)
    scan = log.scanned(bytes(data))
    assert scan.stop == log.stops[0]
    read = []
    scan.read = lambda at, n: read.append(n) or bytes(data[at : at + n])
    assert scan_trailing_data(scan) == (0, True)
    list(frames_after_damage(scan))
    assert sum(read) < 3 * SIZE
    data[:WAL_HEADER_BYTES] = bytes(WAL_HEADER_BYTES)
    read.clear()
    holds_marks(scan.read, SIZE)
    assert len(read) <= recovery.MARK_CANDIDATES_MAX * 2


def test_a_mark_without_a_valid_seal_is_none_wherever_a_buffer_ends(monkeypatch):
    """A client can write a payload that is a mark but for its seal, and whose words all look like one."""
    log = Log().group()
    body = msgspec.msgpack.encode(ChainMark(1, 0, 0, 1 << 40, 0, 0))
    forged = bytearray(control_frame(FrameType.GROUP_MARK, 0, body))
    head = types_of(np.frombuffer(forged[:80], "<u8").reshape(1, 10))
    assert head.tolist() == [FrameType.GROUP_MARK]
    forged[8:56] = bytes(forged[:8]) * 6
    words = np.frombuffer(forged[:80], "<u8").copy()
    words[W_BODY_XXH3] = body_hashes(forged, scan_frames(forged))[0]
    forged[:80] = words.tobytes()
    for behind in range(8, 81, 8):
        data = bytearray(log.data)
        at = log.stops[0] + 512 - behind
        data[log.stops[0] : log.stops[0] + 8] = b"\xff" * 8
        data[at : at + len(forged)] = forged
        monkeypatch.setattr(recovery, "RECOVERY_READ_BYTES", 512)
        scan = log.scanned(bytes(data))
        assert scan.stop == log.stops[0]
        assert mark_at(at, scan) is None
        assert classify_tail(scan, 0) is WalTailState.TORN


def test_a_file_full_of_places_like_marks_is_taken_to_have_one(monkeypatch):
    monkeypatch.setattr(recovery, "MARK_CANDIDATES_MAX", 10)
    word = (1 << 30).to_bytes(4, "little") + bytes([FrameType.GROUP_MARK, 2, 0, 0])
    for places, is_found in ((10, False), (11, True)):
        data = bytes(WAL_HEADER_BYTES) + word * places + bytes(800)
        assert holds_marks(lambda at, n, data=data: data[at : at + n], len(data)) is is_found


@pytest.mark.parametrize("window", [80, 96, 104, 200, 208, 512, 1_000])
def test_the_frame_of_a_key_and_the_one_after_it_are_in_one_chunk(monkeypatch, window):
    """Wherever the buffers of a scan end, and however long the frame after the key is."""
    monkeypatch.setattr(recovery, "RECOVERY_READ_BYTES", window)
    log = Log()
    for n, length in enumerate((8, 40, 120, 16, 250, 8, 8, 200)):
        batch, start = CommitBatch(), log.at.offset
        for kind, body in (
            (FrameType.IDEMPOTENCY_KEY, bytes(n + 1)),
            (FrameType.TOPIC_DELETE, bytes(length)),
        ):
            batch.parts.append(ControlPart(control_frame(kind, 5, b"\xc4" + bytes([len(body)]) + body)))
        batch.bytes = sum(len(part.frame) for part in batch.parts)
        content = b"".join(bytes(each) for each in lay_out(batch, log.at, 0, ((), ())))
        log.data[start : start + len(content)] = content
        log.stops.append(log.at.offset)
        log.at.durable = log.at.offset
    scan = FileScan(HEADER, SIZE, lambda at, n: bytes(log.data[at : at + n]))
    chunks = [types_of(chunk.batch.words).tolist() for chunk in scan.iter_chunks()]
    assert not scan.reason
    assert sum(map(len, chunks)) == 24
    assert all(chunk[-1] != FrameType.IDEMPOTENCY_KEY for chunk in chunks)
    assert len(chunks) > 1


def test_the_frame_of_a_key_at_the_end_of_a_torn_log_is_a_chunk(monkeypatch):
    monkeypatch.setattr(recovery, "RECOVERY_READ_BYTES", 96)
    log = Log().group()
    key = control_frame(FrameType.IDEMPOTENCY_KEY, 5, b"\xc4\x01x")
    batch = CommitBatch()
    batch.parts.append(ControlPart(key))
    batch.bytes = len(key)
    content = b"".join(bytes(each) for each in lay_out(batch, log.at, 0, ((), ())))
    log.data[log.stops[0] : log.stops[0] + len(content)] = content
    stop = log.stops[0] + len(content)
    for behind in (b"", b"\x10\x27\0\0" + b"x" * 90, b"x" * 50):
        data = bytearray(log.data)
        data[stop : stop + len(behind)] = behind
        assert log.scanned(bytes(data)).stop == stop


def test_frames_after_damage_are_listed():
    """The list also contains the damaged frame itself if its header verifies."""
    log = Log()
    for _ in range(5):
        log.group()
    data = bytearray(log.data)
    data[log.stops[1] - 8] ^= 1
    scan = log.scanned(bytes(data))
    assert sum(len(piece.batch) for piece in frames_after_damage(scan)) == 7
    data[log.stops[0] + 5] ^= 1
    assert sum(len(piece.batch) for piece in frames_after_damage(log.scanned(bytes(data)))) == 6


@given(st.binary(max_size=4_000), st.integers(0, 400))
def test_any_bytes_are_classified(noise, keep):
    """A scan never raises, never loops, and accepts only bytes that were written."""
    log = Log().group().group().group()
    data = bytes(log.data[: WAL_HEADER_BYTES + keep]) + noise
    scan = log.scanned(data)
    assert classify_tail(scan, 0) in set(WalTailState)
    assert scan.stop <= WAL_HEADER_BYTES + keep or data[: scan.stop] == bytes(log.data[: scan.stop])
    assert all(len(piece.batch) for piece in frames_after_damage(scan))
