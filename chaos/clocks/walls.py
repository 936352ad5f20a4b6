"""Wall clocks of an engine's processes, each of which can be stepped, frozen and shaken."""

from __future__ import annotations

import mmap
import subprocess
import time
from pathlib import Path

from chaos.order import CannotRun

SOURCE = Path(__file__).with_name("clockshim.c")
KINDS = ("supervisor", "wal_shard", "compactor", "reclaimer", "relocator", "gateway", "chaos", "other")
WORDS = 4
NS = 1_000_000_000
LAST_NS = (1 << 63) - 1
"""The largest instant that nanoseconds since the epoch can say: in the year 2262."""


class Walls:
    """The clocks. `preload` goes into the engine's environment as LD_PRELOAD."""

    def __init__(self, scratch: Path) -> None:
        path = scratch / f"clock-{time.monotonic_ns()}"
        path.write_bytes(bytes(len(KINDS) * WORDS * 8))
        with path.open("r+b") as file:
            self._map = mmap.mmap(file.fileno(), 0)
        self._words = memoryview(self._map).cast("q")
        self.preload = path.with_suffix(".so")
        try:
            where = f'-DCLOCK_FILE="{path}"'
            done = subprocess.run(
                ["gcc", "-O2", "-shared", "-fPIC", where, "-o", str(self.preload), str(SOURCE)],
                capture_output=True, text=True, check=False, timeout=60,
            )  # fmt: skip
        except OSError as e:
            raise CannotRun(f"gcc: {e.strerror}") from None
        if done.returncode:
            raise CannotRun(f"the clock shim does not compile: {done.stderr[-300:]}")

    def step(self, seconds: float, *kinds: str) -> None:
        """Be off by so much, in these kinds of processes or in all."""
        self._set(0, round(seconds * NS), kinds)

    def be_at(self, ns: int, *kinds: str) -> None:
        """Go on from this instant, nanoseconds since the epoch."""
        self._set(0, ns - time.time_ns(), kinds)

    def freeze(self, ns: int, *kinds: str) -> None:
        """Stand still at this instant; 0: go on."""
        self._set(1, ns, kinds)

    def shake(self, seconds: float, *kinds: str) -> None:
        """Be off by up to so much at each reading, either way."""
        self._set(2, round(seconds * NS), kinds)

    def right(self) -> None:
        """Tell the true time again."""
        for at in range(len(KINDS) * WORDS):
            if at % WORDS != 3:
                self._words[at] = 0

    def readings(self, kind: str) -> int:
        """How often processes of this kind asked for the time."""
        return self._words[KINDS.index(kind) * WORDS + 3]

    def now_us(self, kind: str = "wal_shard") -> int:
        """What such a process sees now, microseconds since the epoch, shaking apart."""
        at = KINDS.index(kind) * WORDS
        return (self._words[at + 1] or time.time_ns() + self._words[at]) // 1_000

    def close(self) -> None:
        """Unmap."""
        self._words.release()
        self._map.close()

    def _set(self, word: int, value: int, kinds: tuple[str, ...]) -> None:
        for kind in kinds or KINDS:
            self._words[KINDS.index(kind) * WORDS + word] = value
