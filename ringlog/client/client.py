"""connect() and Client: the synchronous client."""

from __future__ import annotations

import logging
import os
import weakref
from collections.abc import Iterable, Iterator, Sequence
from datetime import datetime
from functools import partial
from types import TracebackType
from typing import TYPE_CHECKING, Any, Literal, NoReturn, TypeVar, Unpack, overload

from ringlog import environment
from ringlog.client.assembler import Assembler
from ringlog.client.checks import (
    flag,
    limits_of_group,
    node_name,
    seconds,
    seconds_to_end,
    sequence,
    start_at,
    tags_of,
    text,
    whole,
)
from ringlog.client.checks import producer_id as checked_producer_id
from ringlog.client.core import ProducerCore, ProducerOptions, parse_codec, parse_durability
from ringlog.client.dropped import end_dropped, end_shell, end_with, forget_in_child
from ringlog.client.ending import EXIT_CLOSE_S, before_end, tell_multiprocessing, warn_of_left
from ringlog.client.fields import NewRecord, Payload, RecordFields, digest_of
from ringlog.client.green_threads import check_green_threads
from ringlog.client.locked import LockedConnection
from ringlog.client.once import check_once, check_window
from ringlog.client.pages import EARLIEST, STORED, Cursor, Page, Record, Start, TagFilter
from ringlog.client.producer import Producer
from ringlog.client.results import Appended, ClientEvent, ClientHealth, ClientState, CloseReport
from ringlog.client.routers import Routers
from ringlog.client.session import Session, new_client_id
from ringlog.client.shared_reads import SharedReads
from ringlog.client.shell import Shell, belongs_to_process
from ringlog.client.topics import Topics
from ringlog.cores import import_whole
from ringlog.errors import ConfigError, InvalidRequest, UsageError
from ringlog.limits import CREDIT_DEFAULT, IDEMPOTENCY_KEY_BYTES_MAX
from ringlog.link.address import Address, parse_url
from ringlog.link.curve import is_public_key, read_key_file
from ringlog.link.peer import FdSet
from ringlog.link.pending import Steps, start
from ringlog.link.protocol import Transport
from ringlog.names import utf8
from ringlog.payload import RAW, PayloadCodec
from ringlog.shm import engine_trouble
from ringlog.types import Codec, Durability

if TYPE_CHECKING:
    from ringlog.client.group import Group
    from ringlog.client.group_facts import GroupLimits
    from ringlog.client.numbered import NumberedProducer
    from ringlog.client.queue import Queue
    from ringlog.client.reader import Reader
    from ringlog.client.tailer import Tailer
    from ringlog.client.watch import Watch
    from ringlog.client.watching import Topics as WatchTopics

T = TypeVar("T")
TIMEOUT_MS_DEFAULT = 10_000
TIMEOUT_MS_MAX = 3_600_000
log = logging.getLogger("ringlog.client")
log.addHandler(logging.NullHandler())
_live: weakref.WeakSet[Client] = weakref.WeakSet()
_parents: list[Session] = []
"""Sessions of the process we were forked from: freeing their sockets here would disturb it."""


class ClientOptions:
    """Checked options of connect, with what the environment adds."""

    def __init__(
        self, url: str | None, client_id: str | None, key: str | None, timeout_ms: int | None, transport: str
    ) -> None:
        self.address: Address = parse_url(url)
        self.client_id = None if client_id is None else text(client_id, "client_id")
        self.secret_key = "" if self.address.is_local else _secret_key(key)
        self.timeout_ms = _timeout_ms(timeout_ms)
        self.transport: Transport | Literal["auto"] = _transport(self.address, transport)


def _transport(address: Address, asked: str) -> Transport | Literal["auto"]:
    if text(asked, "transport") not in {"auto", "ring", "ipc", "tcp"}:
        raise UsageError("transport is auto, ring, ipc or tcp", found=asked)
    if address.is_local:
        trouble = engine_trouble()
        if trouble:
            raise UsageError(trouble, address=str(address))
        if asked == "tcp":
            raise UsageError("tcp needs an address ringlog://host:port", address=str(address))
        return asked  # type: ignore[return-value]
    if asked not in {"auto", "tcp"}:
        raise UsageError(f"{asked} needs a run directory on this host", address=str(address))
    return "tcp"


