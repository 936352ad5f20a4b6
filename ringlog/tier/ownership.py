"""Whose a cold store is. Two engines in one place would overwrite one another: segments have equal names.

The object `engine` holds the id of the engine whose segments lie there. The first one writes it. Before the
first segment is moved, the same id is written to `meta/cold-owner` of the data directory, and stays there. An
engine that lacks the setting of its cold tier knows by it where missing data parts may be.
"""

from __future__ import annotations

from ringlog.errors import CorruptData
from ringlog.storage.disk import Disk, replace_file
from ringlog.storage.layout import COLD_OWNER, META_DIR
from ringlog.tier.store import ColdMissing, SegmentStore

NAME = "engine"
_ID_BYTES_MAX = 64


def claim(store: SegmentStore, disk: Disk, data_dir: str, engine_id: str) -> str:
    """Make the store this engine's if it is nobody's; returns whose it is.

    Raises ColdUnavailable, DiskError, and CorruptData when the store does not keep what it was given.
    """
    directory = f"{data_dir}/{META_DIR}"
    owner = _owner(store)
    if owner != engine_id and owner:
        return owner
    if not disk.exists(f"{directory}/{COLD_OWNER}"):
        replace_file(disk, directory, COLD_OWNER, engine_id.encode())
    if owner:
        return owner
    store.put(NAME, f"{directory}/{COLD_OWNER}")
    owner = _owner(store)
    if not owner:
        raise CorruptData("cold store does not keep whose it is", file=NAME)
    return owner


def _owner(store: SegmentStore) -> str:
    try:
        return store.get_range(NAME, 0, _ID_BYTES_MAX).decode("ascii", "replace")
    except ColdMissing:
        return ""
