"""The tombstone decision: worked cases as a table, then the rules as properties."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ringlog.topic.tombstone import Floors, Gap, next_lost, plan_read


def _floors(head, earliest, cap=1, ttl=1, trim=1):
    return Floors(head, earliest, cap, ttl, trim)


CASES = [
    ("A", _floors(5, 4), 0, None, 3),
    ("B0", _floors(5, 3, cap=3), 0, (1, 2, "cap"), 2),
    ("B1", _floors(5, 3, cap=3), 1, (2, 2, "cap"), 2),
    ("B2", _floors(5, 3, cap=3), 2, None, 2),
    ("C0", _floors(5, 4, cap=3), 0, (1, 2, "cap"), 3),
    ("C2", _floors(5, 4, cap=3), 2, None, 3),
    ("D", _floors(6, 3), 0, None, 2),
    ("D7", _floors(7, 4, cap=4), 0, (1, 3, "cap"), 3),
    ("E0", _floors(8, 5, cap=5, ttl=3), 0, (1, 4, "mixed"), 4),
    ("E2", _floors(8, 5, cap=5, ttl=3), 2, (3, 4, "cap"), 4),
    ("F", _floors(5, 6, ttl=6), 0, (1, 5, "ttl"), 5),
    ("G", _floors(5, 1), 9, (1, 5, "recreated"), 0),
    ("I", _floors(5, 6), 0, None, 5),
    ("J", _floors(3, 2, cap=2), 0, (1, 1, "cap"), 1),
    ("source trim", _floors(5, 3, trim=3), 0, (1, 2, "source_trim"), 2),
]


@pytest.mark.parametrize(
    ("floors", "cursor", "gap", "after"), [case[1:] for case in CASES], ids=[c[0] for c in CASES]
)
def test_the_worked_cases_give_the_documented_tombstones(floors, cursor, gap, after):
    """CASES lists floors, cursor, and the expected gap and position."""
    plan = plan_read(cursor, floors)
    assert plan.gap == (Gap(*gap) if gap else None)
    assert (plan.after, plan.stop) == (after, floors.head_seq)


def test_a_lost_range_is_announced_between_the_records_around_it():
    """The first read stops before the range, and the second one starts with the tombstone."""
    floors = _floors(258, 1)
    first = plan_read(0, floors, [34, 257])
    assert (first.gap, first.after, first.stop) == (None, 0, 33)
    second = plan_read(33, floors, [34, 257])
    assert (second.gap, second.after, second.stop) == (Gap(34, 257, "restart_loss"), 257, 258)
    assert plan_read(257, floors, [34, 257]).gap is None


def test_a_cursor_inside_a_lost_range_gets_only_the_rest_of_it():
    """The gap starts at the greater of cursor + 1 and the start of the range."""
    plan = plan_read(100, _floors(258, 1), [34, 257])
    assert (plan.gap, plan.after) == (Gap(101, 257, "restart_loss"), 257)


def test_an_eviction_floor_above_a_lost_range_gives_one_tombstone():
    """The tombstone of the eviction covers the lost range."""
    plan = plan_read(0, _floors(300, 280, cap=280), [34, 257])
    assert (plan.gap, plan.after, plan.stop) == (Gap(1, 279, "cap"), 279, 300)


def test_an_eviction_floor_inside_a_lost_range_leaves_the_rest_for_the_next_read():
    """A reply contains one tombstone, and no tombstone is dropped."""
    floors = _floors(300, 258, cap=100)
    first = plan_read(0, floors, [34, 257])
    assert (first.gap, first.after, first.stop) == (Gap(1, 99, "cap"), 99, 99)
    second = plan_read(99, floors, [34, 257])
    assert (second.gap, second.after, second.stop) == (Gap(100, 257, "restart_loss"), 257, 300)


def test_a_lost_range_after_deleted_records_is_announced_at_once():
    """Deleted records give no tombstone, lost records do."""
    plan = plan_read(0, _floors(300, 258), [34, 257])
    assert (plan.gap, plan.after) == (Gap(34, 257, "restart_loss"), 257)


def test_recreated_takes_precedence_and_restarts_the_reader():
    """The same holds if the cursor is below the new head."""
    plan = plan_read(2, _floors(9, 4, cap=4), recreated=True)
    assert (plan.gap, plan.after, plan.stop) == (Gap(1, 9, "recreated"), 3, 9)


def test_a_recreated_empty_topic_misses_no_record():
    """The tombstone has an empty range."""
    plan = plan_read(7, _floors(0, 1), recreated=True)
    assert plan.gap == Gap(1, 0, "recreated")
    assert plan.gap.missed_estimate == 0
    assert (plan.after, plan.stop) == (0, 0)


def test_a_cursor_at_the_head_gets_no_tombstone():
    """The reader is caught up."""
    assert plan_read(5, _floors(5, 1)).gap is None


@st.composite
def _topics(draw):
    head = draw(st.integers(0, 60))
    evict = [draw(st.integers(1, head + 1)) for _ in range(3)]
    earliest = draw(st.integers(max(evict), head + 1))
    lost, at = [], 1
    for _ in range(draw(st.integers(0, 3))):
        first = draw(st.integers(at, at + 20))
        last = draw(st.integers(first, first + 10))
        lost += [first, last]
        at = last + 2
    return Floors(head, earliest, *evict), lost


@given(_topics(), st.integers(0, 60))
def test_every_pass_to_the_head_announces_each_lost_position_exactly_once(topic, start):
    """No involuntary loss is silent, no loss is announced twice, and every read advances."""
    floors, lost = topic
    cursor, announced, walked = min(start, floors.head_seq), [], set()
    first = cursor
    for _ in range(20):
        plan = plan_read(cursor, floors, lost)
        assert plan.after <= max(plan.stop, plan.after) <= floors.head_seq
        if plan.gap:
            announced += range(plan.gap.gap_from, plan.gap.gap_to + 1)
        walked.update(range(max(plan.after + 1, floors.earliest_seq), plan.stop + 1))
        assert plan.stop > cursor or plan.after > cursor or cursor == floors.head_seq
        cursor = max(plan.after, plan.stop)
        if cursor == floors.head_seq:
            break
    ranges = zip(lost[::2], lost[1::2], strict=True)
    dead = {seq for a, b in ranges for seq in range(a, b + 1)} | set(range(1, floors.evict_floor))
    due = {seq for seq in dead if first < seq <= floors.head_seq}
    assert len(announced) == len(set(announced))
    assert due <= set(announced)
    assert not walked & set(announced)


def test_a_lost_range_above_the_head_is_not_announced_yet():
    """No read moves a cursor beyond the head."""
    assert next_lost(5, 5, [6, 9]) is None
    assert next_lost(5, 7, [6, 9]) == (6, 7)
