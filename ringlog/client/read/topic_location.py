"""TopicLocation: where the records of a topic on this host are, as its shard described it last."""

from __future__ import annotations

import errno

from ringlog.board.topics import TopicFacts
from ringlog.client.connection.read_connection import Connection
from ringlog.client.read.pages import Cursor
from ringlog.client.watches.topic_keep_alive import KeepAliveHandle
from ringlog.clock import Clock
from ringlog.descriptors import READ_DESCRIPTORS, can_open_descriptors, descriptor_limit_message
from ringlog.envelope.messages import Located
from ringlog.errors import NotReady
from ringlog.limits import EXTENTS_PER_LOCATE_MAX
from ringlog.link.futures import Steps

TRIES_PER_LOCATE = 4
_TRIES_MAX = 200
"""Most locations in a row that lead to no record. After the first few, retries pause for REREAD_PAUSE_S. The
caller then gets NotReady."""
_WAKES_MAX = 64
"""Most publications to wait through between two retries."""
REREAD_PAUSE_S = 0.05
"""Pause in seconds before another read."""


class TopicLocation:
    """Location of one topic for one reader, until it is outdated."""

    def __init__(self, connection: Connection, topic: str, *, clock: Clock, is_following: bool) -> None:
        """`is_following`: see open_source."""
        self._connection, self._topic, self._clock = connection, topic, clock
        self._is_following = is_following
        self._keep_alive: KeepAliveHandle | None = None
        self.located: Located | None = None
        self.located_for: Cursor | None = None
        self.after: int = 0
        """`located` contains the location of every record after this seq."""
        self.wants_all: bool = False
        """True if the reader moves back and forth: the next location must cover the whole topic."""
        self._located_us = 0
        self.generation: int = -1
        """Start of the engine that described the location."""

    @property
    def is_of_this_start(self) -> bool:
        """True if the engine was not started again since."""
        return self.generation == self._connection.generation

    def close(self) -> None:
        """Drop the location, and no longer mark the topic as in use."""
        self.invalidate()
        if self._keep_alive is not None:
            self._keep_alive.end()
        self._keep_alive = None

    def keep_topic_alive(self, epoch: int = 0) -> None:
        """See Source.keep_topic_alive."""
        handle = self._keep_alive
        if self._is_following and (handle is None or epoch not in {0, handle.epoch}):
            self._keep_alive = self._connection.keep_topic_alive(self._topic, epoch)
            if handle is not None:
                handle.end()

    def is_last_file_known(self, located: Located) -> bool:
        """Return True if the shard has not started another log file since."""
        file_id, _ = self._connection.marks(located.shard).wal
        return any(extent.file_id == file_id and not extent.segment for extent in located.extents)

    def is_stale(self, located: Located, facts: TopicFacts, now_us: int) -> bool:
        """Return True if records were removed since the location was requested, or are due to expire."""
        if facts.version > located.version:
            return True
        return 0 < facts.due_us <= now_us and self._located_us < facts.due_us

    def invalidate(self) -> None:
        """Drop the location: the next read requests it again."""
        self.located = self.located_for = None

    def try_again(self, tries: int, shard: int) -> Steps[int]:
        """Count a location that led to no record. Pause after the first few.

        Files move while they are read, and the next location names their new place. If it does not, the
        moving process or the shard may be restarting. The caller sees only a pause.
        """
        if tries >= TRIES_PER_LOCATE and not can_open_descriptors(READ_DESCRIPTORS):
            raise NotReady(descriptor_limit_message(), topic=self._topic, errno=errno.EMFILE)
        if tries >= _TRIES_MAX:
            raise NotReady(
                "the topic moved or changed during every read attempt: retry later", topic=self._topic
            )
        if tries >= TRIES_PER_LOCATE:
            for _ in range(_WAKES_MAX):
                marks = self._connection.marks(shard)
                if not (yield self._connection.published_since(shard, marks, REREAD_PAUSE_S)):
                    break
        return tries + 1

    def locate(self, cursor: Cursor) -> Steps[Located]:
        """Return the location of the records after `cursor`, from the shard if it is not known."""
        if self.located is None:
            self.generation = self._connection.generation
            self._located_us = self._clock.now_us()
            after = 0 if self.wants_all else cursor.seq
            self.located = located = yield self._connection.locate(self._topic, after, cursor.epoch)
            if len(located.extents) >= EXTENTS_PER_LOCATE_MAX:
                self.wants_all = False  # It does not fit into one reply.
            self.located_for, self.after = cursor, after
            self.keep_topic_alive(located.epoch)
        return self.located
