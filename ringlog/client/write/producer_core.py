"""ProducerCore: a producer without waiting, shared by both clients.

Records collect in an open batch until it is full, its linger time ends, or the program flushes. The batch
then becomes one frame of the producer's Stream. The memory limit covers a record from its addition until its
frame is settled.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, TypeGuard

import numpy as np
from numpy.typing import NDArray

from ringlog.client.connection.session import Session
from ringlog.client.requests.results import Appended, FlushReport, ProducerStats
from ringlog.client.requests.validation import check_int_range, check_sequence, check_str
from ringlog.client.write.assembler import RECORD_OVERHEAD_BYTES, Assembler
from ringlog.client.write.batch import Batch, joined
from ringlog.client.write.fields import column_values, digest_of, fields_of
from ringlog.client.write.idempotent_append import append_idempotent
from ringlog.client.write.producer_options import ProducerOptions, named_producer_id
from ringlog.client.write.stream import Stream
from ringlog.errors import (
    Backpressure,
    ConnectionTrouble,
    InvalidRequest,
    RecordTooLarge,
    RinglogError,
    UsageError,
)
from ringlog.frame import codec as frame_codec
from ringlog.frame.columns import COLUMN_NAMES, encode_records
from ringlog.frame.header import append_header_template
from ringlog.frame.layout import HEADER_BYTES
from ringlog.frame.view import open_frame
from ringlog.limits import COMPRESS_BYTES_MIN, RECORD_BYTES_MAX
from ringlog.link.futures import Pending, Steps
from ringlog.link.timers import Timer
from ringlog.payload import RAW
from ringlog.types import Codec, Durability

FRAME_OVERHEAD_BYTES = HEADER_BYTES + 16
EACH_PART_RECORDS = 8_192
"""One-record frames are passed on in parts of this many records, so that the first are sent early."""


class ProducerFlush(Pending[None]):
    """Wait for the records that were sent before. Later records do not lengthen it."""

    __slots__ = ("batches",)

    def __init__(self, batches: set[Batch]) -> None:
        super().__init__()
        self.batches: set[Batch] = batches
        """Those that are not done."""
        if not batches:
            self.resolve(None)

    @property
    def records(self) -> int:
        """Number of records that are not settled."""
        return sum([batch.records for batch in self.batches])

    def note_done(self, batch: Batch) -> None:
        """Note that a batch is done."""
        self.batches.discard(batch)
        if not self.batches:
            self.resolve(None)


class ProducerCore:
    """One producer. Not thread-safe: the shell holds the client's lock, or runs in one loop."""

    def __init__(self, session: Session, topic: Any, options: ProducerOptions) -> None:
        self.session = session
        self.topic: str = check_str(topic, "topic")
        self.options = options
        self._durability = options.durability or Durability.EPHEMERAL  # No more than the topic's own class.
        self._header = append_header_template(
            flags=frame_codec.flags_of(self._durability, options.payload.kind)
        )
        producer_id = None if options.name is None else named_producer_id(options.name)
        self.stream: Stream = session.open_stream(
            topic, producer_id=producer_id, create=options.create, durability=options.durability,
            disable_backpressure=options.disable_backpressure,
        )  # fmt: skip
        self.stream.on_batch_done = self._batch_done
        self.stream.on_split = self._frames_of_each
        self._encode = None if options.payload is RAW else options.payload.encode
        self._keyed: Stream | None = None
        self._open: Batch | None = None
        self._records = Assembler()
        self._linger_ns = int(options.linger_ms * 1_000_000)
        self._linger: Timer | None = None
        self._records_sent = self._waits = 0
        self._reported_acked = self._reported_failed = 0
        self._first_error: RinglogError | None = None
        self._room_waiters: list[Pending[None]] = []
        self._flushes: list[ProducerFlush] = []
        """Flushes for which a caller waits. Each holds the batches that were open at its start."""

        session.producer_cores.add(self)

    @property
    def is_gathering(self) -> bool:
        """True while records wait for a full frame or the end of the linger time."""
        return self._open is not None

    def keyed_stream(self) -> Stream:
        """Return the stream of frames that are sent by message. Their numbers must not mix with those of the
        ring."""
        if self._keyed is None:
            self._keyed = self.session.open_stream(
                self.topic, create=self.options.create, durability=self.options.durability,
                disable_backpressure=self.options.disable_backpressure,
            )  # fmt: skip
        return self._keyed

    # -- adding records -----------------------------------------------------------------------------

    def encode(self, data: Any) -> bytes | None:
        """Return the payload of a value; None for a null. Raises RecordTooLarge and the errors of the payload
        codec."""
        payload = data if type(data) is bytes and self._encode is None else self.options.payload.encode(data)
        if payload is not None and len(payload) > RECORD_BYTES_MAX:
            raise RecordTooLarge(
                f"a record must have at most {RECORD_BYTES_MAX} bytes, got {len(payload)}", topic=self.topic,
                bytes=len(payload), max=RECORD_BYTES_MAX,
            )  # fmt: skip
        return payload

    def are_raw_payloads(self, items: Any) -> TypeGuard[Sequence[bytes]]:
        """Return True if the items are a list or tuple of bytes, which need no work per item.

        Their sizes are checked together when the frame is encoded.
        """
        return self._encode is None and type(items) in {list, tuple} and set(map(type, items)) == {bytes}

    def encode_all(self, items: Any) -> Any:
        """Return the payloads of many values, as `encode` for each.

        Without a codec, a list or tuple is returned without a check. Items that are not bytes raise
        UsageError when the frames are encoded.
        """
        if self._encode is None and type(items) in {list, tuple}:
            return items
        return [self.encode(value) for value in check_sequence(items, "payloads")]

    def fields(self, record: dict[str, Any]) -> dict[str, Any]:
        """Check the fields of a record. Returns values by frame column."""
        return column_values(record, self.session.clock)

    def has_room(self, size: int) -> bool:
        """Return True if the buffer has room for `size` bytes. A single record is always accepted by an empty
        buffer."""
        used_bytes = self.stream.pending_bytes + self._records.bytes
        return used_bytes + size + FRAME_OVERHEAD_BYTES <= self.options.max_buffer_bytes or not used_bytes

    def add(self, payload: bytes | None, values: dict[str, Any] | None = None) -> tuple[Batch, int]:
        """Add one record to the open batch. Returns the batch and the record's index."""
        batch = self._open
        if batch is None:
            batch = self._begin()
        index = self._records.add(payload, values)
        batch.records = index + 1
        self._records_sent += 1
        options = self.options
        if index + 1 >= options.max_frame_records or self._records.bytes >= options.max_frame_bytes:
            self.flush_open()
        return batch, index

    def flush_open(self) -> None:
        """Encode the open batch as a frame and send it."""
        batch, records = self._open, self._records
        if batch is None:
            return
        self._open, self._records = None, Assembler()
        if self._linger is not None:
            self._linger.cancel()
            self._linger = None
        try:
            frame = self._frame(records)
        except RinglogError as e:
            if len(records.payloads) > 1:
                self._send_each_alone(batch, records)
            else:
                self.stream.fail_batch(batch, e)
            return
        self.stream.send_frames(batch, frame, np.array([0, len(frame)], dtype=np.int64))

    def _send_each_alone(self, batch: Batch, records: Assembler) -> None:
        """Send each record as its own frame, because they cannot be encoded as one. Records that cannot be
        encoded fail."""
        batch.split()
        failed: dict[int, RinglogError] = {}
        frames: list[bytearray] = []
        for row in range(len(records.payloads)):
            try:
                frames.append(self._frame(records.only([row])))
            except RinglogError as e:
                failed[row] = e
        self.stream.send_rows(batch, frames, [row for row in range(batch.frames) if row not in failed])
        for row, error in failed.items():
            batch.fail_frames(np.array([row]), error)

    def _frames_of_each(self, frame: Any) -> tuple[bytearray, NDArray[np.int64]]:
        """Return a frame for each record of one of our frames: (frames, their offsets)."""
        found = open_frame(frame, seed=None, verify=False).records()
        records = Assembler()
        records.payloads = found.payloads
        records.columns = {
            name: values for name in COLUMN_NAMES[1:] if (values := getattr(found, name)) is not None
        }
        return joined([self._frame(records.only([row])) for row in range(len(found.payloads))])

    def add_frame(self, records: Assembler) -> Batch:
        """Send records as one frame, after the open batch."""
        if records.ids:
            raise UsageError("dedup_id is not supported by producers: use append, append_many or put")
        frame = self._frame(records)
        self.flush_open()
        batch = Batch(self.stream)
        batch.records = len(records.payloads)
        self._records_sent += batch.records
        self.stream.send_frames(batch, frame, np.array((0, len(frame)), dtype=np.int64))
        return batch

    def assemble(self, items: Any) -> Assembler:
        """Check values, NewRecords and Records, and collect them for one frame."""
        records = Assembler()
        if self.are_raw_payloads(items):
            records.set_payloads(items)
            return records
        for item in check_sequence(items, "records"):
            found = fields_of(item)
            if found is None:
                records.add(self.encode(item))
            else:
                dedup_id = found[1].pop("dedup_id", None)
                row = records.add(self.encode(found[0]), self.fields(found[1]))
                if dedup_id is not None:
                    records.ids[row] = digest_of(dedup_id)
        if not records.payloads:
            raise InvalidRequest("records must not be empty", records=0, min=1)
        return records

    def encode_frames(self, payloads: Any, records: Any) -> list[tuple[bytearray, NDArray[np.int64]]]:
        """Encode frames of `records` payloads each, as buffers with offsets. Raises errors of invalid
        records.

        Does not access the producer's state, so it needs no lock.
        """
        records = check_int_range(records, "records_per_frame", 1)
        step = max(EACH_PART_RECORDS // records, 1) * records
        return [
            frame_codec.encode_frames(
                payloads[start : start + step] if len(payloads) > step else payloads,
                records, topic_id=0, durability=self.options.durability or Durability.EPHEMERAL,
                payload_kind=self.options.payload.kind,
            )
            for start in range(0, max(len(payloads), 1), step)
        ]  # fmt: skip

    def add_frames(
        self, parts: list[tuple[bytearray, NDArray[np.int64]]], count: int, records: int = 1
    ) -> Batch:
        """Send `count` payloads in frames of `encode_frames` as one batch, after the open batch."""
        self.flush_open()
        batch = Batch(self.stream)
        batch.expect_frames(count, records)
        self._records_sent += count
        self.stream.send_parts(batch, parts)
        return batch

    def _begin(self) -> Batch:
        batch = self._open = Batch(self.stream)
        batch.is_gathered = True
        session = self.session
        self._linger = session.timers.call_at(
            session.clock.monotonic_ns() + self._linger_ns, self._linger_over
        )
        return batch

    def _linger_over(self) -> None:
        self._linger = None
        self.flush_open()

    def _frame(self, records: Assembler) -> bytearray:
        options, codec = self.options, self._codec_for(records)
        if codec is Codec.NONE:
            return frame_codec.encode_single_frame(records.payloads, records.columns, self._header)
        return frame_codec.frame(
            encode_records(records.payloads, **records.columns), topic_id=0, durability=self._durability,
            payload_kind=options.payload.kind, codec=codec,
        )  # fmt: skip

    def _codec_for(self, records: Assembler) -> Codec:
        if self.options.codec is not None:
            return self.options.codec
        info = self.session.topics.cached(self.topic)
        if info is None or records.bytes < COMPRESS_BYTES_MIN:
            return Codec.NONE
        return Codec[str(info.config.get("compression", "none")).upper()]

    def append_idempotent(self, records: Assembler, window_ms: int) -> Steps[Appended]:
        """Append records with dedup ids, by message. Only new records are appended."""
        return append_idempotent(self.session, self.keyed_stream(), records, self._frame, window_ms)

    def keyed_frame(self, records: Assembler) -> bytearray:
        """Encode one frame for an append by message under an idempotency key."""
        return self._frame(records)

    # -- waiting --------------------------------------------------------------------------------------

    def wait_room(self) -> Pending[None]:
        """Send the open batch and wait until a frame is settled. Then call `has_room` again.

        Fails with Backpressure if frames were given up because the engine did not answer in time.
        """
        self._waits += 1
        self.flush_open()
        pending: Pending[None] = Pending()
        self._room_waiters.append(pending)
        return pending

    def buffer_full_error(self) -> Backpressure:
        """Return the error of a send that found no room in time."""
        return Backpressure(
            "the producer's buffer is full: retry later, or raise max_buffer_bytes", topic=self.topic,
            pending_bytes=self.stream.pending_bytes, max_buffer_bytes=self.options.max_buffer_bytes,
        )  # fmt: skip

    def wait_settled(self) -> ProducerFlush:
        """Send the open batch and wait until all records sent so far are settled."""
        self.flush_open()
        flush = ProducerFlush(self.stream.open_batches())
        if not flush.is_done:
            self._flushes.append(flush)
        return flush

    def report(self, flush: ProducerFlush | None = None) -> FlushReport:
        """Return the counts since the last report. Unfinished are the records of `flush`, which ends with
        this call; without one, all records."""
        stream = self.stream
        if flush is not None and not flush.is_done:
            self._flushes.remove(flush)
        acked = stream.records_acked - self._reported_acked
        failed = stream.records_failed - self._reported_failed
        self._reported_acked, self._reported_failed = stream.records_acked, stream.records_failed
        error, self._first_error = self._first_error, None
        every = stream.pending_records + len(self._records.payloads)
        unfinished = every if flush is None else flush.records
        return FlushReport(acked, failed, unfinished, error)

    def stats(self) -> ProducerStats:
        """Return the counters."""
        stream, buffered = self.stream, len(self._records.payloads)
        return ProducerStats(
            self._records_sent, stream.records_acked, stream.records_failed, stream.records_deduped,
            stream.frames_sent, stream.bytes_sent, buffered, stream.pending_records + buffered,
            stream.pending_bytes + self._records.bytes, stream.retries, self._waits,
        )  # fmt: skip

    def fail_unsettled(self) -> tuple[int, int]:
        """Give up all unsettled records. Returns the number of unsent records and of records with an unknown
        outcome."""
        self.flush_open()
        unsent, unknown = self.stream.unfinished()
        self.stream.fail_all(_closed)
        self.detach()
        return unsent, unknown

    def detach(self) -> None:
        """Remove the producer from the session: it sends no further records."""
        self.session.producer_cores.discard(self)
        self.session.streams.discard(self.stream)
        if self._keyed is not None:
            self.session.streams.discard(self._keyed)

    def _batch_done(self, batch: Batch, error: RinglogError | None) -> None:
        if error is not None and self._first_error is None:
            self._first_error = error
        if self._room_waiters:
            waiting, self._room_waiters = self._room_waiters, []
            # Given-up frames also make room. But a sender that waits because the engine does not answer must
            # fail after its timeout, instead of continuing with further records.
            is_given_up = isinstance(error, ConnectionTrouble)
            for pending in waiting:
                if is_given_up:
                    pending.fail(self.buffer_full_error())
                else:
                    pending.resolve(None)
        if self._flushes:
            flushes = self._flushes
            self._flushes = [flush for flush in flushes if not flush.batches <= {batch}]
            for flush in flushes:
                flush.note_done(batch)


def size_of(payload: bytes | None) -> int:
    """Return the buffer size of a record without fields."""
    return (len(payload) if payload else 0) + RECORD_OVERHEAD_BYTES


def _closed(was_sent: bool) -> RinglogError:
    return UsageError(
        "the client was closed before these records were settled",
        outcome="unknown" if was_sent else "not_applied",
    )
