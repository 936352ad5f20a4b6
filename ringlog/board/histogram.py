"""Log-linear histograms on the board: four buckets an octave, one writer, any number of readers.

Bucket 0 holds what lies below 2**shift; bucket 1 + 4 * octave + quarter holds values from
2**(shift + octave) * (1 + quarter / 4) on; the last takes everything above. A reader may see a sum that
is one record ahead of the buckets: these are figures for people, not facts to decide by.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

QUARTERS = 4
BUCKETS = 127
OCTAVES = 31
LAST = 1 + QUARTERS * OCTAVES
NS_SHIFT = 10
"""Times begin at 1,024 ns and reach 2**41 ns, half an hour."""
COUNT_SHIFT = 0


def bucket_of(value: int, shift: int) -> int:
    """Bucket of one value."""
    scaled = value >> shift
    if scaled <= 0:
        return 0
    octave = scaled.bit_length() - 1
    if octave >= OCTAVES:
        return LAST
    return 1 + QUARTERS * octave + ((value << 2 >> (shift + octave)) & 3)


def bucket_floor(bucket: int, shift: int) -> float:
    """Least value of a bucket."""
    if bucket == 0:
        return 0.0
    octave, quarter = divmod(bucket - 1, QUARTERS)
    return float(1 << (shift + octave)) * (1 + quarter / QUARTERS)


@dataclass(frozen=True, slots=True)
class HistogramSnapshot:
    """One reading. `counts` (BUCKETS,) int64; values in the histogram's unit."""

    counts: NDArray[np.int64]
    total: int
    """Sum of the values recorded."""
    shift: int

    @property
    def count(self) -> int:
        """Values recorded."""
        return int(self.counts.sum())

    @property
    def mean(self) -> float:
        """Arithmetic mean, 0.0 when empty."""
        return self.total / self.count if self.count else 0.0

    def percentile(self, p: float) -> float:
        """Value below which `p` percent lie, interpolated inside its bucket; 0.0 when empty."""
        cumulative = np.cumsum(self.counts)
        if cumulative[-1] == 0:
            return 0.0
        rank = cumulative[-1] * min(max(p, 0.0), 100.0) / 100
        bucket = int(np.searchsorted(cumulative, max(rank, 1e-9)))
        floor, ceiling = bucket_floor(bucket, self.shift), bucket_floor(bucket + 1, self.shift)
        inside = (rank - (cumulative[bucket] - self.counts[bucket])) / self.counts[bucket]
        return float(floor + (ceiling - floor) * inside)

    def since(self, earlier: HistogramSnapshot) -> HistogramSnapshot:
        """What was recorded between an earlier reading and this one."""
        return HistogramSnapshot(self.counts - earlier.counts, self.total - earlier.total, self.shift)


class Histogram:
    """A histogram in shared words: the sum at `base`, then BUCKETS counts. Reading needs no write access."""

    def __init__(self, words: memoryview, base: int, shift: int) -> None:
        self._words = words
        self._base = base
        self._shift = shift

    def record(self, value: int, n: int = 1) -> None:
        """Count `value` n times."""
        words, base = self._words, self._base
        words[base + 1 + bucket_of(value, self._shift)] += n
        words[base] = (words[base] + value * n) & 0xFFFFFFFFFFFFFFFF

    def snapshot(self) -> HistogramSnapshot:
        """A private copy of the counts."""
        base = self._base
        counts = np.array(self._words[base + 1 : base + 1 + BUCKETS], dtype=np.int64)
        return HistogramSnapshot(counts, int(self._words[base]), self._shift)

    def percentile(self, p: float) -> float:
        """As HistogramSnapshot.percentile, of this moment."""
        return self.snapshot().percentile(p)

    def clear(self) -> None:
        """Forget everything; for a new incarnation that wants to begin at zero."""
        for index in range(self._base, self._base + 1 + BUCKETS):
            self._words[index] = 0
