"""The catalog of segments of a shard: overlaps, tiers, memory, and lookups among many topics."""

from __future__ import annotations

import random
import sys
import tracemalloc

import numpy as np
import pytest

from ringlog.envelope.messages import SegmentRef
from ringlog.errors import InvariantViolation
from ringlog.topic.segment_catalog import SegmentCatalog, owned_by

COLUMNS = (
    "topic_id", "epoch", "first_seq", "last_seq", "records", "bytes", "entry_start", "entry_stop",
    "data_start", "data_stop",
)  # fmt: skip
TABLE = np.dtype([(name, "<u8") for name in COLUMNS])


def table(*rows: tuple[int, int, int]) -> np.ndarray:
    """Return a topic table of (topic_id, first, last) with 100 bytes of data for each topic."""
    made = np.zeros(len(rows), dtype=TABLE)
    for at, (topic_id, first, last) in enumerate(rows):
        made[at] = (
            topic_id,
            1,
            first,
            last,
            last - first + 1,
            0,
            at,
            at + 1,
            4_096 + 100 * at,
            4_196 + 100 * at,
        )
    return made


def ref(number: int, topics: int = 1, tier: int = 0) -> SegmentRef:
    return SegmentRef(number, f"packs/pack-{number:016x}", number * 11, 1_000, 1, 1, topics, tier)


def shape(sealed: SegmentCatalog, topic_id: int, after: int = 0) -> list[tuple[int, int, int]]:
    return [(e.segment, e.first_seq, e.last_seq) for e in sealed.ranges(topic_id, after)]


def test_an_extent_gives_the_bytes_of_its_topic():
    """An extent contains the data part, its salt, and the bytes and index rows of the topic."""
    sealed = SegmentCatalog()
    sealed.add(ref(5, topics=2), table((1, 1, 10), (2, 7, 9)))
    (extent,) = sealed.ranges(2, 0)
    assert (extent.path, extent.salt, extent.start, extent.stop) == (
        "packs/pack-0000000000000005.data", 55, 4_196, 4_296,
    )  # fmt: skip
    assert (extent.entry_start, extent.entry_stop, extent.tier) == (1, 2, 0)
    assert sealed.ranges(3, 0) == []
    assert sealed.sealed_to(3) == 0


def test_of_overlapping_segments_the_greater_number_wins():
    """The same holds for segments of one topic and for shared ones."""
    for topics in (1, 2):
        sealed = SegmentCatalog()
        sealed.add(ref(9, topics), table((4, 21, 30)))
        sealed.add(ref(3, topics), table((4, 1, 100)))
        assert shape(sealed, 4) == [(3, 1, 20), (9, 21, 30), (3, 31, 100)]
        assert shape(sealed, 4, after=30) == [(3, 1, 100)]
        assert shape(sealed, 4, after=25) == [(9, 21, 30), (3, 31, 100)]
        assert sealed.sealed_to(4) == 100
        sealed.remove(3)
        assert shape(sealed, 4) == [(9, 21, 30)]
        sealed.add(ref(12, topics), table((4, 1, 50)))
        assert shape(sealed, 4) == [(12, 1, 50)]


def test_random_segments_agree_with_a_dictionary():
    """The greatest segment number that contains a position serves it. A removal undoes exactly one
    segment."""
    rng = random.Random(30)
    sealed, model = SegmentCatalog(), {}
    for number in range(1, 400):
        if model and rng.random() < 0.4:
            gone = rng.choice(list(model))
            del model[gone]
            sealed.remove(gone)
        topics = sorted(rng.sample(range(1, 6), rng.choice((1, 1, 3))))
        rows = []
        for topic_id in topics:
            first = rng.randrange(1, 90)
            rows.append((topic_id, first, first + rng.randrange(1, 30)))
        model[number] = rows
        sealed.add(ref(number, len(rows)), table(*rows))
        topic_id, after = rng.randrange(1, 6), rng.randrange(0, 60)
        expected = {}
        for holder in sorted(model):
            for each, first, last in model[holder]:
                if each == topic_id:
                    expected |= dict.fromkeys(range(first, last + 1), holder)
        found, reached = {}, 0
        for extent in sealed.ranges(topic_id, after):
            assert extent.first_seq > reached
            reached = extent.last_seq
            found |= dict.fromkeys(range(extent.first_seq, reached + 1), extent.segment)
        assert {s: n for s, n in found.items() if s > after} == {
            s: n for s, n in expected.items() if s > after
        }
        assert sealed.sealed_to(topic_id) == max(expected, default=0)
        assert sealed.topics_of(number) == topics


