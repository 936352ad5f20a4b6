"""Producers of a topic and their settled frames: a frame that is sent twice is appended once (W4).

A producer numbers its frames. For each producer the topic remembers the highest settled number, and the seqs
of recent frames, so that a repeat gets its original reply. Memory is O(runs): consecutive numbers with equal
counts, which a busy producer sends, are one entry.

Producers that write in turns have a run for each frame. Beyond DEDUP_RUNS_PER_TOPIC_MAX the topic forgets the
seqs of older frames, and joins their runs: that a number was used takes no entry of its own. A repeat of such
a frame is still recognised, and its reply has no seq.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections import OrderedDict
from dataclasses import dataclass, field
from operator import attrgetter

import numpy as np
from numpy.typing import NDArray

from ringlog.limits import (
    DEDUP_FRAMES_PER_PRODUCER,
    DEDUP_RUNS_PER_CHECK,
    DEDUP_RUNS_PER_TOPIC_MAX,
    PRODUCERS_PER_TOPIC_MAX,
)
from ringlog.types import SESSION_BIT


@dataclass(slots=True)
class ProducerSeqRun:
    """`frames` consecutive producer_seqs from `first`, each with `count` records, from `base_seq` on.

    `base_seq` 0: the seqs of these frames are forgotten, and `count` means nothing."""

    first: int
    frames: int
    base_seq: int
    count: int


@dataclass(slots=True)
class ProducerHistory:
    """The settled frames of one producer in one topic.

    Numbers above `forgotten_to` that are in no run were never used. The runs without seqs are the first ones.
    """

    highest: int = 0
    forgotten_to: int = 0
    """Highest number of a run that was dropped."""
    refused_to: int = field(default=0, compare=False)
    """Highest number that was refused permanently, in this incarnation. The next number may follow it."""
    claim: int = 0
    """Number of claims of this named producer. Only frames under the latest claim are accepted, so a name has
    one owner. 0 = never claimed."""
    claimed_at: int = 0
    """Highest settled number at the time of the claim. Frames of earlier owners above it were never
    appended."""
    owner: int = field(default=0, compare=False)
    """Latest owner, in this incarnation. A repeated request of this owner gets the same claim."""
    _runs: list[ProducerSeqRun] = field(default_factory=list)
    _dropped: int = 0
    """Number of dropped runs at the front of `_runs`."""
    _remembered: int = 0

    def extend(self, first: int, frames: int, base_seq: int, count: int) -> None:
        """Add a run of consecutive new frames; `first` is above `highest`."""
        last = self._runs[-1] if self._runs else None
        if (
            last is not None
            and last.count == count
            and last.first + last.frames == first
            and last.base_seq + last.frames * count == base_seq
        ):
            last.frames += frames
        else:
            self._runs.append(ProducerSeqRun(first, frames, base_seq, count))
        self.highest = first + frames - 1
        self._remembered += frames
        self._forget_old()

    def add_runs(self, runs: list[ProducerSeqRun]) -> None:
        """Add n >= 1 runs that cannot be joined, ascending and above `highest`."""
        self._runs += runs
        self._remembered += sum([run.frames for run in runs])
        self.highest = runs[-1].first + runs[-1].frames - 1
        self._forget_old()

    def _forget_old(self) -> None:
        # Only whole runs are dropped, so that slightly more frames than the bound may stay, never fewer.
        runs = self._runs
        while self._remembered - runs[self._dropped].frames >= DEDUP_FRAMES_PER_PRODUCER:
            run = runs[self._dropped]
            self.forgotten_to = run.first + run.frames - 1
            self._remembered -= run.frames
            self._dropped += 1
        if self._dropped * 2 > len(runs):
            del runs[: self._dropped]
            self._dropped = 0

    def claim_for(self, owner: int) -> bool:
        """Make `owner` the owner. Return False if it was already."""
        if owner == self.owner:
            return False
        self.owner, self.claim, self.claimed_at = owner, self.claim + 1, self.highest
        return True

    def is_in_doubt(self, producer_seq: int) -> bool:
        """Return True if a frame of this number, sent under an outdated claim, may have been appended."""
        return producer_seq <= self.claimed_at and self.is_settled(producer_seq)

    @property
    def next_seq(self) -> int:
        """The only number that a frame with the flag *follows* may have."""
        return max(self.highest, self.refused_to) + 1

    def to_numbers(self) -> list[int]:
        """Return the complete state as plain numbers.

        These are: highest, forgotten_to, for a claimed producer also claim and claimed_at, then four numbers
        for each run."""
        numbers = [self.highest, self.forgotten_to]
        if self.claim:
            numbers += (self.claim, self.claimed_at)
        for run in self._runs[self._dropped :]:
            numbers += (run.first, run.frames, run.base_seq, run.count)
        return numbers

    @classmethod
    def from_numbers(cls, numbers: list[int]) -> ProducerHistory:
        """Return the producer that `to_numbers` described. Raises ValueError for impossible numbers."""
        if len(numbers) < 2 or len(numbers) % 2:
            raise ValueError("history of a producer must have 2 or 4 numbers plus 4 for each run")
        producer = cls(numbers[0], numbers[1])
        at = 2
        if not len(numbers) % 4:
            producer.claim, producer.claimed_at = numbers[2:4]
            at = 4
        runs = list(
            map(
                ProducerSeqRun,
                numbers[at::4],
                numbers[at + 1 :: 4],
                numbers[at + 2 :: 4],
                numbers[at + 3 :: 4],
            )
        )
        above = producer.forgotten_to
        for run in runs:
            if run.first <= above or run.frames < 1 or run.count < 1:
                raise ValueError("runs of a producer must be ascending")
            above = run.first + run.frames - 1
        if runs and above != producer.highest:
            raise ValueError("runs of a producer must end at its highest number")
        producer._runs = runs
        producer._remembered = sum([run.frames for run in runs])
        return producer

    @property
    def run_count(self) -> int:
        """Number of runs."""
        return len(self._runs) - self._dropped

    def find(self, producer_seq: int) -> tuple[int, int] | None:
        """Return (first_seq, count) of a settled frame; None if its seq is forgotten or it never existed."""
        run = self._run_of(producer_seq)
        if run is None or not run.base_seq:
            return None
        return run.base_seq + (producer_seq - run.first) * run.count, run.count

    def is_settled(self, producer_seq: int) -> bool:
        """Return True if a frame with this number was appended, or is too old to know it."""
        return producer_seq <= self.forgotten_to or self._run_of(producer_seq) is not None

    def _run_of(self, producer_seq: int) -> ProducerSeqRun | None:
        at = bisect_right(self._runs, producer_seq, lo=self._dropped, key=_first_of) - 1
        if at < self._dropped or producer_seq - self._runs[at].first >= self._runs[at].frames:
            return None
        return self._runs[at]

    def forget_seqs(self, keep: int) -> int:
        """Forget the seqs of all but the latest `keep` >= 1 runs, and join the others where numbers follow.

        Return by how many runs the history became shorter. Each run is forgotten once, so the cost for a run
        is constant."""
        before = self.run_count
        if before <= keep:
            return 0
        runs, stop = self._runs, len(self._runs) - keep
        start = self._first_with_seq()
        last = runs[start - 1] if start > self._dropped else None
        end = self.forgotten_to + 1 if last is None else last.first + last.frames
        joined: list[ProducerSeqRun] = []
        for run in runs[start:stop]:
            if run.first != end:
                self._join(last, end)
                last, end = run, run.first
                joined.append(run)
            end += run.frames
        self._join(last, end)
        runs[start:stop] = joined
        return before - self.run_count

    def _join(self, run: ProducerSeqRun | None, end: int) -> None:
        """Extend a run without seqs up to `end`; None = the numbers up to `forgotten_to`."""
        if run is None:
            self._remembered -= end - 1 - self.forgotten_to
            self.forgotten_to = end - 1
        else:
            run.frames, run.base_seq, run.count = end - run.first, 0, 1

    def forget_unused(self) -> int:
        """Drop the runs without seqs: numbers between them that were never used count as settled now.

        Return the number of dropped runs."""
        stop = self._first_with_seq()
        dropped = self._runs[self._dropped : stop]
        if dropped:
            self.forgotten_to = dropped[-1].first + dropped[-1].frames - 1
            self._remembered -= sum([run.frames for run in dropped])
            del self._runs[:stop]
            self._dropped = 0
        return len(dropped)

    def _first_with_seq(self) -> int:
        return bisect_left(self._runs, 1, lo=self._dropped, key=_base_of)


_first_of = attrgetter("first")
_base_of = attrgetter("base_seq")
_RUNS_KEPT = DEDUP_RUNS_PER_TOPIC_MAX - DEDUP_RUNS_PER_CHECK
_RUNS_WITH_SEQS = (1_024, 128, 16, 1)
"""Latest runs of each producer that keep their seqs. The next smaller number applies if that is too much."""


def _is_named(item: tuple[int, ProducerHistory]) -> bool:
    return item[0] < SESSION_BIT


class ProducerTable:
    """All producers of one topic, the one with the longest silence first."""

    __slots__ = ("_added", "_by_id", "_most", "_sessions", "_single", "_single_id")

    def __init__(self, most: int = PRODUCERS_PER_TOPIC_MAX) -> None:
        self._most = most
        self._by_id: OrderedDict[int, ProducerHistory] | None = None
        """None while there is at most one producer, as in most topics."""
        self._single_id = 0
        self._single: ProducerHistory | None = None
        self._sessions = 0
        self._added = 0
        """Most runs that were added since they were counted."""

    def __len__(self) -> int:
        if self._by_id is None:
            return 0 if self._single is None else 1
        return len(self._by_id)

    def get(self, producer_id: int) -> ProducerHistory | None:
        """Return the producer's history; None if it never wrote here or was forgotten."""
        return self._find(producer_id)

    def _find(self, producer_id: int) -> ProducerHistory | None:
        if self._by_id is None:
            return self._single if producer_id == self._single_id else None
        return self._by_id.get(producer_id)

    @property
    def has_room(self) -> bool:
        """There is space for a new producer. False if the table is full of named producers."""
        return len(self) < self._most or self._sessions > 0

    def admit(self, producer_id: int) -> ProducerHistory | None:
        """Return the producer's history, a new one if needed; None if the table is full of named producers.

        The caller adds at most one run by itself, and others with `record`."""
        producer = self._find(producer_id)
        if producer is not None:
            if self._by_id is not None:
                self._by_id.move_to_end(producer_id)
            self._note_added(1)
            return producer
        if not self.has_room:
            return None
        if len(self) >= self._most:
            self._forget_one()
        producer = ProducerHistory()
        self.restore(producer_id, producer)
        return producer

    def restore(self, producer_id: int, producer: ProducerHistory) -> None:
        """Add a producer that is not in the table, with its history, as the latest one."""
        self._sessions += producer_id >= SESSION_BIT
        if self._by_id is None and self._single is None:
            self._single_id, self._single = producer_id, producer
        else:
            if self._by_id is None:
                assert self._single is not None
                self._by_id = OrderedDict({self._single_id: self._single})
                self._single_id, self._single = 0, None
            self._by_id[producer_id] = producer
        self._note_added(max(producer.run_count, 1))

    def _note_added(self, runs: int) -> None:
        self._added += runs
        if self._added >= DEDUP_RUNS_PER_CHECK:
            self._added = 0
            self._forget_old()

    def _forget_old(self) -> None:
        """Bound the runs of all producers, those of the producers with the longest silence first.

        As long as possible only seqs are forgotten. With too many gaps between the numbers, gaps are
        forgotten too: last those of named producers, whose programs may resume after days."""
        items = self.items()
        excess = sum([past.run_count for _, past in items]) - _RUNS_KEPT
        for keep in _RUNS_WITH_SEQS:
            for _, past in items:
                if excess <= 0:
                    return
                excess -= past.forget_seqs(keep)
        for _, past in sorted(items, key=_is_named):
            if excess <= 0:
                return
            excess -= past.forget_unused()

    def _forget_one(self) -> None:
        self._sessions -= 1
        if self._by_id is None:
            self._single_id, self._single = 0, None
            return
        oldest = next(each for each in self._by_id if each >= SESSION_BIT)
        del self._by_id[oldest]

    def record(self, producer_id: int, producer_seqs: NDArray[np.uint64], base_seqs: NDArray[np.uint64],
               counts: NDArray[np.uint64]) -> None:  # fmt: skip
        """Add new frames of an admitted producer: (n,) arrays with ascending producer_seqs, n >= 1."""
        producer = self._find(producer_id)
        if producer is None:
            raise KeyError(producer_id)
        frames = len(producer_seqs)
        first, base, count = int(producer_seqs[0]), int(base_seqs[0]), int(counts[0])
        if frames == 1:
            producer.extend(first, 1, base, count)
            return
        # A run is consecutive in both numberings. Other producers may have written between two of these
        # frames.
        breaks = np.flatnonzero(
            (producer_seqs[1:] != producer_seqs[:-1] + np.uint64(1))
            | (counts[1:] != counts[:-1])
            | (base_seqs[1:] != base_seqs[:-1] + counts[:-1])
        )
        starts = np.concatenate(([0], breaks + 1))
        lengths = np.diff(np.concatenate((starts, [frames])))
        producer.extend(first, int(lengths[0]), base, count)
        if len(starts) > 1:
            rest = starts[1:]
            producer.add_runs(
                list(
                    map(
                        ProducerSeqRun,
                        producer_seqs[rest].tolist(),
                        lengths[1:].tolist(),
                        base_seqs[rest].tolist(),
                        counts[rest].tolist(),
                    )
                )
            )
            self._note_added(len(rest))

    def items(self) -> list[tuple[int, ProducerHistory]]:
        """Return (producer_id, history) of every producer, the one with the longest silence first."""
        if self._by_id is None:
            return [] if self._single is None else [(self._single_id, self._single)]
        return list(self._by_id.items())
