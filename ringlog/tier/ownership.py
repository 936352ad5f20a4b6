"""Ownership of a cold store: two engines in one store would overwrite each other, as segment names repeat.

The object `engine` in the store contains the id of the engine that owns it. The first engine writes it.
Before an engine moves its first segment, it writes its id to `meta/cold-owner` in the data directory. The
file stays there, so an engine without the setting of its cold tier knows where missing data parts may be.

After the store has confirmed the owner, `meta/cold-owner` records that as well. From then on a store without
the object is a different place, for example a mount point without its volume. The engine never writes to it.
"""

from __future__ import annotations

from ringlog.errors import ColdUnavailable, CorruptData
from ringlog.storage.disk import Disk, replace_file
from ringlog.storage.layout import COLD_OWNER, META_DIR
from ringlog.tier.store import ColdMissing, SegmentStore

OWNER_OBJECT = "engine"
_CONFIRMED = b" confirmed"
_ID_BYTES_MAX = 64


def claim_store(store: SegmentStore, disk: Disk, data_dir: str, engine_id: str) -> str:
    """Make this engine the owner of the store if it has none. Returns the id of the owner.

    Raises ColdUnavailable, DiskError, and CorruptData if the store does not return what was written.
    """
    directory = f"{data_dir}/{META_DIR}"
    owner = _owner(store)
    if owner != engine_id and owner:
        return owner
    is_confirmed = _recorded_owner(disk, directory).endswith(_CONFIRMED)
    if not owner and is_confirmed:
        raise ColdUnavailable(
            "the cold store is not the one that this engine moved segments to: it lacks the file `engine`. "
            "Mount its volume, or correct cold.dir or cold.url",
            file=OWNER_OBJECT,
        )  # fmt: skip
    if not owner:
        replace_file(disk, directory, COLD_OWNER, engine_id.encode())
        store.put(OWNER_OBJECT, f"{directory}/{COLD_OWNER}")
        owner = _owner(store)
    if not owner:
        raise CorruptData("cold store did not return the owner id that was written", file=OWNER_OBJECT)
    if not is_confirmed:
        replace_file(disk, directory, COLD_OWNER, engine_id.encode() + _CONFIRMED)
    return owner


def _recorded_owner(disk: Disk, directory: str) -> bytes:
    """Return the content of `meta/cold-owner`; empty if no segment was ever moved."""
    path = f"{directory}/{COLD_OWNER}"
    if not disk.exists(path):
        return b""
    fd = disk.open_read(path)
    try:
        return disk.read_at(fd, _ID_BYTES_MAX, 0)
    finally:
        disk.close(fd)


def _owner(store: SegmentStore) -> str:
    try:
        if not store.exists(OWNER_OBJECT):
            return ""
        return store.get_range(OWNER_OBJECT, 0, _ID_BYTES_MAX).decode("ascii", "replace")
    except ColdMissing:
        return ""
