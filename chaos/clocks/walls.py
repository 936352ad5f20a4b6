"""Wall clocks of an engine's processes.

Each kind of process can have its clock stepped, frozen or jittered.
"""

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
"""The largest instant in nanoseconds since the epoch that fits a signed 64-bit integer: in the year 2262."""


class Walls:
    """The clocks of one engine. Pass `preload` to the engine as LD_PRELOAD."""

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
        """Offset the clock by `seconds`, in these kinds of processes or in all."""
        self._set(0, round(seconds * NS), kinds)

    def set_time(self, ns: int, *kinds: str) -> None:
        """Continue from this instant (nanoseconds since the epoch)."""
        self._set(0, ns - time.time_ns(), kinds)

    def freeze(self, ns: int, *kinds: str) -> None:
        """Stop the clock at this instant (nanoseconds since the epoch); 0: let it run again."""
        self._set(1, ns, kinds)

    def jitter(self, seconds: float, *kinds: str) -> None:
        """Offset each reading by a random amount of up to `seconds` in either direction."""
        self._set(2, round(seconds * NS), kinds)

    def right(self) -> None:
        """Return all clocks to the true time."""
        for at in range(len(KINDS) * WORDS):
            if at % WORDS != 3:
                self._words[at] = 0

    def readings(self, kind: str) -> int:
        """Return how often processes of this kind have read the clock."""
        return self._words[KINDS.index(kind) * WORDS + 3]

    def now_us(self, kind: str = "wal_shard") -> int:
        """Return the current time of these processes (microseconds since the epoch), without jitter."""
        at = KINDS.index(kind) * WORDS
        return (self._words[at + 1] or time.time_ns() + self._words[at]) // 1_000

    def close(self) -> None:
        """Unmap the file."""
        self._words.release()
        self._map.close()

    def _set(self, word: int, value: int, kinds: tuple[str, ...]) -> None:
        for kind in kinds or KINDS:
            self._words[KINDS.index(kind) * WORDS + word] = value