def _secret_key(key: str | None) -> str:
    """The secret key of a TCP connection: of the call, of the key file, of the variable; "" = none. Raises
    UsageError, which never holds the key."""
    source, path = "key", os.environ.get(environment.KEY_FILE)
    if key is None and path:
        try:
            return read_key_file(path, needs_secret=True).secret.decode()
        except ConfigError as e:
            raise UsageError(f"{environment.KEY_FILE}: {e.message}", **e.detail) from None
    if key is None:
        source, key = environment.KEY, os.environ.get(environment.KEY, "")
    if key and not is_public_key(key):
        found = f"{len(key)} characters" if isinstance(key, str) else type(key).__name__
        raise UsageError(f"{source} must be 40 characters of Z85, the secret_key of a key file, got {found}")
    return key


def _timeout_ms(asked: int | None) -> int:
    found: Any = asked if asked is not None else os.environ.get(environment.TIMEOUT_MS, TIMEOUT_MS_DEFAULT)
    try:
        value = whole(asked, "timeout_ms") if asked is not None else int(found)
    except (TypeError, ValueError):
        raise UsageError("timeout_ms is a number of milliseconds", found=found) from None
    if not 1 <= value <= TIMEOUT_MS_MAX:
        raise UsageError("timeout_ms out of range", found=value, min=1, max=TIMEOUT_MS_MAX)
    return value


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
    """Connect to an engine: `ringlog:///run/dir` on this host or `ringlog://host:port?server_key=…`.

    Without a URL: RINGLOG_URL, else ./ringlog-data/run. Connecting is lazy; `wait` seconds prove it, or
    NotConnected is raised. `timeout_ms` (default RINGLOG_TIMEOUT_MS or 10,000) bounds every request and
    every ticket. `key` is the secret key of a TCP connection (default: that of the key file RINGLOG_KEY_FILE,
    or RINGLOG_KEY). Without `reconnect` the client ends when its engine goes away, and whatever waits raises
    NotConnected. Raises UsageError for
    options that make no sense.
    """
    check_green_threads()
    options = ClientOptions(url, client_id, key, timeout_ms, transport)
    wait = None if wait is None else seconds_to_end(wait, "wait")
    client = Client(options, reconnect=flag(reconnect, "reconnect"))
    if wait is not None:
        try:
            client.wait_ready(wait)
        except BaseException:
            client.close(0)
            raise
    return client


