"""Producer of an asyncio client."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Sequence
from types import TracebackType
from typing import Generic, TypeVar, Unpack

from ringlog.aio.shell import LoopShell
from ringlog.aio.ticket import Ticket
from ringlog.client.read.pages import Record
from ringlog.client.requests.results import FlushReport, ProducerStats
from ringlog.client.requests.validation import check_str, check_timeout
from ringlog.client.write.fields import NewRecord, RecordFields
from ringlog.client.write.producer_core import ProducerCore, size_of
from ringlog.client.write.producer_options import CLOSED, OF_PARENT, ProducerOptions
from ringlog.envelope.messages import ProducerStateReply
from ringlog.errors import RequestTimeout, UsageError

T = TypeVar("T")


class Producer(Generic[T]):
    """Sends many records to one topic, batched into frames.

    An async context manager: leaving it flushes, and raises an error if a record was not appended.

    Example:
        async with client.producer("orders", linger_ms=5.0) as producer:
            for payload in payloads:
                await producer.send(payload)
    """

    def __init__(self, shell: LoopShell, topic: str, options: ProducerOptions, client: object) -> None:
        self.topic: str = check_str(topic, "topic")
        self._shell = shell
        self._client = client
        """Reference that keeps the client alive while this producer is in use."""
        self._options = options
        self._core_of_loop: ProducerCore | None = None
        self._is_closing = False
        """True from the first call of `close`: no further records."""
        self._is_closed = False
        """True once that is done: every record is settled."""
        self._closed_text = CLOSED

    async def send(self, data: T, /, **record: Unpack[RecordFields]) -> Ticket:
        """Add one record to the current frame. Waits only if the buffer is full.

        Args:
            data: Payload in bytes, or a value that the producer's codec encodes.
            **record: Other fields of the record: key, tag, headers, event_ts and so on.

        Returns:
            Ticket that resolves when the record is settled.

        Raises:
            Backpressure: The buffer is full: at once with `on_full="raise"`, otherwise after the client's
                timeout.
        """
        core = self._sending_core()
        payload = core.encode(data)
        values = core.fields(dict(record)) if record else None
        if not core.has_room(size_of(payload)):
            await self._room(core, size_of(payload))
        return Ticket(self._shell, *core.add(payload, values))

    async def send_many(self, data: Iterable[T | Record | NewRecord], /) -> Ticket:
        """Send records as one atomic frame of at most 10,000 records, with one ticket."""
        core = self._sending_core()
        records = core.assemble(data)
        await self._room(core, records.bytes)
        return Ticket(self._shell, core.add_frame(records))

    async def send_each(self, payloads: Sequence[T], /, *, records_per_frame: int = 1) -> Ticket:
        """Send each record as its own frame, or `records_per_frame` records at a time, with one ticket for
        all.

        Each frame is appended independently. The result is an AppendedEach with the seqs in order.
        """
        core = self._sending_core()
        encoded = core.encode_all(payloads)
        parts = core.encode_frames(encoded, records_per_frame)
        await self._room(core, sum([len(buffer) for buffer, _ in parts]))
        return Ticket(self._shell, core.add_frames(parts, len(encoded), records_per_frame))

    async def flush(self, timeout: float | None = None) -> FlushReport:
        """Send buffered records and wait until all records that were sent before are settled.

        Args:
            timeout: Longest time to wait, in seconds. None waits until the client's own timeout settles every
                record.

        Returns:
            Counts of acked and failed records since the last report, and of the records that the flush did
                not settle in time.
        """
        return await self._flush(self._core(), check_timeout(timeout, "timeout"))

    async def _flush(self, core: ProducerCore, timeout: float | None) -> FlushReport:
        flush = core.wait_settled()
        await self._shell.wait(flush, timeout)
        return core.report(flush)

    def stats(self) -> ProducerStats:
        """Return the counters of this producer."""
        return self._core().stats()

    async def resume(self) -> ProducerStateReply | None:
        """Query what the engine last settled for this named producer. None for a producer without a name."""
        return await self._shell.result(self._sending_core().stream.query_producer_state())

    async def close(self, timeout: float | None = None) -> FlushReport:
        """Accept no further records, flush, then close the producer. Idempotent.

        Records that are not settled after `timeout` continue. Another call waits for them, as does a call
        during this one.

        Args:
            timeout: Longest time to wait, in seconds.

        Returns:
            The counts that `flush` returns.
        """
        timeout = check_timeout(timeout, "timeout")
        if self._is_closed:
            return FlushReport(0, 0, 0)
        if self._shell.is_closed:  # That failed the records that were not settled.
            return FlushReport(0, 0, 0) if self._core_of_loop is None else self._core_of_loop.report()
        core, self._is_closing = self._core(), True
        report = await self._flush(core, timeout)
        if not report.unfinished:
            self._is_closed = True
            core.detach()
        return report

    async def __aenter__(self) -> Producer[T]:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        report = await self.close()
        if kind is None and not report.is_complete:
            raise report.error or RequestTimeout(
                "records were not settled", outcome="unknown", topic=self.topic, records=report.unfinished
            )

    def restart_in_child(self) -> None:
        """Reset the producer after a fork: a new identity and an empty buffer. A named producer is closed,
        since the parent owns the name."""
        self._core_of_loop = None
        if self._options.name is not None and not self._is_closed:
            self._is_closing = self._is_closed = True
            self._closed_text = OF_PARENT

    def _core(self) -> ProducerCore:
        session = self._shell.session
        if self._is_closed:
            raise UsageError(self._closed_text, topic=self.topic)
        if self._core_of_loop is None:
            self._core_of_loop = ProducerCore(session, self.topic, self._options)
        return self._core_of_loop

    def _sending_core(self) -> ProducerCore:
        core = self._core()
        if self._is_closing:
            raise UsageError(self._closed_text, topic=self.topic)
        return core

    async def _room(self, core: ProducerCore, size: int) -> None:
        if core.has_room(size):
            return
        if self._options.on_full == "raise":
            core.wait_room()
            raise core.buffer_full_error()
        try:
            async with asyncio.timeout(core.session.timeout_ms / 1000):
                while not core.has_room(size):
                    await self._shell.result(core.wait_room())
        except TimeoutError:
            raise core.buffer_full_error() from None
        self._sending_core()  # Raises UsageError if the producer was closed meanwhile.
