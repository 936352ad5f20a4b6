"""Where pages come from: the engine's files when it runs on this host, else the gateway.

Both answer `fetch` with a Portion: what to announce, frames that hold the records behind it, and how far
that covers the topic. Frames that a page did not use are kept, so that small pages do not read twice.
Every frame was verified by its checksums on this side of the wire, whoever read it (architecture 2).
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
    """Choose by transport. `is_settling`: whoever reads to the head without waiting finds the copies of what
    was acked at the sources of the topic's routers (RT-20). `is_following`: whoever waits for more keeps the
    topic in use until the source is closed (F39)."""
    if not connection.is_transport_known:
        return _DeferredSource(connection, topic, is_settling=is_settling, is_following=is_following)
    if connection.transport == "ring":
        return LocalSource(connection, topic, is_settling=is_settling, is_following=is_following)
    return RemoteSource(connection, topic, is_settling=is_settling, is_following=is_following)


class _DeferredSource:
    """A source made before the engine was met: which one it is, the first meeting decides."""

    def __init__(self, connection: Connection, topic: str, *, is_settling: bool, is_following: bool) -> None:
        self._connection, self._topic = connection, topic
        self._is_settling, self._is_following = is_settling, is_following
        self._source: Source | None = None

    def _met(self) -> Steps[Source]:
        if self._source is None:
            yield self._connection.resolve(self._topic)  # It meets the engine.
            self._source = open_source(
                self._connection, self._topic, is_settling=self._is_settling, is_following=self._is_following
            )
        return self._source

    def fetch(self, cursor: Cursor, *, limit: int, bytes_max: int, wait_s: float) -> Steps[FetchResult]:
        """See Source."""
        source = yield from self._met()
        return (yield from source.fetch(cursor, limit=limit, bytes_max=bytes_max, wait_s=wait_s))

    def seek_time(self, ts_us: int) -> Steps[Cursor]:
        """See Source."""
        source = yield from self._met()
        return (yield from source.seek_time(ts_us))

    def record_check(self, version: int) -> RecordCheck:
        """See Source. Nothing was read before the first fetch."""
        if self._source is None:
            raise InvariantViolation("records are checked that were never read", topic=self._topic)
        return self._source.record_check(version)

    def keep_topic_alive(self, epoch: int = 0) -> None:
        """See Source. Nothing is in use before the first fetch."""
        if self._source is not None:
            self._source.keep_topic_alive(epoch)

    def close(self) -> None:
        """See Source."""
        if self._source is not None:
            self._source.close()
