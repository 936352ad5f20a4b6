"""The hold of a backup: the engine sees it in another process, not longer than a day, not on a low disk."""

from __future__ import annotations

import errno
import fcntl
import os
from pathlib import Path

import pytest

from ringlog.limits import BACKUP_HOLD_S
from ringlog.storage.segment_hold import SegmentHold, hold_segments
from ringlog.testing import ManualClock


@pytest.fixture
def data_dir(tmp_path: Path) -> str:
    (tmp_path / "meta").mkdir()
    return str(tmp_path)


def test_a_hold_is_seen_until_the_last_backup_ends(data_dir: str) -> None:
    clock = ManualClock()
    reclaimer = SegmentHold(data_dir, clock, min_free_bytes=0)
    relocator = SegmentHold(data_dir, clock, min_free_bytes=0)
    assert not reclaimer.is_held()
    with hold_segments(data_dir):
        with hold_segments(data_dir):
            assert reclaimer.is_held()
        assert relocator.is_held()
    assert not reclaimer.is_held()
    assert not relocator.is_held()


def test_a_hold_counts_for_a_limited_time(data_dir: str) -> None:
    """A backup that hangs must not fill the disk."""
    clock = ManualClock()
    hold = SegmentHold(data_dir, clock, min_free_bytes=0)
    with hold_segments(data_dir):
        assert hold.is_held()
        clock.advance(seconds=BACKUP_HOLD_S - 1)
        assert hold.is_held()
        clock.advance(seconds=1)
        assert not hold.is_held()
    assert not hold.is_held()
    with hold_segments(data_dir):
        assert hold.is_held(), "the next backup has its own time"


def test_a_hold_does_not_count_while_the_disk_is_low(data_dir: str) -> None:
    """The engine would refuse writes although it can free space."""
    with hold_segments(data_dir):
        assert not SegmentHold(data_dir, ManualClock(), min_free_bytes=1 << 62).is_held()


@pytest.mark.parametrize("code", [errno.EMFILE, errno.EIO])
def test_a_lock_that_cannot_be_checked_counts_as_a_backup(data_dir: str, monkeypatch, code: int) -> None:
    """Nothing is deleted then, and the process goes on."""
    hold = SegmentHold(data_dir, ManualClock(), min_free_bytes=0)

    def fail(*_: object) -> int:
        raise OSError(code, os.strerror(code))

    with monkeypatch.context() as patched:
        patched.setattr(os, "open", fail)
        assert hold.is_held()
    assert not hold.is_held()
    with monkeypatch.context() as patched:
        patched.setattr(fcntl, "flock", fail)
        assert hold.is_held()
    assert not hold.is_held()


def test_a_directory_without_metadata_is_not_held(tmp_path: Path) -> None:
    assert not SegmentHold(str(tmp_path), ManualClock(), min_free_bytes=0).is_held()
