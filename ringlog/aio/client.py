"""connect() and Client for asyncio."""

from __future__ import annotations

import os
import weakref
from collections.abc import Generator, Iterable, Iterator
from datetime import datetime
from functools import partial
from types import TracebackType
from typing import Any, Literal, NoReturn, TypeVar, Unpack, overload

from ringlog.aio.group import Group
from ringlog.aio.producer import Producer
from ringlog.aio.queue import Queue
from ringlog.aio.reader import Reader, Tailer
from ringlog.aio.routers import Routers
from ringlog.aio.shell import LoopShell
from ringlog.aio.topics import Topics
from ringlog.aio.watch import Watch
from ringlog.client.assembler import Assembler
from ringlog.client.checks import (
    flag,
    limits_of_group,
    node_name,
    seconds,
    seconds_to_end,
    start_at,
    tags_of,
    text,
)
from ringlog.client.client import ClientOptions, checked_key
from ringlog.client.core import ProducerCore, ProducerOptions, parse_codec, parse_durability
from ringlog.client.ending import EXIT_CLOSE_S, before_end, tell_multiprocessing
from ringlog.client.fields import NewRecord, Payload, RecordFields, digest_of
from ringlog.client.group_facts import GroupLimits
from ringlog.client.grouping import GroupWorking
from ringlog.client.once import check_once, check_window
from ringlog.client.pages import EARLIEST, STORED, Cursor, Page, Record, Start, TagFilter
from ringlog.client.results import Appended, ClientEvent, ClientHealth, ClientState, CloseReport
from ringlog.client.session import Session, new_client_id
from ringlog.client.shared_reads import SharedReads
from ringlog.client.shell import belongs_to_process
from ringlog.client.watching import Topics as WatchTopics
from ringlog.client.watching import watch_options
from ringlog.clock import SystemClock
from ringlog.limits import CREDIT_DEFAULT
from ringlog.link.peer import FdSet
from ringlog.link.pending import Steps, gather
from ringlog.link.protocol import Transport
from ringlog.payload import RAW, PayloadCodec
from ringlog.types import Codec, Durability

T = TypeVar("T")
_live: weakref.WeakSet[Client] = weakref.WeakSet()
_shells: weakref.WeakSet[LoopShell] = weakref.WeakSet()
"""They outlive their clients where those were dropped, until the collector finds them."""
_parents: list[Session] = []
"""Sessions of the process we were forked from: freeing their sockets here would disturb it."""


def connect(
    url: str | None = None,
    *,
    client_id: str | None = None,
    key: str | None = None,
    timeout_ms: int | None = None,
    wait: float | None = None,
    reconnect: bool = True,
    transport: Literal["auto", "ring", "ipc", "tcp"] = "auto",
) -> Client:
    """Make a client; options as in ringlog.connect. `await` it or enter it to have `wait` respected."""
    options = ClientOptions(url, client_id, key, timeout_ms, transport)
    wait = None if wait is None else seconds_to_end(wait, "wait")
    return Client(options, wait=wait, reconnect=flag(reconnect, "reconnect"))


