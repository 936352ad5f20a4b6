"""A cold store belongs to one engine."""

from __future__ import annotations

import pytest

from ringlog.errors import ColdUnavailable
from ringlog.testing.disk import Fault, FaultyDisk, SimulatedDisk
from ringlog.tier.local import LocalStore
from ringlog.tier.ownership import claim


def test_the_first_engine_claims_it_and_another_is_told_whose_it_is():
    disk = SimulatedDisk("/data/meta", "/other/meta", "/cold")
    store = LocalStore(disk, "/cold")
    assert claim(store, disk, "/data", "aa" * 16) == "aa" * 16
    assert claim(store, disk, "/data", "aa" * 16) == "aa" * 16
    assert claim(store, disk, "/other", "bb" * 16) == "aa" * 16
    disk.power_loss(1)
    assert claim(store, disk, "/other", "bb" * 16) == "aa" * 16


def test_a_store_that_cannot_say_is_nobodys_to_use():
    disk = SimulatedDisk("/data/meta", "/cold")
    faulty = FaultyDisk(disk, Fault("write", 1, "ENOSPC"))
    with pytest.raises(ColdUnavailable):
        claim(LocalStore(faulty, "/cold"), disk, "/data", "aa" * 16)
    assert claim(LocalStore(disk, "/cold"), disk, "/data", "aa" * 16) == "aa" * 16
