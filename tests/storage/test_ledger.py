"""StoredRecordIndex compared with plain lists: over the log, over segments, and over both with the same
records."""

from __future__ import annotations

import random
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest

from ringlog.errors import CorruptData, DiskError
from ringlog.frame.facts import RecordFacts
from ringlog.frame.layout import Column
from ringlog.storage import record_index as ledgers
from ringlog.storage import tail as tails
from ringlog.storage.extents import LogHighWatermark
from ringlog.storage.record_index import StoredRecordIndex, bitmap_of
from ringlog.storage.tail import WINDOW_BYTES
from ringlog.tags import TagMatch, parse_match
from tests.support.log_file import TS_US
from tests.support.log_world import LogWorld

TAGS = ("", "a", "ab", "b", "é", "a/x", "b/x")


@dataclass
class Row:
    seq: int
    size: int
    stamp: int
    expires: int
    tag: str


class Library:
    """A LogWorld, its StoredRecordIndex, and the expected rows."""

    def __init__(self, root: Path) -> None:
        self.world = LogWorld(str(root))
        self.ledger = StoredRecordIndex(
            self.world.disk, str(root), str(root), lambda _: LogHighWatermark(*self.world._mark)
        )
        self.rows: list[Row] = []

    def located(self):
        return self.world.locate("t", 0).result()

    def of(self):
        return self.ledger.for_topic(self.located())

    def write(self, rng: random.Random, frames: int) -> None:
        """Write frames of several shapes, with frames of another topic between them."""
        for _ in range(frames):
            if rng.random() < 0.3:
                self.world.write_other(b"o" * rng.randrange(2_000))
            count = rng.choice([1, 1, 2, 30])
            rows = [
                Row(
                    len(self.rows) + 1 + i, rng.randrange(60), TS_US + len(self.rows) // 7 * 1_000,
                    rng.choice([0, TS_US + 5, TS_US + rng.randrange(20_000)]), rng.choice(TAGS),
                )
                for i in range(count)
            ]  # fmt: skip
            stamp = max([row.stamp for row in rows] + [row.stamp for row in self.rows[-1:]])
            columns = {}
            if rng.random() < 0.5:
                columns[Column.TAG] = [row.tag.encode() for row in rows]
            if rng.random() < 0.3:
                columns[Column.EXPIRES_AT] = [row.expires for row in rows]
            if rng.random() < 0.2:
                columns[Column.META] = [b"{}" for _ in rows]
            for row in rows:
                row.stamp = stamp
                row.tag = row.tag if Column.TAG in columns else ""
                row.expires = row.expires if Column.EXPIRES_AT in columns else 0
            self.world.write([b"x" * row.size for row in rows], columns, ts=stamp)
            for row in rows:
                row.size += 2 if Column.META in columns else 0
            self.rows += rows
        self.world.publish()

    def check(self, rng: random.Random) -> None:
        """Make every query at a random position."""
        asked, rows = self.of(), self.rows
        first = rng.randrange(1, len(rows) + 1)
        last = rng.randrange(first, len(rows) + 2)
        within = [row for row in rows if first <= row.seq <= last]
        seqs, sizes, stamps = asked.positions(first, last)
        assert list(zip(seqs.tolist(), sizes.tolist(), stamps.tolist(), strict=True)) == [
            (row.seq, row.size, row.stamp) for row in within
        ]
        assert asked.totals(first, last) == (len(within), sum(row.size for row in within))
        some = sorted(rng.sample(range(1, len(rows) + 5), 4))
        there, sizes = asked.sizes_of(np.array(some, dtype=np.uint64))
        assert there.tolist() == [seq for seq in some if seq <= len(rows)]
        assert sizes.tolist() == [rows[seq - 1].size for seq in there.tolist()]
        ts = rng.choice(rows).stamp + rng.choice([-1, 0, 1])
        assert asked.seek_time(ts) == next((row.seq for row in rows if row.stamp >= ts), len(rows) + 1)
        for tag, is_prefix in (("a", False), ("a", True), ("", True), ("é", False), ("none", False)):
            found = asked.tagged(TagMatch(tag.encode(), is_prefix), last)
            assert list(found) == [
                row.seq
                for row in rows
                if row.tag and row.seq < last and (row.tag.startswith(tag) if is_prefix else row.tag == tag)
            ]
        for pattern in ("+", "+/x", "a/#", "#"):
            match = parse_match(["tag", "Levels", pattern])
            chosen = [row.seq for row in rows if row.seq < last and match.test(row.tag.encode())]
            assert list(asked.tagged(match, last)) == chosen
        now = rng.choice([TS_US, TS_US + 5, TS_US + 10_000, TS_US + 30_000])
        assert list(asked.expired(now)) == [row.seq for row in rows if 0 < row.expires <= now]
        assert asked.next_expiry(now) == min((row.expires for row in rows if row.expires > now), default=0)


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(12))
def test_queries_agree_with_plain_lists_wherever_records_are_stored(tmp_path, seed):
    """Records are in the log, in segments, or in both at once, while more records are written."""
    rng = random.Random(seed)
    library = Library(tmp_path)
    for _ in range(6):
        library.write(rng, rng.randrange(1, 40))
        for _ in range(3):
            library.check(rng)
        if rng.random() < 0.5:
            library.world.seal(trims=rng.random() < 0.5)
        elif rng.random() < 0.5:
            library.world.roll()
            library.world.publish()
        library.check(rng)
    library.ledger.close()
    library.check(rng)
    library.ledger.close()


