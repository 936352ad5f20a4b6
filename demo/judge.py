"""The judges: what was read, held against the source. No engine is asked anything here."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import numpy as np
import xxhash
from numpy.typing import NDArray

from demo.source import Source, id_of


@dataclass(slots=True)
class Counts:
    """What one pass over the topics found."""

    read: int = 0
    """Records read."""
    altered: int = 0
    """Records that are no event of the source, byte for byte, or lie in another topic than it."""
    out_of_order: int = 0
    """Records behind a later one of the same producer."""
    gaps: int = 0
    """Records whose number does not follow on the one before it."""
    announced: int = 0
    """Tombstones: losses the engine admits."""


class Ledger:
    """Notes every record read, by event id."""

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
        """Consecutive records of a topic."""
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
        """A tombstone was met."""
        self.counts.announced += 1

    def save(self, path: Path) -> None:
        """Keep it for another process."""
        counts = self.counts
        facts = [counts.read, counts.altered, counts.out_of_order, counts.gaps, counts.announced]
        np.savez(path, seen=self.seen, seqs=self.seqs, counts=np.array(facts))


def load(path: Path) -> tuple[NDArray[np.uint32], NDArray[np.uint64], Counts]:
    """(seen, seqs, counts) of a saved ledger."""
    with np.load(path) as found:
        return found["seen"], found["seqs"], Counts(*found["counts"].tolist())


@dataclass(frozen=True, slots=True)
class Verdict:
    """What became of the acknowledged events."""

    acked: int
    read: int
    lost: int
    """Acknowledged and not there, whole and unaltered."""
    doubled: int
    """There more than once: how many too many."""
    out_of_order: int
    moved: int
    """There under another number than was acknowledged."""
    others: int
    """Altered records, gaps in the numbers and announced losses."""

    @property
    def is_good(self) -> bool:
        """Nothing is wrong."""
        return not (self.lost or self.doubled or self.out_of_order or self.moved or self.others)


def judge(
    acked: NDArray[np.uint64], seen: NDArray[np.uint32], seqs: NDArray[np.uint64], counts: Counts
) -> Verdict:
    """`acked` holds the number each event was acknowledged under, 0 = it was not."""
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
