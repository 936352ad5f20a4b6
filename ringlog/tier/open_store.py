"""Opens the store of the cold tier that the settings name."""

from __future__ import annotations

from ringlog.config import ColdConfig
from ringlog.errors import ConfigError
from ringlog.storage.disk import Disk
from ringlog.tier.local import LocalStore
from ringlog.tier.objects import ObjectStore
from ringlog.tier.store import SegmentStore


def open_store(cold: ColdConfig, disk: Disk) -> SegmentStore | None:
    """Return the cold tier's store, or None if no cold tier is configured. Raises ConfigError."""
    if cold.dir and cold.url:
        raise ConfigError("cold.dir and cold.url: set one of them", dir=cold.dir, url=cold.url)
    if cold.dir:
        return LocalStore(disk, cold.dir)
    if cold.url:
        return ObjectStore(disk, cold.url, timeout_s=cold.timeout_s)
    return None
