"""Process pages: fields, watermarks, dead writers, and files that are not boards."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from ringlog import shm
from ringlog.board import layout
from ringlog.board.board import (
    Board,
    BoardError,
    BoardUnstable,
    HistogramKind,
    ProcessField,
    ProcessState,
    WatermarkKind,
)
from ringlog.board.mapping import BoardFile


@pytest.fixture
def board(shm_dir: Path) -> Iterator[Board]:
    board = Board.create(shm_dir, 8)
    yield board
    board.close()


def test_fields_written_by_one_process_are_read_by_others(board: Board, shm_dir: Path) -> None:
    mine = board.process(3)
    seen = Board.open(shm_dir, writable=False)
    theirs = seen.process(3)
    assert theirs.state is ProcessState.EMPTY
    for number, word in enumerate(ProcessField):
        mine.set(word, number + 1000)
    mine.set(ProcessField.STATE, ProcessState.READY)
    mine.add(ProcessField.FRAMES, 5)
    assert theirs.state is ProcessState.READY
    assert theirs.get(ProcessField.FRAMES) == list(ProcessField).index(ProcessField.FRAMES) + 1005
    assert [
        theirs.get(word) for word in ProcessField if word not in {ProcessField.STATE, ProcessField.FRAMES}
    ] == [
        number + 1000
        for number, word in enumerate(ProcessField)
        if word not in {ProcessField.STATE, ProcessField.FRAMES}
    ]
    assert all(board.process(slot).get(word) == 0 for slot in (2, 4) for word in ProcessField), (
        "pages do not overlap"
    )
    seen.close()


def test_a_counter_wraps_instead_of_raising(board: Board) -> None:
    page = board.process(0)
    page.set(ProcessField.BYTES, (1 << 64) - 2)
    page.add(ProcessField.BYTES, 5)
    assert page.get(ProcessField.BYTES) == 3


def test_an_unknown_state_reads_as_failed(board: Board) -> None:
    board.process(0).set(ProcessField.STATE, 77)
    assert board.process(0).state is ProcessState.FAILED


def test_a_board_opened_for_reading_cannot_be_written(board: Board, shm_dir: Path) -> None:
    """The memory mapping itself is read-only."""
    seen = Board.open(shm_dir, writable=False)
    with pytest.raises(TypeError, match="read-only"):
        seen.process(0).set(ProcessField.PID, 1)
    with pytest.raises(TypeError, match="read-only"):
        seen.process(0).set_watermark(WatermarkKind.DURABLE, 1, 1)
    seen.close()


def test_watermarks_are_separate_and_start_at_zero(board: Board) -> None:
    page = board.process(1)
    assert [page.watermark(which) for which in WatermarkKind] == [(0, 0)] * 3
    for number, which in enumerate(WatermarkKind, 1):
        page.set_watermark(which, number << 24, 4096 * number)
    assert [page.watermark(which) for which in WatermarkKind] == [(n << 24, 4096 * n) for n in (1, 2, 3)]
    assert all(page.get(word) == 0 for word in ProcessField)
    assert page.histogram(HistogramKind.COMMIT).snapshot().count == 0


def sequence_of(which: WatermarkKind) -> int:
    return layout.WATERMARK_BASE + which * layout.WATERMARK_WORDS


def test_a_writer_that_died_mid_write_blocks_no_reader_and_is_repaired(board: Board) -> None:
    """The reader gives up in bounded time. The successor's first write makes the slot whole (B2, RF-27)."""
    page = board.process(1)
    page.set_watermark(WatermarkKind.DURABLE, 5, 500)
    page.set_watermark(WatermarkKind.PUBLISHED, 6, 600)
    page.set(sequence_of(WatermarkKind.DURABLE), page.get(sequence_of(WatermarkKind.DURABLE)) + 1)
    with pytest.raises(BoardUnstable, match=r"half written.*slot=1.*mark='DURABLE'"):
        page.watermark(WatermarkKind.DURABLE)
    assert page.watermark(WatermarkKind.PUBLISHED) == (6, 600)
    assert page.repair_watermarks() == [WatermarkKind.DURABLE]
    assert page.watermark(WatermarkKind.DURABLE) == (0, 0), "what cannot be believed says nothing"
    page.set_watermark(WatermarkKind.DURABLE, 7, 700)
    assert page.watermark(WatermarkKind.DURABLE) == (7, 700)
    assert page.repair_watermarks() == []


