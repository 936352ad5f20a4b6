"""What one watch of a client has just read of a topic, for its other watches that stand at the same place.

To look a topic up on the board, to find the place in one's own files and to check a frame costs a watch some
30 us, and with a thousand watches of one topic that is most of what a delivery costs. What a watch read is
what the others would read as long as nobody has written to the topic's slot on the board: nothing was
appended, deleted, evicted or lost since.

Who is behind reads whole pages, and a page costs ten times what that does: hundreds of watches that have
fallen behind together would never catch up again, each reading the same. So the pages they read are shared
as well. The head moves on meanwhile; what was appended makes no difference to what lies before, and that
nothing was removed the topic's version on the board says.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence
from typing import NamedTuple

from ringlog.bounded_cache import BoundedByBytes
from ringlog.client.read.pages import Cursor, Page
from ringlog.client.read.record_batches import FrameRecordBatch, RecordBatch
from ringlog.envelope.messages import Located
from ringlog.limits import SHARED_FRAMES_BYTES_MAX
from ringlog.link.delivery import LocationHint


class SharedFrame(NamedTuple):
    """The one frame that a turn was about, and when that was so."""

    located: Located
    generation: int
    sequence: int
    """Of the topic's slot, from before it was looked at; see Connection.topic_sequence."""
    epoch: int
    hint: LocationHint
    batches: tuple[FrameRecordBatch, ...]
    earliest_seq: int
    cursor: Cursor
    """Behind the frame."""

    def page(self) -> Page:
        """A page of its own for each watch: what one reader does with it is not seen by another."""
        cursor = self.cursor
        return Page(
            self.located.topic, self.batches, cursor, tombstone=None, head_seq=cursor.seq,
            earliest_seq=self.earliest_seq,
        )  # fmt: skip


class PageLimits(NamedTuple):
    """How much a watch takes at once."""

    records: int
    bytes: int


class SharedPage(NamedTuple):
    """The records behind a position, as one watch that was behind has read them: a page of its limits."""

    located: Located
    """How the topic was when it was read; nothing of it expires by itself."""
    generation: int
    epoch: int
    limits: PageLimits
    batches: tuple[RecordBatch, ...]
    cursor: Cursor
    """Behind them."""
    file_id: int
    offset: int
    """Where in the log it goes on; file 0 = not known."""


class SharedReads:
    """The last reading of each topic, and the last passages, of all watches of one client. Any thread may
    call."""

    def __init__(self, bytes_max: int = SHARED_FRAMES_BYTES_MAX) -> None:
        self.watches = 0
        """How many there are; they count themselves."""
        self._readings: BoundedByBytes[int, SharedFrame] = BoundedByBytes(bytes_max)
        """The last of each topic."""
        self._passages: BoundedByBytes[tuple[int, int], SharedPage] = BoundedByBytes(bytes_max)
        """By topic and the position they begin behind."""
        self._followers: dict[int, int] = {}
        """How many watches follow a topic."""
        self._lock = threading.Lock()  # For those that come and go.

    @property
    def is_useful(self) -> bool:
        """There is more than one watch."""
        return self.watches > 1

    def get_frame(self, topic_id: int, epoch: int, hint: LocationHint) -> SharedFrame | None:
        """What was read at this place; whether it still `holds` is for the source to say."""
        found = self._readings.get(topic_id)
        return found if found is not None and found.hint == hint and found.epoch == epoch else None

    def put_frame(self, topic_id: int, reading: SharedFrame) -> None:
        """Leave it to the others instead of what there was; the oldest go when there are too many bytes."""
        self._readings.put(topic_id, reading, sum(piece.view.total_bytes for piece in reading.batches))

    def follow(self, topic_id: int) -> None:
        """One more watch follows this topic."""
        with self._lock:
            self._followers[topic_id] = self._followers.get(topic_id, 0) + 1

    def unfollow(self, topic_id: int) -> None:
        """One less; what was read for several goes with the last but one."""
        with self._lock:
            left = self._followers.pop(topic_id, 1) - 1
            if left:
                self._followers[topic_id] = left
        if left < 2:
            self._passages.drop_where(lambda key: key[0] == topic_id)

    def is_followed_by_several(self, topic_id: int) -> bool:
        """Is there anybody to leave a passage to?"""
        return self._followers.get(topic_id, 0) > 1

    def get_page(self, topic_id: int, after: Cursor, limits: PageLimits) -> SharedPage | None:
        """What was read behind this position by somebody with the same limits; whether it `facts_if_current`
        is
        for the source to say."""
        found = self._passages.get((topic_id, after.seq))
        # Who does not know the topic's life yet takes whichever there is (epoch 0).
        is_it = found is not None and found.limits == limits and after.epoch in {0, found.epoch}
        return found if is_it else None

    def put_page(self, topic_id: int, after: int, passage: SharedPage) -> None:
        """Leave it to those that come later to this place; what was left first goes first."""
        self._passages.put((topic_id, after), passage, _pinned(passage.batches))

    def __len__(self) -> int:
        return len(self._readings) + len(self._passages)


def _pinned(pieces: Sequence[RecordBatch]) -> int:
    """Bytes that live on with them: all of what was read at once, frames of others among it."""
    return sum({id(piece.buffer.obj): memoryview(piece.buffer.obj).nbytes for piece in pieces}.values())
