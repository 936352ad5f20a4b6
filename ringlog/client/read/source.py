"""Sources of pages: the engine's files on its host, otherwise the gateway.

Both answer `fetch` with a FetchResult: a gap to report, frames with the records after it, and the seq up to
which these are complete. Frames that a page does not use are cached, so that small pages do not read twice.
The client verifies the checksums of every frame itself, also of frames from the gateway.
"""

from __future__ import annotations

from ringlog.client.connection.read_connection import Connection
from ringlog.client.read.fetch_result import FetchResult, RecordCheck, Source
from ringlog.client.read.local_source import LocalSource
from ringlog.client.read.pages import Cursor
from ringlog.client.read.remote_source import RemoteSource
from ringlog.errors import InvariantViolation
from ringlog.link.futures import Steps


def open_source(
    connection: Connection, topic: str, *, is_settling: bool = False, is_following: bool = False
) -> Source:
    """Open a source according to the transport.

    Args:
        connection: Connection of the client.
        topic: Name of the topic.
        is_settling: Before a read without waiting reaches the head, have the topic's routers forward all
            acked records of their sources.
        is_following: Keep the topic in use (`expire_unused_ms`) until the source is closed.

    Returns:
        The source. Before the first connection it waits for one.
    """
    if not connection.is_transport_known:
        return _DeferredSource(connection, topic, is_settling=is_settling, is_following=is_following)
    if connection.transport == "ring":
        return LocalSource(connection, topic, is_settling=is_settling, is_following=is_following)
    return RemoteSource(connection, topic, is_settling=is_settling, is_following=is_following)


class _DeferredSource:
    """Source that is opened before the first connection to the engine, which decides the transport."""

    def __init__(self, connection: Connection, topic: str, *, is_settling: bool, is_following: bool) -> None:
        self._connection, self._topic = connection, topic
        self._is_settling, self._is_following = is_settling, is_following
        self._source: Source | None = None

    def _resolved_source(self) -> Steps[Source]:
        if self._source is None:
            yield self._connection.resolve(self._topic)  # Connects to the engine.
            self._source = open_source(
                self._connection, self._topic, is_settling=self._is_settling, is_following=self._is_following
            )
        return self._source

    def fetch(self, cursor: Cursor, *, limit: int, bytes_max: int, wait_s: float) -> Steps[FetchResult]:
        """See Source."""
        source = yield from self._resolved_source()
        return (yield from source.fetch(cursor, limit=limit, bytes_max=bytes_max, wait_s=wait_s))

    def seek_time(self, ts_us: int) -> Steps[Cursor]:
        """See Source."""
        source = yield from self._resolved_source()
        return (yield from source.seek_time(ts_us))

    def record_check(self, version: int) -> RecordCheck:
        """See Source. Only after the first fetch."""
        if self._source is None:
            raise InvariantViolation("record_check was called before the first fetch", topic=self._topic)
        return self._source.record_check(version)

    def keep_topic_alive(self, epoch: int = 0) -> None:
        """See Source. Without effect before the first fetch."""
        if self._source is not None:
            self._source.keep_topic_alive(epoch)

    def close(self) -> None:
        """See Source."""
        if self._source is not None:
            self._source.close()
