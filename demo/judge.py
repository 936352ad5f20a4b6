"""Compares what was read with the source. No function here queries an engine."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import numpy as np
import xxhash
from numpy.typing import NDArray

from demo.source import Source, id_of


@dataclass(slots=True)
class Counts:
    """Counts of one pass over the topics."""

    read: int = 0
    """Records read."""
    altered: int = 0
    """Records that equal no event of the source byte for byte, or that are in another topic."""
    out_of_order: int = 0
    """Records after a later record of the same producer."""
    gaps: int = 0
    """Breaks in the sequence of seqs."""
    announced: int = 0
    """Tombstones: losses that the engine reports."""


class Ledger:
    """Stores which records were read, by event id."""

    def __init__(self, source: Source, producers: int) -> None:
        self.counts = Counts()
        self._producers = producers
        self._digests = source.digests.tolist()
        self._topic_of = source.topic_of.tolist()
        self._index = {topic: i for i, topic in enumerate(source.topics)}
        self._last_id = {topic: [-1] * producers for topic in source.topics}
        self._next_seq = dict.fromkeys(source.topics, 1)
        self.seen = np.zeros(len(source), dtype=np.uint32)
        self.seqs = np.zeros(len(source), dtype=np.uint64)

    def take(self, topic: str, first_seq: int, payloads: list[bytes]) -> None:
        """Add consecutive records of a topic."""
        counts, index, last_id = self.counts, self._index[topic], self._last_id[topic]
        counts.read += len(payloads)
        counts.gaps += first_seq != self._next_seq[topic]
        self._next_seq[topic] = first_seq + len(payloads)
        digest, size = xxhash.xxh3_64_intdigest, len(self._digests)
        for seq, payload in enumerate(payloads, first_seq):
            event = id_of(payload)
            is_known = 0 <= event < size and self._topic_of[event] == index
            if not is_known or digest(payload) != self._digests[event]:
                counts.altered += 1
                continue
            self.seen[event] += 1
            self.seqs[event] = seq
            producer = event % self._producers
            counts.out_of_order += event < last_id[producer]
            last_id[producer] = max(last_id[producer], event)

    def announce(self) -> None:
        """Count a tombstone."""
        self.counts.announced += 1

    def save(self, path: Path) -> None:
        """Save the ledger for another process."""
        counts = self.counts
        facts = [counts.read, counts.altered, counts.out_of_order, counts.gaps, counts.announced]
        np.savez(path, seen=self.seen, seqs=self.seqs, counts=np.array(facts))


def load(path: Path) -> tuple[NDArray[np.uint32], NDArray[np.uint64], Counts]:
    """Return (seen, seqs, counts) of a saved ledger."""
    with np.load(path) as found:
        return found["seen"], found["seqs"], Counts(*found["counts"].tolist())


@dataclass(frozen=True, slots=True)
class Verdict:
    """Fate of the acknowledged events."""

    acked: int
    read: int
    lost: int
    """Acknowledged events that were not read, or only altered."""
    doubled: int
    """Number of extra copies of events."""
    out_of_order: int
    moved: int
    """Events under another seq than the acknowledged one."""
    others: int
    """Altered records, breaks in the seqs, and announced losses."""

    @property
    def is_good(self) -> bool:
        """Whether no fault was found."""
        return not (self.lost or self.doubled or self.out_of_order or self.moved or self.others)


def judge(
    acked: NDArray[np.uint64], seen: NDArray[np.uint32], seqs: NDArray[np.uint64], counts: Counts
) -> Verdict:
    """Judge one pass. `acked` has the acknowledged seq of each event; 0: not acknowledged."""
    was_acked = acked > 0
    return Verdict(
        acked=int(was_acked.sum()),
        read=counts.read,
        lost=int((was_acked & (seen == 0)).sum()),
        doubled=int((seen[seen > 1] - 1).sum()),
        out_of_order=counts.out_of_order,
        moved=int((was_acked & (seen == 1) & (seqs != acked)).sum()),
        others=counts.altered + counts.gaps + counts.announced,
    )
