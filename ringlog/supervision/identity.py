"""Identity of a data directory, and the incarnation numbers of its processes.

`<data>/meta/engine` contains the engine id, the first unused incarnation number, and the shared-memory
directory of the engine that started here last. The file is replaced as a whole and synced before a number is
used. A number is therefore never used twice, whichever process dies (P1).
"""

from __future__ import annotations

import os

from ringlog.entropy import random_hex
from ringlog.errors import StartRefused
from ringlog.storage.disk import Disk, replace_file
from ringlog.storage.identity_file import (
    ENGINE_FILE,
    EngineFile,
    encode_identity,
    newest_incarnation,
    read_identity,
    read_restore_id,
)
from ringlog.storage.layout import META_DIR, RESTORED, WAL_DIR

__all__ = ["ENGINE_FILE", "EngineFile", "EngineIdentity"]
_BLOCK = 16
"""Numbers that one sync reserves, so that most restarts wait for no disk. Unused numbers are skipped."""


class EngineIdentity:
    """The engine id and the source of incarnation numbers. The caller must hold the data directory's lock."""

    def __init__(self, disk: Disk, data_dir: str) -> None:
        """Read `meta/engine`, or create an identity if the directory has none. Raises StartRefused."""
        self._disk = disk
        self._meta = os.path.join(data_dir, META_DIR)
        disk.make_dir(self._meta)
        disk.sync_dir(data_dir)
        known = self.peek(disk, data_dir)
        if known is None:
            self._refuse_orphaned_wal(data_dir)
            known = EngineFile(engine_id=random_hex(16), next_incarnation=1)
        self._refuse_used_numbers(data_dir, known)
        self.engine_id: str = known.engine_id
        self.restore_id: str = self._read_restore_id(data_dir)
        self.previous_shm_dir: str = known.shm_dir
        self._shm_dir = known.shm_dir
        self._next = self._durable_to = known.next_incarnation

    def record_start(self, shm_dir: str, expected: int) -> int:
        """Record this start's shared-memory directory and return the first incarnation number of the start.

        `expected` is the number of incarnations that the start needs at once. Raises DiskError.
        """
        self._shm_dir = shm_dir
        self._reserve(expected)
        return self._next

    def allocate_incarnation(self) -> int:
        """Return the next incarnation number, after the reservation is durable. Raises DiskError."""
        if self._next >= self._durable_to:
            self._reserve(_BLOCK)
        number, self._next = self._next, self._next + 1
        return number

    def allocate_unrecorded(self) -> int:
        """Return the next number without a durable reservation, for a process that writes no data.

        This engine does not issue the number again: the next reservation that succeeds skips it.
        """
        number, self._next = self._next, self._next + 1
        return number

    def forget_shm_dir(self) -> None:
        """Record that this engine left nothing in shared memory. Raises DiskError."""
        self._shm_dir = ""
        self._reserve(0)

    def _reserve(self, count: int) -> None:
        """Make `count` further numbers usable. On DiskError none of them is usable."""
        durable_to = self._next + count
        facts = encode_identity(self.engine_id, durable_to, self._shm_dir)
        replace_file(self._disk, self._meta, ENGINE_FILE, facts)
        self._durable_to = durable_to

    @staticmethod
    def peek(disk: Disk, data_dir: str) -> EngineFile | None:
        """Return the identity in the directory, or None if there is none. Raises StartRefused if corrupt."""
        try:
            return read_identity(disk, data_dir)
        except ValueError as e:
            path = os.path.join(data_dir, META_DIR, ENGINE_FILE)
            raise StartRefused(
                "meta/engine is corrupt: restore it from a backup; nothing was changed", file=path,
                reason=str(e),
            ) from None  # fmt: skip

    def _read_restore_id(self, data_dir: str) -> str:
        try:
            return read_restore_id(self._disk, data_dir)
        except ValueError as e:
            raise StartRefused(
                "meta/restored is corrupt: write 16 random hexadecimal digits to it", reason=str(e),
                file=os.path.join(self._meta, RESTORED),
            ) from None  # fmt: skip

    def _refuse_used_numbers(self, data_dir: str, known: EngineFile) -> None:
        """Refuse to start if the counter is not above every incarnation number in the log's file names.

        Such a counter is damaged or older than the log. Recovery would ignore files of a later incarnation.
        """
        newest = newest_incarnation(self._disk, data_dir)
        if newest >= known.next_incarnation:
            raise StartRefused(
                "meta/engine is older than the log: restore the file from the same backup as the log",
                file=os.path.join(self._meta, ENGINE_FILE), next_incarnation=known.next_incarnation,
                newest=newest,
            )  # fmt: skip

    def _refuse_orphaned_wal(self, data_dir: str) -> None:
        """Refuse to start on a log without an identity file: a new one could reuse incarnation numbers."""
        wal = os.path.join(data_dir, WAL_DIR)
        if self._disk.exists(wal) and self._disk.list_dir(wal):
            raise StartRefused("meta/engine is missing but the log exists: restore it from a backup", dir=wal)
