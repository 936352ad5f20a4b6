"""Runs of frames in flight: submitted together and matched with settle entries together. Pure.

A run is any number of whole frames of one topic and one producer in one private buffer. The client keeps it
until every frame has its entry, so that frames of a lost ring can be sent again. Entries arrive in the order
of the frames, so matching compares two ranges of positions. The cost is the same for one frame and for
10,000.
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
    """Frames `offsets[i]:offsets[i + 1]` of `buffer`, i < count.

    Subclasses handle the results of the frames.
    """

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
        self.topic: str = topic
        self.buffer: bytearray | memoryview[int] = buffer
        self.offsets: I64 = offsets
        self.count: int = len(offsets) - 1
        self.frame_bytes: int = 0
        """Size of every frame, if several frames of one size were stamped; else 0."""
        self.deadline_ns: int = deadline_ns
        """Time at which the run is given up. The owner observes it and sets `is_abandoned`."""
        self.pushed: int = 0
        """Number of frames that were pushed into a ring or sent. The engine may have received them."""
        self.was_rewound: bool = False
        """Frames of the run were in a ring that is lost. The engine may have applied them all the same."""
        self.settled: int = 0
        """Number of frames with a settle entry; these are the first ones."""
        self.is_abandoned: bool = False
        """The owner does not wait any more: frames that were not pushed must not be pushed."""

    def on_entries(self, first: int, entries: SettleEntries) -> None:
        """Handle the settle entries of the frames from row `first` on."""
        raise NotImplementedError

    def on_failed(self, first: int, count: int, error: RinglogError) -> None:
        """Handle the failure of frames first to first + count - 1, which get no entries."""
        raise NotImplementedError

    def take_entries(self, entries: SettleEntries) -> None:
        """Pass on the entries of the next frames."""
        first = self.settled
        self.settled += len(entries)
        self.on_entries(first, entries)

    def fail_next(self, count: int, error: RinglogError) -> None:
        """Fail the next `count` frames, which get no entries."""
        first = self.settled
        self.settled += count
        self.pushed = max(self.pushed, self.settled)
        self.on_failed(first, count, error)

    @property
    def disable_backpressure(self) -> bool:
        """Frames that are sent by message must not be refused for pressure."""
        return False

    @property
    def was_sent(self) -> bool:
        """The engine may have received a part of the run, now or through an earlier ring."""
        return self.pushed > 0 or self.was_rewound

    def rewind(self) -> int:
        """Mark all unsettled frames as not pushed. Return the number of those that were pushed."""
        count = self.pushed - self.settled
        self.was_rewound |= count > 0
        self.pushed = self.settled
        return count

    def free_bytes(self) -> None:
        """Free the bytes of the frames, which are not sent again."""
        self.buffer = bytearray()

    def size_of(self, row: int) -> int:
        """Return the size of one frame in bytes."""
        return int(self.offsets[row + 1] - self.offsets[row])

    def first_larger(self, frame_bytes: int) -> int:
        """Return the row of the first unpushed frame that is larger than this; `count` if there is none."""
        if len(self.buffer) <= frame_bytes:
            return self.count
        larger = np.diff(self.offsets[self.pushed :]) > frame_bytes
        at = int(larger.argmax())
        return self.pushed + at if larger[at] else self.count

    def view(self, start: int, stop: int) -> memoryview:
        """Return the bytes of frames start to stop - 1."""
        return memoryview(self.buffer)[int(self.offsets[start]) : int(self.offsets[stop])]

    def stamp(
        self, *, topic_id: int, epoch: int, producer_id: int, first_producer_seq: int, follows: bool = False
    ) -> None:
        """Write the identity into the headers: frame i gets producer_seq first + i.

        Not allowed after a push.

        Each frame follows the previous one (layout.FLAG_FOLLOWS); with `follows` the first frame follows an
        earlier one.
        """
        self.frame_bytes = kernel.stamp(
            self.buffer, self.offsets, topic_id, epoch, producer_id, first_producer_seq, follows
        )

    def put_claim(self, claim: int) -> None:
        """Write the claim of the named producer into every frame."""
        np.frombuffer(self.buffer, dtype="<u8")[(self.offsets[:-1] >> 3) + layout.W_BASE_SEQ] = claim

    def set_follows_flags(self, *, first: bool) -> None:
        """Mark every frame as following the previous one (layout.FLAG_FOLLOWS).

        The first frame is marked only if `first`.
        """
        words = np.frombuffer(self.buffer, dtype="<u8")
        tails = (self.offsets[:-1] >> 3) + layout.W_TAIL
        words[tails] |= FOLLOWS
        if not first:
            words[tails[0]] ^= FOLLOWS

    def copy_frames(self, rows: NDArray[Any]) -> tuple[bytearray, I64]:
        """Copy the chosen frames into a new buffer. Return (buffer, offsets)."""
        view = memoryview(self.buffer)
        spans = [(int(self.offsets[row]), int(self.offsets[row + 1])) for row in rows]
        offsets = np.zeros(len(spans) + 1, dtype=np.int64)
        np.cumsum([stop - start for start, stop in spans], out=offsets[1:])
        return bytearray().join([view[start:stop] for start, stop in spans]), offsets


class InFlight:
    """Frames in one ring with their positions, oldest first."""

    def __init__(self) -> None:
        self._stretches: deque[tuple[OutboundFrames, range | I64]] = deque()
        self._matched = 0  # Number of frames of the first entry of `_stretches` that are settled.
        self.frames: int = 0

    def add(self, run: OutboundFrames, positions: Any) -> None:
        """Add the next frames of `run`, which are at these positions, after all others."""
        placed = positions if isinstance(positions, range) else np.asarray(positions, dtype=np.int64)
        self._stretches.append((run, placed))
        self.frames += len(placed)

    def match(self, entries: SettleEntries) -> int:
        """Pass settle entries of the ring to their runs. Return their number.

        Raises RingError if an entry does not belong to the oldest unsettled frame.
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
                    "settle entry does not belong to the oldest unsettled frame",
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
        """Remove all frames. Return the runs with unsettled frames, oldest first, each once."""
        runs = list(dict.fromkeys(run for run, _ in self._stretches))
        self._stretches.clear()
        self._matched = self.frames = 0
        return runs
