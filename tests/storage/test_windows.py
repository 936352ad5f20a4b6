"""Files of readers: their descriptors are closed, and no finalizer runs for a file that was closed."""

from __future__ import annotations

import enum
import gc
from pathlib import Path

import numpy as np
import pytest

from ringlog.frame import batch
from ringlog.frame.layout import HEADER_WORDS, FrameType
from ringlog.storage import windows
from ringlog.storage.real_disk import RealDisk
from ringlog.storage.windows import PreadFile


@pytest.fixture
def path(tmp_path: Path) -> str:
    place = tmp_path / "file"
    place.write_bytes(bytes(range(64)))
    return str(place)


@pytest.fixture
def dropped(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Descriptors of the finalizers that run."""
    found: list[int] = []
    real = windows._OwnedDescriptor.__del__

    def counted(opened: windows._OwnedDescriptor) -> None:
        found.append(opened.fd)
        real(opened)

    monkeypatch.setattr(windows, "_unused", [])
    monkeypatch.setattr(windows._OwnedDescriptor, "__del__", counted)
    return found


def closed(fd: int) -> bool:
    return not Path(f"/proc/self/fd/{fd}").exists()


def test_closing_and_dropping_a_file_runs_no_finalizer(path: str, dropped: list[int]) -> None:
    """In a finalizer Python loses the exception of a signal."""
    for _ in range(10):
        file = PreadFile(RealDisk(), path)
        fd = file._open.fd
        assert bytes(file.window(8, 24).buffer) == bytes(range(8, 24))
        file.close()
        assert closed(fd)
        file.close()
        del file
    gc.collect()
    assert not dropped


def test_a_file_that_is_dropped_is_closed(path: str, dropped: list[int]) -> None:
    file = PreadFile(RealDisk(), path)
    fd = file._open.fd
    del file
    gc.collect()
    assert dropped == [fd]
    assert closed(fd)


def test_many_files_at_the_same_time_keep_a_bounded_number_of_objects(path: str, dropped: list[int]) -> None:
    files = [PreadFile(RealDisk(), path) for _ in range(windows._UNUSED_MAX + 5)]
    assert len({file._open.fd for file in files}) == len(files)
    for file in files:
        file.close()
    assert len(windows._unused) == windows._UNUSED_MAX


@pytest.mark.skipif(not hasattr(enum.EnumType, "__getattr__"), reason="Python 3.11 only")
def test_comparing_types_of_frames_runs_no_python(monkeypatch: pytest.MonkeyPatch) -> None:
    """numpy swallows every exception of an attribute lookup, also that of a signal."""
    asked: list[str] = []

    def looked_up(cls: type, name: str) -> object:
        asked.append(name)
        raise AttributeError(name)

    monkeypatch.setattr(enum.EnumType, "__getattr__", looked_up)
    words = np.zeros((3, HEADER_WORDS), dtype=np.uint64)
    assert not batch.is_of_type(words, FrameType.APPEND).any()
    assert not asked
