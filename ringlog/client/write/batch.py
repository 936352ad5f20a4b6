"""Batch: records that are settled together, and the frames that contain them.

A batch is one frame of n records, or several frames. It is done when every frame is settled or has failed.
Frames that were refused temporarily are resent in another Shipment. The batch only counts the missing frames.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from ringlog.client.requests.results import Appended, AppendedEach
from ringlog.errors import RinglogError
from ringlog.frame.settle_entry import (
    FLAG_DEDUPED,
    FLAGS_SHIFT,
    S_COMMIT_TS,
    S_COUNT_STATUS,
    S_EPOCH,
    S_FIRST_SEQ,
    STATUS_SHIFT,
    SettleEntries,
    entry_error,
)
from ringlog.link.channel.outbound_frames import OutboundFrames
from ringlog.link.futures import Pending
from ringlog.link.timers import Timer

if TYPE_CHECKING:
    from ringlog.client.write.stream import Stream

_STATUS_MASK = np.uint64(0xFFFF << STATUS_SHIFT)
_COUNT_MASK = 0xFFFFFFFF


def joined(frames: Sequence[bytearray]) -> tuple[bytearray, NDArray[np.int64]]:
    """Return frames in one buffer, with their offsets."""
    offsets = np.zeros(len(frames) + 1, dtype=np.int64)
    np.cumsum([len(frame) for frame in frames], out=offsets[1:])
    return bytearray().join(frames), offsets


class Batch(Pending[Appended]):
    """Resolves with an Appended (one frame) or an AppendedEach (many). Fails with the first refusal."""

    __slots__ = (
        "bytes",
        "commit_ts",
        "deduped",
        "epoch",
        "errors",
        "failed_frames",
        "first_error",
        "frame_records",
        "frames",
        "is_gathered",
        "missing",
        "records",
        "seqs",
        "stream",
    )  # fmt: skip

    def __init__(self, stream: Stream) -> None:
        super().__init__()
        self.stream: Stream = stream
        self.records: int = 0
        self.frames: int = 1
        self.missing: int = 1
        """Number of frames that are not settled."""
        self.bytes: int = 0
        """Bytes of the frames, which count towards the producer's limit."""
        self.epoch: int = 0
        self.commit_ts: int = 0
        self.deduped: bool = False
        self.failed_frames: int = 0
        self.frame_records: int = 1
        self.first_error: RinglogError | None = None
        self.is_gathered: bool = False
        """True if a producer collected the records: they share a frame by chance, and each record has its own
        result."""
        self.errors: dict[int, RinglogError] | None = None
        """For a frame that was split into one frame per record: errors of failed records, by index."""
        self.seqs: NDArray[np.uint64] | None = None
        """(frames,) first seq of each frame; None for a batch of one frame."""

    @property
    def has_many_frames(self) -> bool:
        """True for a batch of several frames."""
        return self.seqs is not None

    def expect_frames(self, count: int, records: int = 1) -> None:
        """Set the size: `count` records in frames of `records`; the last frame may be smaller."""
        self.records, self.frame_records = count, records
        self.frames = self.missing = -(-count // records)
        self.seqs = np.zeros(self.frames, dtype=np.uint64)

    def split(self) -> None:
        """Become a batch of one frame per record, since the refusal of the frame may concern only one
        record."""
        self.errors = {}
        self.expect_frames(self.records)

    def record_result(self, index: int) -> Appended:
        """Return the result of one record of a one-frame batch, or of the whole batch for index -1.

        Raises the error of the record. The batch must be done.
        """
        if index >= 0 and self.errors is not None and self.seqs is not None:
            if index in self.errors:
                raise self.errors[index]
            seq = int(self.seqs[index])
            stream = self.stream
            return Appended(
                stream.topic,
                self.epoch,
                seq,
                seq,
                1,
                stream.effective_durability,
                self.deduped,
                self.commit_ts,
            )
        appended = self.result()
        if index < 0:
            return appended
        seq = appended.first_seq + index if appended.first_seq else 0
        return Appended(
            appended.topic,
            appended.epoch,
            seq,
            seq,
            1,
            appended.durability,
            appended.deduped,
            appended.commit_ts,
        )

    def record_error(self, index: int) -> Exception | None:
        """Return the error of one record, as record_result; None if it succeeded or is not done."""
        if index >= 0 and self.errors is not None:
            return self.errors.get(index) if self.is_done else None
        return self.error if isinstance(self.error, Exception) else None

    def settle_single_frame(self, entry: list[int]) -> None:
        """Settle the only frame as appended."""
        count = entry[S_COUNT_STATUS] & _COUNT_MASK
        first = entry[S_FIRST_SEQ]
        self.missing = 0
        self.deduped = bool(entry[S_COUNT_STATUS] >> FLAGS_SHIFT & FLAG_DEDUPED)
        last = first + count - 1 if first else 0
        stream = self.stream
        appended = Appended(
            stream.topic, entry[S_EPOCH], first, last, count, stream.effective_durability, self.deduped,
            entry[S_COMMIT_TS],
        )  # fmt: skip
        stream.handle_batch_done(self, acked=count)
        self.resolve(appended)

    def settle_frames(
        self, rows: NDArray[Any] | slice, entries: SettleEntries, *, is_fresh: bool = False
    ) -> None:
        """Settle these frames as appended. `is_fresh`: no frame is known to be a repeat."""
        assert self.seqs is not None
        self.seqs[rows] = entries[:, S_FIRST_SEQ]
        self.missing -= len(entries)
        self.commit_ts = max(self.commit_ts, int(entries[-1, S_COMMIT_TS]))
        self.epoch = int(entries[-1, S_EPOCH])
        if not is_fresh and bool((entries[:, S_COUNT_STATUS] >> np.uint64(FLAGS_SHIFT)).any()):
            self.deduped = True
        if not self.missing:
            self._finish_all()

    def fail_frames(self, rows: NDArray[Any], error: RinglogError) -> None:
        """Settle these frames as failed, without further retries."""
        count = len(rows)
        if self.errors is not None:
            self.errors |= dict.fromkeys(rows.tolist(), error)
        self.failed_frames += count
        self.missing -= count
        if self.first_error is None:
            self.first_error = error
        if self.missing <= 0:
            self._finish_all()

    def _finish_all(self) -> None:
        error = self.first_error
        if error is not None:
            if self.has_many_frames and self.errors is None:
                error.detail |= {"failed": self.failed_frames, "of": self.frames}
            lost = min(self.failed_frames * self.frame_records, self.records)
            acked = self.records - lost if self.has_many_frames else 0
            self.stream.handle_batch_done(self, acked=acked, error=error)
            self.fail(error)
            return
        assert self.seqs is not None
        self.stream.handle_batch_done(self, acked=self.records)
        first, last = self._span(self.seqs)
        self.resolve(
            AppendedEach(
                self.stream.topic, self.epoch, first, last, self.records, self.stream.effective_durability,
                self.deduped, self.commit_ts, self.seqs, self.frame_records,
            )
        )  # fmt: skip

    def _span(self, firsts: NDArray[np.uint64]) -> tuple[int, int]:
        """Return the lowest and highest known seq of the batch; (0, 0) if none is known."""
        known = firsts[firsts > 0]
        if not len(known):
            return 0, 0
        highest = int(firsts.argmax())
        in_last = self.records - (self.frames - 1) * self.frame_records
        size = in_last if highest == self.frames - 1 else self.frame_records
        return int(known.min()), int(firsts[highest]) + size - 1


class Shipment(OutboundFrames):
    """Frames of one batch on their way to a shard. `rows` are their indexes in the batch; None = all of
    them."""

    __slots__ = ("attempts", "batch", "is_stamped", "order", "refusal", "rows", "timer")

    def __init__(
        self,
        batch: Batch,
        buffer: bytearray,
        offsets: NDArray[np.int64],
        deadline_ns: int,
        rows: NDArray[Any] | None = None,
        attempts: int = 0,
        order: int = 0,
    ) -> None:
        super().__init__(batch.stream.topic, buffer, offsets, deadline_ns)
        self.batch: Batch = batch
        self.rows: NDArray[Any] | None = rows
        self.is_stamped: bool = False
        self.timer: Timer | None = None
        self.attempts: int = attempts
        self.order: int = order
        """Number of the stream's shipment with which these frames were first sent."""
        self.refusal: RinglogError | None = None
        """Error because of which the frames wait to be resent."""

    @property
    def disable_backpressure(self) -> bool:
        """Option of the stream."""
        return self.batch.stream.disable_backpressure

    @property
    def sort_key(self) -> tuple[int, int]:
        """Position of the frames in the sending order of their stream."""
        return self.order, 0 if self.rows is None else int(self.rows[0])

    def on_entries(self, first: int, entries: SettleEntries) -> None:
        """Settle appended frames, and pass refused frames to the stream."""
        self._mark_progress()
        if not self.is_abandoned:
            self._apply_entries(first, entries)
        self._finish_processing()

    def _apply_entries(self, first: int, entries: SettleEntries) -> None:
        batch = self.batch
        if not batch.has_many_frames and not int(entries[0, S_COUNT_STATUS]) >> STATUS_SHIFT & 0xFFFF:
            batch.settle_single_frame(entries[0].tolist())
            return
        status = entries[:, S_COUNT_STATUS]
        if int(np.bitwise_or.reduce(status)) >> STATUS_SHIFT == 0:
            batch.settle_frames(self._rows_of(first, len(entries)), entries, is_fresh=True)
            return
        refused = (status & _STATUS_MASK) != 0
        if not refused.any():
            batch.settle_frames(self._rows_of(first, len(entries)), entries)
            return
        acked = np.flatnonzero(~refused)
        if len(acked):
            batch.settle_frames(self._rows_at(first + acked), entries[acked])
        self._refused(first, entries, np.flatnonzero(refused))

    def on_failed(self, first: int, count: int, error: RinglogError) -> None:
        """Pass frames without a result to the stream: their request was refused or got no reply."""
        self._mark_progress()
        if not self.is_abandoned:
            self.batch.stream.handle_refused(self, np.arange(first, first + count), error, by_shard=False)
        self._finish_processing()

    def abandon(self) -> None:
        """Free the bytes: no caller waits for the result any more."""
        self.is_abandoned = True
        self.free_bytes()
        if self.timer is not None:
            self.timer.cancel()

    def _mark_progress(self) -> None:
        if self.settled == self.count:
            if self.timer is not None:
                self.timer.cancel()
            self.batch.stream.handle_settled(self)

    def _finish_processing(self) -> None:
        # Only after the stream has the refused frames, which it must send before later ones.
        if self.settled == self.count:
            self.batch.stream.handle_processed(self)

    def rows_in_batch(self, frames: NDArray[Any]) -> NDArray[Any]:
        """Return the indexes in the batch of these frames of the shipment."""
        return frames if self.rows is None else self.rows[frames]

    @property
    def unsettled_records(self) -> int:
        """Number of records in the frames that are not settled."""
        left, batch = self.count - self.settled, self.batch
        if not left or not batch.has_many_frames:
            return batch.records if left else 0
        last_row = self.count - 1 if self.rows is None else int(self.rows[-1])
        missing = batch.frames * batch.frame_records - batch.records if last_row == batch.frames - 1 else 0
        return left * batch.frame_records - missing

    def _rows_of(self, first: int, count: int) -> slice | NDArray[Any]:
        return slice(first, first + count) if self.rows is None else self.rows[first : first + count]

    def _rows_at(self, frames: NDArray[Any]) -> NDArray[Any]:
        return self.rows_in_batch(frames)

    def _refused(self, first: int, entries: SettleEntries, at: NDArray[Any]) -> None:
        """Pass refused frames to the stream, consecutive ones with the same reason together."""
        statuses = (entries[at, S_COUNT_STATUS] & _STATUS_MASK) >> np.uint64(STATUS_SHIFT)
        for chosen in np.split(at, np.flatnonzero(statuses[1:] != statuses[:-1]) + 1):
            error = entry_error(entries[chosen[0]], self.topic)
            assert error is not None
            self.batch.stream.handle_refused(self, first + chosen, error, by_shard=True)
