"""Frames that many readers of one process want at the same time: read and verified once.

A reader that comes first leaves the verified view here, the others take it. Memory is bounded by bytes; what
was left first goes first. Views are of buffers that nobody writes to any more. Any thread may call.
"""

from __future__ import annotations

from typing import NamedTuple

from ringlog.bounded import BoundedByBytes
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
        self._views: BoundedByBytes[Place, FrameView] = BoundedByBytes(bytes_max)

    def get(self, place: Place) -> FrameView | None:
        """The frame at this place, if somebody left it."""
        return self._views.get(place)

    def leave(self, place: Place, view: FrameView) -> None:
        """Leave a verified frame to the others."""
        if self.readers > 1 and self._views.get(place) is None:
            self._views.put(place, view, view.total_bytes)

    def __len__(self) -> int:
        return len(self._views)
