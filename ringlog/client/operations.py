# Generated from ringlog/aio/operations.py by tools/unasync.py: do not edit; `make fmt` regenerates it.
"""What a client is asked to do: write, read, watch, work."""

from __future__ import annotations

import weakref
from collections.abc import Iterable
from datetime import datetime
from typing import TYPE_CHECKING, Any, Literal, TypeVar, Unpack, overload

from ringlog.client.connection.session import Session
from ringlog.client.producer import Producer
from ringlog.client.read.pages import EARLIEST, STORED, Cursor, Page, Record, Start, TagFilter
from ringlog.client.requests.results import Appended, ClientState
from ringlog.client.requests.validation import (
    check_group_limits,
    check_start,
    check_str,
    check_tag_filter,
    check_timeout,
    node_name,
)
from ringlog.client.routers import Routers
from ringlog.client.topics import Topics
from ringlog.client.watches.shared_reads import SharedReads
from ringlog.client.write.assembler import Assembler
from ringlog.client.write.fields import NewRecord, Payload, RecordFields, digest_of
from ringlog.client.write.idempotent_append import check_idempotency_key, check_once, check_window
from ringlog.client.write.producer_core import ProducerCore
from ringlog.client.write.producer_options import ProducerOptions, parse_codec, parse_durability
from ringlog.clock import SystemClock
from ringlog.cores import import_in_thread
from ringlog.limits import CREDIT_DEFAULT
from ringlog.link.futures import Steps, run_steps
from ringlog.payload import RAW, PayloadCodec
from ringlog.types import Codec, Durability

if TYPE_CHECKING:
    from ringlog.client.connection.shell import ThreadedShell
    from ringlog.client.group import Group
    from ringlog.client.lease_client import LeaseClient
    from ringlog.client.leases.group_facts import GroupLimits
    from ringlog.client.leases.lease_operations import QueueConnection
    from ringlog.client.queue import Queue
    from ringlog.client.reader import Reader
    from ringlog.client.tailer import Tailer
    from ringlog.client.watch import Watch
    from ringlog.client.watches.watch_core import Topics as WatchTopics

T = TypeVar("T")


