"""Cache of what one watch has just read of a topic, for other watches of its client at the same position.

Reading a topic's slot, finding the position in the files and verifying a frame costs about 30 us for each
watch. With 1,000 watches of one topic this is most of the cost of a delivery. Another watch would read the
same frame as long as the topic's slot on the board has not changed: no record was appended, deleted, evicted
or lost since.

A watch that has fallen behind reads whole pages, and a page costs ten times as much. Hundreds of watches that
fell behind together would each read the same pages and never catch up. Their pages are therefore shared as
well. The head may advance meanwhile, since appends do not affect earlier records. The topic's version on the
board proves that no record was removed.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence
from typing import NamedTuple

from ringlog.bounded_cache import ByteBoundedCache
from ringlog.client.read.pages import Cursor, Page
from ringlog.client.read.record_batches import FrameRecordBatch, RecordBatch
from ringlog.envelope.messages import Located
from ringlog.limits import SHARED_FRAMES_BYTES_MAX
from ringlog.link.subscription import LocationHint


class SharedFrame(NamedTuple):
    """Frame of one grant, with the state of the topic when it was read."""

    located: Located
    generation: int
    sequence: int
    """Change number of the topic's slot, read before the frame. See Connection.topic_sequence."""
    epoch: int
    hint: LocationHint
    batches: tuple[FrameRecordBatch, ...]
    earliest_seq: int
    cursor: Cursor
    """Position after the frame."""

    def page(self) -> Page:
        """Return a new page for one watch. Readers must not see each other's changes to it."""
        cursor = self.cursor
        return Page(
            self.located.topic, self.batches, cursor, tombstone=None, head_seq=cursor.seq,
            earliest_seq=self.earliest_seq,
        )  # fmt: skip


class PageLimits(NamedTuple):
    """Largest page of a watch, in records and bytes."""

    records: int
    bytes: int


class SharedPage(NamedTuple):
    """Records after a position that one lagging watch has read: a page with the watch's limits."""

    located: Located
    """State of the topic when it was read. Its records have no expiry."""
    generation: int
    epoch: int
    limits: PageLimits
    batches: tuple[RecordBatch, ...]
    cursor: Cursor
    """Position after the records."""
    file_id: int
    offset: int
    """Offset in the log file at which reading continues; file_id 0 = unknown."""


class SharedReads:
    """Last frame and last pages of each topic that the watches of one client have read. Thread-safe."""

    def __init__(self, bytes_max: int = SHARED_FRAMES_BYTES_MAX) -> None:
        self._bytes_max = bytes_max
        self.watches = 0
        """Number of watches. Each watch adds and subtracts itself."""
        self._followers: dict[int, int] = {}
        """Number of watches that follow each topic."""
        self.restart_in_child()

    def restart_in_child(self) -> None:
        """Make the locks and what they guard again after a fork: another thread of the parent may have held
        them."""
        self._frames: ByteBoundedCache[int, SharedFrame] = ByteBoundedCache(self._bytes_max)
        """Last frame of each topic, by topic id."""
        self._pages: ByteBoundedCache[tuple[int, int], SharedPage] = ByteBoundedCache(self._bytes_max)
        """Pages, by topic id and the seq after which they begin."""
        self._lock = threading.Lock()  # Guards the counts of followers.

    @property
    def is_useful(self) -> bool:
        """True if the client has more than one watch."""
        return self.watches > 1

    def get_frame(self, topic_id: int, epoch: int, hint: LocationHint) -> SharedFrame | None:
        """Return the frame at this location. The caller must check with its source whether it is still
        current."""
        found = self._frames.get(topic_id)
        return found if found is not None and found.hint == hint and found.epoch == epoch else None

    def put_frame(self, topic_id: int, shared_frame: SharedFrame) -> None:
        """Replace the topic's frame. The oldest frames are dropped if the cache exceeds its size."""
        self._frames.put(
            topic_id, shared_frame, sum(batch.view.total_bytes for batch in shared_frame.batches)
        )

    def follow(self, topic_id: int) -> None:
        """Count one more watch of this topic."""
        with self._lock:
            self._followers[topic_id] = self._followers.get(topic_id, 0) + 1

    def unfollow(self, topic_id: int) -> None:
        """Count one watch less. The topic's pages are dropped when only one watch is left."""
        with self._lock:
            left = self._followers.pop(topic_id, 1) - 1
            if left:
                self._followers[topic_id] = left
        if left < 2:
            self._pages.drop_where(lambda key: key[0] == topic_id)

    def is_followed_by_several(self, topic_id: int) -> bool:
        """Return True if several watches follow the topic."""
        return self._followers.get(topic_id, 0) > 1

    def get_page(self, topic_id: int, after: Cursor, limits: PageLimits) -> SharedPage | None:
        """Return the page after this position for the same limits.

        The caller must check with its source whether the page is still current.
        """
        found = self._pages.get((topic_id, after.seq))
        # Epoch 0, a watch that does not know the topic's life yet, matches any life.
        is_it = found is not None and found.limits == limits and after.epoch in {0, found.epoch}
        return found if is_it else None

    def put_page(self, topic_id: int, after: int, shared_page: SharedPage) -> None:
        """Add a page for watches that reach this position later. The oldest pages are dropped first."""
        self._pages.put((topic_id, after), shared_page, _pinned(shared_page.batches))

    def __len__(self) -> int:
        return len(self._frames) + len(self._pages)


def _pinned(record_batches: Sequence[RecordBatch]) -> int:
    """Return the bytes that these batches keep in memory: whole read buffers, including other topics'
    frames."""
    return sum(
        {id(batch.buffer.obj): memoryview(batch.buffer.obj).nbytes for batch in record_batches}.values()
    )
