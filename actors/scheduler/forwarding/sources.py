"""Reads the sources of routers from the engine's files, through a connection from within the engine.

A scheduler reads like every reader on the host, with the same checks, deletes and tombstones. Only its
requests to shards and its waits differ: they do not block.
"""

from __future__ import annotations

from collections import OrderedDict
from typing import Any

from ringlog.actors.scheduler.forwarding.forwarding_core import ReadForwardBatch, SourceFlowKey
from ringlog.board.topics import TopicFacts
from ringlog.client.read.fetch_result import FetchResult
from ringlog.client.read.local_source import LocalSource
from ringlog.client.read.pages import Cursor
from ringlog.client.watches.topic_keep_alive import KeepAliveHandle
from ringlog.clock import Clock
from ringlog.envelope import messages as m
from ringlog.errors import NotConnected, TopicNotFound
from ringlog.limits import ROUTER_SOURCES_OPEN_MAX
from ringlog.link.futures import Pending, Steps, resolved, run_steps
from ringlog.link.local_links import LocalLinks
from ringlog.link.protocol import ShardWatermarks, Transport
from ringlog.link.timers import Timers
from ringlog.placement import shard_of
from ringlog.storage.log_map import LogMap

REQUEST_TIMEOUT_NS = 10_000_000_000
_NS_PER_S = 1_000_000_000
_MARK_POLL_S = 0.01


class EngineConnection:
    """A connection of an engine process, for reading one topic.

    It implements Connection of ringlog.client.connection.read_connection.
    """

    transport: Transport = "ring"
    is_transport_known = True
    cold_dir = ""
    """Empty: the relocator reads cold data. A hanging store then delays only reads of cold data."""

    def __init__(
        self, links: LocalLinks, clock: Clock, timers: Timers, topic_id: int = 0,
        log_map: LogMap | None = None,
    ) -> None:  # fmt: skip
        """Create a connection for the topic with this id, whatever other topics had or get its name.

        `log_map` is the map of an earlier connection of this process.
        """
        self._links, self._clock, self._timers, self._topic_id = links, clock, timers, topic_id
        self.log_map: LogMap = log_map or LogMap()
        """Known places of topics in the log, shared by the connections of this process."""

    def for_topic(self, topic_id: int) -> EngineConnection:
        """Return a connection for another topic with the same log map."""
        return EngineConnection(self._links, self._clock, self._timers, topic_id, self.log_map)

    @property
    def data_dir(self) -> str:
        return self._links.engine.data_dir

    @property
    def shm_dir(self) -> str:
        return self._links.engine.shm_dir

    @property
    def generation(self) -> int:
        return self._links.generation

    def ask(self, shard: int, message: m.Message, attachment: Any = None) -> Steps[Any]:
        """Send a shard a request and return the reply.

        Retries for REQUEST_TIMEOUT_NS (10 s) while the shard restarts.
        """
        deadline_ns = self._clock.monotonic_ns() + REQUEST_TIMEOUT_NS
        reply = yield self._links.request(shard, message, deadline_ns, attachment)
        return reply.message

    def pause(self, seconds: float) -> Pending[None]:
        """Return a Pending that is done after this time."""
        pending: Pending[None] = Pending()
        when_ns = self._clock.monotonic_ns() + round(seconds * _NS_PER_S)
        self._timers.call_at(when_ns, lambda: pending.resolve(None))
        return pending

    def resolve(self, topic: str) -> Pending[m.TopicInfo]:
        """Request the topic's facts from the shard of its id.

        Fails with TopicNotFound if the name has another id.
        """
        return run_steps(self._resolve(topic))

    def _resolve(self, topic: str) -> Steps[m.TopicInfo]:
        shard = shard_of(self._topic_id, self._links.shards)
        info: m.TopicInfo = yield from self.ask(shard, m.TopicResolve(topic))
        if info.topic_id != self._topic_id:
            raise TopicNotFound("no such topic", topic=topic)
        return info

    def locate(self, topic: str, after: int, epoch: int = 0) -> Pending[m.Located]:
        """Request the places of the topic's records after `after`."""
        return run_steps(self._locate(topic, after, epoch))

    def _locate(self, topic: str, after: int, epoch: int) -> Steps[m.Located]:
        shard = shard_of(self._topic_id, self._links.shards)
        located: m.Located = yield from self.ask(shard, m.Locate(topic, after, epoch))
        if located.topic_id != self._topic_id:
            raise TopicNotFound("no such topic", topic=topic)
        return located

    def latest(self, topic: str) -> Pending[Cursor]:
        """Request the cursor of the topic's last record."""
        return run_steps(self._latest(topic))

    def _latest(self, topic: str) -> Steps[Cursor]:
        shard = shard_of(self._topic_id, self._links.shards)
        reply: m.TopicStateReply = yield from self.ask(shard, m.TopicState(topic))
        return Cursor(reply.epoch, reply.head_seq)

    def keep_topic_alive(self, topic: str, epoch: int = 0) -> KeepAliveHandle:
        """Do nothing: see source_keep_alive.py."""
        return KeepAliveHandle(epoch)

    def facts(self, info: m.TopicInfo | m.Located) -> TopicFacts | None:
        """Return the current facts of the topic's slot on the board, or None."""
        return self._links.board.topic_facts(info)

    def topic_sequence(self, info: m.TopicInfo | m.Located) -> int:
        """Return the sequence number of the topic's slot, which changes with every change of the slot."""
        return self._links.board.topic_sequence(info)

    def sequence_word(self, info: m.TopicInfo | m.Located) -> tuple[memoryview, int] | None:
        """Return the memory and the index of that number, or None if the slot cannot be read."""
        return self._links.board.sequence_word(info)

    def marks(self, shard: int) -> ShardWatermarks:
        """Return the shard's current published marks."""
        return self._links.board.watermarks(shard)

    def published_since(self, shard: int, seen: ShardWatermarks, timeout_s: float) -> Pending[bool]:
        """Check the shard's marks once, after at most 10 ms.

        New records arrive through news. This check covers marks that are published later than the news.
        """
        pending: Pending[bool] = Pending()
        when_ns = self._clock.monotonic_ns() + round(min(timeout_s, _MARK_POLL_S) * _NS_PER_S)
        self._timers.call_at(when_ns, lambda: pending.resolve(self.marks(shard) != seen))
        return pending

    def cold_read(self, request: m.ColdRead) -> Pending[memoryview]:
        """Request bytes of a cold segment from the relocator."""
        return run_steps(self._cold(request))

    def _cold(self, request: m.ColdRead) -> Steps[memoryview]:
        reply = yield self._links.ask_relocator(request, self._clock.monotonic_ns() + REQUEST_TIMEOUT_NS)
        return memoryview(reply.attachment or b"")

    def catch_up(self, topic: str, topic_id: int) -> Pending[None]:
        """Do nothing: a scheduler does not wait for routers."""
        return resolved(None)

    def seek_remote(self, request: m.SeekTime) -> Pending[m.SeekTimeReply]:
        """Raise NotConnected: this process reads files."""
        raise NotConnected("a scheduler reads files and has no remote reads")

    def read_remote(self, request: m.Read) -> Pending[tuple[m.ReadReply, memoryview]]:
        """Raise NotConnected: this process reads files."""
        raise NotConnected("a scheduler reads files and has no remote reads")


