"""Ages: about when each job was put, and how long jobs waited until they were first handed out. Pure.

Numbers and commit stamps both only grow (CK-3), so a few of them say all: of each change of the stamp, in
milliseconds, the first number under it. When there are too many, only those stay that lie further apart,
twice as far each time: then a job may look older than it is by as much.
"""

from __future__ import annotations

from array import array
from bisect import bisect_right

from ringlog.limits import QUEUE_AGES_MAX, WAIT_WINDOW_MS

_STEP_BITS = 3
"""Eight steps an octave: a wait is known to an eighth of itself."""
_STEPS = 1 << _STEP_BITS
_BUCKETS = 48 * _STEPS


class EnqueueTimes:
    """When the jobs of one queue were put, as far as this incarnation saw it."""

    def __init__(self) -> None:
        self._firsts = array("Q")
        self._times = array("Q")
        self._grain_ms = 1
        """Instants are at least so far apart."""

    def __len__(self) -> int:
        return len(self._firsts)

    def record_enqueue(self, first: int, put_ms: int) -> None:
        """Jobs from `first` on were put at this time."""
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
        """Jobs below this one are gone."""
        at = bisect_right(self._firsts, below) - 1
        if at > 0:
            del self._firsts[:at], self._times[:at]
        if len(self._firsts) < QUEUE_AGES_MAX // 4:
            self._grain_ms = max(self._grain_ms // 2, 1)

    def put_ms(self, seq: int) -> int | None:
        """When this job was put, or a little earlier; None = before anybody looked."""
        at = bisect_right(self._firsts, seq) - 1
        return self._times[at] if at >= 0 else None

    def first_after(self, ms: int) -> int:
        """Jobs below this number were put by then; those of which nothing is known count from the first time
        that is known. 0 = none was."""
        at = bisect_right(self._times, ms)
        if not at:
            return 0
        return self._firsts[at] if at < len(self._firsts) else 1 << 63

    def counts_by_put_time(self, first: int, stop: int) -> list[tuple[int, int]]:
        """Of the jobs in [first, stop), those of which it is known: (how many, when they were put)."""
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
    """How long jobs waited, lately: a histogram of this window of time and of the one before it."""

    def __init__(self) -> None:
        self._now = array("Q", bytes(8 * _BUCKETS))
        self._before = array("Q", bytes(8 * _BUCKETS))
        self._window = -1

    def record_waits(self, count: int, waited_ms: int, now_ms: int) -> None:
        """So many jobs were handed out for the first time after so long."""
        self._rotate_windows(now_ms)
        self._now[min(_bucket(max(waited_ms, 0)), _BUCKETS - 1)] += count

    def p99_ms(self, now_ms: int) -> int:
        """99 in 100 of them waited no longer than this; 0 when none was handed out lately."""
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
    """The longest wait that is counted in a bucket."""
    if bucket < 2 * _STEPS:
        return bucket
    shift = bucket // _STEPS - 1
    return (((bucket - shift * _STEPS) + 1) << shift) - 1