class Client:
    """One connection to one engine, for one loop. `async with connect(…) as client`."""

    def __init__(self, options: ClientOptions, *, wait: float | None, reconnect: bool) -> None:
        self._options = options
        self._wait = wait
        self._reconnect = reconnect
        self._node = options.client_id or new_client_id()
        self._shell = LoopShell(partial(_new_session, options, self._node, reconnect))
        self._shared_reads = SharedReads()
        self._appenders: dict[tuple[str, Durability | None, bool, bool], ProducerCore] = {}
        self._producers: weakref.WeakSet[Producer[Any]] = weakref.WeakSet()
        self._readers: weakref.WeakSet[Reader | Tailer | Watch] = weakref.WeakSet()
        """What it gave out and has to close at the latest when it is closed itself."""
        self._queues: weakref.WeakSet[Queue] = weakref.WeakSet()
        _live.add(self)
        _shells.add(self._shell)
        tell_multiprocessing()

    @property
    def topics(self) -> Topics:
        """Topics of the engine."""
        return Topics(self._shell, self)

    @property
    def routers(self) -> Routers:
        """Routers of the engine."""
        return Routers(self._shell, self)

    # -- how it is ----------------------------------------------------------------------------------

    @property
    def state(self) -> ClientState:
        """How this client and its engine stand."""
        if self._shell.is_closed:
            return ClientState.CLOSED
        session = self._shell.session_or_none
        return session.state if session is not None else ClientState.CONNECTING

    def health(self) -> ClientHealth:
        """Everything a liveness check may ask."""
        return self._shell.session.health()

    def events(self) -> Iterator[ClientEvent]:
        """What happened to the connection, oldest first; the last 256."""
        session = self._shell.session_or_none
        return iter(list(session.events) if session is not None else [])

    @property
    def transport(self) -> Transport:
        """How it talks to the engine; `ring` where that is not decided before the engine was met."""
        session = self._shell.session_or_none
        if session is not None:
            return session.transport
        return "ring" if self._options.transport == "auto" else self._options.transport

    @property
    def connection(self) -> Session:
        """What readers need."""
        return self._shell.session

    async def wait_ready(self, timeout: float) -> None:
        """Wait until the engine was met; raises NotConnected after `timeout` seconds, and AuthFailed."""
        wait_s = seconds(timeout, "timeout")
        try:
            await self._shell.result(self._shell.session.links.connect(), wait_s)
        except TimeoutError:
            raise self._shell.session.no_engine(timeout_s=timeout) from None

    async def run(self, steps: Steps[T]) -> T:
        """Run an operation over `connection`."""
        return await self._shell.run(steps)

    # -- writing ------------------------------------------------------------------------------------

    async def append(
        self,
        topic: str,
        data: Payload,
        /,
        *,
        durability: Durability | str | None = None,
        create: bool = True,
        disable_backpressure: bool = False,
        dedup_id: str | None = None,
        dedup_window_ms: int | None = None,
        **record: Unpack[RecordFields],
    ) -> Appended:
        """Append one record and wait until it met its class. See ringlog.client.Client.append."""
        window_ms = check_window(dedup_window_ms)
        core = self._appender(topic, parse_durability(durability), create, disable_backpressure)
        records = Assembler()
        records.add(core.encode(data), core.fields(dict(record)) if record else None)
        if dedup_id is not None:
            records.ids[0] = digest_of(dedup_id)
            return await self._shell.run(core.append_once(records, window_ms))
        return await self._shell.result(core.add_frame(records))

    async def append_many(
        self,
        topic: str,
        records: Iterable[Record | NewRecord | Payload],
        /,
        *,
        idempotency_key: str | None = None,
        dedup_window_ms: int | None = None,
        durability: Durability | str | None = None,
        create: bool = True,
        disable_backpressure: bool = False,
    ) -> Appended:
        """Append records in one atomic write. See ringlog.client.Client.append_many."""
        key, window_ms = checked_key(idempotency_key), check_window(dedup_window_ms)
        core = self._appender(topic, parse_durability(durability), create, disable_backpressure)
        assembled = core.assemble(records)
        if assembled.ids:
            check_once(assembled, topic, key)
            return await self._shell.run(core.append_once(assembled, window_ms))
        if key:
            frame = core.keyed_frame(assembled)
            keyed = core.session.append_keyed(core.keyed_stream(), frame, key, window_ms)
            return await self._shell.run(keyed)
        return await self._shell.result(core.add_frame(assembled))

    @overload
    def producer(
        self, topic: str, *, linger_ms: float = ..., max_frame_records: int = ..., max_frame_bytes: int = ...,
        max_buffer_bytes: int = ..., on_full: Literal["wait", "raise"] = ...,
        durability: Durability | str | None = ..., codec: Codec | str | None = ..., create: bool = ...,
        name: str | None = ..., disable_backpressure: bool = ...,
    ) -> Producer[bytes]: ...  # fmt: skip

    @overload
    def producer(
        self, topic: str, *, linger_ms: float = ..., max_frame_records: int = ..., max_frame_bytes: int = ...,
        max_buffer_bytes: int = ..., on_full: Literal["wait", "raise"] = ...,
        durability: Durability | str | None = ..., codec: Codec | str | None = ...,
        payload: PayloadCodec[T], create: bool = ..., name: str | None = ...,
        disable_backpressure: bool = ...,
    ) -> Producer[T]: ...  # fmt: skip

    def producer(
        self,
        topic: str,
        *,
        linger_ms: float = 2.0,
        max_frame_records: int = 4096,
        max_frame_bytes: int = 1 << 20,
        max_buffer_bytes: int = 32 << 20,
        on_full: Literal["wait", "raise"] = "wait",
        durability: Durability | str | None = None,
        codec: Codec | str | None = None,
        payload: PayloadCodec[Any] = RAW,
        create: bool = True,
        name: str | None = None,
        disable_backpressure: bool = False,
    ) -> Producer[Any]:
        """A producer of many records to one topic. See ringlog.client.Client.producer."""
        options = ProducerOptions(
            linger_ms, max_frame_records, max_frame_bytes, max_buffer_bytes, on_full,
            parse_durability(durability), parse_codec(codec), payload, create, name, disable_backpressure,
        )  # fmt: skip
        producer: Producer[Any] = Producer(self._shell, topic, options)
        self._producers.add(producer)
        return producer

    # -- reading ------------------------------------------------------------------------------------

    async def read(
        self,
        topic: str,
        after: Cursor | int = 0,
        *,
        start: datetime | None = None,
        limit: int = 256,
        max_bytes: int = 0,
        wait_ms: int = 0,
        tags: TagFilter | None = None,
        node: str | list[str] | None = None,
    ) -> Page:
        """One page of records after `after`; empty when there are none. See ringlog.client.Client.read."""
        from ringlog.client.reader import read

        steps = read(
            self._shell.session, topic, after, start=start, limit=limit, max_bytes=max_bytes, wait_ms=wait_ms,
            tags=tags, node=node,
        )  # fmt: skip
        return await self._shell.run_reading(steps)

    def reader(
        self, topic: str, start: Start = EARLIEST, *, follow: bool = False, tags: TagFilter | None = None,
        node: str | list[str] | None = None,
    ) -> Reader:  # fmt: skip
        """Iterate over records and tombstones; with `follow` wait for more for ever."""
        reader = Reader(self._shell, topic, start, follow=follow, tags=tags, node=node)
        self._readers.add(reader)
        return reader

    def tailer(self, topic: str, start: Start = EARLIEST, *, follow: bool = True) -> Tailer:
        """Fast reading on the engine's host."""
        tailer = Tailer(self._shell, topic, start, follow=follow)
        self._readers.add(tailer)
        return tailer

    def watch(
        self, topics: WatchTopics, *, start: Start = EARLIEST, cursor: str = "",
        tags: TagFilter | None = None, node: str | list[str] | None = None, limit: int = 0,
        max_bytes: int = 0, consistency: Literal["eventual", "strong"] = "eventual",
        credit: int = CREDIT_DEFAULT, lenient: bool = False,
    ) -> Watch:  # fmt: skip
        """Follow many topics at once; the options are those of ringlog.client.Client.watch."""
        options = watch_options(
            topics, start=start, cursor=cursor, tags=tags, node=node, limit=limit, max_bytes=max_bytes,
            consistency=consistency, credit=credit, lenient=lenient,
        )  # fmt: skip
        watch = Watch(self._shell, options, self._shared_reads)
        self._readers.add(watch)
        return watch

    # -- working ------------------------------------------------------------------------------------

    def queue(
        self, topic: str, *, node: str | None = None, payload: PayloadCodec[Any] = RAW,
        release_on_exit: bool = True,
    ) -> Queue:  # fmt: skip
        """A queue, as the worker `node` sees it. See ringlog.client.Client.queue."""
        queue = Queue(self, self._shell, topic, node_name(node, self._node), payload, release_on_exit)
        self._queues.add(queue)
        return queue

    def group(
        self, topic: str, name: str, *, mode: Literal["queue", "stream"] = "stream", start: Start = STORED,
        tags: TagFilter | None = None, node: str | None = None, **limits: Unpack[GroupLimits],
    ) -> Group:  # fmt: skip
        """A consumer group of a topic, as its member `node` sees it. See ringlog.client.Client.group."""
        working = GroupWorking(
            text(topic, "topic"), text(name, "name"), text(mode, "mode"), node_name(node, self._node),
            SystemClock(), start=start_at(start), tags=tags_of(tags), **limits_of_group(limits),
        )  # fmt: skip
        group = Group(self, self._shell, working)
        self._queues.add(group.leases)
        return group

    # -- the end ------------------------------------------------------------------------------------

    async def close(self, timeout: float = 10.0) -> CloseReport:
        """Send what was gathered, wait up to `timeout` seconds, end. Says what was not delivered.

        Readers and tailers end with it and let go of their files; what they handed out stays valid.
        """
        shell, timeout = self._shell, seconds_to_end(timeout)
        if shell.is_closed:
            return CloseReport(0, 0, 0)
        session = shell.session_or_none
        if session is None:
            shell.close()
            return CloseReport(0, 0, 0)
        for queue in list(self._queues):
            await queue.close(timeout)
        cores: list[ProducerCore] = list(shell.session.cores)
        try:
            await shell.result(gather([core.idle() for core in cores]), timeout)
        except TimeoutError:
            session.note("close_timeout", timeout_s=timeout)
        await shell.wait_undone(timeout)
        left = [core.end() for core in cores]
        requests = session.links.open_requests
        shell.close()
        for reader in list(self._readers):
            reader.close()
        _live.discard(self)
        return CloseReport(sum(unsent for unsent, _ in left), sum(unknown for _, unknown in left), requests)

    def __reduce__(self) -> NoReturn:
        raise belongs_to_process()

    def __await__(self) -> Generator[Any, None, Client]:
        return self._begin().__await__()

    async def __aenter__(self) -> Client:
        return await self._begin()

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()

    async def _begin(self) -> Client:
        if self._wait is not None:
            try:
                await self.wait_ready(self._wait)
            except BaseException:
                await self.close(0)
                raise
        return self

    # -- inside -------------------------------------------------------------------------------------

    def _appender(
        self, topic: str, durability: Durability | None, create: bool, is_pressing: bool
    ) -> ProducerCore:
        session = self._shell.session
        key = (topic, durability, create, is_pressing)
        try:
            core = self._appenders.get(key)
        except TypeError:
            core = None  # What has no hash is refused below.
        if core is None:
            text(topic, "topic")
            options = ProducerOptions(
                linger_ms=0, max_frame_records=1, max_buffer_bytes=1 << 40, durability=durability,
                create=create, disable_backpressure=is_pressing,
            )  # fmt: skip
            core = self._appenders[key] = ProducerCore(session, topic, options)
        return core

    def _restart_in_child(self) -> None:
        self._node = self._options.client_id or new_client_id()
        parents = self._shell.restart_in_child(
            partial(_new_session, self._options, self._node, self._reconnect)
        )
        if parents is not None:
            _parents.append(parents)
        self._appenders.clear()
        for producer in list(self._producers):
            producer.restart_in_child()
        for queue in list(self._queues):
            queue.restart_in_child()


def _new_session(options: ClientOptions, node: str, reconnect: bool, fds: FdSet) -> Session:
    # It knows nothing of the client: that ends when nobody has it any more.
    return Session(
        options.address, client_id=node, timeout_ms=options.timeout_ms,
        fds=fds, transport=options.transport, secret_key=options.secret_key, reconnect=reconnect,
    )  # fmt: skip


def _restart_all_in_child() -> None:
    for client in list(_live):
        client._restart_in_child()
    for shell in list(_shells):
        parents = shell.restart_in_child()  # Of a client that was dropped; of the others there is none.
        if parents is not None:
            _parents.append(parents)


def _finish_all() -> None:
    """At the end of the process: what was sent by clients that were not closed in their loop."""
    for shell in list(_shells):
        # A loop that is not closed may run in another thread, until the very end.
        if shell.is_left:
            shell.end_left(EXIT_CLOSE_S)


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_restart_all_in_child)
before_end(_finish_all)
