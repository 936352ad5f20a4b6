"""Results of reading: parts of a topic from any source, and frames that a page left unused."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from ringlog.client.read.pages import Cursor, Record
from ringlog.client.read.record_batches import RecordBatch, visible_record_batches
from ringlog.link.futures import Steps
from ringlog.storage.frame_run import FrameRun
from ringlog.storage.visibility import I64, NO_SEQS
from ringlog.topic.tombstone import Gap

NO_WORD = memoryview(bytes(8)).cast("Q")


class RecordCheck(Protocol):
    """Tests whether a record that was read ahead may still be returned.

    While `words[at] == seen` it may, and the check need not be called: a call costs as much as creating a
    record.
    """

    words: memoryview
    at: int
    seen: int

    def __call__(self, record: Record[Any]) -> bool:
        """Return True if the record may be returned."""
        ...


@dataclass(frozen=True, slots=True)
class FetchResult:
    """Consecutive part of a topic: first `gap`, then the records after `after` that `runs` contain."""

    epoch: int
    head_seq: int
    earliest_seq: int
    gap: Gap | None
    after: int
    runs: Sequence[FrameRun]
    examined: int
    """Seq up to which this part is complete. Frames may extend beyond it."""
    hidden: I64 = field(default_factory=lambda: NO_SEQS)
    """Seqs to omit silently, ascending: deleted or expired records."""
    version: int = 0
    """Version of the topic at the read. It grows with every removal."""

    def batches(self, topic: str) -> Iterator[RecordBatch]:
        """Iterate over the records, one large frame or many small frames at a time. The first batch starts
        after `after`."""
        after = self.after
        for run in self.runs:
            yield from visible_record_batches(run, after, self.examined, self.hidden, topic)
            after = max(after, run.last_seq)


class Source(Protocol):
    """Source of one topic's records."""

    def fetch(self, cursor: Cursor, *, limit: int, bytes_max: int, wait_s: float) -> Steps[FetchResult]:
        """Read after `cursor`: about `limit` records or `bytes_max` bytes, more if frames are large.

        If there is no result, waits up to `wait_s` seconds, which may be infinite. Raises TopicNotFound, also
        if the topic is deleted meanwhile; CorruptData for damage; and ConnectionTrouble.
        """
        ...

    def seek_time(self, ts_us: int) -> Steps[Cursor]:
        """Return the cursor before the first record committed at or after `ts_us` (microseconds), or the end
        of the topic.

        Raises the errors of `fetch`.
        """
        ...

    def record_check(self, version: int) -> RecordCheck:
        """Return a check for the records of the last read, which had this version of the topic."""
        ...

    def keep_topic_alive(self, epoch: int = 0) -> None:
        """Mark this life of the topic as in use until `close`, if the source was opened to follow it."""
        ...

    def close(self) -> None:
        """Release the files. The source may be used again."""
        ...


class CachedFrames:
    """Frames that completely cover the seqs `start` + 1 to `stop` of one life of the topic."""

    def __init__(self) -> None:
        self.clear()

    def clear(self) -> None:
        """Drop all frames."""
        self.runs: list[FrameRun] = []
        self.start: int = -1
        self.stop: int = -1
        self.epoch: int = 0

    def store(self, runs: list[FrameRun], start: int, stop: int, epoch: int) -> None:
        """Replace the frames."""
        self.runs, self.start, self.stop, self.epoch = runs, start, stop, epoch

    def covers(self, after: int, epoch: int) -> bool:
        """Return True if the record after `after` is covered."""
        return self.start <= after < self.stop and epoch == self.epoch

    def runs_after(self, after: int) -> list[FrameRun]:
        """Drop frames that end at or before `after`, and return the rest."""
        self.runs = [run for run in self.runs if run.last_seq > after]
        self.start = max(self.start, after)
        return self.runs
