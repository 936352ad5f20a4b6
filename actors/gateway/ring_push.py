"""Frames of a client elsewhere, on their way through the gateway's own ring."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from ringlog.errors import RequestTimeout, RinglogError
from ringlog.frame.settle_entry import S_POSITION, WORDS, SettleEntries
from ringlog.link.channel.outbound_frames import I64, OutboundFrames


class RingPush(OutboundFrames):
    """Frames of one Append on their way through our ring; `done` gets the entries or the error."""

    __slots__ = ("_done", "_entries", "_error")

    def __init__(
        self, topic: str, buffer: Any, offsets: I64, deadline_ns: int,
        done: Callable[[bytes, RinglogError | None], None],
    ) -> None:  # fmt: skip
        super().__init__(topic, buffer, offsets, deadline_ns)
        self._done = done
        self._entries = np.zeros((self.count, WORDS), dtype=np.uint64)
        self._error: RinglogError | None = None

    def on_entries(self, first: int, entries: SettleEntries) -> None:
        """Keep them; the position a client sees is the number of the frame in its message."""
        kept = self._entries[first : first + len(entries)]
        kept[:] = entries
        kept[:, S_POSITION] = np.arange(first, first + len(entries))
        self._finish()

    def on_failed(self, first: int, count: int, error: RinglogError) -> None:
        """One frame without a fate makes the fate of the whole message unknown."""
        self._error = self._error or error
        self._finish()

    def give_up(self) -> None:
        """Its time is over."""
        if not self.is_abandoned and self.settled < self.count:
            self.is_abandoned = True
            self._done(b"", RequestTimeout("the frames were not settled in time", outcome="unknown"))

    def _finish(self) -> None:
        if self.settled == self.count and not self.is_abandoned:
            self._done(self._entries.tobytes(), self._error)
