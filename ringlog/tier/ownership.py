"""Whose a cold store is. Two engines in one place would overwrite one another: segments have equal names.

The object `engine` holds the id of the engine whose segments lie there. The first one writes it. Before the
first segment is moved, the same id is written to `meta/cold-owner` of the data directory, and stays there. An
engine that lacks the setting of its cold tier knows by it where missing data parts may be. Once the store
has confirmed whose it is, `meta/cold-owner` says that too: a store without the object is another place from
then on, such as a mount point without its volume, and nothing is written there.
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
    """Make the store this engine's if it is nobody's; returns whose it is.

    Raises ColdUnavailable, DiskError, and CorruptData when the store does not keep what it was given.
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
        raise CorruptData("cold store does not keep whose it is", file=OWNER_OBJECT)
    if not is_confirmed:
        replace_file(disk, directory, COLD_OWNER, engine_id.encode() + _CONFIRMED)
    return owner


def _recorded_owner(disk: Disk, directory: str) -> bytes:
    """What the data directory says of its cold store; empty when it never had one."""
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
