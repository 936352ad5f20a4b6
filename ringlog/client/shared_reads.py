"""What one watch of a client has just read of a topic, for its other watches that stand at the same place.

Frames alone are shared below (storage.frame_share); but to look a topic up on the board, to find the place
in one's own files and to check a header costs a watch some 30 us, and with a thousand watches of one topic
that is most of what a delivery costs. What a watch read is what the others would read as long as nobody has
written to the topic's slot on the board: nothing was appended, deleted, evicted or lost since.
"""

from __future__ import annotations

import threading
from typing import NamedTuple

from ringlog.client.pages import Cursor, Page
from ringlog.client.pieces import FramePiece
from ringlog.envelope.messages import Located
from ringlog.limits import SHARED_FRAMES_BYTES_MAX
from ringlog.link.delivery import Hint
from ringlog.storage.frame_share import FrameShare


class Reading(NamedTuple):
    """The one frame that a turn was about, and when that was so."""

    located: Located
    generation: int
    sequence: int
    """Of the topic's slot, from before it was looked at; see Connection.topic_sequence."""
    epoch: int
    hint: Hint
    pieces: tuple[FramePiece, ...]
    earliest_seq: int
    cursor: Cursor
    """Behind the frame."""

    def page(self) -> Page:
        """A page of its own for each watch: what one reader does with it is not seen by another."""
        cursor = self.cursor
        return Page(
            self.located.topic, self.pieces, cursor, tombstone=None, head_seq=cursor.seq,
            earliest_seq=self.earliest_seq,
        )  # fmt: skip


class SharedReads:
    """The last reading of each topic, of all watches of one client. Any thread may call."""

    def __init__(self, bytes_max: int = SHARED_FRAMES_BYTES_MAX) -> None:
        self.frames = FrameShare()
        self._bytes_max = bytes_max
        self._bytes = 0
        self._readings: dict[int, Reading] = {}
        self._lock = threading.Lock()  # For changes; looking is one operation on a dictionary.

    @property
    def is_useful(self) -> bool:
        """There is more than one watch."""
        return self.frames.readers > 1

    def get(self, topic_id: int, epoch: int, hint: Hint) -> Reading | None:
        """What was read at this place; whether it still `holds` is for the source to say."""
        found = self._readings.get(topic_id)
        return found if found is not None and found.hint == hint and found.epoch == epoch else None

    def leave(self, topic_id: int, reading: Reading) -> None:
        """Leave it to the others instead of what there was; the oldest go when there are too many bytes."""
        size = _size(reading)
        with self._lock:
            self._drop(topic_id)
            if size > self._bytes_max:
                return
            self._readings[topic_id] = reading
            self._bytes += size
            while self._bytes > self._bytes_max:
                self._drop(next(iter(self._readings)))

    def _drop(self, topic_id: int) -> None:
        dropped = self._readings.pop(topic_id, None)
        if dropped is not None:
            self._bytes -= _size(dropped)

    def __len__(self) -> int:
        return len(self._readings)


def _size(reading: Reading) -> int:
    return sum(piece.view.total_bytes for piece in reading.pieces)