def test_a_tier_can_be_set_and_a_segment_is_registered_once():
    """An unknown segment number raises KeyError."""
    sealed = SegmentCatalog()
    sealed.add(ref(5), table((1, 1, 10)))
    sealed.set_tier(5, 2)
    assert sealed.ranges(1, 0)[0].tier == sealed.refs[5].tier == 2
    with pytest.raises(InvariantViolation, match="already registered"):
        sealed.add(ref(5), table((1, 1, 10)))
    with pytest.raises(KeyError):
        sealed.remove(6)
    with pytest.raises(KeyError):
        sealed.set_tier(6, 1)


def test_a_shard_uses_only_its_own_rows_of_a_segment_of_another_shard_count():
    """Every topic of the segment has exactly one owner."""
    rows = table(*((topic_id, 1, 5) for topic_id in range(1, 101)))
    shards = [SegmentCatalog() for _ in range(4)]
    for shard, sealed in enumerate(shards):
        sealed.add(ref(1, 100), rows, owned_by(rows, shard, 4))
    holders = [[shard for shard in range(4) if shards[shard].sealed_to(each)] for each in range(1, 101)]
    assert all(len(each) == 1 for each in holders)
    assert owned_by(rows, 0, 1) is None


def test_covered_joins_adjacent_ranges():
    sealed = SegmentCatalog()
    for number, first, last in ((1, 1, 10), (2, 11, 20), (3, 30, 40), (4, 35, 36)):
        sealed.add(ref(number), table((1, first, last)))
    assert sealed.covered(1) == [(1, 20), (30, 40)]
    assert sealed.covered(1, after=25) == [(30, 40)]


def test_100_000_topics_in_packs_take_few_bytes_and_few_steps():
    """The catalog takes less than 70 bytes for each topic of a pack. A lookup among 25 packs takes fewer than
    120 calls."""
    tracemalloc.start()
    sealed = SegmentCatalog()
    ids = np.arange(1, 100_001, dtype=np.uint64)
    before = tracemalloc.get_traced_memory()[0]
    for part in range(25):
        mine = ids[part::5] if part else ids
        rows = np.zeros(len(mine), dtype=TABLE)
        rows["topic_id"], rows["first_seq"], rows["last_seq"] = mine, part * 10 + 1, part * 10 + 10
        sealed.add(ref(part + 1, len(mine)), rows)
    pairs = 100_000 + sum(len(ids[part::5]) for part in range(1, 25))
    size = (tracemalloc.get_traced_memory()[0] - before) / pairs
    tracemalloc.stop()
    assert size < 70
    calls = 0

    def count(_frame: object, event: str, _argument: object) -> None:
        nonlocal calls
        calls += event in {"call", "c_call"}

    sys.setprofile(count)
    try:
        found = [sealed.sealed_to(topic_id * 97) for topic_id in range(1, 1_001)]
    finally:
        sys.setprofile(None)
    assert all(found)
    assert calls / 1_000 < 120, "a search in each pack, and no more"


@pytest.mark.parametrize("stretches", [2, 64])
@pytest.mark.parametrize("is_gap_first", [False, True])
def test_a_segment_does_not_cover_the_gaps_between_its_frames(stretches, is_gap_first):
    """The order of registration does not matter.

    After a restart, a segment with its data part in the cold tier was registered after a segment with a
    greater number that spans it. Its records were then reported as damaged.
    """
    entries = np.zeros(
        stretches, dtype=[("base_seq", "<i8"), ("count", "<i8"), ("offset", "<i8"), ("length", "<i8")]
    )
    for at in range(stretches):
        entries[at] = (1 + 40 * at, 20, 4_096 + 100 * at, 100)
    span = (4, 1, 40 * stretches - 20)
    with_gaps = table(span)
    with_gaps["records"], with_gaps["entry_stop"] = 20 * stretches, stretches
    sealed = SegmentCatalog()

    def add_gaps() -> None:
        sealed.add(ref(9), sealed.split_rows(with_gaps, entries))

    if is_gap_first:
        add_gaps()
    sealed.add(ref(3), table((4, 21, 40)))
    if not is_gap_first:
        add_gaps()
    assert shape(sealed, 4)[:3] == [(9, 1, 20), (3, 21, 40), (9, 41, 60)]
