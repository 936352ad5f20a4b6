"""Waiting for a word of shared memory: spin for a moment, then sleep.

Two processes that answer each other do so within microseconds. A wake-up takes 50 to 500 µs, depending on the
idle state of the CPU. A waiting process therefore spins first, in C and without the GIL, and yields its CPU
meanwhile. After a request it spins long enough for a reply of a process that must be woken up. After a reply
it spins as long as a sequential program takes to send its next request. Then it asks for a wake-up and
sleeps.

If other processes need the CPUs, spinning delays the reply itself, so all processes sleep at once. A process
that may use less than two CPUs never spins. Contention is measured once a second for the whole host, and not
estimated from the length of single waits.
"""

from __future__ import annotations

import math
import os
from collections.abc import Callable

from ringlog.native_kernel import kernel

SPIN_REPLY_NS = 1_000_000
"""Longest spin (ns) for a reply. It covers a wake-up of the other process."""
SPIN_REQUEST_NS = 100_000
"""Longest spin (ns) for the next request after a reply. A sequential program sends it within this time."""
SPIN_WORDS_MAX = 64
"""Most words that one spin can watch (native/kernel.c). A process that waits for more words sleeps."""
CPU_CONTENDED_SHARE = 0.2
"""Share of the time in which a task waited for a CPU, above which no process spins."""
CONTENTION_SAMPLE_NS = 1_000_000_000
_PRESSURE = "/proc/pressure/cpu"
_GROUPS = "/sys/fs/cgroup"


class SpinPolicy:
    """Decides whether this process should spin before it sleeps."""

    def __init__(self, pressure: str = _PRESSURE) -> None:
        self._pressure = pressure
        self._measured_ns = self._stalled_us = 0
        self._next_ns = 0
        self._can_look = _processors() > 1
        self._is_wanted = False

    def should_spin(self, now_ns: int) -> bool:
        """Return False if the CPUs are contended or the process may use less than two. `now_ns` is monotonic.

        Measures the contention once a second.
        """
        if self._can_look and now_ns >= self._next_ns:
            self._measure(now_ns)
        return self._is_wanted

    def _measure(self, now_ns: int) -> None:
        self._next_ns = now_ns + CONTENTION_SAMPLE_NS
        stalled_us = _stalled_us(self._pressure)
        passed_us = (now_ns - self._measured_ns) / 1_000
        is_cpu_contended = (
            bool(self._measured_ns) and stalled_us - self._stalled_us > CPU_CONTENDED_SHARE * passed_us
        )
        self._measured_ns, self._stalled_us = now_ns, stalled_us
        self._is_wanted = not is_cpu_contended


def spin_wait(words: list[memoryview], seen: list[int], ns: int) -> bool:
    """Watch up to SPIN_WORDS_MAX words of 8 bytes for `ns` nanoseconds.

    Returns True as soon as a word differs from its value in `seen`, else False at the end.
    """
    return kernel.look(words, seen, ns)


def _processors() -> int:
    """Return the number of whole CPUs that this process may use permanently."""
    allowed = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return int(min(allowed, cpu_quota(_text("/proc/self/cgroup"), _text)))


def cpu_quota(own_groups: str, read: Callable[[str], str]) -> float:
    """Return the CPU quota of the control groups in /proc/self/cgroup and of their parents; infinite if none.

    Spinning uses up the quota. A container sees its own group as the root.
    """
    least = math.inf
    for line in own_groups.splitlines():
        number, _, rest = line.partition(":")
        controllers, _, path = rest.partition(":")
        if not number.isdigit() or (controllers and "cpu" not in controllers.split(",")):
            continue
        parts = [part for part in path.split("/") if part and part != ".."]
        for depth in range(len(parts) + 1):
            at = "".join(f"/{part}" for part in parts[:depth])
            if controllers:
                place = f"{_GROUPS}/{controllers}{at}/cpu.cfs"
                words = f"{read(f'{place}_quota_us')} {read(f'{place}_period_us')}".split()
            else:
                words = read(f"{_GROUPS}{at}/cpu.max").split()
            if len(words) == 2 and all(word.isdigit() and int(word) for word in words):
                least = min(least, int(words[0]) / int(words[1]))
    return least


def _stalled_us(path: str) -> int:
    """Return the µs since boot in which a task waited for a CPU; 0 if the kernel does not report it."""
    total = _text(path).partition("\n")[0].rpartition("total=")[2]
    return int(total) if total.isdigit() else 0


def _text(path: str) -> str:
    """Return the text of a file; "" if it cannot be read."""
    try:
        with open(path, "rb") as file:
            return file.read().decode("utf-8", "replace")
    except OSError:
        return ""
