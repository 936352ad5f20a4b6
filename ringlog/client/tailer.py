"""Tailer: the fast way to read on the engine's own host.

It maps the log's files and hands out stretches of them, verified but not copied: a gigabyte a second and
more into Arrow. A stretch keeps its mapping alive as long as it, or anything viewed from it, lives.

What that costs: if the disk fails under a mapping, the kernel kills the process with SIGBUS. A tailer
belongs in a process that may die and be started again; elsewhere use `reader().pages()`.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import cached_property
from math import inf
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from ringlog.client.borrowed import Borrowed
from ringlog.client.checks import flag, seconds, start_at, text
from ringlog.client.local_source import LocalSource
from ringlog.client.pages import EARLIEST, Cursor, Record, Start, Tombstone
from ringlog.client.pieces import FramePiece, Piece, open_run_frame, visible_pieces
from ringlog.client.portion import Portion
from ringlog.client.reader import Runs, resolve_start
from ringlog.errors import UsageError
from ringlog.frame import batch as frames
from ringlog.frame import layout
from ringlog.frame.view import FrameView
from ringlog.limits import MIB
from ringlog.storage.mask import I64, NOTHING
from ringlog.storage.reader import FrameRun

if TYPE_CHECKING:
    import pyarrow as pa

WINDOW_BYTES = 4 * MIB
"""Log scanned for one batch."""
_NO_LIMIT = 1 << 62


class TailBatch:
    """Consecutive records, as they lie in the log or in a segment. All views are read-only.

    Records that were deleted or have expired are left out of everything it gives. Without a copy where a
    frame is not compressed and nothing is left out: `memoryviews()`, `frames()`, and `arrow()` of frames of
    64 records and more. Copied: `bytes()`, `records()`, Arrow of smaller frames, which are put together,
    and `numpy()` when there is more than one frame.
    """

    def __init__(
        self, topic: str, epoch: int, run: FrameRun, after: int, until: int, hidden: I64 = NOTHING
    ) -> None:
        """The records of `run` behind `after` up to `until`, without the `hidden` (ascending) positions."""
        self.topic = topic
        self.epoch = epoch
        self.first_seq = max(run.first_seq, after + 1)
        self.last_seq = min(run.last_seq, until)
        self._run = run.after(after)
        low, high = np.searchsorted(hidden, [self.first_seq, self.last_seq + 1])
        self._hidden = hidden[low:high]

    def __len__(self) -> int:
        if len(self._hidden) or self.last_seq < self._run.last_seq:
            return sum(map(len, self._pieces))
        return int(frames.counts_of(self._run.batch.words).sum()) - (self.first_seq - self._run.first_seq)

    def __repr__(self) -> str:
        return f"<TailBatch {self.topic} {self.first_seq}..{self.last_seq}>"

    @property
    def ts(self) -> int:
        """When the last record was committed, in microseconds since the epoch."""
        last = next(piece for piece in reversed(self._pieces) if len(piece))
        return int(last.commit_stamps[-1])

    @property
    def cursor(self) -> Cursor:
        """Behind the last record."""
        return Cursor(self.epoch, self.last_seq)

    def until(self, seq: int) -> TailBatch:
        """The records up to `seq`, which is not before the first; without a copy."""
        if seq >= self.last_seq:
            return self
        return TailBatch(self.topic, self.epoch, self._run, self.first_seq - 1, seq, self._hidden)

    @property
    def stored_bytes(self) -> int:
        """Bytes of the frames that hold the records, as they are stored."""
        return int(self._run.batch.total_bytes.sum())

    @property
    def stored(self) -> tuple[FrameRun, I64]:
        """The frames that hold the records, of which the first and the last may hold others beside; and the
        ascending positions among them that are left out."""
        return self._run.within(self.first_seq - 1, self.last_seq), self._hidden

    @property
    def seqs(self) -> I64:
        """(n,) numbers of the records, ascending; from headers alone."""
        words = self._run.batch.words
        counts = frames.counts_of(words).astype(np.int64)
        ends = np.cumsum(counts)
        base = words[:, layout.W_BASE_SEQ].astype(np.int64) - (ends - counts)
        numbers = np.repeat(base, counts) + np.arange(ends[-1])
        numbers = numbers[slice(*np.searchsorted(numbers, [self.first_seq, self.last_seq + 1]).tolist())]
        if len(self._hidden):
            numbers = numbers[~np.isin(numbers, self._hidden, assume_unique=True)]
        return numbers

    @property
    def pieces(self) -> list[Piece]:
        """The records frame by frame, small frames many at once: what the other methods are made of."""
        return self._pieces

    def frames(self) -> Iterator[FrameView]:
        """View the frames one by one; the first may begin inside of one. Slow when they are small.

        A frame out of whose middle records have gone comes as several views.
        """
        for row in range(len(self._run.batch)):
            view = open_run_frame(self._run, row, self.topic)
            first, last = max(view.first_seq, self.first_seq), min(view.last_seq, self.last_seq)
            low, high = np.searchsorted(self._hidden, [first, last + 1])
            starts = [first, *(self._hidden[low:high] + 1).tolist()]
            stops = [*self._hidden[low:high].tolist(), last + 1]
            for start, stop in zip(starts, stops, strict=True):
                if start < stop:
                    yield view.slice(start - view.first_seq, stop - view.first_seq)

    def bytes(self) -> list[bytes]:
        """The payloads, copied out."""
        return [payload for piece in self._pieces for payload in piece.payloads()]

    def memoryviews(self) -> list[memoryview]:
        """The payloads as views of the log."""
        return [view for piece in self._pieces for view in piece.payload_views()]

    def numpy(self) -> tuple[NDArray[np.uint8], NDArray[np.int64]]:
        """(data, offsets): payload i is `data[offsets[i]:offsets[i + 1]]`; offsets is (n + 1,) int64."""
        if len(self._run.batch) == 1 and not len(self._hidden):
            payloads = next(self.frames()).payloads
            return payloads.data, payloads.offsets.astype(np.int64)
        sizes: list[NDArray[np.int64]] = []
        parts: list[Any] = []
        for piece in self._pieces:
            if isinstance(piece, FramePiece) and piece.is_whole:
                payloads = piece.view.payloads
                sizes.append(np.diff(payloads.offsets).astype(np.int64))
                parts.append(payloads.data[payloads.offsets[0] : payloads.offsets[-1]])
            else:
                values = piece.payloads()
                sizes.append(np.fromiter(map(len, values), np.int64, len(values)))
                parts.append(np.frombuffer(b"".join(values), np.uint8))
        offsets = np.zeros(len(self) + 1, dtype=np.int64)
        np.cumsum(np.concatenate(sizes), out=offsets[1:])
        return np.concatenate(parts), offsets

    def record_batches(self, *, nulls: bool = False, columns: int | None = None) -> list[pa.RecordBatch]:
        """Arrow RecordBatches: seq, ts and the columns; of a large frame one, without a copy.

        `columns` (a bitmap of layout.Column) and `nulls` as in FrameView.to_arrow. Needs pyarrow.
        """
        return [
            batch for piece in self._pieces for batch in piece.record_batches(nulls=nulls, columns=columns)
        ]

    def arrow(self, *, nulls: bool = False) -> pa.Table:
        """All records as one Arrow table; large frames are its chunks, without a copy."""
        import pyarrow

        bitmap = int(np.bitwise_or.reduce(frames.columns_of(self._run.batch.words)))
        return pyarrow.Table.from_batches(self.record_batches(nulls=nulls, columns=bitmap))

    def records(self) -> list[Record]:
        """The records as objects: slow, for convenience."""
        return [record for piece in self._pieces for record in piece.records()]

    @cached_property
    def _pieces(self) -> list[Piece]:
        return list(visible_pieces(self._run, self.first_seq - 1, self.last_seq, self._hidden, self.topic))


class Tailer:
    """Iterates over TailBatch and Tombstone items of one topic; `for item in client.tailer("t")`.

    With `follow` (the default) it waits for more until it is closed; `next(timeout)` waits a bounded time.
    """

    def __init__(self, client: Runs, topic: str, start: Start = EARLIEST, *, follow: bool = True) -> None:
        topic, start, follow = text(topic, "topic"), start_at(start), flag(follow, "follow")
        if client.connection.transport != "ring":
            raise UsageError(
                "a tailer reads the engine's files and must run on its host",
                transport=client.connection.transport,
                instead="reader().pages()",
            )
        self._client = client
        self._topic = topic
        self._follow = follow
        self._source = LocalSource(
            client.connection, topic, is_mapped=True, is_settling=True, is_following=follow
        )
        self._files = Borrowed(self._source)
        self._start: Start | None = start
        self._cursor = Cursor(0, 0)
        self._ready: list[TailBatch | Tombstone] = []
        self._resume = 0
        self._is_caught_up = False
        self._is_closed = False

    @property
    def cursor(self) -> Cursor:
        """Behind the last item given."""
        self._settle_start()
        return self._cursor

    def seek(self, start: Start) -> None:
        """Go on from there."""
        self._start = start_at(start)
        self._ready.clear()

    def next(self, timeout: float | None = None) -> TailBatch | Tombstone | None:
        """Return the next item, or None after `timeout` seconds without one; None = wait for ever."""
        timeout = seconds(timeout, "timeout")
        self._settle_start()
        if self._ready and not self._source.is_current:
            self._ready.clear()  # Read ahead, and some of it may have been deleted since (DL-9).
        while not self._ready:
            self._fetch(inf if timeout is None else timeout)
            if timeout is not None:
                break
        if not self._ready:
            return None
        item = self._ready.pop(0)
        if isinstance(item, TailBatch):
            self._cursor = item.cursor
        else:
            self._cursor = Cursor(self._cursor.epoch, self._resume)
        return item

    def __iter__(self) -> Iterator[TailBatch | Tombstone]:
        while not self._is_closed:
            item = self.next(None if self._follow else 0.0)
            if item is not None:
                yield item
            elif not self._follow and self._is_caught_up:
                return

    def close(self) -> None:
        """End the iteration and let go of files. What was handed out stays valid."""
        self._is_closed = True
        self._ready.clear()
        self._files.end()

    def __enter__(self) -> Tailer:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _settle_start(self) -> None:
        if self._start is not None:
            with self._files.use() as source:
                steps = resolve_start(self._client.connection, source, self._topic, self._start)
                self._cursor = self._client.run(steps)
            self._start = None

    def _fetch(self, wait_s: float) -> None:
        with self._files.use() as source:
            steps = source.fetch(self._cursor, limit=_NO_LIMIT, bytes_max=WINDOW_BYTES, wait_s=wait_s)
            portion: Portion = self._client.run(steps)
        self._resume = portion.after
        self._is_caught_up = portion.examined >= portion.head_seq
        self._cursor = Cursor(portion.epoch, self._cursor.seq)
        if (gap := portion.gap) is not None:
            self._ready.append(
                Tombstone(
                    self._topic, gap.gap_from, gap.gap_to, gap.reason, portion.earliest_seq, portion.head_seq
                )
            )
        self._ready += batches_of(portion, self._topic)
        if not self._ready:
            self._cursor = Cursor(portion.epoch, max(self._cursor.seq, portion.examined))


def batches_of(portion: Portion, topic: str) -> list[TailBatch]:
    """The records of a portion, a batch for each stretch; those of which nothing is left are passed over."""
    after = portion.after
    found: list[TailBatch] = []
    for run in portion.runs:
        if after < portion.examined and run.last_seq > after:
            batch = TailBatch(topic, portion.epoch, run, after, portion.examined, portion.hidden)
            if batch:
                found.append(batch)
            after = batch.last_seq
    return found
