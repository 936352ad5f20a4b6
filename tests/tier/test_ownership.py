"""A cold store belongs to one engine."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress

import pytest

from ringlog.errors import ColdUnavailable, DiskError
from ringlog.storage.disk import replace_file
from ringlog.storage.layout import COLD_OWNER
from ringlog.testing.disk import DiskFault, FaultyDisk, SimulatedDisk
from ringlog.tier.local import LocalStore
from ringlog.tier.ownership import OwnedStore
from ringlog.tier.store import ColdMissing
from tests.support.disk_files import create_file

NAME = f"packs/pack-{1 << 48:016x}.data"


def owned(disk, letters: str = "aa", data_dir: str = "/data", *, root: str = "/cold") -> OwnedStore:
    """Return a store as the engine with this id uses it."""
    return OwnedStore(LocalStore(disk, root), disk, data_dir, letters * 16)


def test_the_first_engine_claims_the_store_and_another_one_gets_its_owner():
    disk = SimulatedDisk("/data/meta", "/other/meta", "/cold")
    assert owned(disk, "aa", "/data").claim() == "aa" * 16
    assert owned(disk, "aa", "/data").claim() == "aa" * 16
    assert owned(disk, "bb", "/other").claim() == "aa" * 16
    disk.power_loss(1)
    assert owned(disk, "bb", "/other").claim() == "aa" * 16


def test_a_store_whose_owner_cannot_be_written_is_unavailable():
    disk = SimulatedDisk("/data/meta", "/cold")
    faulty = FaultyDisk(disk, DiskFault("write", 1, "ENOSPC"))
    with pytest.raises(ColdUnavailable):
        OwnedStore(LocalStore(faulty, "/cold"), disk, "/data", "aa" * 16).claim()
    assert owned(disk).claim() == "aa" * 16


def test_an_empty_directory_is_not_the_claimed_store():
    """A mount point without its volume: the engine writes nothing there, and the store is usable when the
    volume returns."""
    disk = SimulatedDisk("/data/meta", "/cold", "/bare")
    assert owned(disk).claim() == "aa" * 16
    with pytest.raises(ColdUnavailable, match="Mount its volume"):
        owned(disk, root="/bare").claim()
    assert disk.list_dir("/bare") == []
    assert owned(disk).claim() == "aa" * 16


@pytest.mark.parametrize("call", [1, 2, 3])
@pytest.mark.parametrize("op", ["write", "full_sync", "rename", "dir_sync"])
def test_a_failed_first_claim_can_be_repeated(op, call):
    disk = SimulatedDisk("/data/meta", "/cold")
    faulty = FaultyDisk(disk, DiskFault(op, call, "EIO"))
    with suppress(ColdUnavailable, DiskError):
        owned(faulty).claim()
    disk.power_loss(call)
    assert owned(disk).claim() == "aa" * 16


def test_a_claim_of_an_earlier_version_is_confirmed_by_the_store():
    disk = SimulatedDisk("/data/meta", "/cold", "/bare")
    replace_file(disk, "/data/meta", COLD_OWNER, b"aa" * 16)
    LocalStore(disk, "/cold").put("engine", f"/data/meta/{COLD_OWNER}")
    assert owned(disk).claim() == "aa" * 16
    with pytest.raises(ColdUnavailable):
        owned(disk, root="/bare").claim()


def store_calls(store: OwnedStore) -> list[tuple[str, Callable[[], object]]]:
    """Return every use of a store, except its claim."""
    return [
        ("get_range", lambda: store.get_range(NAME, 0, 9)),
        ("size", lambda: store.size(NAME)),
        ("exists", lambda: store.exists(NAME)),
        ("put", lambda: store.put(NAME, "/data/source")),
        ("make_durable", lambda: store.make_durable(NAME)),
        ("delete", lambda: store.delete(NAME)),
    ]


def with_object(*directories: str) -> SimulatedDisk:
    """Return a disk on which engine aa owns /cold and has moved an object there."""
    disk = SimulatedDisk("/data", "/data/meta", "/cold", *directories)
    create_file(disk, "/data/source", b"records")
    store = owned(disk)
    assert store.claim() == "aa" * 16
    store.put(NAME, "/data/source")
    return disk


def test_an_engine_does_not_use_the_store_of_another_one():
    """It had its own store before: its cold segments are there."""
    disk = with_object("/other/meta", "/mine")
    assert owned(disk, "bb", "/other", root="/mine").claim() == "bb" * 16
    before = disk.contents()
    for name, use in store_calls(owned(disk, "bb", "/other")):
        with pytest.raises(ColdUnavailable, match="belongs to another engine"):
            use()
        assert disk.contents() == before, name


def test_a_store_without_owner_can_be_read_by_an_engine_that_never_claimed_one():
    """A restored engine finds its objects before its first claim, and on a volume that is read-only. Whether
    one is missing is not known: the place may be an empty mount point."""
    disk = SimulatedDisk("/data", "/data/meta", "/cold")
    create_file(disk, "/data/source", b"records")
    LocalStore(disk, "/cold").put(NAME, "/data/source")
    store = owned(disk)
    assert store.get_range(NAME, 0, 9) == b"records"
    assert store.size(NAME) == 7
    assert owned(disk).exists(NAME)
    other = NAME.replace(".data", ".idx")
    for use in (lambda: store.get_range(other, 0, 9), lambda: store.size(other), lambda: store.exists(other)):
        with pytest.raises(ColdUnavailable, match="Mount its volume"):
            use()
    for use in (lambda: store.put(NAME, "/data/source"), lambda: store.delete(NAME), store.check):
        with pytest.raises(ColdUnavailable):
            use()
    assert store.get_range(NAME, 0, 9) == b"records"


def test_an_object_that_is_durable_at_once_needs_no_request_to_become_so():
    """In a bucket, the check of the owner costs two."""
    disk = with_object()

    class AsBucket(LocalStore):
        is_durable_at_once = True
        reads = 0

        def get_range(self, name, start, stop):
            self.reads += 1
            return super().get_range(name, start, stop)

    bucket = AsBucket(disk, "/cold")
    OwnedStore(bucket, disk, "/data", "aa" * 16).make_durable(NAME)
    assert not bucket.reads


def test_an_engine_without_cold_segments_has_nothing_to_remove_from_the_store_of_another_one():
    """A removal is complete then, and the object with the same name stays."""
    disk = with_object("/other/meta")
    owned(disk, "bb", "/other").delete(NAME)
    assert owned(disk).get_range(NAME, 0, 9) == b"records"


@pytest.mark.parametrize("is_used", [False, True], ids=["at the start", "while running"])
def test_an_object_is_not_missing_at_a_mount_point_without_its_volume(is_used):
    """Nothing is written there, and no removal is complete."""
    disk = with_object("/bare")
    local = LocalStore(disk, "/cold")
    for at in range(6):
        local.root = "/cold"
        store = OwnedStore(local, disk, "/data", "aa" * 16)
        if is_used:
            assert store.size(NAME) == 7
        local.root = "/bare"
        name, use = store_calls(store)[at]
        with pytest.raises(ColdUnavailable, match="Mount its volume"):
            use()
        assert disk.list_dir("/bare") == [], name
        local.root = "/cold"
        assert store.get_range(NAME, 0, 9) == b"records"


def test_a_volume_that_is_unmounted_during_a_removal_leaves_it_incomplete():
    disk = with_object("/bare")

    class IsUnmounted(LocalStore):
        def delete(self, name):
            self.root = "/bare"
            super().delete(name)

    with pytest.raises(ColdUnavailable, match="Mount its volume"):
        OwnedStore(IsUnmounted(disk, "/cold"), disk, "/data", "aa" * 16).delete(NAME)
    assert owned(disk).exists(NAME)


def test_an_object_is_missing_if_its_store_still_names_its_owner():
    disk = with_object()
    store = owned(disk)
    store.delete(NAME)
    store.delete(NAME)
    assert not store.exists(NAME)
    with pytest.raises(ColdMissing):
        store.size(NAME)
