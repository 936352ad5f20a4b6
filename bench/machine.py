"""The machine and the moment: what it is, how fast it is just now, and how it is brought to rest.

A virtual machine that gave its idle memory back to its host pays for every page it touches again, 1 to
40 us each as we saw, and most after a pause: exactly what a log that wakes for one record does. The
probes say which kind of hour a result fell into; two results of different hours are not comparable.
"""

from __future__ import annotations

import mmap
import os
import platform
import statistics
import time
from pathlib import Path
from typing import Any

import numpy as np

PAGE = mmap.PAGESIZE
TOUCHED_PAGES = 2_048
PAUSE_S = 0.5
ROUNDS = 3
DROP_CACHES = Path("/proc/sys/vm/drop_caches")
COMPACT_MEMORY = Path("/proc/sys/vm/compact_memory")


def facts() -> dict[str, Any]:
    """The machine, and what the probes give now."""
    return {
        "cpus": os.cpu_count(),
        "cpu": _model(),
        "kernel": platform.release(),
        "python": platform.python_version(),
        "load": os.getloadavg()[0],
        "at": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
        **_probes(),
    }


def settle() -> None:
    """Write back what is dirty and, as root, give up the page cache and join free memory: every run begins
    in the same state, and memory that was used up by earlier work does not slow this one."""
    os.sync()
    for switch in (DROP_CACHES, COMPACT_MEMORY):
        try:
            switch.write_text("3" if switch is DROP_CACHES else "1")
        except OSError:
            return  # Not root: measured as it is, and the probes say how it is.


def _probes() -> dict[str, float]:
    """Microseconds of a page touched first, of one touched again after a pause, and GB/s of copying."""
    first, again = [], []
    for _ in range(ROUNDS):
        with mmap.mmap(-1, TOUCHED_PAGES * PAGE) as mapping:
            words = np.frombuffer(mapping, np.uint8)[::PAGE]
            first.append(_touch_us(words))
            time.sleep(PAUSE_S)
            again.append(_touch_us(words))
            del words
    source, target = np.ones(32 << 20, np.uint8), np.zeros(32 << 20, np.uint8)
    target[:] = source
    begun = time.perf_counter()
    for _ in range(ROUNDS):
        target[:] = source
    copied = ROUNDS * source.nbytes / (time.perf_counter() - begun) / 1e9
    return {
        "page_first_us": round(statistics.median(first), 2),
        "page_after_pause_us": round(statistics.median(again), 2),
        "copy_gb_per_s": round(copied, 1),
    }


def _touch_us(words: np.ndarray[Any, Any]) -> float:
    begun = time.perf_counter()
    words += 1
    return (time.perf_counter() - begun) * 1e6 / len(words)


def _model() -> str:
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        if line.startswith("model name"):
            return line.split(":", 1)[1].strip()
    return ""
