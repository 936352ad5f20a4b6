"""Frames that many readers of one process want at the same time: read and verified once.

A reader that comes first leaves the verified view here, the others take it. Memory is bounded by bytes; what
was left first goes first. Views are of buffers that nobody writes to any more. Any thread may call.
"""

from __future__ import annotations

import threading
from typing import NamedTuple

from ringlog.frame.view import FrameView
from ringlog.limits import SHARED_FRAMES_BYTES_MAX


class Place(NamedTuple):
    """Where one frame of the log lies. Path and salt name one life of one file."""

    path: str
    salt: int
    offset: int


class FrameShare:
    """What the readers of one client share. Keeps nothing while there is only one of them."""

    def __init__(self, bytes_max: int = SHARED_FRAMES_BYTES_MAX) -> None:
        self.readers = 0
        """How many there are; their owners count."""
        self._bytes_max = bytes_max
        self._bytes = 0
        self._views: dict[Place, FrameView] = {}
        self._lock = threading.Lock()  # For changes; looking is one operation on a dictionary.

    def get(self, place: Place) -> FrameView | None:
        """The frame at this place, if somebody left it."""
        return self._views.get(place)

    def leave(self, place: Place, view: FrameView) -> None:
        """Leave a verified frame to the others."""
        if self.readers < 2 or view.total_bytes > self._bytes_max:
            return
        with self._lock:
            if place in self._views:
                return
            self._views[place] = view
            self._bytes += view.total_bytes
            while self._bytes > self._bytes_max:
                self._bytes -= self._views.pop(next(iter(self._views))).total_bytes

    def __len__(self) -> int:
        return len(self._views)
