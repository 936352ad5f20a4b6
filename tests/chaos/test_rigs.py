"""The rigs: power cuts, and a block store that fails, loses and replays writes."""

from __future__ import annotations

import pytest

from tests.support.real_disks import in_private_mounts, needs_mounts

pytestmark = [needs_mounts, pytest.mark.slow]


@pytest.mark.parametrize("kind", ["ext4", "xfs"])
@pytest.mark.parametrize("flag", [1, 2])
def test_after_a_power_cut_only_synced_bytes_are_present(tmp_path, kind, flag):
    in_private_mounts(
        """
        import os
        from chaos.rigs.mount import volume
        with volume(args[0], scratch) as one:
            fd = os.open(one.root / "a", os.O_CREAT | os.O_RDWR)
            os.posix_fallocate(fd, 0, 65536)
            os.pwrite(fd, b"x" * 5000, 0)
            os.fsync(fd)
            folder = os.open(one.root, os.O_RDONLY)
            os.fsync(folder)
            os.close(folder)
            os.pwrite(fd, b"y" * 5000, 8192)
            one.cut(int(args[1]))
            try:
                os.fdatasync(fd)
            except OSError as e:
                print(e.errno)
            else:
                raise SystemExit("a sync after the cut succeeds")
            os.close(fd)
            one.down()
            one.up()
            data = (one.root / "a").read_bytes()
            assert data[:5000] == b"x" * 5000 and b"y" not in data
        """,
        tmp_path, kind, str(flag),
    )  # fmt: skip


def test_the_process_of_a_device_holds_no_mount_of_it(tmp_path):
    """Otherwise its end, after a kill of the harness, would wait for the device that it serves itself."""
    in_private_mounts(
        """
        import os
        from chaos.rigs.blockstore import stored_volume
        with stored_volume("ext4", scratch) as stored:
            server = stored.store._process.pid
            assert os.readlink(f"/proc/{server}/ns/mnt") != os.readlink("/proc/self/ns/mnt")
            assert str(scratch) in Path("/proc/self/mounts").read_text()
            assert str(scratch) not in Path(f"/proc/{server}/mounts").read_text()
        """,
        tmp_path,
    )


@pytest.mark.parametrize("kind", ["ext4", "xfs"])
def test_a_failed_write_is_reported_by_one_sync_only(tmp_path, kind):
    """This shows the behaviour of the kernel. Without it the classes would prove nothing."""
    in_private_mounts(
        """
        import os
        from chaos.rigs.blockstore import stored_volume
        from chaos.rigs.extents import range_of
        with stored_volume(args[0], scratch) as stored:
            path = stored.volume.root / "a"
            fd = os.open(path, os.O_CREAT | os.O_RDWR)
            os.posix_fallocate(fd, 0, 65536)
            os.pwrite(fd, b"x" * 4096, 0)
            os.fsync(fd)
            where = range_of(path)
            os.pwrite(fd, b"y" * 4096, 4096)
            stored.store.mode("write_eio", low=where.low, high=where.high)
            try:
                os.fdatasync(fd)
            except OSError:
                os.close(fd)
            else:
                raise SystemExit("no error")
            stored.store.mode("ok")
            again = os.open(path, os.O_RDWR)
            assert os.pread(again, 4096, 4096) == b"y" * 4096
            os.fdatasync(again)
            os.close(again)
            assert stored.store.seen()["write_errors"] > 0
            stored.power_cycle()
            assert path.read_bytes()[4096:8192] == bytes(4096)
        """,
        tmp_path, kind,
    )  # fmt: skip


def test_a_recorded_device_can_be_restored_to_each_state(tmp_path):
    in_private_mounts(
        """
        import os
        from chaos.rigs.blockstore import stored_volume
        with stored_volume("ext4", scratch) as stored:
            volume, store = stored.volume, stored.store
            volume.down()
            store.record()
            stored.loop.forget()
            volume.up()
            for name in ("a", "b", "c"):
                fd = os.open(volume.root / name, os.O_CREAT | os.O_RDWR)
                os.pwrite(fd, name.encode() * 3000, 0)
                os.fsync(fd)
                os.close(fd)
            volume.down()
            entries = store.recorded()
            found = []
            for base in [i + 1 for i, entry in enumerate(entries) if not entry.is_write]:
                store.show(base)
                stored.loop.forget()
                volume.up()
                found.append(sum((volume.root / name).exists() for name in "abc"))
                volume.down()
            assert found == sorted(found) and {0, 1, 2, 3} == set(found), found
        """,
        tmp_path,
    )  # fmt: skip


def test_a_slow_store_delays_syncs_and_a_dead_one_fails_them(tmp_path):
    in_private_mounts(
        """
        import os, time
        from chaos.rigs.blockstore import stored_volume
        with stored_volume("ext4", scratch) as stored:
            fd = os.open(stored.volume.root / "a", os.O_CREAT | os.O_RDWR)
            stored.store.mode("ok", delay_s=0.2)
            begun = time.monotonic()
            os.pwrite(fd, b"x", 0)
            os.fsync(fd)
            assert time.monotonic() - begun >= 0.2
            stored.store.mode("dead")
            os.pwrite(fd, b"x" * 9000, 0)
            try:
                os.fsync(fd)
            except OSError:
                os.close(fd)
            else:
                raise SystemExit("a dead device syncs")
        """,
        tmp_path,
    )  # fmt: skip
