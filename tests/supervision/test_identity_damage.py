"""A damaged or outdated meta/engine: its incarnation counter must never go back unnoticed (RF-70, RF-76)."""

from __future__ import annotations

from pathlib import Path

import msgspec
import pytest

from ringlog.errors import CorruptData, StartRefused
from ringlog.storage.identity_file import EngineFile
from ringlog.storage.layout import wal_name
from ringlog.storage.real_disk import RealDisk
from ringlog.supervision.identity import EngineIdentity
from ringlog.verify.identity_decoder import verify_identity
from tests.support.shard_world import World
from tests.support.shard_worlds import restart, started


def test_every_flipped_bit_of_the_identity_is_refused(tmp_path: Path) -> None:
    """A changed digit of the counter would allocate incarnations twice."""
    identity = EngineIdentity(RealDisk(), str(tmp_path))
    identity.record_start("/dev/shm/ringlog-0-0123abcd", 14)
    path = tmp_path / "meta" / "engine"
    sound = path.read_bytes()
    assert not verify_identity("meta/engine", sound).is_damaged
    for at in range(len(sound)):
        for bit in range(8):
            damaged = sound[:at] + bytes([sound[at] ^ 1 << bit]) + sound[at + 1 :]
            path.write_bytes(damaged)
            with pytest.raises(StartRefused):
                EngineIdentity(RealDisk(), str(tmp_path))
            assert verify_identity("meta/engine", damaged).is_damaged, (at, bit)


def test_an_identity_from_before_checksums_is_accepted(tmp_path: Path) -> None:
    (tmp_path / "meta").mkdir()
    old = {"engine_id": "0" * 32, "next_incarnation": 7, "shm_dir": ""}
    (tmp_path / "meta" / "engine").write_bytes(msgspec.json.encode(old))
    assert EngineIdentity(RealDisk(), str(tmp_path)).record_start("", 1) == 7
    assert msgspec.json.decode((tmp_path / "meta" / "engine").read_bytes(), type=EngineFile).check


def test_a_damaged_restore_id_is_refused(tmp_path: Path) -> None:
    assert not EngineIdentity(RealDisk(), str(tmp_path)).restore_id
    path = tmp_path / "meta" / "restored"
    for damaged in (b"", b"0123", b"0123456789abcdef\n", b"0123456789abcdeF"):
        path.write_bytes(damaged)
        with pytest.raises(StartRefused, match="meta/restored"):
            EngineIdentity(RealDisk(), str(tmp_path))
    path.write_bytes(b"0123456789abcdef")
    assert EngineIdentity(RealDisk(), str(tmp_path)).restore_id == "0123456789abcdef"


def test_an_identity_older_than_the_log_is_refused(tmp_path: Path) -> None:
    """The file is complete and valid, but from an old backup (RF-76)."""
    identity = EngineIdentity(RealDisk(), str(tmp_path))
    first = identity.record_start("", 4)
    stream = tmp_path / "wal" / "shard-00"
    stream.mkdir(parents=True)
    (stream / wal_name(first + 3, 0)).touch()
    EngineIdentity(RealDisk(), str(tmp_path))
    (stream / wal_name(first + 4, 0)).touch()
    with pytest.raises(StartRefused, match="older than the log"):
        EngineIdentity(RealDisk(), str(tmp_path))


def test_a_shard_with_an_old_incarnation_refuses_to_start_and_loses_no_record() -> None:
    world = started({"t": "fsync"})
    for n in range(3):
        world.append("t", [b"%d" % n])
        restart(world, "stop")
    again = World(world.disk, incarnation=1)
    world.kill()
    again.reboot()
    with pytest.raises(CorruptData, match="later incarnation"):
        again.start()
    sound = World(world.disk, incarnation=world.incarnation)
    sound.start()
    assert [payload for _, payload in sound.records("t")] == [b"0", b"1", b"2"]
