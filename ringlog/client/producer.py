"""Producer: sends many records to one topic, batched into frames."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from types import TracebackType
from typing import Generic, TypeVar, Unpack

from ringlog.client.connection.session import Session
from ringlog.client.connection.shell import ThreadedShell
from ringlog.client.read.pages import Record
from ringlog.client.requests.results import FlushReport, ProducerStats
from ringlog.client.requests.validation import check_str, check_timeout
from ringlog.client.ticket import Ticket
from ringlog.client.write.fields import NewRecord, RecordFields
from ringlog.client.write.producer_core import ProducerCore, size_of
from ringlog.client.write.producer_options import CLOSED, OF_PARENT, ProducerOptions
from ringlog.envelope.messages import ProducerStateReply
from ringlog.errors import RequestTimeout, UsageError

T = TypeVar("T")


class Producer(Generic[T]):
    """Sends many records to one topic, batched into frames. Thread-safe.

    A context manager: leaving it flushes, and raises an error if a record was not appended.

    Example:
        with client.producer("orders", linger_ms=5.0) as producer:
            for payload in payloads:
                producer.send(payload)
    """

    def __init__(self, shell: ThreadedShell, topic: str, options: ProducerOptions, client: object) -> None:
        self.topic: str = check_str(topic, "topic")
        self._shell = shell
        self._client = client
        """Reference that keeps the client alive while this producer is in use."""
        self._options = options
        self._is_closing = False
        """True from the first call of `close`: no further records."""
        self._is_closed = False
        """True once that is done: every record is settled."""
        self._closed_text = CLOSED
        with shell.checked_lock, shell.guarded_session as session:
            self._core = ProducerCore(session, topic, options)

    # -- sending ------------------------------------------------------------------------------------

    def send(self, data: T, /, **record: Unpack[RecordFields]) -> Ticket:
        """Add one record to the current frame.

        If the buffer is full, the call waits up to the client's timeout, unless the producer has
        `on_full="raise"`. No record is dropped.

        Args:
            data: Payload in bytes, or a value that the producer's codec encodes.
            **record: Other fields of the record: key, tag, headers, event_ts and so on.

        Returns:
            Ticket that resolves when the record is settled.

        Raises:
            Backpressure: The buffer is full.
            RecordTooLarge, InvalidRequest, UsageError: The record is invalid.
        """
        core = self._core
        payload = core.encode(data)
        values = core.fields(dict(record)) if record else None
        shell = self._shell
        shell.require_open()
        with shell.lock:
            try:
                if self._is_closing or shell.interrupted_by or not core.has_room(size_of(payload)):
                    self._require_room(size_of(payload))
                batch, index = self._core.add(payload, values)
                if index == 0 or not core.is_gathering:
                    core.session.links.pump()
                    shell.leadership.ensure_progress()
            except BaseException as e:
                shell.mark_interrupted(e)
                raise
        if shell.callbacks.are_due:
            shell.callbacks.run()
        return Ticket(shell, batch, index)

    def send_many(self, data: Iterable[T | Record | NewRecord], /) -> Ticket:
        """Send records as one atomic frame with one ticket. Raises BatchTooLarge above 10,000 records."""
        core = self._core
        records = core.assemble(data)
        with self._shell.checked_lock, self._shell.guarded_session as session:
            self._require_room(records.bytes)
            batch = self._core.add_frame(records)
            session.links.pump()
        return Ticket(self._shell, batch)

    def send_each(self, payloads: Sequence[T], /, *, records_per_frame: int = 1) -> Ticket:
        """Send many frames at once with one ticket. Each frame is appended independently.

        Args:
            payloads: Payloads, in order.
            records_per_frame: Records of one frame. A frame is appended atomically.

        Returns:
            Ticket of an AppendedEach, whose `seqs` are the seqs of the records in order. A refused frame does
                not affect the others; the error contains the number of failed records.
        """
        core = self._core
        encoded = core.encode_all(payloads)
        parts = core.encode_frames(encoded, records_per_frame)
        size = sum([len(buffer) for buffer, _ in parts])
        with self._shell.checked_lock, self._shell.guarded_session as session:
            self._require_room(size)
            batch = self._core.add_frames(parts, len(encoded), records_per_frame)
            session.links.pump()
        return Ticket(self._shell, batch)

    def flush(self, timeout: float | None = None) -> FlushReport:
        """Send buffered records and wait until all records that were sent before are settled.

        Args:
            timeout: Longest time to wait, in seconds. None waits until the client's own timeout settles every
                record.

        Returns:
            Counts of acked and failed records since the last report, and of the records that the flush did
                not settle in time.
        """
        shell, timeout = self._shell, check_timeout(timeout, "timeout")
        with shell.checked_lock, shell.guarded_session:
            flush = self._core.wait_settled()
        shell.wait(flush, timeout)
        with shell.lock:
            return self._core.report(flush)

    def stats(self) -> ProducerStats:
        """Return the counters of this producer."""
        with self._shell.lock:
            return self._core.stats()

    @property
    def resumed(self) -> ProducerStateReply | None:
        """State that the engine had of this named producer, after the first send or `resume`. None before."""
        return self._core.stream.resumed

    def resume(self) -> ProducerStateReply | None:
        """Query what the engine last settled for this named producer. None for a producer without a name."""
        if self._is_closing:
            raise UsageError(self._closed_text, topic=self.topic)
        return self._shell.ask(lambda _: self._core.stream.query_producer_state())

    def close(self, timeout: float | None = None) -> FlushReport:
        """Accept no further records, flush, then close the producer. Idempotent.

        Records that are not settled after `timeout` continue. Another call waits for them, as does a call
        during this one.

        Args:
            timeout: Longest time to wait, in seconds.

        Returns:
            The counts that `flush` returns.
        """
        if self._is_closed:
            return FlushReport(0, 0, 0)
        timeout = check_timeout(timeout, "timeout")
        self._is_closing = True
        report = self._core.report() if self._shell.interrupted_by else self.flush(timeout)
        if not report.unfinished and not self._shell.interrupted_by:
            with self._shell.lock:
                self._is_closed = True
                self._core.detach()
        return report

    def __enter__(self) -> Producer[T]:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        report = self.close()
        if kind is None and not report.is_complete:
            raise report.error or RequestTimeout(
                "records were not settled", outcome="unknown", topic=self.topic, records=report.unfinished
            )

    # -- internals ----------------------------------------------------------------------------------

    def _require_room(self, size: int) -> None:
        """Wait for room in the buffer, or raise Backpressure. Call with the lock held."""
        shell = self._shell
        shell.require_usable()
        if self._is_closing:
            raise UsageError(self._closed_text, topic=self.topic)
        core = self._core
        if core.has_room(size):
            return
        if self._options.on_full == "raise":
            core.wait_room()
            raise core.buffer_full_error()
        deadline = shell.now_s() + core.session.timeout_ms / 1000
        while not core.has_room(size):
            room = core.wait_room()
            if not shell.wait_locked(room, deadline):
                raise core.buffer_full_error()
            room.result()
        if self._is_closing:
            raise UsageError(self._closed_text, topic=self.topic)

    def restart_in_child(self, session: Session) -> None:
        """Reset the producer after a fork: a new identity and an empty buffer. The parent keeps its records
        and the name."""
        self._core = ProducerCore(session, self.topic, self._options)
        if self._options.name is not None and not self._is_closed:
            self._is_closing = self._is_closed = True
            self._closed_text = OF_PARENT
