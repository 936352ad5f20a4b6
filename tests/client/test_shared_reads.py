"""The stored reads that watches of one client share."""

from __future__ import annotations

import pytest

from ringlog.client.read.pages import Cursor
from ringlog.client.read.record_batches import FrameRecordBatch
from ringlog.client.watches.shared_reads import PageLimits, SharedFrame, SharedPage, SharedReads
from ringlog.envelope.messages import Located
from ringlog.frame import encode_records, frame
from ringlog.frame.view import open_frame
from ringlog.link.subscription import LocationHint

HINT = LocationHint(1, 1, 7, 4096, 8192)


def reading(topic_id, *, hint=HINT, epoch=3):
    view = open_frame(frame(encode_records([b"x" * 1_000]), topic_id=topic_id), seed=None, verify=False)
    return SharedFrame(
        Located("t", topic_id, epoch, 0, 0, 1, 1, 1, 1, 1, False, []),
        1,
        2,
        epoch,
        hint,
        (FrameRecordBatch(view),),
        1,
        Cursor(epoch, hint.last_seq),
    )


@pytest.fixture
def size():
    return reading(1).batches[0].view.total_bytes


def test_a_frame_is_found_only_at_its_position_in_its_epoch():
    shared, left = SharedReads(), reading(1)
    shared.put_frame(1, left)
    assert shared.get_frame(1, 3, HINT) is left
    assert shared.get_frame(2, 3, HINT) is None
    assert shared.get_frame(1, 4, HINT) is None
    assert shared.get_frame(1, 3, HINT._replace(offset=0)) is None


def test_the_last_frame_of_a_topic_replaces_the_previous_one(size):
    shared = SharedReads(bytes_max=size)
    for n in range(5):
        hint = HINT._replace(first_seq=n, last_seq=n)
        last = reading(1, hint=hint)
        shared.put_frame(1, last)
        assert shared.get_frame(1, 3, hint) is last
    assert len(shared) == 1


def test_stored_frames_are_bounded_by_bytes_and_the_oldest_is_dropped_first(size):
    shared = SharedReads(bytes_max=3 * size)
    for topic_id in range(10):
        shared.put_frame(topic_id, reading(topic_id))
    assert [shared.get_frame(topic_id, 3, HINT) is not None for topic_id in range(10)] == [False] * 7 + [
        True
    ] * 3
    too_large = SharedReads(bytes_max=size - 1)
    too_large.put_frame(1, reading(1))
    assert len(too_large) == 0


LIMITS = PageLimits(10, 1_000)


def shared_page(topic_id=1, *, epoch=3, after=0):
    left = reading(topic_id, epoch=epoch)
    return SharedPage(left.located, 1, epoch, LIMITS, left.batches, Cursor(epoch, after + 1), 7, 8192)


def test_a_page_is_found_only_for_its_position_epoch_and_limits():
    shared, left = SharedReads(), shared_page()
    shared.put_page(1, 0, left)
    assert shared.get_page(1, Cursor(3, 0), LIMITS) is left
    assert shared.get_page(1, Cursor(3, 1), LIMITS) is None
    assert shared.get_page(1, Cursor(4, 0), LIMITS) is None
    assert shared.get_page(2, Cursor(3, 0), LIMITS) is None
    assert shared.get_page(1, Cursor(3, 0), PageLimits(10, 999)) is None


def test_stored_pages_are_bounded_by_pinned_bytes_and_the_oldest_is_dropped_first():
    view = open_frame(frame(encode_records([b"x" * 1_000]), topic_id=1), seed=None, verify=False)
    pinned = memoryview(view.whole_frame_view.body.obj).nbytes
    shared = SharedReads(bytes_max=3 * pinned)
    for after in range(10):
        shared.put_page(1, after, shared_page(after=after))
    kept = [n for n in range(10) if shared.get_page(1, Cursor(3, n), LIMITS) is not None]
    assert kept == [7, 8, 9]
    shared.put_page(1, 9, shared_page(after=9))
    assert len(shared) == 3, "left once more it counts once"
    too_large = SharedReads(bytes_max=pinned - 1)
    too_large.put_page(1, 0, shared_page())
    assert len(too_large) == 0


def test_a_forked_child_waits_for_no_lock_of_its_parent():
    """A thread of the parent that held a lock at the fork does not exist in the child."""
    shared, left = SharedReads(), reading(1)
    with shared._lock, shared._frames._lock, shared._pages._lock:
        shared.restart_in_child()
        shared.follow(1)
        shared.put_frame(1, left)
        shared.unfollow(1)
    assert shared.get_frame(1, 3, HINT) is left
