"""Frames of remote clients in the gateway's own ring to a shard."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from ringlog.errors import RequestTimeout, RinglogError
from ringlog.frame.settle_entry import S_POSITION, WORDS, SettleEntries
from ringlog.link.channel.outbound_frames import I64, OutboundFrames


class RingPush(OutboundFrames):
    """Frames of one Append in the gateway's ring.

    `done` is called once, with the settle entries or the error.
    """

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
        """Store settle entries. For the client, the position of a frame is its index in the message."""
        kept = self._entries[first : first + len(entries)]
        kept[:] = entries
        kept[:, S_POSITION] = np.arange(first, first + len(entries))
        self._finish()

    def on_failed(self, first: int, count: int, error: RinglogError) -> None:
        """Record a failure.

        If one frame fails without an entry, the outcome of the whole message is unknown.
        """
        self._error = self._error or error
        self._finish()

    def give_up(self) -> None:
        """Fail with RequestTimeout if frames are still unsettled."""
        if not self.is_abandoned and self.settled < self.count:
            self.is_abandoned = True
            self._done(
                b"",
                RequestTimeout("append timed out: it may or may not have been applied", outcome="unknown"),
            )  # fmt: skip

    def _finish(self) -> None:
        if self.settled == self.count and not self.is_abandoned:
            self._done(self._entries.tobytes(), self._error)
