"""Who this data directory is, and the numbers of the lives of its processes.

`<data>/meta/engine` holds the engine's id, the first incarnation number not handed out yet, and the
shared-memory directory of the engine that last started here. It is replaced as a whole and synced
before a number is used, so a number is never used twice, whatever dies when.
"""

from __future__ import annotations

import os
import secrets

from ringlog.errors import StartRefused
from ringlog.storage.disk import Disk, replace_file
from ringlog.storage.identity_file import (
    ENGINE_FILE,
    EngineFile,
    encode_identity,
    newest_incarnation,
    read_identity,
)
from ringlog.storage.layout import META_DIR, WAL_DIR

__all__ = ["ENGINE_FILE", "EngineFile", "EngineIdentity"]
_BLOCK = 16
"""Numbers made durable at once, so that most restarts wait for no disk. Unused ones are skipped."""


class EngineIdentity:
    """The engine's id and its supply of incarnation numbers. Needs the data directory's lock."""

    def __init__(self, disk: Disk, data_dir: str) -> None:
        """Read `meta/engine`, or found a new engine in an empty directory; raises StartRefused."""
        self._disk = disk
        self._meta = os.path.join(data_dir, META_DIR)
        disk.make_dir(self._meta)
        disk.sync_dir(data_dir)
        known = self.peek(disk, data_dir)
        if known is None:
            self._refuse_orphaned_wal(data_dir)
            known = EngineFile(engine_id=secrets.token_hex(16), next_incarnation=1)
        self._refuse_used_numbers(data_dir, known)
        self.engine_id = known.engine_id
        self.previous_shm_dir = known.shm_dir
        self._shm_dir = known.shm_dir
        self._next = self._durable_to = known.next_incarnation

    def record_start(self, shm_dir: str, expected: int) -> int:
        """Record this start's shared-memory directory and return its first incarnation number.

        `expected` is how many numbers the start will need at once.
        """
        self._shm_dir = shm_dir
        self._reserve(expected)
        return self._next

    def allocate_incarnation(self) -> int:
        """Return the next incarnation number, durable as taken; raises DiskError when it cannot be."""
        if self._next >= self._durable_to:
            self._reserve(_BLOCK)
        number, self._next = self._next, self._next + 1
        return number

    def allocate_unrecorded(self) -> int:
        """Return the next number without making that durable, for a process that writes nothing here.

        Nobody gets it again while this engine runs: the next record that succeeds passes over it.
        """
        number, self._next = self._next, self._next + 1
        return number

    def forget_shm_dir(self) -> None:
        """Record that this engine left nothing in shared memory."""
        self._shm_dir = ""
        self._reserve(0)

    def _reserve(self, count: int) -> None:
        """Make `count` further numbers usable; raises DiskError, and then none of them is."""
        durable_to = self._next + count
        facts = encode_identity(self.engine_id, durable_to, self._shm_dir)
        replace_file(self._disk, self._meta, ENGINE_FILE, facts)
        self._durable_to = durable_to

    @staticmethod
    def peek(disk: Disk, data_dir: str) -> EngineFile | None:
        """What the directory says of itself, None when it is new; raises StartRefused for nonsense."""
        try:
            return read_identity(disk, data_dir)
        except ValueError as e:
            path = os.path.join(data_dir, META_DIR, ENGINE_FILE)
            raise StartRefused(
                "meta/engine does not decode; nothing was changed", file=path,
                reason=str(e),
            ) from None  # fmt: skip

    def _refuse_used_numbers(self, data_dir: str, known: EngineFile) -> None:
        """A counter below what the log's names say is damaged, or older than the log (RD-5): recovery would
        take the files of a later life for nobody's."""
        newest = newest_incarnation(self._disk, data_dir)
        if newest >= known.next_incarnation:
            raise StartRefused(
                "meta/engine is older than the log; restore the one that belongs to it",
                file=os.path.join(self._meta, ENGINE_FILE), next_incarnation=known.next_incarnation,
                newest=newest,
            )  # fmt: skip

    def _refuse_orphaned_wal(self, data_dir: str) -> None:
        """A log without its identity: a new one could reuse incarnation numbers (RD-5)."""
        wal = os.path.join(data_dir, WAL_DIR)
        if self._disk.exists(wal) and self._disk.list_dir(wal):
            raise StartRefused(
                "meta/engine is missing though there are logs; restore it from a backup", dir=wal
            )
