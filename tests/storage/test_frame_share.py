"""Frames that the watches of one client have in common."""

from __future__ import annotations

import threading

import pytest

from ringlog.frame import encode_records, frame
from ringlog.frame.view import open_frame
from ringlog.storage.frame_share import FrameShare, Place


@pytest.fixture
def view():
    return open_frame(frame(encode_records([b"x" * 1_000]), topic_id=1), seed=None, verify=False)


def place(n):
    return Place("shard-00/wal/1.wal", 7, 4096 * n)


def test_the_second_reader_finds_what_the_first_left(view):
    share = FrameShare()
    share.readers = 2
    assert share.get(place(1)) is None
    share.leave(place(1), view)
    assert share.get(place(1)) is view
    assert share.get(place(2)) is None
    assert share.get(place(1)._replace(salt=8)) is None, "another life of the file"


def test_a_reader_alone_keeps_nothing(view):
    share = FrameShare()
    share.readers = 1
    share.leave(place(1), view)
    assert len(share) == 0


def test_memory_is_bounded_and_the_oldest_goes_first(view):
    share = FrameShare(bytes_max=3 * view.total_bytes)
    share.readers = 2
    for n in range(10):
        share.leave(place(n), view)
    assert len(share) == 3
    assert [share.get(place(n)) is view for n in range(10)] == [False] * 7 + [True] * 3
    too_large = FrameShare(bytes_max=view.total_bytes - 1)
    too_large.readers = 2
    too_large.leave(place(1), view)
    assert len(too_large) == 0


def test_the_same_frame_left_twice_counts_once(view):
    share = FrameShare(bytes_max=2 * view.total_bytes)
    share.readers = 2
    for _ in range(5):
        share.leave(place(1), view)
    share.leave(place(2), view)
    assert [share.get(place(n)) is view for n in (1, 2)] == [True, True]


def test_threads_leave_beside_each_other_within_the_bound(view):
    share = FrameShare(bytes_max=8 * view.total_bytes)
    share.readers = 4

    def leave(first):
        for n in range(first, first + 500):
            share.leave(place(n), view)

    threads = [threading.Thread(target=leave, args=(1_000 * n,)) for n in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(share) <= 8
