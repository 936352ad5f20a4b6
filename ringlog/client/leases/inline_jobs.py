"""Jobs that came along with the answer to their claim, as payloads or in frames: nothing is to be read."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from ringlog.client.read.pages import Record
from ringlog.client.read.record_batches import visible_record_batches
from ringlog.client.read.remote_source import decode_received_frames
from ringlog.envelope.messages import ClaimReply
from ringlog.errors import CorruptData
from ringlog.storage.visibility import NO_SEQS

I64 = NDArray[np.int64]


class ClaimedRecords(Protocol):
    """Jobs of a claim, wherever they came from; a Piece is one."""

    @property
    def last_seq(self) -> int:
        """The last number."""
        ...

    @property
    def seqs(self) -> I64:
        """(n,) numbers, ascending."""
        ...

    def __len__(self) -> int: ...

    def slice_rows(self, start: int, stop: int) -> ClaimedRecords:
        """Only jobs `start` to `stop`, counted from 0, the latter excluded."""
        ...

    def payloads(self) -> list[bytes | None]:
        """Their payloads."""
        ...

    def records(self) -> list[Record]:
        """Them as records."""
        ...


class InlineJobs:
    """Jobs of one claim. `runs` as in the message ClaimReply; both others have an entry a job."""

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
        """First number and one past the last, where they follow each other in one run."""
        seqs = self._seqs
        return (seqs.start, seqs.stop) if type(seqs) is range and seqs else None

    @property
    def seqs(self) -> I64:
        return np.array(self._seqs, np.int64)

    def slice_rows(self, start: int, stop: int) -> InlineJobs:
        return InlineJobs(
            self._seqs[start:stop], self._payloads[start:stop], self._stamps[8 * start : 8 * stop]
        )

    def payloads(self) -> list[bytes | None]:
        return list(self._payloads)

    def records(self) -> list[Record]:
        stamps = np.frombuffer(self._stamps, "<i8").tolist()
        return list(map(Record, self._seqs, stamps, self._payloads))


def decode_inline_jobs(topic: str, message: ClaimReply, attached: Any) -> list[ClaimedRecords]:
    """The jobs that came along with the answer to their claim, ascending: payloads, and frames, in it or
    `attached`. Raises CorruptData for what arrived damaged, or is not what the answer names."""
    runs, payloads = message.runs, message.payloads
    if not message.frames:
        count = sum(run[1] for run in runs)
        _require(topic, message, count)
        if len(runs) == 1:
            return [InlineJobs(range(runs[0][0], runs[0][0] + count), payloads, message.stamps)]
        seqs = [first + n for first, many, _, _ in runs for n in range(many)]
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
        rest, low = claimed[~is_framed], 0
        _require(topic, message, len(rest))
        for first, stop in _spans(rest):
            high = low + stop - first
            found.append(
                InlineJobs(range(first, stop), payloads[low:high], message.stamps[8 * low : 8 * high])
            )
            low = high
        found.sort(key=lambda stretch: stretch.last_seq)
    return found


def _require(topic: str, message: ClaimReply, count: int) -> None:
    """Are there payloads of so many jobs?"""
    if len(message.payloads) != count or len(message.stamps) != 8 * count:
        raise CorruptData(
            "an answer to a claim does not hold the jobs that it names", topic=topic,
            seq=message.runs[0][0], jobs=count, payloads=len(message.payloads),
        )  # fmt: skip


def _spans(seqs: I64) -> list[tuple[int, int]]:
    """(first, one past the last) of numbers that follow each other, of ascending ones."""
    parts = np.split(seqs, np.flatnonzero(np.diff(seqs) != 1) + 1)
    return [(int(part[0]), int(part[-1]) + 1) for part in parts if len(part)]
