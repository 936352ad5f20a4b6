"""Runs of frames on their way: handed over together, matched with settle entries together. Pure.

A run is any number of whole frames of one topic and one producer in one private buffer. The client
keeps it until every frame has its entry, so that what was in a ring that is gone can be sent again.
Entries come in the order of the frames, so matching compares one stretch of positions with another
and costs the same for one frame and for ten thousand.
"""

from __future__ import annotations

from collections import deque
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ringlog.errors import RingError, RinglogError
from ringlog.frame import layout
from ringlog.frame.batch import FOLLOWS
from ringlog.frame.kernel import kernel
from ringlog.frame.settle_entry import S_POSITION, SettleEntries

I64 = NDArray[np.int64]


class OutboundFrames:
    """Frames `offsets[i]:offsets[i + 1]` of `buffer`, i < count. Subclasses say what their fate means."""

    __slots__ = (
        "buffer",
        "count",
        "deadline_ns",
        "frame_bytes",
        "is_abandoned",
        "offsets",
        "pushed",
        "settled",
        "topic",
        "was_rewound",
    )

    def __init__(self, topic: str, buffer: bytearray | memoryview, offsets: I64, deadline_ns: int) -> None:
        self.topic = topic
        self.buffer = buffer
        self.offsets = offsets
        self.count = len(offsets) - 1
        self.frame_bytes = 0
        """Size of every frame, where several of one size were stamped; else 0."""
        self.deadline_ns = deadline_ns
        """When it is given up; the owner sees to it and sets `is_abandoned`."""
        self.pushed = 0
        """Frames handed to a ring or a socket; those before it may have reached the engine."""
        self.was_rewound = False
        """Frames of it were in a ring that is of no use any more: they may have been applied all the same."""
        self.settled = 0
        """Frames whose entry has come; they are the first ones."""
        self.is_abandoned = False
        """Nobody waits for it any more: what was not pushed must not be pushed."""

    def on_entries(self, first: int, entries: SettleEntries) -> None:
        """Frames first, first + 1, … have these entries."""
        raise NotImplementedError

    def on_failed(self, first: int, count: int, error: RinglogError) -> None:
        """Frames first to first + count - 1 got no entries, for this reason."""
        raise NotImplementedError

    def take_entries(self, entries: SettleEntries) -> None:
        """Pass on the entries of the next frames."""
        first = self.settled
        self.settled += len(entries)
        self.on_entries(first, entries)

    def fail_next(self, count: int, error: RinglogError) -> None:
        """The next `count` frames get no entries."""
        first = self.settled
        self.settled += count
        self.pushed = max(self.pushed, self.settled)
        self.on_failed(first, count, error)

    @property
    def disable_backpressure(self) -> bool:
        """Pressure is no reason to refuse it, where it goes by message (G-12)."""
        return False

    @property
    def was_sent(self) -> bool:
        """Something of it may have reached the engine, now or through an earlier ring."""
        return self.pushed > 0 or self.was_rewound

    def rewind(self) -> int:
        """What is not settled is to be pushed again; returns how many frames that were pushed."""
        count = self.pushed - self.settled
        self.was_rewound |= count > 0
        self.pushed = self.settled
        return count

    def size_of(self, row: int) -> int:
        """Bytes of one frame."""
        return int(self.offsets[row + 1] - self.offsets[row])

    def first_larger(self, frame_bytes: int) -> int:
        """Row of the first frame not pushed that is larger than this; `count` when there is none."""
        if len(self.buffer) <= frame_bytes:
            return self.count
        larger = np.diff(self.offsets[self.pushed :]) > frame_bytes
        at = int(larger.argmax())
        return self.pushed + at if larger[at] else self.count

    def view(self, start: int, stop: int) -> memoryview:
        """The bytes of frames start to stop - 1."""
        return memoryview(self.buffer)[int(self.offsets[start]) : int(self.offsets[stop])]

    def stamp(
        self, *, topic_id: int, epoch: int, producer_id: int, first_producer_seq: int, follows: bool = False
    ) -> None:
        """Write identity into the headers; frame i gets producer_seq first + i. Not after pushing.

        Each frame follows the one before (layout.FLAG_FOLLOWS), the first one too if `follows`.
        """
        self.frame_bytes = kernel.stamp(
            self.buffer, self.offsets, topic_id, epoch, producer_id, first_producer_seq, follows
        )

    def put_claim(self, claim: int) -> None:
        """Every frame says under which claim its named producer sends it."""
        np.frombuffer(self.buffer, dtype="<u8")[(self.offsets[:-1] >> 3) + layout.W_BASE_SEQ] = claim

    def set_follows_flags(self, *, first: bool) -> None:
        """Every frame follows the one before it (layout.FLAG_FOLLOWS), the first one if `first`."""
        words = np.frombuffer(self.buffer, dtype="<u8")
        tails = (self.offsets[:-1] >> 3) + layout.W_TAIL
        words[tails] |= FOLLOWS
        if not first:
            words[tails[0]] ^= FOLLOWS

    def copy_frames(self, rows: NDArray[Any]) -> tuple[bytearray, I64]:
        """Copy the chosen frames into a buffer of their own: (buffer, offsets)."""
        view = memoryview(self.buffer)
        spans = [(int(self.offsets[row]), int(self.offsets[row + 1])) for row in rows]
        offsets = np.zeros(len(spans) + 1, dtype=np.int64)
        np.cumsum([stop - start for start, stop in spans], out=offsets[1:])
        return bytearray().join([view[start:stop] for start, stop in spans]), offsets


class InFlight:
    """Frames in one ring, oldest first, with their positions."""

    def __init__(self) -> None:
        self._stretches: deque[tuple[OutboundFrames, range | I64]] = deque()
        self._matched = 0  # Frames of the first stretch that have their entry.
        self.frames = 0

    def add(self, run: OutboundFrames, positions: Any) -> None:
        """The next frames of `run` lie at these positions, behind all others."""
        placed = positions if isinstance(positions, range) else np.asarray(positions, dtype=np.int64)
        self._stretches.append((run, placed))
        self.frames += len(placed)

    def match(self, entries: SettleEntries) -> int:
        """Hand entries, as they came from the ring, to their runs; return how many there were.

        Raises RingError when an entry is not that of the oldest frame without one.
        """
        start, total = 0, len(entries)
        while start < total and self._stretches:
            run, placed = self._stretches[0]
            stop = min(total, start + len(placed) - self._matched)
            part = entries[start:stop]
            expected = placed[self._matched : self._matched + len(part)]
            oldest, latest = int(expected[0]), int(expected[-1])
            if int(part[0, S_POSITION]) != oldest or int(part[-1, S_POSITION]) != latest:
                raise RingError(
                    "a settle entry is not that of the oldest frame",
                    position=int(part[0, S_POSITION]),
                    expected=oldest,
                )
            self._matched += len(part)
            if self._matched == len(placed):
                self._stretches.popleft()
                self._matched = 0
            self.frames -= len(part)
            start = stop
            run.take_entries(part)
        return start

    def drain(self) -> list[OutboundFrames]:
        """Forget all, and return the runs that have unsettled frames, oldest first, each once."""
        runs = list(dict.fromkeys(run for run, _ in self._stretches))
        self._stretches.clear()
        self._matched = self.frames = 0
        return runs
