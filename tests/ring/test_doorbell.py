"""Bells wake a sleeping process. Lost or repeated rings cause no error."""

from __future__ import annotations

import os
import resource
import select
from pathlib import Path

import pytest

from ringlog.errors import RingError
from ringlog.ring.doorbell import BellListener, BellRinger, EventBell, make_bell
from tests.support.ring_children import Child


def is_ringing(bell: BellListener | EventBell, wait_s: float = 0.0) -> bool:
    return bool(select.select([bell], [], [], wait_s)[0])


def test_a_ring_wakes_the_listener_and_drain_clears_it(shm_dir: Path) -> None:
    path = str(shm_dir / "bell")
    make_bell(path)
    assert os.stat(path).st_mode & 0o777 == 0o600
    listener, ringer = BellListener(path), BellRinger(path)
    assert not is_ringing(listener)
    assert (ringer.ring(), ringer.ring()) == (True, True)
    assert is_ringing(listener)
    assert listener.drain() == 2
    assert (is_ringing(listener), listener.drain()) == (False, 0)
    listener.close()
    ringer.close()


@pytest.mark.slow
def test_the_death_of_a_ringer_does_not_close_the_pipe(shm_dir: Path) -> None:
    path = str(shm_dir / "bell")
    make_bell(path)
    listener = BellListener(path)
    assert Child(lambda: BellRinger(path).ring()).wait() == 0
    assert is_ringing(listener, 5.0)
    assert listener.drain() == 1
    assert not is_ringing(listener), "a dead ringer is no end of file"
    listener.close()


def test_a_full_pipe_is_already_a_wake_up(shm_dir: Path) -> None:
    """The ringer never blocks (RF-35)."""
    path = str(shm_dir / "bell")
    make_bell(path)
    listener, ringer = BellListener(path), BellRinger(path)
    assert all(ringer.ring() for _ in range(70_000))
    assert listener.drain() >= 4_096
    assert not is_ringing(listener)
    listener.close()
    ringer.close()


@pytest.mark.slow
def test_a_ringer_without_free_descriptors_returns_false_and_recovers(shm_dir: Path) -> None:
    """The frame is already published, so an error of the ringer would be wrong (RF-19)."""
    path = str(shm_dir / "bell")
    make_bell(path)

    def ring() -> None:
        ringer = BellRinger(path)
        soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
        resource.setrlimit(resource.RLIMIT_NOFILE, (3, hard))
        assert ringer.ring() is False
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
        assert ringer.ring() is True

    listener = BellListener(path)
    assert Child(ring).wait() == 0
    assert listener.drain() == 1
    listener.close()


def test_ringing_without_a_listener_is_no_error_and_works_later(shm_dir: Path) -> None:
    path = str(shm_dir / "bell")
    ringer = BellRinger(path)
    assert ringer.ring() is False, "no pipe"
    make_bell(path)
    assert ringer.ring() is False, "no listener"
    first = BellListener(path)
    assert ringer.ring() is True
    first.close()
    assert ringer.ring() is False, "the listener died"
    second = BellListener(path)
    assert ringer.ring() is True
    assert is_ringing(second)
    second.close()
    second.close()
    ringer.close()


@pytest.mark.parametrize("kind", ["file", "symlink", "loose"])
def test_a_path_that_is_not_a_private_pipe_is_refused(shm_dir: Path, kind: str) -> None:
    """Neither end writes into another file (RF-111)."""
    path, bell = shm_dir / "bell", shm_dir / "real"
    make_bell(str(bell))
    if kind == "file":
        path.write_bytes(b"")
    elif kind == "symlink":
        path.symlink_to(bell)
    else:
        os.rename(bell, path)
        path.chmod(0o666)
        somebody = os.open(path, os.O_RDWR | os.O_NONBLOCK)
    for use in (BellListener, lambda p: BellRinger(p).ring()):
        with pytest.raises(RingError, match=r"bell|ring"):
            use(str(path))
    if kind == "loose":
        os.close(somebody)


def test_make_bell_refuses_an_existing_path(shm_dir: Path) -> None:
    make_bell(str(shm_dir / "bell"))
    with pytest.raises(RingError, match="File exists"):
        make_bell(str(shm_dir / "bell"))


def test_an_event_bell_counts_rings_until_it_is_closed() -> None:
    bell = EventBell()
    assert bell.drain() == 0
    bell.ring()
    bell.ring()
    assert is_ringing(bell)
    assert (bell.drain(), bell.drain()) == (2, 0)
    bell.close()
    bell.close()
    bell.ring()


def test_an_event_bell_at_its_limit_still_wakes() -> None:
    bell = EventBell()
    os.eventfd_write(bell.fileno(), (1 << 64) - 2)
    bell.ring()
    bell.ring()
    assert is_ringing(bell)
    bell.close()
