"""What the watches of one client have read in common."""

from __future__ import annotations

import pytest

from ringlog.client.pages import Cursor
from ringlog.client.pieces import FramePiece
from ringlog.client.shared_reads import Reading, SharedReads
from ringlog.envelope.messages import Located
from ringlog.frame import encode_records, frame
from ringlog.frame.view import open_frame
from ringlog.link.delivery import Hint

HINT = Hint(1, 1, 7, 4096, 8192)


def reading(topic_id, *, hint=HINT, epoch=3):
    view = open_frame(frame(encode_records([b"x" * 1_000]), topic_id=topic_id), seed=None, verify=False)
    return Reading(
        Located("t", topic_id, epoch, 0, 0, 1, 1, 1, 1, 1, False, []),
        1,
        2,
        epoch,
        hint,
        (FramePiece(view),),
        1,
        Cursor(epoch, hint.last_seq),
    )


@pytest.fixture
def size():
    return reading(1).pieces[0].view.total_bytes


def test_only_the_same_place_of_the_same_life_is_found():
    shared, left = SharedReads(), reading(1)
    shared.leave(1, left)
    assert shared.get(1, 3, HINT) is left
    assert shared.get(2, 3, HINT) is None
    assert shared.get(1, 4, HINT) is None
    assert shared.get(1, 3, HINT._replace(offset=0)) is None


def test_the_last_reading_of_a_topic_replaces_the_one_before(size):
    shared = SharedReads(bytes_max=size)
    for n in range(5):
        hint = HINT._replace(first_seq=n, last_seq=n)
        last = reading(1, hint=hint)
        shared.leave(1, last)
        assert shared.get(1, 3, hint) is last
    assert len(shared) == 1


def test_bytes_are_bounded_and_the_oldest_goes_first(size):
    shared = SharedReads(bytes_max=3 * size)
    for topic_id in range(10):
        shared.leave(topic_id, reading(topic_id))
    assert [shared.get(topic_id, 3, HINT) is not None for topic_id in range(10)] == [False] * 7 + [True] * 3
    too_large = SharedReads(bytes_max=size - 1)
    too_large.leave(1, reading(1))
    assert len(too_large) == 0