class Client:
    """One connection to one engine. Context manager, thread-safe, reopens itself after fork()."""

    def __init__(self, options: ClientOptions, *, reconnect: bool = True) -> None:
        self._options = options
        self._reconnect = reconnect
        self._shell = Shell(partial(_new_session, options, reconnect))
        end_with(self, self._shell)
        self._appenders: dict[tuple[str, Durability | None, bool, bool], ProducerCore] = {}
        self._producers: weakref.WeakSet[Producer[Any]] = weakref.WeakSet()
        self._readers: weakref.WeakSet[Reader | Tailer | Watch] = weakref.WeakSet()
        """What it gave out and has to close at the latest when it is closed itself."""
        self._queues: weakref.WeakSet[Queue] = weakref.WeakSet()
        self.connection = LockedConnection(self._shell)
        """What readers need."""
        self._shared_reads = SharedReads()
        _live.add(self)
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
        """How this client and its engine stand, looked at now."""
        with self._shell.lock:
            return self._shell.look().state

    def health(self) -> ClientHealth:
        """Everything a liveness check may ask."""
        with self._shell.lock:
            return self._shell.look().health()

    def events(self) -> Iterator[ClientEvent]:
        """What happened to the connection, oldest first; the last 256."""
        with self._shell.lock:
            return iter(list(self._shell.look().events))

    @property
    def client_id(self) -> str:
        """This client's name as the engine knows it."""
        return self._shell.session.client_id

    @property
    def transport(self) -> Transport:
        """How it talks to the engine; `ring` where that is not decided before the engine was met."""
        return self._shell.session.transport

    def wait_ready(self, timeout: float) -> None:
        """Wait until the engine was met; raises NotConnected after `timeout` seconds, and AuthFailed as soon
        as it says that it does not admit the key."""
        wait_s = seconds(timeout, "timeout")
        with self._shell.locked() as session:
            connecting = session.links.connect()
        if not self._shell.wait(connecting, wait_s):
            raise self._shell.session.no_engine(timeout_s=timeout)
        connecting.take()

    def run(self, steps: Steps[T]) -> T:
        """Run an operation over `connection` in this thread."""
        return self._shell.run(steps)

    # -- writing ------------------------------------------------------------------------------------

    def append(
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
        """Append one record and wait until it met its class; the topic is made if absent, unless told not to.

        Raises a Refused by what was wrong, RequestTimeout when the fate is unknown, NotConnected when
        there was no engine and nothing was applied. What is refused under pressure (Throttled) is tried again
        until the client's timeout; with `disable_backpressure` pressure is no reason to refuse it.

        With a `dedup_id` a repeat inside the topic's window (`idempotency_window_ms`), or the shorter one of
        `dedup_window_ms`, appends nothing and returns the number of the first time.
        """
        shell, window_ms = self._shell, check_window(dedup_window_ms)
        with shell.locked() as session:
            core = self._appender(session, topic, parse_durability(durability), create, disable_backpressure)
            records = Assembler()
            records.add(core.encode(data), core.fields(dict(record)) if record else None)
            if dedup_id is None:
                batch = core.add_frame(records)
                shell.wait_locked(batch, None)
        if dedup_id is not None:
            records.ids[0] = digest_of(dedup_id)
            return shell.ask(lambda _: start(core.append_once(records, window_ms)))
        return batch.take()

    def append_many(
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
        """Append records in one atomic write, all or nothing, at most 10,000.

        With an `idempotency_key` a repeat inside the topic's window appends nothing and returns the numbers
        of the first time. NewRecords may have a `dedup_id` each instead, up to 1,000 in one write: those
        whose id was used inside the window are left out, and the AppendedOnce says which they are and what
        numbers they have. `dedup_window_ms` is a shorter window than the topic's, for what is new.
        """
        asked = parse_durability(durability)
        key, window_ms = checked_key(idempotency_key), check_window(dedup_window_ms)
        with self._shell.locked() as session:
            core = self._appender(session, topic, asked, create, disable_backpressure)
        assembled = core.assemble(records)
        if assembled.ids:
            check_once(assembled, topic, key)
            return self._shell.ask(lambda _: start(core.append_once(assembled, window_ms)))
        if key:
            frame = core.keyed_frame(assembled)
            return self._shell.ask(
                lambda session: start(session.append_keyed(core.keyed_stream(), frame, key, window_ms))
            )
        with self._shell.locked():
            batch = core.add_frame(assembled)
        self._shell.wait(batch, None)
        return batch.take()

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
        """A producer of many records to one topic, gathered into frames.

        A frame leaves when it has `max_frame_records` or `max_frame_bytes`, or `linger_ms` after its first
        record. `max_buffer_bytes` bounds what is not settled. `durability` asks for more than the topic's
        class. `codec` compresses frames (default: as the topic's `compression` says). A `name` makes the
        producer's identity last: the engine remembers what it settled of it, and `producer.resume()` asks.
        With `disable_backpressure` pressure is no reason to refuse its frames; limits and a full intake are.
        """
        options = ProducerOptions(
            linger_ms, max_frame_records, max_frame_bytes, max_buffer_bytes, on_full,
            parse_durability(durability), parse_codec(codec), payload, create, name, disable_backpressure,
        )  # fmt: skip
        producer: Producer[Any] = Producer(self._shell, topic, options, self)
        self._producers.add(producer)
        return producer

    def numbered_producer(
        self, topic: str, producer_id: int, *, durability: Durability | str | None = None
    ) -> NumberedProducer:
        """Send encoded frames under a producer id and numbers of the caller's, who may resume after a crash.

        The topic has to exist. Nothing is ever tried again under another number: see NumberedProducer.
        """
        import_whole("ringlog.client.numbered")
        from ringlog.client.numbered import NumberedProducer

        topic, producer_id = text(topic, "topic"), checked_producer_id(producer_id)
        return NumberedProducer(self._shell, topic, producer_id, parse_durability(durability), self)

    # -- reading ------------------------------------------------------------------------------------

    def read(
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
        """One page of records after `after`; empty when there are none (CL-5).

        Up to `limit` records (1..1000, 0 = 256) or `max_bytes` of them (0 = 1 MiB, at most 8 MiB); what is
        larger is clamped. `after` as a Cursor carries the topic's life: should that have ended, the page
        says so. `start`, a time with its zone, instead of `after`: from the first record committed then.
        With nothing to tell it waits up to `wait_ms`. `tags` and `node` leave records out, silently.
        """
        import_whole("ringlog.client.reader")
        from ringlog.client.reader import read

        steps = read(
            self.connection, topic, after, start=start, limit=limit, max_bytes=max_bytes, wait_ms=wait_ms,
            tags=tags, node=node,
        )  # fmt: skip
        return self.run(steps)

    def reader(
        self, topic: str, start: Start = EARLIEST, *, follow: bool = False, tags: TagFilter | None = None,
        node: str | list[str] | None = None,
    ) -> Reader:  # fmt: skip
        """Iterate over records and tombstones; with `follow` wait for more for ever."""
        import_whole("ringlog.client.reader")
        from ringlog.client.reader import Reader

        reader = Reader(self, topic, start, follow=follow, tags=tags, node=node)
        self._readers.add(reader)
        return reader

    def tailer(self, topic: str, start: Start = EARLIEST, *, follow: bool = True) -> Tailer:
        """Fast reading on the engine's host: mapped files, memoryviews, NumPy, Arrow."""
        import_whole("ringlog.client.tailer")
        from ringlog.client.tailer import Tailer

        tailer = Tailer(self, topic, start, follow=follow)
        self._readers.add(tailer)
        return tailer

    def watch(
        self, topics: WatchTopics, *, start: Start = EARLIEST, cursor: str = "",
        tags: TagFilter | None = None, node: str | list[str] | None = None, limit: int = 0,
        max_bytes: int = 0, consistency: Literal["eventual", "strong"] = "eventual",
        credit: int = CREDIT_DEFAULT, lenient: bool = False,
    ) -> Watch:  # fmt: skip
        """Follow many topics at once: `for event in client.watch(["orders", "prices.*"], start=LATEST)`.

        `topics`: a name, names, or a mapping from names to where to start; a `*` in a name stands for any
        characters, and topics that are made later and match are read from their beginning. `cursor` is a
        `watch.cursor` of before, for the topics it knows. One turn reads up to `limit` records (0 = 4,096) or
        `max_bytes` (0 = 1 MiB) of a topic; up to `credit` topics have a turn at the same time. With
        consistency "strong" only what survives power loss is given. Unknown names raise TopicNotFound, or are
        left out if `lenient`.
        """
        import_whole("ringlog.client.watch")
        from ringlog.client.watch import Watch
        from ringlog.client.watching import watch_options

        options = watch_options(
            topics, start=start, cursor=cursor, tags=tags, node=node, limit=limit, max_bytes=max_bytes,
            consistency=consistency, credit=credit, lenient=lenient,
        )  # fmt: skip
        watch = Watch(self, self._shell, options, self._shared_reads)
        self._readers.add(watch)
        return watch

    def ready_watches(self, watches: Sequence[Watch], timeout: float | None = None) -> list[Watch]:
        """Those of this client's watches whose `next(0)` has something to look at, for one thread with many.

        Waits until there is one; an empty list after `timeout` seconds.
        """
        timeout = seconds(timeout, "timeout")
        watches = our_watches(watches)
        if self._shell.session.delivery.is_late:
            with self._shell.locked() as session:
                session.delivery.give_back()
        ready = [watch for watch in watches if watch.has_news]
        if not ready:
            subscriptions = [watch.subscription for watch in watches]  # Opens those that were not.
            with self._shell.locked() as session:
                news = session.delivery.waits(*subscriptions)
            self._shell.wait(news, timeout)
            ready = [watch for watch in watches if watch.has_news]
        return ready

    # -- working ------------------------------------------------------------------------------------

    def queue(
        self, topic: str, *, node: str | None = None, payload: PayloadCodec[Any] = RAW,
        release_on_exit: bool = True,
    ) -> Queue:  # fmt: skip
        """A queue, as the worker `node` sees it; without a name, this client's. See ringlog.client.queue.

        On the engine's host, what is claimed is given back as soon as this process is gone; not so without
        `release_on_exit`: then leases last as long as they were asked for.

        With another `payload` than RAW, jobs are put from values and have a `value`; what cannot be decoded
        is rejected by a `jobs()` loop."""
        import_whole("ringlog.client.queue")
        from ringlog.client.queue import Queue

        node = node_name(node, self.client_id)
        queue = Queue(self, self._shell, topic, node, payload, release_on_exit)
        self._queues.add(queue)
        return queue

    def group(
        self, topic: str, name: str, *, mode: Literal["queue", "stream"] = "stream", start: Start = STORED,
        tags: TagFilter | None = None, node: str | None = None, **limits: Unpack[GroupLimits],
    ) -> Group:  # fmt: skip
        """A consumer group of a topic, as its member `node` sees it; made when it is first used. See
        ringlog.client.group.

        `start` is where a new group begins; one that is there goes on where it stands. With `tags` it is a
        group of its own, which passes over every other record. `max_in_flight` and `member_max_in_flight`
        bound what is claimed and not acked, of all members and of one; they, too, are those of a new group.
        What was given out `max_deliveries` times and comes back goes to the topic `dead_letter`, of a new
        group in mode queue. With `create=False` the group has to be there: GroupNotFound.
        With `min_idle_ms` this member's claims take over what another one did nothing about for so long, when
        nothing else is there. On the engine's host what a process holds is ready for others when it ends; not
        so with `release_on_exit=False`.
        """
        import_whole("ringlog.client.group")
        from ringlog.client.group import Group
        from ringlog.client.grouping import GroupWorking

        working = GroupWorking(
            text(topic, "topic"), text(name, "name"), text(mode, "mode"),
            node_name(node, self.client_id), self._shell.session.clock, start=start_at(start),
            tags=tags_of(tags),
            **limits_of_group(limits),
        )  # fmt: skip
        group = Group(self, self._shell, working)
        self._queues.add(group.leases)
        return group

    # -- the end ------------------------------------------------------------------------------------

    def close(self, timeout: float = 10.0) -> CloseReport:
        """Send what was gathered, wait up to `timeout` seconds, end. Says what was not delivered.

        Readers and tailers end with it and let go of their files; what they handed out stays valid. Jobs that
        were claimed and not begun are given back.
        """
        shell, timeout = self._shell, seconds_to_end(timeout)
        if shell.is_closed:
            return CloseReport(0, 0, 0)
        if not shell.torn_by:
            for queue in list(self._queues):
                queue.close(timeout)
        report = CloseReport(*end_shell(shell, timeout))
        for reader in list(self._readers):
            reader.close()
        _live.discard(self)
        return report

    def __enter__(self) -> Client:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def __reduce__(self) -> NoReturn:
        raise belongs_to_process()

    def __repr__(self) -> str:
        return f"<Client {self._options.address} {self._shell.session.state.value}>"

    # -- inside -------------------------------------------------------------------------------------

    def _appender(
        self, session: Session, topic: str, durability: Durability | None, create: bool, is_pressing: bool
    ) -> ProducerCore:
        """The producer behind `append`: one record a frame, sent at once."""
        key = (topic, durability, create, is_pressing)
        try:
            core = self._appenders.get(key)
        except TypeError:
            core = None  # What has no hash is refused below.
        if core is None:
            text(topic, "topic")
            options = ProducerOptions(
                linger_ms=0,
                max_frame_records=1,
                max_buffer_bytes=1 << 40,
                durability=durability,
                create=create,
                disable_backpressure=is_pressing,
            )
            core = self._appenders[key] = ProducerCore(session, topic, options)
        return core

    def _restart_in_child(self) -> None:
        _parents.append(self._shell.restart_in_child())
        self._appenders.clear()
        session = self._shell.session
        session.note("forked", pid=os.getpid())
        for producer in list(self._producers):
            producer.restart_in_child(session)
        for queue in list(self._queues):
            queue.restart_in_child()


def _new_session(options: ClientOptions, reconnect: bool, fds: FdSet) -> Session:
    return Session(
        options.address, client_id=options.client_id or new_client_id(), timeout_ms=options.timeout_ms,
        fds=fds, transport=options.transport, secret_key=options.secret_key, reconnect=reconnect,
    )  # fmt: skip


def our_watches(watches: Any) -> list[Watch]:
    """Watches that were given; raises UsageError for anything else."""
    from ringlog.client.watch import Watch

    found = list(sequence(watches, "watches"))
    for watch in found:
        if not isinstance(watch, Watch):
            raise UsageError(f"watches must be watches of this client, got {type(watch).__name__}")
    return found


def checked_key(key: str | None) -> str:
    """An idempotency key as it travels; "" is none (I-1)."""
    if key is None:
        return ""
    size = len(utf8(text(key, "idempotency_key"), "idempotency_key"))
    if size > IDEMPOTENCY_KEY_BYTES_MAX:
        raise InvalidRequest("idempotency key too long", bytes=size, max=IDEMPOTENCY_KEY_BYTES_MAX)
    return key


def _restart_all_in_child() -> None:
    forget_in_child()
    for client in list(_live):
        client._restart_in_child()


def _close_all() -> None:
    """At the end of the process: what was sent and not flushed still gets a moment."""
    for client in list(_live):
        report = client.close(EXIT_CLOSE_S)
        warn_of_left(report.unsent, report.unknown)
    end_dropped(EXIT_CLOSE_S)


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_restart_all_in_child)
before_end(_close_all)
