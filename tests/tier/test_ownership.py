"""A cold store belongs to one engine."""

from __future__ import annotations

from contextlib import suppress

import pytest

from ringlog.errors import ColdUnavailable, DiskError
from ringlog.storage.disk import replace_file
from ringlog.storage.layout import COLD_OWNER
from ringlog.testing.disk import DiskFault, FaultyDisk, SimulatedDisk
from ringlog.tier.local import LocalStore
from ringlog.tier.ownership import claim_store


def test_the_first_engine_claims_the_store_and_another_one_gets_its_owner():
    disk = SimulatedDisk("/data/meta", "/other/meta", "/cold")
    store = LocalStore(disk, "/cold")
    assert claim_store(store, disk, "/data", "aa" * 16) == "aa" * 16
    assert claim_store(store, disk, "/data", "aa" * 16) == "aa" * 16
    assert claim_store(store, disk, "/other", "bb" * 16) == "aa" * 16
    disk.power_loss(1)
    assert claim_store(store, disk, "/other", "bb" * 16) == "aa" * 16


def test_a_store_whose_owner_cannot_be_written_is_unavailable():
    disk = SimulatedDisk("/data/meta", "/cold")
    faulty = FaultyDisk(disk, DiskFault("write", 1, "ENOSPC"))
    with pytest.raises(ColdUnavailable):
        claim_store(LocalStore(faulty, "/cold"), disk, "/data", "aa" * 16)
    assert claim_store(LocalStore(disk, "/cold"), disk, "/data", "aa" * 16) == "aa" * 16


def test_an_empty_directory_is_not_the_claimed_store():
    """A mount point without its volume: the engine writes nothing there, and the store is usable when the
    volume returns."""
    disk = SimulatedDisk("/data/meta", "/cold", "/bare")
    assert claim_store(LocalStore(disk, "/cold"), disk, "/data", "aa" * 16) == "aa" * 16
    with pytest.raises(ColdUnavailable, match="Mount its volume"):
        claim_store(LocalStore(disk, "/bare"), disk, "/data", "aa" * 16)
    assert disk.list_dir("/bare") == []
    assert claim_store(LocalStore(disk, "/cold"), disk, "/data", "aa" * 16) == "aa" * 16


@pytest.mark.parametrize("call", [1, 2, 3])
@pytest.mark.parametrize("op", ["write", "full_sync", "rename", "dir_sync"])
def test_a_failed_first_claim_can_be_repeated(op, call):
    disk = SimulatedDisk("/data/meta", "/cold")
    faulty = FaultyDisk(disk, DiskFault(op, call, "EIO"))
    with suppress(ColdUnavailable, DiskError):
        claim_store(LocalStore(faulty, "/cold"), faulty, "/data", "aa" * 16)
    disk.power_loss(call)
    assert claim_store(LocalStore(disk, "/cold"), disk, "/data", "aa" * 16) == "aa" * 16


def test_a_claim_of_an_earlier_version_is_confirmed_by_the_store():
    disk = SimulatedDisk("/data/meta", "/cold", "/bare")
    replace_file(disk, "/data/meta", COLD_OWNER, b"aa" * 16)
    LocalStore(disk, "/cold").put("engine", f"/data/meta/{COLD_OWNER}")
    assert claim_store(LocalStore(disk, "/cold"), disk, "/data", "aa" * 16) == "aa" * 16
    with pytest.raises(ColdUnavailable):
        claim_store(LocalStore(disk, "/bare"), disk, "/data", "aa" * 16)
