"""What reading comes to: portions of a topic, whoever gave them, and frames that a page has left over."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from ringlog.client.read.pages import Cursor, Record
from ringlog.client.read.record_batches import RecordBatch, visible_record_batches
from ringlog.link.futures import Steps
from ringlog.storage.reader import FrameRun
from ringlog.storage.visibility import I64, NO_SEQS
from ringlog.topic.tombstone import Gap

NO_WORD = memoryview(bytes(8)).cast("Q")


class RecordCheck(Protocol):
    """Whether a record that was read ahead may still be handed out.

    While `words[at] == seen` it may, and nobody has to call: a call costs as much as making a record.
    """

    words: memoryview
    at: int
    seen: int

    def __call__(self, record: Record) -> bool:
        """True when it may."""
        ...


@dataclass(frozen=True, slots=True)
class FetchResult:
    """Consecutive part of a topic: `gap` first, then the records after `after` that `runs` hold."""

    epoch: int
    head_seq: int
    earliest_seq: int
    gap: Gap | None
    after: int
    runs: Sequence[FrameRun]
    examined: int
    """Position up to which this portion is complete. Frames may reach beyond it."""
    hidden: I64 = field(default_factory=lambda: NO_SEQS)
    """Ascending positions to pass over silently: deleted or expired."""
    version: int = 0
    """Of the topic when it was read; grows with every removal."""

    def batches(self, topic: str) -> Iterator[RecordBatch]:
        """The records, frame by frame or many frames at once; the first begins right behind `after`."""
        after = self.after
        for run in self.runs:
            yield from visible_record_batches(run, after, self.examined, self.hidden, topic)
            after = max(after, run.last_seq)


class Source(Protocol):
    """Gives the portions of one topic."""

    def fetch(self, cursor: Cursor, *, limit: int, bytes_max: int, wait_s: float) -> Steps[FetchResult]:
        """Read on from `cursor`: about `limit` records or `bytes_max` bytes, more when frames are large.

        With nothing to tell it waits up to `wait_s`, infinity allowed. Raises TopicNotFound, also when
        the topic is deleted meanwhile, CorruptData for damage, and connection trouble.
        """
        ...

    def seek_time(self, ts_us: int) -> Steps[Cursor]:
        """Cursor before the first record committed at or after `ts_us`, microseconds; else at the end.

        Raises as fetch.
        """
        ...

    def record_check(self, version: int) -> RecordCheck:
        """A check for the records of what was read last, when the topic had this version."""
        ...

    def keep_topic_alive(self, epoch: int = 0) -> None:
        """Keep this life of the topic in use until it is closed, if it was made to follow it."""
        ...

    def close(self) -> None:
        """Let go of files. The source may be used again."""
        ...


class CachedFrames:
    """Runs that cover the positions `start` + 1 .. `stop` of one life of the topic completely."""

    def __init__(self) -> None:
        self.clear()

    def clear(self) -> None:
        """Forget everything."""
        self.runs: list[FrameRun] = []
        self.start = self.stop = -1
        self.epoch = 0

    def store(self, runs: list[FrameRun], start: int, stop: int, epoch: int) -> None:
        """Keep these instead of what there was."""
        self.runs, self.start, self.stop, self.epoch = runs, start, stop, epoch

    def covers(self, after: int, epoch: int) -> bool:
        """True when the record behind `after` is in here, if there is one."""
        return self.start <= after < self.stop and epoch == self.epoch

    def runs_after(self, after: int) -> list[FrameRun]:
        """Forget runs that lie wholly before and return the rest."""
        self.runs = [run for run in self.runs if run.last_seq > after]
        self.start = max(self.start, after)
        return self.runs
