"""Grants through shared memory, with one scheduler and one client."""

from __future__ import annotations

import os
import select

import pytest

from ringlog.board.layout import BoardError
from ringlog.errors import RingError
from ringlog.limits import GRANT_RING_ROWS
from ringlog.link.channel.grant_ring import GrantReader, GrantWriter, remove_stale_grant_rings
from tests.support.grant_rows import rows


def told(taken):
    return [row[0] // 10 for row in taken.rows.tolist()]


@pytest.fixture
def writer(shm_dir):
    made = GrantWriter(str(shm_dir), "grants-00-1-1", 0)
    yield made
    made.close()


@pytest.fixture
def reader(writer, shm_dir):
    opened = GrantReader(str(shm_dir), "grants-00-1-1")
    yield opened
    opened.close()


def rang(reader):
    return bool(select.select([reader.fileno()], [], [], 0)[0])


def test_grants_written_before_the_client_opened_the_ring_are_received(writer, shm_dir):
    writer.write_grants(rows(0, 3))
    reader = GrantReader(str(shm_dir), "grants-00-1-1")
    taken = reader.take_grants()
    assert (told(taken), taken.is_complete) == ([0, 1, 2], True)
    reader.close()


def test_each_grant_is_taken_once_and_rings_the_bell(writer, reader):
    assert not reader.has_grants
    assert not rang(reader)
    writer.write_grants(rows(0, 1))
    writer.write_grants(rows(1, 5))
    assert reader.has_grants
    assert rang(reader)
    reader.drain_bell()
    assert not rang(reader)
    assert told(reader.take_grants()) == [0, 1, 2, 3, 4]
    assert not reader.has_grants
    taken = reader.take_grants()
    assert (told(taken), taken.is_complete) == ([], True)


def test_an_overrun_is_detected_by_the_client(writer, reader):
    """The scheduler never waits for a client."""
    for first in range(0, GRANT_RING_ROWS + 10, 10):
        writer.write_grants(rows(first, first + 10))
    taken = reader.take_grants()
    assert not taken.is_complete
    assert set(told(taken)) <= set(range(10, GRANT_RING_ROWS + 10))
    writer.write_grants(rows(7, 8))
    taken = reader.take_grants()
    assert (told(taken), taken.is_complete) == ([7], True)


def test_a_closed_ring_is_removed_and_its_reader_can_still_read_it(writer, reader, shm_dir):
    writer.write_grants(rows(0, 2))
    writer.close()
    assert os.listdir(shm_dir) == []
    assert told(reader.take_grants()) == [0, 1]
    with pytest.raises((BoardError, RingError)):
        GrantReader(str(shm_dir), "grants-00-1-1")


def test_a_new_scheduler_removes_only_its_own_stale_rings(shm_dir):
    left = GrantWriter(str(shm_dir), "grants-00-1-1", 0)
    others = GrantWriter(str(shm_dir), "grants-01-1-1", 1)
    remove_stale_grant_rings(str(shm_dir), 0)
    assert sorted(os.listdir(shm_dir)) == ["grants-01-1-1", "grants-01-1-1.bell"]
    left.close()
    others.close()


def test_a_ring_needs_a_bell_that_can_be_created(shm_dir):
    os.mkfifo(shm_dir / "grants-00-1-1.bell")
    with pytest.raises(RingError):
        GrantWriter(str(shm_dir), "grants-00-1-1", 0)
    assert not (shm_dir / "grants-00-1-1").exists()
