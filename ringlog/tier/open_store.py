"""Opens the store of the cold tier that the settings name, for its engine or for a reader without one."""

from __future__ import annotations

from ringlog.config import ColdConfig
from ringlog.errors import ConfigError
from ringlog.storage.disk import Disk
from ringlog.tier.local import LocalStore
from ringlog.tier.objects import ObjectStore
from ringlog.tier.ownership import OwnedStore
from ringlog.tier.store import SegmentStore


def open_owned_store(cold: ColdConfig, disk: Disk, data_dir: str, engine_id: str) -> OwnedStore | None:
    """Return the cold tier's store as this engine uses it; None without a cold tier. Raises ConfigError."""
    store = open_store(cold, disk)
    return None if store is None else OwnedStore(store, disk, data_dir, engine_id)


def open_store(cold: ColdConfig, disk: Disk) -> SegmentStore | None:
    """Return the cold tier's store, of any engine; None without a cold tier. Raises ConfigError."""
    if cold.dir and cold.url:
        raise ConfigError("cold.dir and cold.url: set one of them", dir=cold.dir, url=cold.url)
    if cold.dir:
        return LocalStore(disk, cold.dir)
    if cold.url:
        return ObjectStore(disk, cold.url, timeout_s=cold.timeout_s)
    return None