def test_a_frame_is_read_once_for_many_queries(tmp_path):
    """The index extends at its end and does not scan a frame again."""
    library = Library(tmp_path)
    library.write(random.Random(1), 50)
    disk, read = library.world.disk, []
    whole = disk.read_into
    disk.read_into = lambda fd, buffer, at: read.append(whole(fd, buffer, at)) or read[-1]
    library.of().positions(1, 1 << 40)
    first, size = sum(read), library.world.file.stop
    assert first <= size
    for _ in range(5):
        library.of().positions(1, 1 << 40)
        library.of().seek_time(0)
    assert sum(read) == first
    library.write(random.Random(2), 5)
    library.of().positions(1, 1 << 40)
    assert sum(read) - first == library.world.file.stop - size
    library.of().tagged(TagMatch(b"a"), 1 << 40)
    library.of().tagged(TagMatch(b"b", is_prefix=True), 1 << 40)
    assert sum(read) <= 2 * library.world.file.stop, "once more for tags, when they are first asked for"


def test_a_query_reads_only_the_bytes_that_it_needs(tmp_path):
    """A query at the front of a long log does not read the whole log."""
    library = Library(tmp_path)
    for _ in range(35):
        library.world.write([b"x" * 100_000])
    library.world.publish()
    disk, read = library.world.disk, []
    whole = disk.read_into
    disk.read_into = lambda fd, buffer, at: read.append(whole(fd, buffer, at)) or read[-1]
    assert len(library.of().positions(1, 3)[0]) == 3
    assert sum(read) <= 2 * WINDOW_BYTES
    assert library.of().seek_time(TS_US + 5) == 6


def test_staged_records_follow_the_records_in_files(tmp_path):
    """The index includes the records of a commit batch before they are in a file."""
    library = Library(tmp_path)
    library.world.append([b"1", b"22"])
    staged = RecordFacts(
        np.array([3, 4], np.uint64),
        np.array([3, 4], np.int64),
        np.array([TS_US, TS_US], np.int64),
        None,
        None,
    )
    asked = library.ledger.for_topic(library.located(), [staged])
    assert asked.totals(2, 4) == (3, 9)
    library.world.append([b"333", b"4444"])
    assert library.of().totals(1, 9) == (4, 10), "and not twice afterwards"


