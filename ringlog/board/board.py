"""The board: one page of numbers for each process.

Each word has one writer: the process that owns the page, or the supervisor where layout.ProcessField says so.
All other processes of the engine map the board read-only.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

from ringlog.board import layout, seqlock
from ringlog.board.histogram import COUNT_SHIFT, NS_SHIFT, Histogram
from ringlog.board.layout import (
    BoardError,
    BoardUnstable,
    HistogramKind,
    ProcessField,
    ProcessState,
    WatermarkKind,
)
from ringlog.board.mapping import BoardFile, make_board_file
from ringlog.limits import PROCESSES_MAX

__all__ = [
    "Board",
    "BoardError",
    "BoardUnstable",
    "HistogramKind",
    "ProcessField",
    "ProcessSlot",
    "ProcessState",
    "WatermarkKind",
]

_WORD_MASK = 0xFFFFFFFFFFFFFFFF
_SHIFTS = {
    HistogramKind.COMMIT: NS_SHIFT,
    HistogramKind.SYNC: NS_SHIFT,
    HistogramKind.BATCH_FRAMES: COUNT_SHIFT,
}


class ProcessSlot:
    """The page of one process. Reads work on any board, writes only on one that was opened writable."""

    def __init__(self, words: memoryview, slot: int) -> None:
        self.slot = slot
        self._words = words
        self.get: Callable[[int], int] = words.__getitem__
        """get(word) -> int: value of a word, see ProcessField."""
        self.set: Callable[[int, int], None] = words.__setitem__
        """set(word, value): store a word, 0..2**64-1, see ProcessField."""

    def add(self, word: int, n: int) -> None:
        """Add to a word that only this process writes."""
        words = self._words
        words[word] = (words[word] + n) & _WORD_MASK

    @property
    def state(self) -> ProcessState:
        """ProcessField.STATE; FAILED for an unknown number."""
        number = self._words[ProcessField.STATE]
        return ProcessState(number) if number <= ProcessState.GIVEN_UP else ProcessState.FAILED

    def set_watermark(self, which: WatermarkKind, file_id: int, offset: int) -> None:
        """Set a mark to (file_id, offset in bytes). Also repairs a mark that is half written."""
        at = layout.WATERMARK_BASE + which * layout.WATERMARK_WORDS
        seqlock.write(self._words, at, (file_id, offset, _check(file_id, offset)))

    def watermark(self, which: WatermarkKind) -> tuple[int, int]:
        """Return (file_id, offset) of a mark, (0, 0) if it was never set.

        Raises BoardUnstable if its writer died half-way or the check word does not match (B3). The caller
        must then not use the mark.
        """
        at = layout.WATERMARK_BASE + which * layout.WATERMARK_WORDS
        words = self._words
        before, file_id, offset, check = words[at : at + 4].tolist()
        if before & 1 or words[at] != before:
            file_id, offset, check = seqlock.read(words, at, 3, lambda: self._mark_facts(which))
        if check != _check(file_id, offset) and (file_id or offset or check):
            raise BoardUnstable("board mark: check word mismatch", **self._mark_facts(which))
        return file_id, offset

    def repair_watermarks(self) -> list[WatermarkKind]:
        """Reset unreadable marks to (0, 0) and return them. Only for the new writer of the page."""
        broken = []
        for which in WatermarkKind:
            try:
                self.watermark(which)
            except BoardUnstable:
                broken.append(which)
                self.set_watermark(which, 0, 0)
        return broken

    def histogram(self, which: HistogramKind) -> Histogram:
        """Return one of the page's histograms."""
        base = layout.HISTOGRAM_BASE + which * layout.HISTOGRAM_WORDS
        return Histogram(self._words, base, _SHIFTS[which])

    def _mark_facts(self, which: WatermarkKind) -> dict[str, Any]:
        return {"slot": self.slot, "mark": which.name}


class Board:
    """The pages of all processes."""

    def __init__(self, file: BoardFile) -> None:
        self._file = file
        self._pages: dict[int, ProcessSlot] = {}
        self._views: list[memoryview] = []

    @classmethod
    def create(cls, dir: str | os.PathLike[str], processes: int = PROCESSES_MAX) -> Board:
        """Create the board in a directory and open it writable. Raise BoardError on failure."""
        if not 1 <= processes <= PROCESSES_MAX:
            raise BoardError(
                f"processes must be in 1..{PROCESSES_MAX}, got {processes}",
                processes=processes,
                min=1,
                max=PROCESSES_MAX,
            )
        identity = layout.encode_identity(layout.BOARD_MAGIC, 0, processes, 0)
        make_board_file(_path(dir), layout.PAGE_BYTES * (processes + 1), identity)
        return cls.open(dir, writable=True)

    @classmethod
    def open(cls, dir: str | os.PathLike[str], *, writable: bool) -> Board:
        """Map the board of a directory. Raise BoardError if there is none or it is not valid."""
        return cls(BoardFile(_path(dir), layout.BOARD_MAGIC, writable=writable))

    @property
    def processes(self) -> int:
        """Number of pages."""
        return self._file.slots

    def process(self, slot: int) -> ProcessSlot:
        """Return page number `slot`. Raise BoardError beyond the last page."""
        page = self._pages.get(slot)
        if page is None:
            if not 0 <= slot < self._file.slots:
                raise BoardError(
                    f"process slot must be in 0..{self._file.slots - 1}, got {slot}",
                    slot=slot,
                    slots=self._file.slots,
                )
            start = (slot + 1) * layout.PAGE_WORDS
            view = self._file.words[start : start + layout.PAGE_WORDS]
            self._views.append(view)
            page = self._pages[slot] = ProcessSlot(view, slot)
        return page

    def close(self) -> None:
        """Unmap the board. Its pages and histograms must not be used afterwards. Idempotent."""
        self._pages.clear()
        for view in self._views:
            view.release()
        self._views.clear()
        self._file.close()


def _path(dir: str | os.PathLike[str]) -> str:
    return os.path.join(os.fspath(dir), layout.BOARD_NAME)


def _check(file_id: int, offset: int) -> int:
    """Return a check word that distinguishes a mark from random bytes. It is not a secret."""
    return (file_id * 0x9E3779B97F4A7C15 + offset * 0xC2B2AE3D27D4EB4F + 0x165667B19E3779F9) & _WORD_MASK
