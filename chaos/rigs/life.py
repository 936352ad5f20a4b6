"""A shard's life on a directory of the host: steps by chance, which may end at any call to the disk and go on
after it with what the disk holds then."""

from __future__ import annotations

import logging
import random
import time
from collections.abc import Callable
from pathlib import Path

from chaos.rigs.harness import CLASSES, Harness
from chaos.rigs.hostdisk import HostDisk
from chaos.rigs.judge import POWER_LOSS, How, Seen, check, note_seen, observe, require_same
from chaos.rigs.steps import STEPS
from ringlog.storage.disk import Disk

SIZES = (8, 24, 24, 300, 700, 5_000)
LIMITING = "config"
CHOSEN = (
    "append", "append_many", "append_disk_many", "rotate", "delete_seq", "create", "idle", "seal", "restart",
    "replace", "send_again", LIMITING,
)  # fmt: skip
"""What needs no cold tier."""

# What a shard says of each torn tail is for its operator, not for a thousand of them a minute.
logging.getLogger("ringlog").addHandler(logging.NullHandler())
Wrap = Callable[[HostDisk], Disk]


class Life(Harness):
    """One data directory over all its starts."""

    def __init__(self, root: Path, wrap: Wrap = lambda disk: disk) -> None:
        self._root, self._wrap = root, wrap
        self._sizes = random.Random(1)
        self._is_limited = False
        """A limit that power cut off may hold, and evict from then on."""
        root.mkdir(mode=0o700, exist_ok=True)
        self._host = HostDisk(root)
        super().__init__(wrap(self._host), time.monotonic_ns, cold="", has_cold=False)

    def start(self, *, is_reboot: bool = False, keeps_board: bool = False) -> None:
        self._host = HostDisk(self._root)
        self.world.disk = self._wrap(self._host)
        super().start(is_reboot=is_reboot, keeps_board=keeps_board)
        for name in CLASSES:
            self.need(name)

    def end(self) -> None:
        """The process is gone; its handles too."""
        self.world.runs.clear()
        self._host.abandon()

    def recover(self) -> None:
        """Start after a loss of power, judge, start again, which must change nothing; raises Broken or what a
        start raises."""
        self.start(is_reboot=True)
        before = self.judge()
        self.end()
        self.start()
        require_same(before, observe(self.world), "starting twice changes the state")

    def judge(self, how: How = POWER_LOSS) -> dict[str, Seen]:
        """Look at everything a reader can see now, and keep in mind that he saw it; raises Broken."""
        seen = observe(self.world)
        check(self.model, seen, how)
        note_seen(self.model, seen)
        return seen

    def step(self, rng: random.Random) -> str:
        """Do one step by chance; raises what the shard raises. Returns its name."""
        name, self._sizes = rng.choice(CHOSEN), rng
        if self._is_limited:
            self.configure("f")
        self._is_limited = name == LIMITING
        STEPS[name](self)
        self._is_limited = False
        return name

    def payload(self, size: int = 0) -> bytes:
        """Another one each time, of a size by chance unless it is told."""
        return super().payload(size or self._sizes.choice(SIZES))
