"""Ownership of a cold store: two engines in one store would overwrite each other, as segment names repeat.

The object `engine` in the store contains the id of the engine that owns it. The first engine writes it.
Before an engine moves its first segment, it writes its id to `meta/cold-owner` in the data directory. The
file stays there, so an engine without the setting of its cold tier knows where missing data parts may be.

After the store has confirmed the owner, `meta/cold-owner` records that as well. From then on a store without
the object is a different place, for example a mount point without its volume.

All processes of an engine use its store as an OwnedStore. It lets no call through to a store without the
object, or with another engine's: not even a read, because another engine's segment may have the same name.
The exception are reads of a store without the object by an engine without `meta/cold-owner`: such a store was
restored from a backup by an earlier version.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

from ringlog.errors import ColdUnavailable, CorruptData
from ringlog.storage.disk import Disk, replace_file
from ringlog.storage.layout import COLD_OWNER, META_DIR
from ringlog.tier.store import ColdMissing, SegmentStore

OWNER_OBJECT = "engine"
_CONFIRMED = b" confirmed"
_ID_BYTES_MAX = 64
_REMEDY = "Mount its volume, or correct cold.dir or cold.url"
T = TypeVar("T")


class OwnedStore:
    """A SegmentStore as its engine uses it. In a store of another engine, every call is ColdUnavailable.

    A change is preceded by a check of the owner. Reads rely on the last check until one fails, but an object
    counts as missing only if the store still names its owner afterwards: an empty mount point lacks every
    object. Thread-safe like the store.
    """

    def __init__(self, store: SegmentStore, disk: Disk, data_dir: str, engine_id: str) -> None:
        """`engine_id` has 32 hexadecimal digits. `disk` and `data_dir` are the host's."""
        self._store, self._disk = store, disk
        self.engine_id: str = engine_id
        self._directory = f"{data_dir}/{META_DIR}"
        self._is_checked = False

    # -- the owner ------------------------------------------------------------------------------------

    def claim(self) -> str:
        """Make this engine the owner of the store if it has none. Returns the id of the owner.

        Raises ColdUnavailable, DiskError, and CorruptData if the store does not return what was written.
        """
        owner = self._owner()
        if owner != self.engine_id and owner:
            return owner
        is_confirmed = self._recorded_owner().endswith(_CONFIRMED)
        if not owner and is_confirmed:
            self._require(owner)
        if not owner:
            replace_file(self._disk, self._directory, COLD_OWNER, self.engine_id.encode())
            self._store.put(OWNER_OBJECT, f"{self._directory}/{COLD_OWNER}")
            owner = self._owner()
        if not owner:
            raise CorruptData("cold store did not return the owner id that was written", file=OWNER_OBJECT)
        if not is_confirmed:
            replace_file(self._disk, self._directory, COLD_OWNER, self.engine_id.encode() + _CONFIRMED)
        return owner

    def check(self) -> None:
        """Raise ColdUnavailable if this engine does not own the store, or the owner cannot be read."""
        self._is_checked = False
        self._require(self._owner())
        self._is_checked = True

    def _require(self, owner: str) -> None:
        if not owner:
            raise ColdUnavailable(
                "the cold store is not the one that this engine moved segments to: it lacks the file "
                f"`{OWNER_OBJECT}`. {_REMEDY}",
                file=OWNER_OBJECT,
            )
        if owner != self.engine_id:
            raise ColdUnavailable(
                f"the cold store belongs to another engine. {_REMEDY}", file=OWNER_OBJECT, owner=owner
            )

    def _owner(self) -> str:
        try:
            return self._store.get_range(OWNER_OBJECT, 0, _ID_BYTES_MAX).decode("ascii", "replace")
        except ColdMissing:
            return ""

    def _recorded_owner(self) -> bytes:
        """Return the content of `meta/cold-owner`; empty if no segment was ever moved."""
        path = f"{self._directory}/{COLD_OWNER}"
        if not self._disk.exists(path):
            return b""
        fd = self._disk.open_read(path)
        try:
            return self._disk.read_at(fd, _ID_BYTES_MAX, 0)
        finally:
            self._disk.close(fd)

    # -- changes: see store.SegmentStore --------------------------------------------------------------

    def put(self, name: str, source: str) -> str:
        self.check()
        return self._store.put(name, source)

    def make_durable(self, name: str) -> None:
        if self._store.is_durable_at_once:
            return
        self.check()
        self._store.make_durable(name)

    def delete(self, *names: str) -> None:
        """Remove objects, in this order. A missing one is no error, as long as the store is this engine's.

        Does nothing in the store of another engine if this one never moved a segment to any store: its
        removals wait for no other store then. Raises ColdUnavailable, DiskError.
        """
        owner = self._owner()
        if owner and owner != self.engine_id and not self._recorded_owner():
            return
        self._require(owner)
        for name in names:
            self._store.delete(name)
        self.check()  # If the volume was unmounted meanwhile, the objects still exist on it.

    # -- reads ----------------------------------------------------------------------------------------

    def get_range(self, name: str, start: int, stop: int) -> bytes:
        return self._read(lambda: self._store.get_range(name, start, stop))

    def size(self, name: str) -> int:
        return self._read(lambda: self._store.size(name))

    def exists(self, name: str) -> bool:
        self._admit_read()
        if self._store.exists(name):
            return True
        self.check()
        return False

    def _admit_read(self) -> None:
        """Check the owner, unless that was done. If there never was one, that is no error."""
        if self._is_checked:
            return
        owner = self._owner()
        if owner or self._recorded_owner():
            self._require(owner)
        self._is_checked = True

    def _read(self, read: Callable[[], T]) -> T:
        self._admit_read()
        try:
            return read()
        except ColdMissing:
            self.check()
            raise
        except ColdUnavailable:
            self._is_checked = False  # What is mounted next may be another place.
            raise
