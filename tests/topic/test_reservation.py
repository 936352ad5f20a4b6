"""Reservation of seqs ahead of the head of a topic."""

from __future__ import annotations

from ringlog.limits import HEAD_RESERVATION_MAX, HEAD_RESERVATION_MIN, SEQ_MAX
from ringlog.topic.reservation import Reservation


def test_a_write_below_the_reservation_needs_no_new_one():
    reservation = Reservation()
    assert reservation.needed(1)
    assert reservation.extend(1, 0, 100_000) == 257
    assert not reservation.needed(256)
    assert reservation.needed(257)


def test_a_reservation_exceeds_the_write_and_the_previous_reservation():
    """It is at least 256 above the larger of both."""
    reservation = Reservation()
    assert reservation.extend(10_000, 0, 1) == 10_000 + HEAD_RESERVATION_MIN
    assert reservation.extend(5, 10_000_000, 1) == 10_000 + 2 * HEAD_RESERVATION_MIN


def test_the_step_is_bounded_and_a_reservation_ends_at_seq_max():
    reservation = Reservation()
    for i in range(20):
        before = reservation.reserved
        assert reservation.extend(before, i + 1, 1_000_000) - before <= HEAD_RESERVATION_MAX
    assert reservation.extend(SEQ_MAX - 3, 30, 1) == SEQ_MAX


def test_restore_only_grows_and_settle_shrinks_to_the_head():
    reservation = Reservation()
    reservation.restore(500)
    reservation.restore(300)
    assert reservation.reserved == 500
    reservation.settle(42)
    assert reservation.needed(42)
