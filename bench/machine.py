"""Facts of the machine: what it is, how fast it is now, and how to bring it into a defined state.

A virtual machine that returned its idle memory to its host pays for every page that it touches again. We
observed 1 to 40 us per page, most after a pause. This is exactly the access pattern of a log that wakes up
for one record. The probes record the state of the machine. Results from different states are not comparable.
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
    """Return the facts of the machine and the current values of the probes."""
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
    """Write dirty pages back and, as root, drop the page cache and compact free memory.

    Every run then begins in the same state, and earlier work does not slow it down.
    """
    os.sync()
    for switch in (DROP_CACHES, COMPACT_MEMORY):
        try:
            switch.write_text("3" if switch is DROP_CACHES else "1")
        except OSError:
            return  # Not root: measure as it is; the probes show the state.


def _probes() -> dict[str, float]:
    """Return microseconds of a first page touch, of a touch after a pause, and GB/s of copying."""
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