@pytest.mark.parametrize("word", [1, 2, 3])
def test_a_damaged_watermark_is_refused(board: Board, word: int) -> None:
    """Recovery relies on the durable mark, so a mark without a matching check word must be refused (B3)."""
    page = board.process(1)
    page.set_watermark(WatermarkKind.DURABLE, 5, 500)
    page.add(sequence_of(WatermarkKind.DURABLE) + word, 1 << 20)
    assert BoardUnstable("being written").retriable, "also when it is compiled"
    with pytest.raises(BoardUnstable, match="check word mismatch"):
        page.watermark(WatermarkKind.DURABLE)


def test_a_board_has_exactly_the_requested_pages(board: Board, shm_dir: Path) -> None:
    assert board.processes == 8
    for slot in (-1, 8):
        with pytest.raises(BoardError, match=rf"slot={slot}.*slots=8"):
            board.process(slot)
    with pytest.raises(BoardError, match=r"processes must be in 1\.\..* got 1000"):
        Board.create(shm_dir, 1000)


def test_a_board_is_created_private_and_once(board: Board, shm_dir: Path) -> None:
    with pytest.raises(BoardError, match="file exists"):
        Board.create(shm_dir)
    facts = (shm_dir / "board").stat()
    assert (facts.st_mode & 0o777, facts.st_size) == (0o600, 4096 * 9)
    assert facts.st_blocks * 512 >= facts.st_size, "RD-11: allocated, not sparse"
    assert os.listdir(shm_dir) == ["board"]


def test_files_that_are_not_this_board_are_refused(board: Board, shm_dir: Path) -> None:
    """Magic, version, damage and size are checked (RF-30)."""
    path = shm_dir / "board"
    good = path.read_bytes()[: layout.IDENTITY_BYTES]
    with open(path, "r+b", buffering=0) as file:
        for at in range(layout.IDENTITY_BYTES):
            os.pwrite(file.fileno(), bytes([good[at] ^ 1]), at)
            with pytest.raises(BoardError, match=r"magic|version|checksum"):
                Board.open(shm_dir, writable=True)
            os.pwrite(file.fileno(), good[at : at + 1], at)
    path.chmod(0o644)
    with pytest.raises(BoardError, match="not private"):
        Board.open(shm_dir, writable=False)
    path.chmod(0o600)
    os.truncate(path, 4096 * 8)
    with pytest.raises(BoardError, match="wrong size"):
        Board.open(shm_dir, writable=False)
    os.truncate(path, 10)
    with pytest.raises(BoardError, match="must have at least"):
        Board.open(shm_dir, writable=False)
    with pytest.raises(BoardError, match="No such file"):
        Board.open(shm_dir / "elsewhere", writable=False)
    os.truncate(path, 4096 * 9)


def test_a_topic_table_is_refused_as_a_board(shm_dir: Path) -> None:
    shm.make_file(
        str(shm_dir / "board"), 8192, layout.encode_identity(layout.TOPICS_MAGIC, 0, 1, 0), BoardError
    )
    with pytest.raises(BoardError, match="wrong magic"):
        BoardFile(str(shm_dir / "board"), layout.BOARD_MAGIC, writable=True)


def test_a_weakly_ordered_machine_is_refused(shm_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Seqlocks need a CPU that keeps stores in order."""
    monkeypatch.setattr(shm.platform, "machine", lambda: "aarch64")
    with pytest.raises(BoardError, match="x86-64"):
        Board.create(shm_dir)
