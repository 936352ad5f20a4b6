"""How far ahead a topic reserves (D-9)."""

from __future__ import annotations

from ringlog.limits import HEAD_RESERVATION_MAX, HEAD_RESERVATION_MIN, SEQ_MAX
from ringlog.topic.reservation import Reservation


def test_a_write_below_the_reservation_needs_none():
    reservation = Reservation()
    assert reservation.needed(1)
    assert reservation.extend(1, 0, 100_000) == 257
    assert not reservation.needed(256)
    assert reservation.needed(257)


def test_a_reservation_lies_beyond_the_write_and_beyond_the_one_before():
    """D-9: 256 more than the larger of both."""
    reservation = Reservation()
    assert reservation.extend(10_000, 0, 1) == 10_000 + HEAD_RESERVATION_MIN
    assert reservation.extend(5, 10_000_000, 1) == 10_000 + 2 * HEAD_RESERVATION_MIN


def test_the_step_is_bounded_and_numbers_end_at_the_bound():
    reservation = Reservation()
    for i in range(20):
        before = reservation.reserved
        assert reservation.extend(before, i + 1, 1_000_000) - before <= HEAD_RESERVATION_MAX
    assert reservation.extend(SEQ_MAX - 3, 30, 1) == SEQ_MAX


def test_what_was_found_only_grows_and_settling_shrinks_to_the_head():
    reservation = Reservation()
    reservation.restore(500)
    reservation.restore(300)
    assert reservation.reserved == 500
    reservation.settle(42)
    assert reservation.needed(42)
