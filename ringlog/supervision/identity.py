"""Who this data directory is, and the numbers of the lives of its processes.

`<data>/meta/engine` holds the engine's id, the first incarnation number not handed out yet, and the
shared-memory directory of the engine that last started here. It is replaced as a whole and synced
before a number is used, so a number is never used twice, whatever dies when.
"""

from __future__ import annotations

import os
import secrets
from typing import Annotated

import msgspec

from ringlog.errors import StartRefused
from ringlog.storage.disk import Disk, replace_file
from ringlog.storage.layout import META_DIR, WAL_DIR

ENGINE_FILE = "engine"
_BLOCK = 16
"""Numbers made durable at once, so that most restarts wait for no disk. Unused ones are skipped."""
_BYTES_MAX = 65_536


class EngineFile(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Contents of `meta/engine`, as JSON."""

    engine_id: Annotated[str, msgspec.Meta(pattern="^[0-9a-f]{32}$")]
    next_incarnation: Annotated[int, msgspec.Meta(ge=1)]
    shm_dir: str = ""


class Identity:
    """The engine's id and its supply of incarnation numbers. Needs the data directory's lock."""

    def __init__(self, disk: Disk, data_dir: str) -> None:
        """Read `meta/engine`, or found a new engine in an empty directory; raises StartRefused."""
        self._disk = disk
        self._meta = os.path.join(data_dir, META_DIR)
        disk.make_dir(self._meta)
        disk.sync_dir(data_dir)
        known = self._read()
        if known is None:
            self._refuse_orphaned_wal(data_dir)
            known = EngineFile(engine_id=secrets.token_hex(16), next_incarnation=1)
        self.engine_id = known.engine_id
        self.previous_shm_dir = known.shm_dir
        self._shm_dir = known.shm_dir
        self._next = self._durable_to = known.next_incarnation

    def begin(self, shm_dir: str, expected: int) -> int:
        """Record this start's shared-memory directory and return its first incarnation number.

        `expected` is how many numbers the start will need at once.
        """
        self._shm_dir = shm_dir
        self._reserve(expected)
        return self._next

    def take(self) -> int:
        """Return the next incarnation number, durable as taken; raises DiskError when it cannot be."""
        if self._next >= self._durable_to:
            self._reserve(_BLOCK)
        number, self._next = self._next, self._next + 1
        return number

    def forget_shm_dir(self) -> None:
        """Record that this engine left nothing in shared memory."""
        self._shm_dir = ""
        self._reserve(0)

    def _reserve(self, count: int) -> None:
        """Make `count` further numbers usable; raises DiskError, and then none of them is."""
        durable_to = self._next + count
        facts = EngineFile(engine_id=self.engine_id, next_incarnation=durable_to, shm_dir=self._shm_dir)
        replace_file(self._disk, self._meta, ENGINE_FILE, msgspec.json.encode(facts))
        self._durable_to = durable_to

    def _read(self) -> EngineFile | None:
        path = os.path.join(self._meta, ENGINE_FILE)
        if not self._disk.exists(path):
            return None
        fd = self._disk.open_read(path)
        try:
            data = self._disk.read_at(fd, _BYTES_MAX, 0)
        finally:
            self._disk.close(fd)
        try:
            return msgspec.json.decode(data, type=EngineFile)
        except (msgspec.MsgspecError, UnicodeDecodeError) as e:
            raise StartRefused(
                "meta/engine does not decode; nothing was changed", file=path, reason=str(e)
            ) from None

    def _refuse_orphaned_wal(self, data_dir: str) -> None:
        """A log without its identity: a new one could reuse incarnation numbers (RD-5)."""
        wal = os.path.join(data_dir, WAL_DIR)
        if self._disk.exists(wal) and self._disk.list_dir(wal):
            raise StartRefused(
                "meta/engine is missing though there are logs; restore it from a backup", dir=wal
            )
