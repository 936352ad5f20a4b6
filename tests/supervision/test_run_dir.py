"""Directories of the engine: private, and cleaned only if the engine created them."""

from __future__ import annotations

import fcntl
import os
from pathlib import Path

import pytest

from ringlog.board.board import Board
from ringlog.errors import NotConnected, StartRefused
from ringlog.storage.real_disk import RealDisk
from ringlog.supervision import run_dir as r
from ringlog.testing.clock import ManualClock


@pytest.fixture
def info(tmp_path: Path) -> r.EngineInfo:
    return r.EngineInfo(
        engine_id="e", start_id="s", shm_dir="/dev/shm/x", data_dir=str(tmp_path), shards=1, protocol=1,
        version="1", supervisor_pid=1,
    )  # fmt: skip


def test_a_new_directory_is_private(tmp_path: Path) -> None:
    path = str(tmp_path / "data")
    r.make_private_dir(RealDisk(), path, "data directory")
    assert os.stat(path).st_mode & 0o777 == 0o700


@pytest.mark.parametrize("mode", [0o701, 0o750, 0o777])
def test_a_directory_open_to_others_is_refused_with_the_chmod_command(tmp_path: Path, mode: int) -> None:
    path = tmp_path / "data"
    path.mkdir()
    path.chmod(mode)
    with pytest.raises(StartRefused, match=f"chmod 700 {path}"):
        r.make_private_dir(RealDisk(), str(path), "data directory")


def test_a_file_a_link_and_a_missing_parent_are_refused(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    (tmp_path / "real").mkdir(mode=0o700)
    (tmp_path / "link").symlink_to(tmp_path / "real")
    for name in ("file", "link"):
        with pytest.raises(StartRefused, match="not a directory"):
            r.make_private_dir(RealDisk(), str(tmp_path / name), "data directory")
    with pytest.raises(StartRefused, match="parent"):
        r.make_private_dir(RealDisk(), str(tmp_path / "a" / "b"), "data directory")


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can give a directory away")
def test_a_directory_of_another_user_is_refused(tmp_path: Path) -> None:
    (tmp_path / "data").mkdir(mode=0o700)
    os.chown(tmp_path / "data", 12345, -1)
    with pytest.raises(StartRefused, match="another user"):
        r.make_private_dir(RealDisk(), str(tmp_path / "data"), "data directory")


def test_a_shared_memory_directory_is_private_and_random_and_removable() -> None:
    one, two = r.make_shm_dir(lambda path: None), r.make_shm_dir(lambda path: None)
    try:
        assert one != two
        assert os.stat(one).st_mode & 0o777 == 0o700
        assert r.is_stale_shm_dir(one)
    finally:
        for path in (one, two):
            (Path(path) / "ring").write_text("x")
            r.remove_shm_dir(path)
    assert not os.path.exists(one)
    assert not r.is_stale_shm_dir(one)


def test_a_shared_memory_directory_is_on_record_before_it_exists() -> None:
    """If the supervisor dies between the two steps, the next one still finds the directory."""
    recorded: list[tuple[str, bool]] = []
    path = r.make_shm_dir(lambda path: recorded.append((path, os.path.exists(path))))
    r.remove_shm_dir(path)
    assert recorded == [(path, False)]


def test_only_directories_with_the_engines_name_pattern_are_removed(tmp_path: Path) -> None:
    for path in (
        str(tmp_path),
        "/dev/shm",
        f"/dev/shm/ringlog-{os.geteuid()}-0000000g",
        "",
        "/dev/shm/../tmp",
    ):
        r.remove_shm_dir(path)
    assert tmp_path.is_dir()
    link = Path(f"/dev/shm/ringlog-{os.geteuid()}-{os.getpid():08x}")
    link.symlink_to(tmp_path)
    try:
        assert not r.is_stale_shm_dir(str(link))
        r.remove_shm_dir(str(link))
        assert tmp_path.is_dir()
    finally:
        link.unlink()


def test_orphans_are_detected_by_their_lock_on_the_board(tmp_path: Path) -> None:
    """Every process of the engine inherits this lock (P3)."""
    assert not r.orphans_alive(str(tmp_path))
    Board.create(tmp_path).close()
    assert not r.orphans_alive(str(tmp_path))
    with open(tmp_path / "board", "rb") as held:
        fcntl.flock(held, fcntl.LOCK_SH)
        assert r.orphans_alive(str(tmp_path))
    assert not r.orphans_alive(str(tmp_path))


def test_a_too_small_shared_memory_is_refused_with_the_options() -> None:
    with pytest.raises(StartRefused, match=r"--shm-size.*run\.ring_bytes"):
        r.require_shm_space(1 << 60)


def test_engine_json_is_written_read_and_removed(tmp_path: Path, info: r.EngineInfo) -> None:
    r.write_engine_json(RealDisk(), str(tmp_path), info)
    assert r.read_engine_json(str(tmp_path)) == info
    assert os.stat(tmp_path / "engine.json").st_mode & 0o077 == 0
    r.remove_announcements(RealDisk(), str(tmp_path))
    with pytest.raises(NotConnected, match="no engine"):
        r.read_engine_json(str(tmp_path))
    r.remove_announcements(RealDisk(), str(tmp_path))


@pytest.mark.parametrize("content", [b"", b"[]", b"\xff\xfe", b'{"engine_id":1}'])
def test_an_unreadable_engine_json_raises_not_connected(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "engine.json").write_bytes(content)
    with pytest.raises(NotConnected, match="is corrupt"):
        r.read_engine_json(str(tmp_path))


def test_the_time_base_of_leases_changes_only_with_a_boot_of_the_host(
    tmp_path: Path,
) -> None:
    disk, clock = RealDisk(), ManualClock()
    base_us = clock.now_us() - clock.monotonic_ns() // 1_000
    assert r.time_base_us(disk, str(tmp_path), "boot-1", clock) == base_us
    clock.step(3_600)
    clock.advance(5)
    assert r.time_base_us(disk, str(tmp_path), "boot-1", clock) == base_us
    assert r.time_base_us(disk, str(tmp_path), "boot-2", clock) == base_us + 3_600_000_000
    (tmp_path / r.TIME_JSON).write_bytes(b"{torn")
    assert r.time_base_us(disk, str(tmp_path), "boot-2", clock) == base_us + 3_600_000_000
