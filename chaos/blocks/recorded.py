"""The life of a shard on a recorded block device.

Every write and flush below the file system, and every disk call and ack above it, is recorded with times of
one clock.
"""

from __future__ import annotations

import bisect
import os
import random
import time
from dataclasses import dataclass, field
from pathlib import Path

from chaos.rigs.blockstore import BlockEntry, StoredVolume
from chaos.rigs.hostdisk import HostDisk, WatchedDisk
from chaos.rigs.life import Life
from chaos.rigs.model import Model
from chaos.states.images import Image
from ringlog.testing import disk as d
from ringlog.testing.recording_disk import RecordingDisk
from tests.support.shard_world import DATA

FOLDER = "life"


class _Stamped(list[d.Operation]):
    """Operations with the time at which each returned."""

    def __init__(self) -> None:
        super().__init__()
        self.done_ns: list[int] = []

    def append(self, operation: d.Operation) -> None:
        super().append(operation)
        self.done_ns.append(time.monotonic_ns())


@dataclass(slots=True)
class Recorded:
    """Everything that was recorded of one life."""

    steps: list[str]
    model: Model
    operations: list[d.Operation]
    done_ns: list[int]
    begun_ns: list[int]
    """When each call that changes the disk began (ns), including calls that are not in `operations`."""
    entries: list[BlockEntry] = field(default_factory=list)

    def calls_at(self, cut_ns: int) -> tuple[int, bool]:
        """Return how many operations had returned at a time, and whether the next one had begun."""
        done = bisect.bisect_left(self.done_ns, cut_ns)
        last_done = self.done_ns[done - 1] if done else 0
        begun = bisect.bisect_left(self.begun_ns, cut_ns)
        is_under_way = begun > 0 and self.begun_ns[begun - 1] >= last_done
        return done, is_under_way and done < len(self.operations)


def record(stored: StoredVolume, rng: random.Random, steps: int) -> Recorded:
    """Run a shard on the volume for `steps` steps. The volume is unmounted afterwards."""
    volume, store = stored.volume, stored.store
    operations, begun_ns = _Stamped(), []
    root = volume.root / FOLDER
    root.mkdir(mode=0o700)
    _sync_folder(volume.root)
    volume.down()
    store.record()
    stored.loop.forget()
    volume.up()

    def wrap(disk: HostDisk) -> WatchedDisk:
        recording = RecordingDisk(disk)
        recording.operations = operations
        return WatchedDisk(recording, lambda number, call: begun_ns.append(time.monotonic_ns()))

    life = Life(root, wrap)
    life.start()
    try:
        names = [life.step(rng) for _ in range(steps)]
    finally:
        life.end()
    volume.down()
    return Recorded(names, life.model, list(operations), operations.done_ns, begun_ns, store.recorded())


def _sync_folder(path: Path) -> None:
    fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


EMPTY = Image((DATA,), {})
"""Contents of the device when the recording begins."""


def read_image(root: Path) -> Image:
    """Return everything below the life's directory, with paths of the World. Raises OSError."""
    top = root / FOLDER
    directories, files = [], {}
    for path, _, names in os.walk(top, onerror=_raise):
        ours = DATA + path[len(str(top)) :]
        directories.append(ours)
        for name in names:
            files[f"{ours}/{name}"] = Path(path, name).read_bytes()
    return Image(tuple(sorted(directories)), files)


def _raise(error: OSError) -> None:
    raise error