class SourceReaders:
    """Open readers of sources, at most ROUTER_SOURCES_OPEN_MAX. The least recently used is closed first."""

    def __init__(self, connection: EngineConnection, clock: Clock) -> None:
        self._connection, self._clock = connection, clock
        self._open: OrderedDict[SourceFlowKey, LocalSource] = OrderedDict()
        self._busy: set[SourceFlowKey] = set()

    def read(self, request: ReadForwardBatch) -> Steps[FetchResult]:
        """Read the source after the start of the range, up to the requested size.

        Raises like Source.fetch.
        """
        source = self._open.pop(request.key, None)
        if source is None:
            connection = self._connection.for_topic(request.key.source_id)
            source = LocalSource(connection, request.source, clock=self._clock)
        self._open[request.key] = source
        self._busy.add(request.key)
        try:
            cursor = Cursor(request.epoch, request.start)
            return (
                yield from source.fetch(cursor, limit=request.records, bytes_max=request.bytes, wait_s=0.0)
            )
        finally:
            self._busy.discard(request.key)
            self._shrink()

    def close_reader(self, key: SourceFlowKey) -> None:
        """Close the reader of a source, unless a read is in progress."""
        if key not in self._busy and (source := self._open.pop(key, None)) is not None:
            source.close()

    def close(self) -> None:
        """Close all readers."""
        for source in list(self._open.values()):
            source.close()
        self._open.clear()

    def _shrink(self) -> None:
        for key in list(self._open):
            if len(self._open) <= ROUTER_SOURCES_OPEN_MAX:
                break
            self.close_reader(key)
