"""Waiting for a word of shared memory: look at it for a moment, then sleep.

Two processes that answer each other are back within microseconds, and being woken takes 50 to 500 of them, as
deeply as the processor was halted. So whoever waits looks on first, in C and without the interpreter's lock,
with his processor on offer: who waits for an answer, until one would be there that the other side had to be
woken for; who has answered, as long as a program takes that does one thing after the other. Then he asks to
be woken, and sleeps. Where others want the processors, looking on takes from them what the answer needs: then
everybody sleeps at once, and so does always who may use less than two processors. That is measured once a
second, for all processes of the host, and not guessed from how long single waits took.
"""

from __future__ import annotations

import math
import os
from collections.abc import Callable

from ringlog.native_kernel import kernel

SPIN_REPLY_NS = 1_000_000
"""Who waits for an answer looks so long, which is enough where the other one has to be woken for it, too."""
SPIN_REQUEST_NS = 100_000
"""Who has answered looks so long for more: a program that does one thing after the other is back by then."""
SPIN_WORDS_MAX = 64
"""Words that are looked at together (native/kernel.c); who waits for more sleeps."""
CPU_CONTENDED_SHARE = 0.2
"""Part of the time in which somebody waited for a processor, above which nobody looks on."""
CONTENTION_SAMPLE_NS = 1_000_000_000
_PRESSURE = "/proc/pressure/cpu"
_GROUPS = "/sys/fs/cgroup"


class SpinPolicy:
    """Whether to look on before sleeping, in this process, at present."""

    def __init__(self, pressure: str = _PRESSURE) -> None:
        self._pressure = pressure
        self._measured_ns = self._stalled_us = 0
        self._next_ns = 0
        self._can_look = _processors() > 1
        self._is_wanted = False

    def should_spin(self, now_ns: int) -> bool:
        """Not where others want the processors, or there is one alone."""
        if self._can_look and now_ns >= self._next_ns:
            self._measure(now_ns)
        return self._is_wanted

    def _measure(self, now_ns: int) -> None:
        self._next_ns = now_ns + CONTENTION_SAMPLE_NS
        stalled_us = _stalled_us(self._pressure)
        passed_us = (now_ns - self._measured_ns) / 1_000
        is_crowded = (
            bool(self._measured_ns) and stalled_us - self._stalled_us > CPU_CONTENDED_SHARE * passed_us
        )
        self._measured_ns, self._stalled_us = now_ns, stalled_us
        self._is_wanted = not is_crowded


def spin_wait(words: list[memoryview], seen: list[int], ns: int) -> bool:
    """Look at up to SPIN_WORDS_MAX words, 8 bytes each, for so long; True as soon as one is not what was
    seen."""
    return kernel.look(words, seen, ns)


def _processors() -> int:
    """Whole processors that this process may use all the time."""
    allowed = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return int(min(allowed, cpu_quota(_text("/proc/self/cgroup"), _text)))


def cpu_quota(own_groups: str, read: Callable[[str], str]) -> float:
    """Processors that the control groups of /proc/self/cgroup, and those above them, let us use: what looking
    on uses up is not there for work. A container sees its own group as the root."""
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
    """Microseconds since the host began in which somebody waited for a processor; 0 = it does not tell."""
    total = _text(path).partition("\n")[0].rpartition("total=")[2]
    return int(total) if total.isdigit() else 0


def _text(path: str) -> str:
    """The text of a file; "" for one that cannot be read."""
    try:
        with open(path, "rb") as file:
            return file.read().decode("utf-8", "replace")
    except OSError:
        return ""
