"""Jobs inside the reply to their claim, as payloads or in frames. No file is read."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from ringlog.client.read.pages import Record, new_record
from ringlog.client.read.record_batches import visible_record_batches
from ringlog.client.read.remote_source import decode_received_frames
from ringlog.envelope.messages import ClaimReply
from ringlog.errors import CorruptData
from ringlog.frame.layout import Column
from ringlog.storage.visibility import NO_SEQS

I64 = NDArray[np.int64]


class ClaimedRecords(Protocol):
    """Jobs of a claim, from any source. A RecordBatch is one kind."""

    @property
    def last_seq(self) -> int:
        """Highest seq."""
        ...

    @property
    def seqs(self) -> I64:
        """(n,) seqs, ascending."""
        ...

    @property
    def commit_stamps(self) -> I64:
        """(n,) commit times, in microseconds since the epoch."""
        ...

    def __len__(self) -> int: ...

    def column(self, column: Column) -> list[bytes] | None:
        """Return the values of a bytes column, b"" for a null; None if no job has the column."""
        ...

    def slice_rows(self, start: int, stop: int) -> ClaimedRecords:
        """Return jobs `start` to `stop`, counted from 0, without `stop`."""
        ...

    def payloads(self) -> list[bytes | None]:
        """Return the payloads; None for a null."""
        ...

    def records(self) -> list[Record]:
        """Return the jobs as records."""
        ...


class InlineJobs:
    """Jobs of one claim with one payload and one commit time per job."""

    __slots__ = ("_payloads", "_seqs", "_stamps")

    def __init__(self, seqs: Sequence[int], payloads: list[bytes], stamps: bytes) -> None:
        self._seqs, self._payloads, self._stamps = seqs, payloads, stamps

    def __len__(self) -> int:
        return len(self._payloads)

    @property
    def last_seq(self) -> int:
        return self._seqs[-1]

    @property
    def span(self) -> tuple[int, int] | None:
        """First seq and one past the last, if the jobs are consecutive and of one run; else None."""
        seqs = self._seqs
        return (seqs.start, seqs.stop) if type(seqs) is range and seqs else None

    @property
    def seqs(self) -> I64:
        return np.array(self._seqs, np.int64)

    @property
    def commit_stamps(self) -> I64:
        return np.frombuffer(self._stamps, "<i8")

    def column(self, column: Column) -> list[bytes] | None:
        return None

    def slice_rows(self, start: int, stop: int) -> InlineJobs:
        return InlineJobs(
            self._seqs[start:stop], self._payloads[start:stop], self._stamps[8 * start : 8 * stop]
        )

    def payloads(self) -> list[bytes | None]:
        return list(self._payloads)

    def records(self) -> list[Record]:
        stamps = np.frombuffer(self._stamps, "<i8").tolist()
        return list(map(new_record, self._seqs, stamps, self._payloads))


def decode_inline_jobs(topic: str, message: ClaimReply, attached: Any) -> list[ClaimedRecords]:
    """Decode the jobs in the reply to their claim, ascending: payloads, and frames in the reply or in
    `attached`.

    Raises CorruptData if the data is damaged or does not contain exactly the jobs that the reply names.
    """
    runs, payloads = message.runs, message.payloads
    if not message.frames:
        count = sum(run[1] for run in runs)
        _require(topic, message, count)
        if len(runs) == 1:
            return [InlineJobs(range(runs[0][0], runs[0][0] + count), payloads, message.stamps)]
        seqs = [first + n for first, run_count, _, _ in runs for n in range(run_count)]
        return [InlineJobs(seqs, payloads, message.stamps)]
    frames = decode_received_frames(
        topic, message.frames, runs[0][0] - 1, memoryview(message.data or attached or b"")
    )
    claimed = np.concatenate([np.arange(first, first + count) for first, count, _, _ in runs])
    is_framed = np.zeros(len(claimed), np.bool_)
    for run in frames:
        for first, last in run.spans():
            is_framed[np.searchsorted(claimed, first) : np.searchsorted(claimed, last, "right")] = True
    found: list[ClaimedRecords] = []
    for first, stop in _spans(claimed[is_framed]):
        for run in frames:
            if run.last_seq >= first:
                found += visible_record_batches(run, first - 1, stop - 1, NO_SEQS, topic)
    if payloads:
        inline_seqs, low = claimed[~is_framed], 0
        _require(topic, message, len(inline_seqs))
        for first, stop in _spans(inline_seqs):
            high = low + stop - first
            found.append(
                InlineJobs(range(first, stop), payloads[low:high], message.stamps[8 * low : 8 * high])
            )
            low = high
        found.sort(key=lambda batch: batch.last_seq)
    return found


def _require(topic: str, message: ClaimReply, count: int) -> None:
    """Raise CorruptData unless the reply has `count` payloads."""
    if len(message.payloads) != count or len(message.stamps) != 8 * count:
        raise CorruptData(
            "the reply to a claim does not contain exactly the jobs that it names", topic=topic,
            seq=message.runs[0][0], jobs=count, payloads=len(message.payloads),
        )  # fmt: skip


def _spans(seqs: I64) -> list[tuple[int, int]]:
    """Return (first, one past the last) of each range of consecutive seqs in an ascending array."""
    parts = np.split(seqs, np.flatnonzero(np.diff(seqs) != 1) + 1)
    return [(int(part[0]), int(part[-1]) + 1) for part in parts if len(part)]
