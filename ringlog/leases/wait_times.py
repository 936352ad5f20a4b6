"""Wait times: approximate enqueue times of jobs, and the waits before their first delivery. Pure.

Seqs and commit times both only grow, so a short list represents them: for each change of the time in
milliseconds, the first seq with this time. If the list is too long, its resolution is halved. A job may then
appear older than it is by that resolution.
"""

from __future__ import annotations

from array import array
from bisect import bisect_right

from ringlog.limits import QUEUE_AGES_MAX, WAIT_WINDOW_MS

_STEP_BITS = 3
"""Eight steps for each doubling: a wait is known to an eighth of its value."""
_STEPS = 1 << _STEP_BITS
_BUCKETS = 48 * _STEPS


class EnqueueTimes:
    """Enqueue times of the jobs of one queue, as far as this incarnation observed them."""

    def __init__(self) -> None:
        self._firsts = array("Q")
        self._times = array("Q")
        self._grain_ms = 1
        """Smallest distance between two times."""

    def __len__(self) -> int:
        return len(self._firsts)

    def record_enqueue(self, first: int, put_ms: int) -> None:
        """Record that the jobs from `first` on were enqueued at this time."""
        if self._times and put_ms < self._times[-1] + self._grain_ms:
            return
        self._firsts.append(first)
        self._times.append(put_ms)
        while len(self._firsts) > QUEUE_AGES_MAX:
            self._grain_ms *= 2
            firsts, times, self._firsts, self._times = self._firsts, self._times, array("Q"), array("Q")
            for each, at_ms in zip(firsts, times, strict=True):
                self.record_enqueue(each, at_ms)

    def forget(self, below: int) -> None:
        """Forget jobs below this seq, which are deleted."""
        at = bisect_right(self._firsts, below) - 1
        if at > 0:
            del self._firsts[:at], self._times[:at]
        if len(self._firsts) < QUEUE_AGES_MAX // 4:
            self._grain_ms = max(self._grain_ms // 2, 1)

    def put_ms(self, seq: int) -> int | None:
        """Return the enqueue time of this job, or a slightly earlier time; None if it was not observed."""
        at = bisect_right(self._firsts, seq) - 1
        return self._times[at] if at >= 0 else None

    def first_after(self, ms: int) -> int:
        """Return the seq below which all jobs were enqueued by then; 0 if none was.

        Jobs without an observed time count with the first observed time."""
        at = bisect_right(self._times, ms)
        if not at:
            return 0
        return self._firsts[at] if at < len(self._firsts) else 1 << 63

    def counts_by_put_time(self, first: int, stop: int) -> list[tuple[int, int]]:
        """Return (number of jobs, enqueue time) for the jobs in [first, stop) whose time is known."""
        found: list[tuple[int, int]] = []
        at = bisect_right(self._firsts, first) - 1
        if at < 0 and self._firsts:
            at, first = 0, self._firsts[0]
        while 0 <= at < len(self._firsts) and first < stop:
            end = min(self._firsts[at + 1], stop) if at + 1 < len(self._firsts) else stop
            found.append((end - first, self._times[at]))
            at, first = at + 1, end
        return found


class WaitHistogram:
    """Recent waits of jobs: histograms of the current time window and of the previous one."""

    def __init__(self) -> None:
        self._now = array("Q", bytes(8 * _BUCKETS))
        self._before = array("Q", bytes(8 * _BUCKETS))
        self._window = -1

    def record_waits(self, count: int, waited_ms: int, now_ms: int) -> None:
        """Record that `count` jobs were delivered for the first time after this wait."""
        self._rotate_windows(now_ms)
        self._now[min(_bucket(max(waited_ms, 0)), _BUCKETS - 1)] += count

    def p99_ms(self, now_ms: int) -> int:
        """Return the 99th percentile of the waits; 0 if no job was delivered recently."""
        self._rotate_windows(now_ms)
        counts = [a + b for a, b in zip(self._now, self._before, strict=True)]
        left = sum(counts) - sum(counts) // 100
        for bucket, count in enumerate(counts):
            left -= count
            if count and left <= 0:
                return _most(bucket)
        return 0

    def _rotate_windows(self, now_ms: int) -> None:
        window = now_ms // WAIT_WINDOW_MS
        if window > self._window:
            empty = array("Q", bytes(8 * _BUCKETS))
            self._before = self._now if window == self._window + 1 else array("Q", bytes(8 * _BUCKETS))
            self._now, self._window = empty, window


def _bucket(ms: int) -> int:
    shift = max(ms.bit_length() - 1 - _STEP_BITS, 0)
    return shift * _STEPS + (ms >> shift)


def _most(bucket: int) -> int:
    """Return the longest wait that a bucket counts."""
    if bucket < 2 * _STEPS:
        return bucket
    shift = bucket // _STEPS - 1
    return (((bucket - shift * _STEPS) + 1) << shift) - 1