class Operations:
    """The calls of a Client, which adds how it begins and ends."""

    if TYPE_CHECKING:

        @property
        def connection(self) -> QueueConnection: ...
        @property
        def client_id(self) -> str: ...
        @property
        def state(self) -> ClientState: ...

    def __init__(self, shell: ThreadedShell) -> None:
        self._shell = shell
        self._shared_reads = SharedReads()
        self._appenders: dict[tuple[str, Durability | None, bool, bool], ProducerCore] = {}
        self._producers: weakref.WeakSet[Producer[Any]] = weakref.WeakSet()
        self._readers: weakref.WeakSet[Reader | Tailer | Watch] = weakref.WeakSet()
        """What it gave out and has to close at the latest when it is closed itself."""
        self._queues: weakref.WeakSet[LeaseClient] = weakref.WeakSet()

    @property
    def topics(self) -> Topics:
        """Topics of the engine."""
        return Topics(self._shell, self)

    @property
    def routers(self) -> Routers:
        """Routers of the engine."""
        return Routers(self._shell, self)

    def wait_ready(self, timeout: float) -> None:
        """Wait until the engine was met; raises NotConnected after `timeout` seconds, and AuthFailed as soon
        as it says that it does not admit the key, VersionMismatch as soon as it is known to be of another
        protocol."""
        wait_s = check_timeout(timeout, "timeout")
        with self._shell.checked_lock, self._shell.guarded_session as session:
            connecting = session.links.connect()
        if not self._shell.wait(connecting, wait_s):
            raise self._shell.session.no_engine(timeout_s=timeout)
        connecting.result()

    def run(self, steps: Steps[T]) -> T:
        """Run an operation over `connection`."""
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
        with shell.checked_lock, shell.guarded_session as session:
            core = self._appender(session, topic, parse_durability(durability), create, disable_backpressure)
            records = Assembler()
            records.add(core.encode(data), core.fields(dict(record)) if record else None)
            if dedup_id is None:
                batch = core.add_frame(records)
                shell.wait_locked(batch, None)
        if dedup_id is not None:
            records.ids[0] = digest_of(dedup_id)
            return shell.ask(lambda _: run_steps(core.append_idempotent(records, window_ms)))
        return batch.result()

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
        key, window_ms = check_idempotency_key(idempotency_key), check_window(dedup_window_ms)
        with self._shell.checked_lock, self._shell.guarded_session as session:
            core = self._appender(session, topic, asked, create, disable_backpressure)
        assembled = core.assemble(records)
        if assembled.ids:
            check_once(assembled, topic, key)
            return self._shell.ask(lambda _: run_steps(core.append_idempotent(assembled, window_ms)))
        if key:
            frame = core.keyed_frame(assembled)
            return self._shell.ask(
                lambda session: run_steps(session.append_keyed(core.keyed_stream(), frame, key, window_ms))
            )
        with self._shell.checked_lock, self._shell.guarded_session:
            batch = core.add_frame(assembled)
        self._shell.wait(batch, None)
        return batch.result()

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
        import_in_thread("ringlog.client.read.paging")
        from ringlog.client.read.paging import read

        steps = read(
            self.connection, topic, after, start=start, limit=limit, max_bytes=max_bytes, wait_ms=wait_ms,
            tags=tags, node=node,
        )  # fmt: skip
        return self._shell.run(steps)

    def reader(
        self, topic: str, start: Start = EARLIEST, *, follow: bool = False, tags: TagFilter | None = None,
        node: str | list[str] | None = None,
    ) -> Reader:  # fmt: skip
        """Iterate over records and tombstones; with `follow` wait for more for ever."""
        import_in_thread("ringlog.client.reader")
        from ringlog.client.reader import Reader

        reader = Reader(self, topic, start, follow=follow, tags=tags, node=node)
        self._readers.add(reader)
        return reader

    def tailer(self, topic: str, start: Start = EARLIEST, *, follow: bool = True) -> Tailer:
        """Fast reading on the engine's host: mapped files, memoryviews, NumPy, Arrow."""
        import_in_thread("ringlog.client.tailer")
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
        import_in_thread("ringlog.client.watch")
        from ringlog.client.watch import Watch
        from ringlog.client.watches.watch_core import watch_options

        options = watch_options(
            topics, start=start, cursor=cursor, tags=tags, node=node, limit=limit, max_bytes=max_bytes,
            consistency=consistency, credit=credit, lenient=lenient,
        )  # fmt: skip
        watch = Watch(self, self._shell, options, self._shared_reads)
        self._readers.add(watch)
        return watch

    # -- working ------------------------------------------------------------------------------------

    def queue(
        self, topic: str, *, node: str | None = None, payload: PayloadCodec[Any] = RAW,
        release_on_exit: bool = True, min_idle_ms: int = 0,
    ) -> Queue:  # fmt: skip
        """A queue, as the worker `node` sees it; without a name, this client's. See ringlog.client.queue.

        On the engine's host, what is claimed is given back as soon as this process is gone; not so without
        `release_on_exit`: then leases last as long as they were asked for. With `min_idle_ms` this
        worker's claims take over jobs that another one did nothing about for so long, when nothing else is
        there.

        With another `payload` than RAW, jobs are put from values and have a `value`; what cannot be decoded
        is rejected by a `jobs()` loop."""
        import_in_thread("ringlog.client.queue")
        from ringlog.client.queue import Queue

        node = node_name(node, self.client_id)
        queue = Queue(self, self._shell, topic, node, payload, release_on_exit, min_idle_ms)
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
        group in mode queue; what came back before rests for `backoff_ms`, doubled with each delivery up to
        `backoff_max_ms`. With `create=False` the group has to be there: GroupNotFound.
        With `min_idle_ms` this member's claims take over what another one did nothing about for so long, when
        nothing else is there. On the engine's host what a process holds is ready for others when it ends; not
        so with `release_on_exit=False`.
        """
        import_in_thread("ringlog.client.group")
        from ringlog.client.group import Group
        from ringlog.client.leases.group_lease_operations import GroupLeaseOperations

        working = GroupLeaseOperations(
            check_str(topic, "topic"), check_str(name, "name"), check_str(mode, "mode"),
            node_name(node, self.client_id), SystemClock(), start=check_start(start),
            tags=check_tag_filter(tags),
            **check_group_limits(limits),
        )  # fmt: skip
        group = Group(self, self._shell, working)
        self._queues.add(group)
        return group

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
            check_str(topic, "topic")
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
