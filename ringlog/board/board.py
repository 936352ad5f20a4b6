"""The board: one page of facts for each process.

Each number has one writer: the process whose page it is, or the supervisor where layout.P says so.
Anybody else of ours maps the board read-only and looks.
"""

from __future__ import annotations

import os
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
    HistogramKind.GROUP_FRAMES: COUNT_SHIFT,
}


class ProcessSlot:
    """One process's page. Reading works on any board, writing on one opened writable."""

    def __init__(self, words: memoryview, slot: int) -> None:
        self.slot = slot
        self._words = words
        self.get = words.__getitem__
        """get(word) -> int: the number P names."""
        self.set = words.__setitem__
        """set(word, value): store the number P names, 0..2**64-1."""

    def add(self, word: int, n: int) -> None:
        """Add to a number only we write."""
        words = self._words
        words[word] = (words[word] + n) & _WORD_MASK

    @property
    def state(self) -> ProcessState:
        """P.STATE; FAILED for a number that is no state."""
        number = self._words[ProcessField.STATE]
        return ProcessState(number) if number <= ProcessState.GIVEN_UP else ProcessState.FAILED

    def set_watermark(self, which: WatermarkKind, file_id: int, offset: int) -> None:
        """Move a mark to (file_id, offset bytes); also repairs what a dead writer left half done."""
        at = layout.WATERMARK_BASE + which * layout.WATERMARK_WORDS
        seqlock.write(self._words, at, (file_id, offset, _check(file_id, offset)))

    def watermark(self, which: WatermarkKind) -> tuple[int, int]:
        """(file_id, offset) of a mark, (0, 0) if it was never set.

        Raises BoardUnstable when its writer died half-way or the words do not verify: then believe nothing.
        """
        at = layout.WATERMARK_BASE + which * layout.WATERMARK_WORDS
        file_id, offset, check = seqlock.read(self._words, at, 3, lambda: self._mark_facts(which))
        if check != _check(file_id, offset) and (file_id or offset or check):
            raise BoardUnstable("board mark does not verify", **self._mark_facts(which))
        return file_id, offset

    def repair_watermarks(self) -> list[WatermarkKind]:
        """Set to (0, 0) every mark that cannot be read; returns which. Only for the page's own new writer."""
        broken = []
        for which in WatermarkKind:
            try:
                self.watermark(which)
            except BoardUnstable:
                broken.append(which)
                self.set_watermark(which, 0, 0)
        return broken

    def histogram(self, which: HistogramKind) -> Histogram:
        """One of the page's histograms."""
        base = layout.HISTOGRAM_BASE + which * layout.HISTOGRAM_WORDS
        return Histogram(self._words, base, _SHIFTS[which])

    def _mark_facts(self, which: WatermarkKind) -> dict[str, Any]:
        return {"slot": self.slot, "mark": which.name}


class Board:
    """All process pages."""

    def __init__(self, file: BoardFile) -> None:
        self._file = file
        self._pages: dict[int, ProcessSlot] = {}
        self._views: list[memoryview] = []

    @classmethod
    def create(cls, dir: str | os.PathLike[str], processes: int = PROCESSES_MAX) -> Board:
        """Make the board in a directory and open it writable; raises BoardError when it cannot be made."""
        if not 1 <= processes <= PROCESSES_MAX:
            raise BoardError("processes out of bounds", processes=processes, min=1, max=PROCESSES_MAX)
        identity = layout.encode_identity(layout.BOARD_MAGIC, 0, processes, 0)
        make_board_file(_path(dir), layout.PAGE_BYTES * (processes + 1), identity)
        return cls.open(dir, writable=True)

    @classmethod
    def open(cls, dir: str | os.PathLike[str], *, writable: bool) -> Board:
        """Map the board of a directory; raises BoardError when there is none or it is not ours."""
        return cls(BoardFile(_path(dir), layout.BOARD_MAGIC, writable=writable))

    @property
    def processes(self) -> int:
        """How many pages there are."""
        return self._file.slots

    def process(self, slot: int) -> ProcessSlot:
        """Page number `slot`; raises BoardError beyond the last."""
        page = self._pages.get(slot)
        if page is None:
            if not 0 <= slot < self._file.slots:
                raise BoardError("no such process slot", slot=slot, slots=self._file.slots)
            start = (slot + 1) * layout.PAGE_WORDS
            view = self._file.words[start : start + layout.PAGE_WORDS]
            self._views.append(view)
            page = self._pages[slot] = ProcessSlot(view, slot)
        return page

    def close(self) -> None:
        """Unmap; pages and histograms taken from this board must not be used any more. Idempotent."""
        self._pages.clear()
        for view in self._views:
            view.release()
        self._views.clear()
        self._file.close()


def _path(dir: str | os.PathLike[str]) -> str:
    return os.path.join(os.fspath(dir), layout.BOARD_NAME)


def _check(file_id: int, offset: int) -> int:
    """A word that tells a mark from chance; not a secret."""
    return (file_id * 0x9E3779B97F4A7C15 + offset * 0xC2B2AE3D27D4EB4F + 0x165667B19E3779F9) & _WORD_MASK
