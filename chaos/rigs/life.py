"""A shard on a directory of the host that takes random steps.

Each step may end at any disk call; the next start continues with what the disk then holds.
"""

from __future__ import annotations

import logging
import random
import time
from collections.abc import Callable
from pathlib import Path

from chaos.rigs.harness import CLASSES, Harness
from chaos.rigs.hostdisk import HostDisk
from chaos.rigs.judge import POWER_LOSS, CrashKind, Seen, check, note_seen, observe, require_same
from chaos.rigs.steps import STEPS
from ringlog.storage.disk import Disk

SIZES = (8, 24, 24, 300, 700, 5_000)
LIMITING = "config"
CHOSEN = (
    "append", "append_many", "append_disk_many", "rotate", "delete_seq", "create", "idle", "seal", "restart",
    "replace", "send_again", LIMITING,
)  # fmt: skip
"""Steps that need no cold tier."""

# Suppress the shard's warning about each torn end: there are thousands per minute.
logging.getLogger("ringlog").addHandler(logging.NullHandler())
Wrap = Callable[[HostDisk], Disk]


class Life(Harness):
    """One data directory over all its starts."""

    def __init__(self, root: Path, wrap: Wrap = lambda disk: disk) -> None:
        self._root, self._wrap = root, wrap
        self._sizes = random.Random(1)
        self._is_limited = False
        """A previous step that set a limit did not finish. The limit may be in force and evict records."""
        root.mkdir(mode=0o700, exist_ok=True)
        self._host = HostDisk(root)
        super().__init__(wrap(self._host), time.monotonic_ns, cold="", has_cold=False)

    def start(self, *, is_reboot: bool = False, keeps_board: bool = False) -> None:
        self._host = HostDisk(self._root)
        self.world.disk = self._wrap(self._host)
        super().start(is_reboot=is_reboot, keeps_board=keeps_board)
        for name in CLASSES:
            self.ensure_topic(name)

    def end(self) -> None:
        """End the process and close its handles."""
        self.world.runs.clear()
        self._host.abandon()

    def recover(self) -> None:
        """Start after a power loss, judge, and start again, which must change nothing.

        Raises GuaranteeBroken, or the error of a start.
        """
        self.start(is_reboot=True)
        before = self.judge()
        self.end()
        self.start()
        require_same(before, observe(self.world), "starting twice changes the state")

    def judge(self, how: CrashKind = POWER_LOSS) -> dict[str, Seen]:
        """Judge everything that a reader can observe now, and record that it was observed.

        Raises GuaranteeBroken.
        """
        seen = observe(self.world)
        check(self.model, seen, how)
        note_seen(self.model, seen)
        return seen

    def step(self, rng: random.Random) -> str:
        """Take one random step. Returns its name. Raises the errors of the shard."""
        name, self._sizes = rng.choice(CHOSEN), rng
        if self._is_limited:
            self.configure("f")
        self._is_limited = name == LIMITING
        STEPS[name](self)
        self._is_limited = False
        return name

    def payload(self, size: int = 0) -> bytes:
        """Return a new payload. Its size is random if `size` is 0."""
        return super().payload(size or self._sizes.choice(SIZES))
