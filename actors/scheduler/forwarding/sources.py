"""The sources of routers, read from the engine's files: what a reader needs of a connection, from within.

A scheduler reads as every reader on the host does, with the same checks, deletes and tombstones; it only asks
shards and waits in its own way, without blocking.
"""

from __future__ import annotations

from collections import OrderedDict
from typing import Any

from actors.scheduler.forwarding.forwarding_core import ReadForwardBatch, SourceFlowKey
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

ASK_NS = 10_000_000_000
_NS_PER_S = 1_000_000_000
_LOOK_S = 0.01


class EngineConnection:
    """A Connection (ringlog.client.connection.read_connection) of one of the engine's own processes, to read
    one topic."""

    transport: Transport = "ring"
    is_transport_known = True
    cold_dir = ""
    """Cold segments are asked for: a store that hangs must hold up only who waits for it (TI-9)."""

    def __init__(
        self, links: LocalLinks, clock: Clock, timers: Timers, topic_id: int = 0,
        log_map: LogMap | None = None,
    ) -> None:  # fmt: skip
        """`topic_id`: which topic is meant, whatever others had or will have its name. `log_map`: of the
        process, if this is not its first connection."""
        self._links, self._clock, self._timers, self._topic_id = links, clock, timers, topic_id
        self.log_map = log_map or LogMap()
        """What this process knows of where topics lie in the log."""

    def for_topic(self, topic_id: int) -> EngineConnection:
        """The same, to read this topic."""
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
        """Ask a shard; returns its message. It is asked again while it restarts, for ASK_NS."""
        deadline_ns = self._clock.monotonic_ns() + ASK_NS
        reply = yield self._links.request(shard, message, deadline_ns, attachment)
        return reply.message

    def pause(self, seconds: float) -> Pending[None]:
        """Done after a while."""
        pending: Pending[None] = Pending()
        when_ns = self._clock.monotonic_ns() + round(seconds * _NS_PER_S)
        self._timers.call_at(when_ns, lambda: pending.resolve(None))
        return pending

    def resolve(self, topic: str) -> Pending[m.TopicInfo]:
        """Who is this topic? Asked for by its id's shard."""
        return run_steps(self._resolve(topic))

    def _resolve(self, topic: str) -> Steps[m.TopicInfo]:
        shard = shard_of(self._topic_id, self._links.shards)
        info: m.TopicInfo = yield from self.ask(shard, m.TopicResolve(topic))
        if info.topic_id != self._topic_id:
            raise TopicNotFound("no such topic", topic=topic)
        return info

    def locate(self, topic: str, after: int, epoch: int = 0) -> Pending[m.Located]:
        """Where do its records lie?"""
        return run_steps(self._locate(topic, after, epoch))

    def _locate(self, topic: str, after: int, epoch: int) -> Steps[m.Located]:
        shard = shard_of(self._topic_id, self._links.shards)
        located: m.Located = yield from self.ask(shard, m.Locate(topic, after, epoch))
        if located.topic_id != self._topic_id:
            raise TopicNotFound("no such topic", topic=topic)
        return located

    def latest(self, topic: str) -> Pending[Cursor]:
        """The cursor behind its last record."""
        return run_steps(self._latest(topic))

    def _latest(self, topic: str) -> Steps[Cursor]:
        shard = shard_of(self._topic_id, self._links.shards)
        reply: m.TopicStateReply = yield from self.ask(shard, m.TopicState(topic))
        return Cursor(reply.epoch, reply.head_seq)

    def keep_topic_alive(self, topic: str, epoch: int = 0) -> KeepAliveHandle:
        """Not here: see source_uses.py."""
        return KeepAliveHandle(epoch)

    def facts(self, info: m.TopicInfo | m.Located) -> TopicFacts | None:
        """Its slot on the board, now."""
        return self._links.topic_facts(info)

    def topic_sequence(self, info: m.TopicInfo | m.Located) -> int:
        """Another number after each change of its slot."""
        return self._links.topic_sequence(info)

    def sequence_word(self, info: m.TopicInfo | m.Located) -> tuple[memoryview, int] | None:
        """Where that number lies."""
        return self._links.sequence_word(info)

    def marks(self, shard: int) -> ShardWatermarks:
        """The shard's published marks, now."""
        return self._links.watermarks(shard)

    def published_since(self, shard: int, seen: ShardWatermarks, timeout_s: float) -> Pending[bool]:
        """A look after a moment: news say when there is something, this is for marks that lag behind."""
        pending: Pending[bool] = Pending()
        when_ns = self._clock.monotonic_ns() + round(min(timeout_s, _LOOK_S) * _NS_PER_S)
        self._timers.call_at(when_ns, lambda: pending.resolve(self.marks(shard) != seen))
        return pending

    def cold_read(self, request: m.ColdRead) -> Pending[memoryview]:
        """Bytes of a cold segment."""
        return run_steps(self._cold(request))

    def _cold(self, request: m.ColdRead) -> Steps[memoryview]:
        reply = yield self._links.ask_relocator(request, self._clock.monotonic_ns() + ASK_NS)
        return memoryview(reply.attachment or b"")

    def catch_up(self, topic: str, topic_id: int) -> Pending[None]:
        """Not here: who forwards waits for no router."""
        return resolved(None)

    def seek_remote(self, request: m.SeekTime) -> Pending[m.SeekTimeReply]:
        """Not here: files are read."""
        raise NotConnected("this process reads files")

    def read_remote(self, request: m.Read) -> Pending[tuple[m.ReadReply, memoryview]]:
        """Not here: files are read."""
        raise NotConnected("this process reads files")


class SourceReaders:
    """Open readers of sources; the longest unused is let go."""

    def __init__(self, connection: EngineConnection, clock: Clock) -> None:
        self._connection, self._clock = connection, clock
        self._open: OrderedDict[SourceFlowKey, LocalSource] = OrderedDict()
        self._busy: set[SourceFlowKey] = set()

    def read(self, asked: ReadForwardBatch) -> Steps[FetchResult]:
        """The source behind the stretch's start, about as much as is wanted. Raises as Source.fetch."""
        source = self._open.pop(asked.key, None)
        if source is None:
            connection = self._connection.for_topic(asked.key.source_id)
            source = LocalSource(connection, asked.source, clock=self._clock)
        self._open[asked.key] = source
        self._busy.add(asked.key)
        try:
            cursor = Cursor(asked.epoch, asked.start)
            return (yield from source.fetch(cursor, limit=asked.records, bytes_max=asked.bytes, wait_s=0.0))
        finally:
            self._busy.discard(asked.key)
            self._shrink()

    def close_reader(self, key: SourceFlowKey) -> None:
        """Nobody reads it any more."""
        if key not in self._busy and (source := self._open.pop(key, None)) is not None:
            source.close()

    def close(self) -> None:
        """Let go of all files."""
        for source in self._open.values():
            source.close()
        self._open.clear()

    def _shrink(self) -> None:
        for key in list(self._open):
            if len(self._open) <= ROUTER_SOURCES_OPEN_MAX:
                break
            self.close_reader(key)