def test_records_below_earliest_seq_are_dropped_from_memory(tmp_path):
    library = Library(tmp_path)
    for _ in range(10):
        library.world.append([b"x"] * 10)
    library.of().positions(1, 1 << 40)
    library.world.earliest_seq = 91
    assert library.of().totals(91, 100) == (10, 10)
    assert len(library.ledger._tails[5, 1]) == 10


def test_tags_of_dropped_records_are_dropped_too(tmp_path, monkeypatch):
    """Each record has its own tag and earliest_seq advances: the memory stays bounded (RF-108)."""
    monkeypatch.setattr(tails, "_ROOM_MIN", 16)
    library = Library(tmp_path)
    last = 0
    for _ in range(20):
        tags = [b"%d" % seq for seq in range(last + 1, last + 11)]
        tags[3] = b""
        library.world.append([b"x"] * 10, {Column.TAG: tags})
        last += 10
        library.world.earliest_seq = last - 4
        asked = library.of()
        assert list(asked.tagged(TagMatch(b"", is_prefix=True), last + 1)) == list(range(last - 4, last + 1))
        for seq in range(last - 4, last + 1):
            assert list(asked.tagged(TagMatch(b"%d" % seq), last + 1)) == [seq]
        assert not asked.tagged(TagMatch(b"%d" % (last - 5)), last + 1)
    tail = library.ledger._tails[5, 1]
    assert len(tail) == 5
    assert len(tail.tags) <= 5 * 4
    assert tail.memory_cost < 5 + 8 * 21


def test_a_growable_array_frees_unused_memory():
    held = tails.GrowableArray(np.int64)
    held.append(np.arange(100_000))
    held.drop(99_990)
    assert held.values.tolist() == list(range(99_990, 100_000))
    assert len(held._room) == 10
    held.append(np.arange(5))
    assert held.values.tolist() == [*range(99_990, 100_000), *range(5)]


def test_the_index_in_memory_is_bounded(tmp_path, monkeypatch):
    """The least recently queried topic is dropped, and read again at its next query."""
    monkeypatch.setattr(ledgers, "TAIL_RECORDS_MAX", 25)
    library = Library(tmp_path)
    for topic_id in (5, 15, 25):
        library.world.topic_id = topic_id
        library.world._written = 0
        library.world.append([b"x"] * 10)
        assert library.of().totals(1, 99) == (10, 10)
    assert list(library.ledger._tails) == [(15, 1), (25, 1)]
    library.world.topic_id = 5
    assert library.of().totals(1, 99) == (10, 10)


def test_the_log_of_a_new_incarnation_is_read_again(tmp_path):
    """A power loss may have removed records that were read earlier."""
    library = Library(tmp_path)
    library.world.append([b"lost", b"lost"])
    assert library.of().totals(1, 9) == (2, 8)
    library.world._extents, library.world._files = [], []
    library.world._written = 0
    library.world.roll(incarnation=2)
    library.world.append([b"new"])
    assert library.of().totals(1, 9) == (1, 3)


def test_damage_and_a_missing_file_raise_typed_errors(tmp_path):
    library = Library(tmp_path)
    library.world.append([b"precious"])
    located = library.located()
    path = tmp_path / located.extents[0].path
    data = bytearray(path.read_bytes())
    data[data.index(b"precious")] ^= 1
    path.write_bytes(data)
    with pytest.raises(CorruptData, match="damaged") as damaged:
        library.of().totals(1, 9)
    assert damaged.value.detail["file"] == located.extents[0].path
    path.unlink()
    with pytest.raises(DiskError):
        library.of().totals(1, 9)


def test_a_bitmap_of_seqs_contains_exactly_the_seqs():
    seqs = np.array([1, 5, 1 << 62], dtype=np.uint64)
    assert list(bitmap_of(seqs)) == seqs.tolist()
    assert not bitmap_of(seqs[:0])
