# Generated from ringlog/aio/operations.py by tools/unasync.py: do not edit; `make fmt` regenerates it.
"""Calls of a client: write, read, watch, and work on jobs."""

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
    check_payload_codec,
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
from ringlog.client.write.idempotent_append import check_dedup_write, check_idempotency_key, check_window
from ringlog.client.write.keyed_append import append_keyed
from ringlog.client.write.producer_core import ProducerCore
from ringlog.client.write.producer_options import ProducerOptions, parse_codec, parse_durability
from ringlog.clock import SystemClock
from ringlog.compilation import import_in_thread
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
    from ringlog.client.watches.watch_options import Topics as WatchTopics

T = TypeVar("T")


class Operations:
    """Calls that both kinds of Client share. A Client adds its opening and closing."""

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
        self._readers: weakref.WeakSet[Reader[Any] | Tailer | Watch[Any]] = weakref.WeakSet()
        """Readers of this client. Closing the client closes them."""
        self._queues: weakref.WeakSet[LeaseClient[Any]] = weakref.WeakSet()

    @property
    def topics(self) -> Topics:
        """Topics of the engine."""
        return Topics(self._shell, self)

    @property
    def routers(self) -> Routers:
        """Routers of the engine."""
        return Routers(self._shell, self)

    def wait_ready(self, timeout: float) -> None:
        """Wait until the engine answers.

        Args:
            timeout: Longest time to wait, in seconds.

        Raises:
            NotConnected: The engine did not answer within `timeout`.
            AuthFailed: The engine refused the key.
            VersionMismatch: The engine uses another protocol version.
        """
        wait_s = check_timeout(timeout, "timeout")
        with self._shell.checked_lock, self._shell.guarded_session as session:
            connecting = session.links.connect()
        if not self._shell.wait(connecting, wait_s):
            raise self._shell.session.no_engine_error(timeout_s=timeout)
        connecting.result()

    def run(self, steps: Steps[T]) -> T:
        """Run an operation over `connection` and return its result."""
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
        """Append one record and wait until it reached its durability class.

        Args:
            topic: Topic to append to.
            data: Payload in bytes; None appends a null.
            durability: Durability class of this write, if stronger than the topic's.
            create: Create the topic if it does not exist.
            disable_backpressure: Do not let the engine refuse the record because of pressure. Limits still
                apply.
            dedup_id: Skip the append if this id was used within the window, and return the seq of the first
                append.
            dedup_window_ms: Deduplication window in milliseconds, if shorter than the topic's
                `idempotency_window_ms`.
            **record: Other fields of the record: key, tag, node, meta, headers, event_ts, ttl_ms, expires_at,
                not_before, priority.

        Returns:
            Seq, durability class and commit time of the record.

        Raises:
            Refused: The engine refused the record. The subclass states the reason. The client retries
                Throttled until its timeout, unless its detail names a `limit`.
            RequestTimeout: No reply within the client's timeout. Whether the record was appended is unknown.
            NotConnected: There was no connection to an engine. Nothing was appended.

        Example:
            appended = client.append("orders", b"...", key=b"42", dedup_id="order-42")
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
        """Append up to 10,000 records in one atomic write.

        Idempotency is per write with `idempotency_key`, or per record with NewRecord.dedup_id. The two cannot
        be combined.

        Args:
            topic: Topic to append to.
            records: Payloads, NewRecord objects, or Record objects that were read before. Up to 1,000 records
                of one write may have a `dedup_id`.
            idempotency_key: Skip the write if this key was used within the topic's window, and return the
                seqs of the first write.
            dedup_window_ms: Window in milliseconds for the new key or ids, if shorter than the topic's.
            durability: Durability class of this write, if stronger than the topic's.
            create: Create the topic if it does not exist.
            disable_backpressure: Do not let the engine refuse the write because of pressure. Limits still
                apply.

        Returns:
            Seqs, durability class and commit time. With dedup ids an AppendedOnce, which names the repeated
                records.

        Raises:
            Refused: The engine refused the write. The subclass states the reason.
            RequestTimeout: No reply within the client's timeout. Whether the records were appended is
                unknown.
            NotConnected: There was no connection to an engine. Nothing was appended.
        """
        level = parse_durability(durability)
        key, window_ms = check_idempotency_key(idempotency_key), check_window(dedup_window_ms)
        with self._shell.checked_lock, self._shell.guarded_session as session:
            core = self._appender(session, topic, level, create, disable_backpressure)
        assembled = core.assemble(records)
        if assembled.ids:
            check_dedup_write(assembled, topic, key)
            return self._shell.ask(lambda _: run_steps(core.append_idempotent(assembled, window_ms)))
        if key:
            frame = core.keyed_frame(assembled)
            return self._shell.ask(
                lambda session: run_steps(append_keyed(session, core.keyed_stream(), frame, key, window_ms))
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
        """Open a producer, which sends many records to one topic in frames.

        The producer sends a frame when it has `max_frame_records` records or `max_frame_bytes` bytes, or
        `linger_ms` after its first record.

        Args:
            topic: Topic to append to.
            linger_ms: Longest time that a record waits for others, in milliseconds.
            max_frame_records: Most records of one frame, 1 to 10,000.
            max_frame_bytes: Size in bytes at which a frame is sent.
            max_buffer_bytes: Most bytes of records that are not settled.
            on_full: At a full buffer "wait" up to the client's timeout, or "raise" Backpressure at once.
            durability: Durability class of the records, if stronger than the topic's.
            codec: Compression of frames: none, lz4 or zstd. None uses the topic's `compression`.
            payload: Codec that encodes values to payloads.
            create: Create the topic if it does not exist.
            name: Name of a producer whose identity survives its process. `producer.resume()` then returns
                what the engine last settled for it.
            disable_backpressure: Do not let the engine refuse frames because of pressure. Limits and a full
                intake still apply.

        Returns:
            The producer.
        """
        options = ProducerOptions(
            linger_ms, max_frame_records, max_frame_bytes, max_buffer_bytes, on_full,
            parse_durability(durability), parse_codec(codec), payload, create, name, disable_backpressure,
        )  # fmt: skip
        producer: Producer[Any] = Producer(self._shell, topic, options, self)
        self._producers.add(producer)
        return producer

    # -- reading ------------------------------------------------------------------------------------

    @overload
    def read(
        self, topic: str, after: Cursor | int = ..., *, start: datetime | None = ..., limit: int = ...,
        max_bytes: int = ..., wait_ms: int = ..., tags: TagFilter | None = ...,
        node: str | list[str] | None = ...,
    ) -> Page: ...  # fmt: skip

    @overload
    def read(
        self, topic: str, after: Cursor | int = ..., *, payload: PayloadCodec[T],
        start: datetime | None = ..., limit: int = ...,
        max_bytes: int = ..., wait_ms: int = ..., tags: TagFilter | None = ...,
        node: str | list[str] | None = ...,
    ) -> Page[T]: ...  # fmt: skip

    def read(
        self,
        topic: str,
        after: Cursor | int = 0,
        *,
        payload: PayloadCodec[Any] = RAW,
        start: datetime | None = None,
        limit: int = 256,
        max_bytes: int = 0,
        wait_ms: int = 0,
        tags: TagFilter | None = None,
        node: str | list[str] | None = None,
    ) -> Page[Any]:
        """Read one page of records after a position. The page is empty if there are no records.

        Args:
            topic: Topic to read.
            after: Read after this seq or Cursor. With a Cursor, the page reports whether the topic was
                created again since.
            payload: Codec that decodes payloads to the `value` of records.
            start: A time with a time zone, instead of `after`: read from the first record that was committed
                at or after it.
            limit: Most records, 1 to 1,000; 0 = 256. Larger values are reduced.
            max_bytes: Most bytes of records; 0 = 1 MiB. Values above 8 MiB are reduced.
            wait_ms: Longest time to wait for a record, in milliseconds.
            tags: Return only records whose tag matches.
            node: Omit records of this node, or of these nodes.

        Returns:
            The page. Its `cursor` is the position behind it.

        Raises:
            TopicNotFound: The topic does not exist.
        """
        import_in_thread("ringlog.client.read.paging")
        from ringlog.client.read.paging import read

        codec = check_payload_codec(payload)
        steps = read(
            self.connection, topic, after, start=start, limit=limit, max_bytes=max_bytes, wait_ms=wait_ms,
            tags=tags, node=node,
        )  # fmt: skip
        return (self._shell.run(steps)).with_payload(codec)

    @overload
    def reader(
        self, topic: str, start: Start = ..., *, follow: bool = ..., tags: TagFilter | None = ...,
        node: str | list[str] | None = ...,
    ) -> Reader: ...  # fmt: skip

    @overload
    def reader(
        self, topic: str, start: Start = ..., *, payload: PayloadCodec[T], follow: bool = ...,
        tags: TagFilter | None = ..., node: str | list[str] | None = ...,
    ) -> Reader[T]: ...  # fmt: skip

    def reader(
        self, topic: str, start: Start = EARLIEST, *, payload: PayloadCodec[Any] = RAW, follow: bool = False,
        tags: TagFilter | None = None, node: str | list[str] | None = None,
    ) -> Reader[Any]:  # fmt: skip
        """Return an iterator over the records and tombstones of a topic. With `follow` it waits for new
        records.

        Args:
            topic: Topic to read.
            start: EARLIEST, LATEST, the first seq, a Cursor, or a time with a time zone.
            payload: Codec that decodes payloads to the `value` of records.
            follow: Wait for new records instead of ending at the head.
            tags: Return only records whose tag matches.
            node: Omit records of this node, or of these nodes.

        Returns:
            Iterator over Record and Tombstone items.
        """
        import_in_thread("ringlog.client.reader")
        from ringlog.client.reader import Reader

        reader = Reader(self, topic, start, payload=payload, follow=follow, tags=tags, node=node)
        self._readers.add(reader)
        return reader

    def tailer(self, topic: str, start: Start = EARLIEST, *, follow: bool = True) -> Tailer:
        """Return a tailer, the fastest reader on the engine's host: mapped files, memoryviews, NumPy, Arrow.

        Args:
            topic: Topic to read.
            start: EARLIEST, LATEST, the first seq, a Cursor, or a time with a time zone.
            follow: Wait for new records instead of ending at the head.

        Returns:
            Iterator over TailBatch and Tombstone items.
        """
        import_in_thread("ringlog.client.tailer")
        from ringlog.client.tailer import Tailer

        tailer = Tailer(self, topic, start, follow=follow)
        self._readers.add(tailer)
        return tailer

    @overload
    def watch(
        self, topics: WatchTopics, *, start: Start = ..., cursor: str = ..., tags: TagFilter | None = ...,
        node: str | list[str] | None = ..., limit: int = ..., max_bytes: int = ...,
        consistency: Literal["eventual", "strong"] = ..., credit: int = ..., lenient: bool = ...,
    ) -> Watch: ...  # fmt: skip

    @overload
    def watch(
        self, topics: WatchTopics, *, payload: PayloadCodec[T], start: Start = ..., cursor: str = ...,
        tags: TagFilter | None = ..., node: str | list[str] | None = ..., limit: int = ...,
        max_bytes: int = ..., consistency: Literal["eventual", "strong"] = ..., credit: int = ...,
        lenient: bool = ...,
    ) -> Watch[T]: ...  # fmt: skip

    def watch(
        self, topics: WatchTopics, *, payload: PayloadCodec[Any] = RAW, start: Start = EARLIEST,
        cursor: str = "", tags: TagFilter | None = None, node: str | list[str] | None = None, limit: int = 0,
        max_bytes: int = 0, consistency: Literal["eventual", "strong"] = "eventual",
        credit: int = CREDIT_DEFAULT, lenient: bool = False,
    ) -> Watch[Any]:  # fmt: skip
        """Follow many topics at once: `for event in client.watch(["orders", "prices.*"], start=LATEST)`.

        Args:
            topics: A name, names, or a mapping from names to start positions. `*` in a name matches any
                characters. Matching topics that are created later are read from their beginning.
            payload: Codec that decodes payloads to the `value` of records.
            start: Start position of topics without one of their own.
            cursor: `watch.cursor` of an earlier watch. It takes precedence for the topics that it contains.
            tags: Return only records whose tag matches.
            node: Omit records of this node, or of these nodes.
            limit: Most records of one page; 0 = 4,096.
            max_bytes: Most bytes of one page; 0 = 1 MiB.
            consistency: With "strong", return only records that survive a power loss.
            credit: Number of topics that may be granted to this watch at a time.
            lenient: Ignore names of topics that do not exist, instead of raising TopicNotFound.

        Returns:
            The watch, which subscribes at its first use.
        """
        import_in_thread("ringlog.client.watch")
        from ringlog.client.watch import Watch
        from ringlog.client.watches.watch_options import watch_options

        options = watch_options(
            topics, start=start, cursor=cursor, tags=tags, node=node, limit=limit, max_bytes=max_bytes,
            consistency=consistency, credit=credit, lenient=lenient,
        )  # fmt: skip
        watch = Watch(self, self._shell, options, self._shared_reads, payload)
        self._readers.add(watch)
        return watch

    # -- jobs ---------------------------------------------------------------------------------------

    @overload
    def queue(
        self, topic: str, *, node: str | None = ..., release_on_exit: bool = ..., min_idle_ms: int = ...
    ) -> Queue: ...

    @overload
    def queue(
        self, topic: str, *, node: str | None = ..., payload: PayloadCodec[T], release_on_exit: bool = ...,
        min_idle_ms: int = ...,
    ) -> Queue[T]: ...  # fmt: skip

    def queue(
        self, topic: str, *, node: str | None = None, payload: PayloadCodec[Any] = RAW,
        release_on_exit: bool = True, min_idle_ms: int = 0,
    ) -> Queue[Any]:  # fmt: skip
        """Return a view of one worker on a queue. See ringlog.client.queue.

        Args:
            topic: Topic of type `queue`.
            node: Name of the worker. None uses the name of this client.
            payload: Codec that converts between values and payloads. Jobs then have a `value`. A `jobs()`
                loop rejects jobs that it cannot decode.
            release_on_exit: On the engine's host, end the leases of this process when it exits. With False
                they last until their deadline.
            min_idle_ms: If no other job is ready, claims take over jobs of other workers whose last delivery
                or lease extension is at least this old, in milliseconds. 0 never does.

        Returns:
            The view.
        """
        import_in_thread("ringlog.client.queue")
        from ringlog.client.queue import Queue

        node = node_name(node, self.client_id)
        queue = Queue(self, self._shell, topic, node, payload, release_on_exit, min_idle_ms)
        self._queues.add(queue)
        return queue

    @overload
    def group(
        self, topic: str, name: str, *, mode: Literal["queue", "stream"] = ..., start: Start = ...,
        tags: TagFilter | None = ..., node: str | None = ..., **limits: Unpack[GroupLimits],
    ) -> Group: ...  # fmt: skip

    @overload
    def group(
        self, topic: str, name: str, *, payload: PayloadCodec[T], mode: Literal["queue", "stream"] = ...,
        start: Start = ..., tags: TagFilter | None = ..., node: str | None = ...,
        **limits: Unpack[GroupLimits],
    ) -> Group[T]: ...  # fmt: skip

    def group(
        self, topic: str, name: str, *, payload: PayloadCodec[Any] = RAW,
        mode: Literal["queue", "stream"] = "stream", start: Start = STORED, tags: TagFilter | None = None,
        node: str | None = None, **limits: Unpack[GroupLimits],
    ) -> Group[Any]:  # fmt: skip
        """Return a view of one member on a consumer group. The first use creates the group. See
        ringlog.client.group.

        Settings apply to a new group. If the group exists, the settings named here must match its own;
        otherwise the first use raises GroupIncompatible.

        Args:
            topic: Topic whose records the group shares.
            name: Name of the group.
            payload: Codec that decodes payloads to the `value` of jobs and records.
            mode: "queue" leases records to several members. "stream" lets one member read all records in
                order.
            start: Position of a new group. An existing group continues at its own position.
            tags: Skip records whose tag does not match. A tag filter makes this a separate group.
            node: Name of the member. None uses the name of this client.
            **limits: Settings of GroupLimits, in milliseconds where their names end in `_ms`. `max_in_flight`
                and `member_max_in_flight` limit the unacked records of the group and of one member. After
                `max_deliveries` deliveries a record moves to the topic `dead_letter`. A returned record waits
                for `backoff_ms`, doubled with each delivery up to `backoff_max_ms`. `create=False` requires
                that the group exists; otherwise the first use raises GroupNotFound. `min_idle_ms` and
                `release_on_exit` are as for `queue`.

        Returns:
            The view.
        """
        import_in_thread("ringlog.client.group")
        from ringlog.client.group import Group
        from ringlog.client.leases.group_lease_operations import GroupLeaseOperations

        operations = GroupLeaseOperations(
            check_str(topic, "topic"), check_str(name, "name"), check_str(mode, "mode"),
            node_name(node, self.client_id), SystemClock(), start=check_start(start),
            tags=check_tag_filter(tags),
            **check_group_limits(limits),
        )  # fmt: skip
        group = Group(self, self._shell, operations, payload)
        self._queues.add(group)
        return group

    # -- internals ----------------------------------------------------------------------------------

    def _appender(
        self, session: Session, topic: str, durability: Durability | None, create: bool, is_pressing: bool
    ) -> ProducerCore:
        """Return the producer core that `append` uses: one record per frame, sent at once."""
        key = (topic, durability, create, is_pressing)
        try:
            core = self._appenders.get(key)
        except TypeError:
            core = None  # An unhashable value is refused below.
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
