"""Which segments are dropped, rewritten and merged, and which leftover files may be removed."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from pyroaring import BitMap64

from ringlog.actors.reclaimer.orphan_files import SNAPSHOTS_BEFORE_REMOVAL, OrphanFiles, group_parts
from ringlog.actors.reclaimer.plan import (
    RegisteredSegment,
    SegmentLiveness,
    SegmentSpans,
    TopicLiveness,
    assess_segment,
    contiguous_parts,
    plan_rewrites,
    row_state,
    superseded_ranges,
)
from ringlog.envelope.messages import SegmentRef
from ringlog.limits import SHARED_SEGMENTS_MAX, SMALL_SEGMENTS_MAX
from ringlog.placement import shard_of
from ringlog.segment.layout import TOPIC_DTYPE, pack_stem, topic_stem

KIB = 1024


def held(
    number: int, *rows: tuple[int, int, int], epoch: int = 1, tier: int = 0, size: int = 100
) -> RegisteredSegment:
    """Return a registered segment. Rows are (topic, first, last), with 10 bytes a record."""
    table = np.zeros(len(rows), dtype=TOPIC_DTYPE)
    for at, (topic, first, last) in enumerate(sorted(rows)):
        table[at]["topic_id"], table[at]["epoch"] = topic, epoch
        table[at]["first_seq"], table[at]["last_seq"] = first, last
        table[at]["records"], table[at]["bytes"] = last - first + 1, 10 * (last - first + 1)
    stem = topic_stem(rows[0][0], rows[0][1], number) if len(rows) == 1 else pack_stem(number)
    ref = SegmentRef(number, stem, 1, size, int(table["records"].sum()), 1, len(rows), tier, number)
    return RegisteredSegment(ref, (0,), table)


def never(*_):
    raise AssertionError("no record needs to be counted")


@pytest.mark.parametrize(
    ("live", "state"),
    [
        (None, "alive"),
        (TopicLiveness(1, 1), "alive"),
        (TopicLiveness(0, 1), "dead"),
        (TopicLiveness(2, 1), "dead"),
        (TopicLiveness(1, 21), "dead"),
        (TopicLiveness(1, 20), "mixed"),
        (TopicLiveness(1, 1, BitMap64([15])), "mixed"),
        (TopicLiveness(1, 1, BitMap64(range(11, 21))), "dead"),
        (TopicLiveness(1, 15, BitMap64(range(15, 21))), "dead"),
        (TopicLiveness(1, 1, BitMap64([5, 50])), "alive"),
    ],
)
def test_a_topic_in_a_segment_is_dead_alive_or_mixed(live, state):
    """A deleted or recreated topic is dead. So are records below the floor and deleted records. An unknown
    topic counts as alive."""
    assert row_state(held(1, (7, 11, 20)).table[0], live) == state


def test_only_mixed_topics_are_counted():
    both = held(1, (7, 1, 10), (8, 1, 10), (9, 1, 10))
    lives = {7: TopicLiveness(1, 11), 8: TopicLiveness(1, 4), 9: TopicLiveness(1, 1)}
    seen = []

    def measure(_held, at, live, elsewhere):
        seen.append((at, live.earliest_seq, elsewhere))
        return 7, 70

    assert assess_segment(both, lives, {}, measure) == SegmentLiveness(17, 170, 300)
    assert seen == [(1, 4, [])]


def test_records_in_a_segment_with_a_greater_number_are_not_counted_twice():
    """A segment that a crash left next to its successor is dead."""
    old, new, other = held(1, (7, 1, 100)), held(9, (7, 31, 100)), held(2, (7, 101, 110))
    elsewhere, shared = superseded_ranges([old, new, other], never, 1)
    assert elsewhere == {1: {0: [(31, 100)]}}
    assert shared == {1, 9}
    assert assess_segment(old, {7: TopicLiveness(1, 31)}, elsewhere[1], never).records == 0
    assert assess_segment(new, {7: TopicLiveness(1, 31)}, {}, lambda *_: (70, 700)).records == 70


def test_two_epochs_of_a_topic_do_not_overlap():
    elsewhere, shared = superseded_ranges([held(1, (7, 1, 100)), held(2, (7, 1, 100), epoch=2)], never, 1)
    assert (elsewhere, shared) == ({}, set())


def test_a_segment_supersedes_only_records_that_it_contains():
    """A record is dead under a smaller number only if it is stored under a greater one."""
    inner, outer = held(1, (7, 11, 20)), held(9, (7, 1, 30))
    outer.table["records"] = 20
    elsewhere, _ = superseded_ranges([inner, outer], lambda *_: [(1, 10), (21, 30)], 1)
    assert elsewhere == {1: {0: [(1, 10), (21, 30)]}}
    assert assess_segment(inner, {7: TopicLiveness(1, 1)}, elsewhere[1], lambda *_: (10, 100)).records == 10


def alive_of(segments, share=1.0):
    return {
        each.ref.number: SegmentLiveness(
            max(1, int(each.ref.records * share)), int(each.table["bytes"].sum() * share),
            int(each.table["bytes"].sum()),
        )
        for each in segments
    }  # fmt: skip


def plan(segments, alive=None, left_alone=()):
    found = plan_rewrites(
        segments, alive or alive_of(segments), left_alone, segment_bytes=64 * KIB, segment_records=10**6
    )
    return [(each.reason, [source.ref.number for source in each.sources]) for each in found]


def test_a_segment_that_is_more_than_half_dead_is_sparse():
    """Exactly half is not sparse."""
    one = held(1, (7, 1, 100))
    assert plan([one], alive_of([one], 0.49)) == [("sparse", [1])]
    assert plan([one], alive_of([one], 0.5)) == []


@pytest.mark.parametrize("tier", [1, 2])
def test_cold_and_moving_segments_are_not_rewritten(tier):
    """A rewrite would bring cold data back to the hot tier."""
    one = held(1, (7, 1, 100), tier=tier)
    assert plan([one], alive_of([one], 0.1)) == []


def test_excluded_segments_are_not_rewritten():
    """Excluded are quarantined segments, and segments that share positions with others."""
    one = held(1, (7, 1, 100))
    assert plan([one], alive_of([one], 0.1), left_alone={1}) == []


def small(count, topic=7, base=0):
    return [held(n + 1, (topic, base + n * 10 + 1, base + n * 10 + 10)) for n in range(count)]


def test_small_adjacent_segments_are_merged_above_a_maximum_number():
    assert plan(small(SMALL_SEGMENTS_MAX)) == []
    assert plan(small(SMALL_SEGMENTS_MAX + 1)) == [("many small segments", list(range(1, 10)))]


def test_a_merge_makes_no_more_than_one_segment():
    segments = [held(n + 1, (7, n * 1500 + 1, n * 1500 + 1500)) for n in range(10)]
    assert [numbers for _, numbers in plan(segments)] == [[1, 2, 3, 4], [5, 6, 7, 8], [9, 10]]


def test_segments_with_another_segment_between_them_are_not_merged():
    """The greater number of the merged segment would hide the records between."""
    segments = small(12)
    segments[5] = held(99, (7, 51, 60), (8, 1, 5))
    assert [numbers for _, numbers in plan(segments)] == [[1, 2, 3, 4, 5], [7, 8, 9, 10, 11, 12]]


def test_shared_segments_are_merged_from_the_smallest_down_to_half_the_maximum():
    packs = [
        held(n, (7, n * 10, n * 10 + n), (8, n * 10, n * 10 + n)) for n in range(1, SHARED_SEGMENTS_MAX + 2)
    ]
    ((reason, numbers),) = plan(packs)
    assert reason == "many small topics' segments"
    assert numbers == [1, 2, 3, 4, 5, 6]
    assert plan(packs[:-1]) == []


def test_rows_of_a_topic_are_split_where_another_segment_lies_between():
    spans = SegmentSpans(
        [held(1, (7, 1, 5), (8, 1, 5)), held(2, (7, 6, 1000)), held(3, (7, 1001, 1005), (8, 6, 9))]
    )
    assert contiguous_parts(7, [(1, 5), (1001, 1005)], spans, {1, 3}) == [0, 1]
    assert contiguous_parts(8, [(1, 5), (6, 9)], spans, {1, 3}) == [0, 0]
    assert contiguous_parts(7, [(1, 5), (6, 1000), (1001, 1005)], spans, {1, 2, 3}) == [0, 0, 0]


# -- leftover files -----------------------------------------------------------------------------------


def test_a_leftover_may_be_removed_after_three_more_snapshots_of_every_shard():
    """Two snapshots are kept, and one more may have been captured before."""
    left = OrphanFiles()
    left.add(["packs/pack-1"], {0: 5, 1: 9})
    assert left.removable({0: 5 + SNAPSHOTS_BEFORE_REMOVAL, 1: 9 + SNAPSHOTS_BEFORE_REMOVAL - 1}) == []
    left.add(["packs/pack-1"], {0: 7, 1: 11})
    assert left.removable({0: 8, 1: 12}) == ["packs/pack-1"], "a second sighting must not restart the wait"
    left.discard(["packs/pack-1"])
    assert left.removable({0: 100, 1: 100}) == []


def test_a_shard_that_did_not_reply_when_a_leftover_was_found_counts_from_its_first_reply():
    """Its snapshots before that may list the leftover."""
    left = OrphanFiles()
    left.add(["packs/pack-1"], {0: 5})
    left.add(["packs/pack-1"], {0: 6, 1: 9})
    assert left.removable({0: 8, 1: 9 + SNAPSHOTS_BEFORE_REMOVAL - 1}) == []
    assert left.removable({0: 8, 1: 9 + SNAPSHOTS_BEFORE_REMOVAL}) == ["packs/pack-1"]


def test_only_the_engines_own_file_names_are_parts():
    """Files with other names are never removed."""
    own = topic_stem(7, 1, 3)
    stems, temporaries = group_parts(
        [f"{own}.data", f"{own}.idx", "packs/0001000000000003.idx.tmp", f"{own}.data.tmp", "packs/notes.txt",
         "packs/pack-3.data", "topics/x/seg.data", "packs/something.tmp", "topics/0/README"],
    )  # fmt: skip
    assert stems == {own: [f"{own}.data", f"{own}.idx"]}
    assert temporaries == ["packs/0001000000000003.idx.tmp", f"{own}.data.tmp"]


def test_a_segment_that_the_topics_own_shard_does_not_know_supersedes_nothing():
    """The owner leads no reader to it, even if another shard knows it."""
    owner = shard_of(7, 3)
    old = held(1, (7, 1, 100))
    stranger = replace(held(2, (7, 1, 100)), shards=tuple({0, 1, 2} - {owner}))
    assert superseded_ranges([old, stranger], never, 3)[0] == {}
    own = replace(stranger, shards=(owner,))
    assert superseded_ranges([old, own], never, 3)[0] == {1: {0: [(1, 100)]}}
