"""Producers of a topic and their settled frames: a frame that is sent twice is appended once (W4).

A producer numbers its frames. For each producer the topic remembers the highest settled number, and the seqs
of recent frames, so that a repeat gets its original reply. Memory is O(runs): consecutive numbers with equal
counts, which a busy producer sends, are one entry.
"""

from __future__ import annotations

from bisect import bisect_right
from collections import OrderedDict
from dataclasses import dataclass, field
from operator import attrgetter

import numpy as np
from numpy.typing import NDArray

from ringlog.limits import DEDUP_FRAMES_PER_PRODUCER, PRODUCERS_PER_TOPIC_MAX
from ringlog.types import SESSION_BIT


@dataclass(slots=True)
class ProducerSeqRun:
    """`frames` consecutive producer_seqs from `first`, each with `count` records, from `base_seq` on."""

    first: int
    frames: int
    base_seq: int
    count: int

    def find(self, producer_seq: int) -> tuple[int, int] | None:
        """Return (first_seq, count) of that frame; None if it is not in this run."""
        at = producer_seq - self.first
        if 0 <= at < self.frames:
            return self.base_seq + at * self.count, self.count
        return None


@dataclass(slots=True)
class ProducerHistory:
    """The settled frames of one producer in one topic.

    Numbers above `forgotten_to` that are in no run were never used.
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
        is_before = producer_seq <= self.claimed_at
        return is_before and (producer_seq <= self.forgotten_to or self.find(producer_seq) is not None)

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

    def find(self, producer_seq: int) -> tuple[int, int] | None:
        """Return (first_seq, count) of a settled frame; None if it is too old or never existed."""
        at = bisect_right(self._runs, producer_seq, lo=self._dropped, key=_first_of) - 1
        return self._runs[at].find(producer_seq) if at >= self._dropped else None


_first_of = attrgetter("first")


class ProducerTable:
    """All producers of one topic, the one with the longest silence first."""

    __slots__ = ("_by_id", "_most", "_sessions", "_single", "_single_id")

    def __init__(self, most: int = PRODUCERS_PER_TOPIC_MAX) -> None:
        self._most = most
        self._by_id: OrderedDict[int, ProducerHistory] | None = None
        """None while there is at most one producer, as in most topics."""
        self._single_id = 0
        self._single: ProducerHistory | None = None
        self._sessions = 0

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
        """Return the producer's history, a new one if needed; None if the table is full of named
        producers."""
        producer = self._find(producer_id)
        if producer is not None:
            if self._by_id is not None:
                self._by_id.move_to_end(producer_id)
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
        if self._by_id is None:
            if self._single is None:
                self._single_id, self._single = producer_id, producer
                return
            self._by_id = OrderedDict({self._single_id: self._single})
            self._single_id, self._single = 0, None
        self._by_id[producer_id] = producer

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

    def items(self) -> list[tuple[int, ProducerHistory]]:
        """Return (producer_id, history) of every producer, the one with the longest silence first."""
        if self._by_id is None:
            return [] if self._single is None else [(self._single_id, self._single)]
        return list(self._by_id.items())
