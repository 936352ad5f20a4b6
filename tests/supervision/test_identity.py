"""Incarnation numbers only grow and are never used twice, whichever process dies at any time (P1)."""

from __future__ import annotations

from pathlib import Path

import pytest

from ringlog.errors import DiskError, StartRefused
from ringlog.storage.real_disk import RealDisk
from ringlog.supervision.identity import EngineIdentity


def test_an_empty_directory_gets_a_random_engine_id(tmp_path: Path) -> None:
    (tmp_path / "a").mkdir()
    (tmp_path / "b").mkdir()
    first = EngineIdentity(RealDisk(), str(tmp_path / "a"))
    assert len(bytes.fromhex(first.engine_id)) == 16
    assert first.engine_id != EngineIdentity(RealDisk(), str(tmp_path / "b")).engine_id


def test_the_engine_id_stays_and_incarnations_grow_over_starts(tmp_path: Path) -> None:
    taken, ids = [], set()
    for _ in range(4):
        identity = EngineIdentity(RealDisk(), str(tmp_path))
        ids.add(identity.engine_id)
        assert identity.record_start("/dev/shm/x", 3) > max(taken, default=0)
        taken += [identity.allocate_incarnation() for _ in range(40)]
    assert len(ids) == 1
    assert taken == sorted(set(taken))


def test_an_incarnation_is_durable_before_it_is_used(tmp_path: Path) -> None:
    """After each allocation, a start from the current disk contents allocates only greater numbers (P1)."""
    identity = EngineIdentity(RealDisk(), str(tmp_path))
    identity.record_start("/dev/shm/x", 2)
    for _ in range(40):
        taken = identity.allocate_incarnation()
        stored = (tmp_path / "meta" / "engine").read_bytes()
        other = tmp_path / f"copy-{taken}"
        (other / "meta").mkdir(parents=True)
        (other / "meta" / "engine").write_bytes(stored)
        assert EngineIdentity(RealDisk(), str(other)).allocate_incarnation() > taken


def test_an_incarnation_that_is_not_durable_is_not_allocated(tmp_path: Path) -> None:
    """On a full disk the failed block stays unused, and a later success continues with it."""
    disk = RealDisk()
    identity = EngineIdentity(disk, str(tmp_path))
    identity.record_start("/dev/shm/x", 1)
    first = identity.allocate_incarnation()
    stored = (tmp_path / "meta" / "engine").read_bytes()
    (tmp_path / "meta" / "engine.tmp").mkdir()
    for _ in range(3):
        with pytest.raises(DiskError):
            identity.allocate_incarnation()
    assert (tmp_path / "meta" / "engine").read_bytes() == stored
    (tmp_path / "meta" / "engine.tmp").rmdir()
    assert identity.allocate_incarnation() == first + 1


def test_the_shm_directory_of_the_last_start_is_stored_until_it_is_removed(tmp_path: Path) -> None:
    identity = EngineIdentity(RealDisk(), str(tmp_path))
    identity.record_start("/dev/shm/x", 1)
    assert EngineIdentity(RealDisk(), str(tmp_path)).previous_shm_dir == "/dev/shm/x"
    identity.forget_shm_dir()
    assert EngineIdentity(RealDisk(), str(tmp_path)).previous_shm_dir == ""


@pytest.mark.parametrize("content", [b"", b"{}", b'{"engine_id":"x","next_incarnation":1}', b"\xff"])
def test_an_unreadable_identity_refuses_the_start_and_is_not_changed(tmp_path: Path, content: bytes) -> None:
    """The engine never deletes a file that it cannot parse."""
    (tmp_path / "meta").mkdir()
    (tmp_path / "meta" / "engine").write_bytes(content)
    with pytest.raises(StartRefused, match="is corrupt"):
        EngineIdentity(RealDisk(), str(tmp_path))
    assert (tmp_path / "meta" / "engine").read_bytes() == content


def test_logs_without_an_identity_refuse_the_start(tmp_path: Path) -> None:
    (tmp_path / "wal" / "shard-00").mkdir(parents=True)
    with pytest.raises(StartRefused, match="missing but the log exists"):
        EngineIdentity(RealDisk(), str(tmp_path))
