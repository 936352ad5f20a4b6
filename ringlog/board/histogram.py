"""Log-linear histograms on the board: four buckets per octave, one writer, any number of readers.

Bucket 0 counts values below 2**shift. Bucket 1 + 4 * octave + quarter counts values from 2**(shift + octave)
*
(1 + quarter / 4) on. The last bucket counts all greater values. A reader may see a sum and buckets that
differ by one record. The numbers are for monitoring; code must not base decisions on them.
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
"""Times begin at 1,024 ns and reach 2**41 ns, about 37 minutes."""
COUNT_SHIFT = 0


def bucket_of(value: int, shift: int) -> int:
    """Return the bucket of a value."""
    scaled = value >> shift
    if scaled <= 0:
        return 0
    octave = scaled.bit_length() - 1
    if octave >= OCTAVES:
        return LAST
    return 1 + QUARTERS * octave + ((value << 2 >> (shift + octave)) & 3)


def bucket_floor(bucket: int, shift: int) -> float:
    """Return the least value of a bucket."""
    if bucket == 0:
        return 0.0
    octave, quarter = divmod(bucket - 1, QUARTERS)
    return float(1 << (shift + octave)) * (1 + quarter / QUARTERS)


@dataclass(frozen=True, slots=True)
class HistogramSnapshot:
    """A copy of a histogram. `counts` (BUCKETS,) int64. Values are in the histogram's unit."""

    counts: NDArray[np.int64]
    total: int
    """Sum of the recorded values."""
    shift: int

    @property
    def count(self) -> int:
        """Number of recorded values."""
        return int(self.counts.sum())

    @property
    def mean(self) -> float:
        """Arithmetic mean, 0.0 if empty."""
        return self.total / self.count if self.count else 0.0

    def percentile(self, p: float) -> float:
        """Return the value below which `p` percent lie, interpolated in its bucket; 0.0 if empty."""
        cumulative = np.cumsum(self.counts)
        if cumulative[-1] == 0:
            return 0.0
        rank = cumulative[-1] * min(max(p, 0.0), 100.0) / 100
        bucket = int(np.searchsorted(cumulative, max(rank, 1e-9)))
        floor, ceiling = bucket_floor(bucket, self.shift), bucket_floor(bucket + 1, self.shift)
        inside = (rank - (cumulative[bucket] - self.counts[bucket])) / self.counts[bucket]
        return float(floor + (ceiling - floor) * inside)

    def since(self, earlier: HistogramSnapshot) -> HistogramSnapshot:
        """Return the values recorded between an earlier snapshot and this one."""
        return HistogramSnapshot(self.counts - earlier.counts, self.total - earlier.total, self.shift)


class Histogram:
    """A histogram in shared words: the sum at `base`, then BUCKETS counts. Reads need no write access."""

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
        """Return a private copy of the counts."""
        base = self._base
        counts = np.array(self._words[base + 1 : base + 1 + BUCKETS], dtype=np.int64)
        return HistogramSnapshot(counts, int(self._words[base]), self._shift)

    def percentile(self, p: float) -> float:
        """Return the current percentile, see HistogramSnapshot.percentile."""
        return self.snapshot().percentile(p)

    def clear(self) -> None:
        """Set all counts to 0, for a new incarnation."""
        for index in range(self._base, self._base + 1 + BUCKETS):
            self._words[index] = 0
