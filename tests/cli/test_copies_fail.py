"""Backup and restore over a disk whose calls fail one by one: the result is an error, or a complete copy."""

from __future__ import annotations

import itertools
import shutil
from pathlib import Path

import pytest

import ringlog
from ringlog.cli.backup import BackupJob, copy_stopped
from ringlog.cli.copies import MANIFEST, changed_files, read_manifest
from ringlog.cli.restore import copy_back
from ringlog.errors import DiskError, UsageError
from ringlog.storage.real_disk import RealDisk
from ringlog.testing.faulty_disk import DiskFault, FaultyDisk
from ringlog.testing.real_engine import engine

pytestmark = [pytest.mark.slow, pytest.mark.timeout(180)]
CALLS_MIN, CALLS_MAX = 15, 2_000


@pytest.fixture(scope="module")
def stopped(tmp_path_factory) -> Path:
    """A data directory with a log and segments, of an engine that has stopped."""
    kept = tmp_path_factory.mktemp("stopped") / "data"
    with engine(wal={"shards": 1, "file_bytes": 1 << 20}, storage={"enabled": True}) as running:
        with ringlog.connect(running.url) as client:
            for n in range(3):
                client.append_many("t", [b"%d" % n * 1_000] * 500, durability="fsync")
        running.stop()
        shutil.copytree(running.data_dir, kept, ignore=shutil.ignore_patterns("run", "LOCK"))
    return kept


def sweep(kind, attempt, target):
    """Fail the first, then the second, ... call that changes the disk, until no call fails. Yield each
    number."""
    for nth in itertools.count(1):
        assert nth < CALLS_MAX
        shutil.rmtree(target, ignore_errors=True)
        disk = FaultyDisk(RealDisk(), DiskFault("any", nth, kind))
        try:
            attempt(disk)
        except DiskError:
            yield nth
        else:
            return  # Any other exception fails the test.


def is_whole(target: Path) -> bool:
    try:
        manifest = read_manifest(target)
    except UsageError:
        return False
    assert not changed_files(target, manifest.files), "what has a manifest is whole"
    return True


@pytest.mark.parametrize("kind", ["EIO", "ENOSPC"])
def test_a_backup_fails_with_an_error_or_is_complete(stopped, tmp_path, kind):
    target = tmp_path / "backup"

    def back_up(disk):
        copy_stopped(BackupJob(stopped, target, "", is_online=False, disk=disk), 1)

    unfinished = [not is_whole(target) for _ in sweep(kind, back_up, target)]
    # After the bytes of the manifest only syncs can fail. Before that, the copy does not count as a backup.
    assert sum(unfinished) >= len(unfinished) - 2 > CALLS_MIN
    assert is_whole(target), "the last try met no fault"


@pytest.mark.parametrize("kind", ["EIO", "ENOSPC"])
def test_a_restore_fails_with_an_error_or_is_complete(stopped, tmp_path, kind):
    backup, target = tmp_path / "backup", tmp_path / "restored"
    manifest = copy_stopped(BackupJob(stopped, backup, "", is_online=False, disk=RealDisk()), 1)
    tries = list(sweep(kind, lambda disk: copy_back(disk, backup, target, manifest.files), target))
    assert len(tries) > CALLS_MIN
    assert not changed_files(target, manifest.files)


def test_a_short_write_is_continued(stopped, tmp_path):
    """A file system may accept half of a write. The copy must also contain the other half."""
    target = tmp_path / "backup"
    disk = FaultyDisk(RealDisk(), DiskFault("write", 1, "short"))
    copy_stopped(BackupJob(stopped, target, "", is_online=False, disk=disk), 1)
    assert is_whole(target)
    assert (target / MANIFEST).exists()
