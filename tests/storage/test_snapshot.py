"""Snapshot files: bytes, names, the order of writing, and merging of rows."""

from __future__ import annotations

import random

import numpy as np
import pytest

from ringlog.errors import CorruptData, DiskError
from ringlog.storage import snapshot as snap
from ringlog.testing.disk import DiskFault, FaultyDisk, Halted, SimulatedDisk
from tests.support.disk_files import overwrite

DATA = "/data"


def table(rows):
    """Return (ids, starts, bytes) of {id: row}."""
    ids = np.array(sorted(rows), dtype=np.uint64)
    lengths = [len(rows[int(each)]) for each in ids]
    starts = np.concatenate([[0], np.cumsum(lengths)]).astype(np.uint64)
    return ids, starts, b"".join(rows[int(each)] for each in ids)


def make(number=1, shard=0, rows=None, facts=b"facts", shards=2):
    rows = {7: b"seven", 3: b"three!", 2**63: b"x"} if rows is None else rows
    return snap.Snapshot(number, shard, shards, 5, 1_700_000_000_000_000, facts, *table(rows))


def rows_of(snapshot):
    return {int(each): bytes(snapshot.row(i)) for i, each in enumerate(snapshot.ids)}


def encoded(snapshot):
    return b"".join(snap.encode_snapshot(snapshot))


@pytest.fixture
def disk():
    disk = SimulatedDisk(DATA)
    disk.make_dir(f"{DATA}/meta")
    disk.sync_dir(DATA)
    return disk


# -- bytes ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("rows", [{}, {1: b"a"}, {3: b"three", 9: b"n" * 1000}])
@pytest.mark.parametrize("facts", [b"", b"12345678", b"123"])
def test_a_snapshot_decodes_to_the_encoded_values(rows, facts):
    """The facts and the rows may have any length."""
    wanted = make(rows=rows, facts=facts)
    found = snap.decode_snapshot(encoded(wanted), "f")
    assert found[:6] == wanted[:6]
    assert rows_of(found) == rows


def test_unchanged_contents_give_the_same_bytes_apart_from_number_and_time():
    """Only the header contains the number and the time."""
    one, other = encoded(make(number=1)), encoded(make(number=2)._replace(created_us=9))
    assert one[snap.HEADER_BYTES :] == other[snap.HEADER_BYTES :]


def test_every_changed_byte_and_every_truncation_is_detected():
    """Any bytes give a snapshot or CorruptData."""
    good = encoded(make())
    for at in range(len(good)):
        bad = bytearray(good)
        bad[at] ^= 1 << (at % 8)
        with pytest.raises(CorruptData):
            snap.decode_snapshot(bytes(bad), "f")
        with pytest.raises(CorruptData):
            snap.decode_snapshot(good[:at], "f")
    with pytest.raises(CorruptData):
        snap.decode_snapshot(good + b"\0", "f")


@pytest.mark.parametrize(
    ("ids", "starts"), [([5, 5], [0, 1, 2]), ([6, 5], [0, 1, 2]), ([5, 6], [0, 0, 2]), ([5, 6], [1, 1, 2])]
)
def test_an_inconsistent_table_with_valid_checksums_is_refused(ids, starts):
    bad = make()._replace(ids=np.array(ids, "<u8"), starts=np.array(starts, "<u8"), rows=b"ab")
    with pytest.raises(CorruptData, match="ids or row starts are inconsistent"):
        snap.decode_snapshot(encoded(bad), "f")


def test_snapshot_names_encode_shard_and_number():
    assert snap.snapshot_name(3, 12) == "snapshot-03.0000000000000012"
    assert snap.parse_snapshot_name("snapshot-03.0000000000000012") == (3, 12)
    for name in (
        "snapshot-3.0000000000000012",
        "snapshot-03.12",
        "snapshot-03.0000000000000012.tmp",
        "engine",
    ):
        assert snap.parse_snapshot_name(name) is None


# -- files ------------------------------------------------------------------------------------------------


def test_load_snapshots_returns_the_newest_first_and_reports_damaged_files(disk):
    """A damaged snapshot is skipped, and the older ones stay usable."""
    for number in (1, 2, 3):
        snap.write_snapshot(disk, DATA, make(number, rows={number: b"r"}))
    overwrite(disk, f"{DATA}/meta/{snap.snapshot_name(0, 3)}", b"rotten")
    found, skipped = snap.load_snapshots(disk, DATA, 0)
    assert [each.number for each in found] == [2, 1]
    assert skipped == ["meta/snapshot-00.0000000000000003: snapshot must have at least 96 bytes, got 6"]
    assert [each.number for each in snap.load_snapshots(disk, DATA, 0, most=1)[0]] == [2]


def test_a_snapshot_under_the_name_of_another_is_skipped(disk):
    snap.write_snapshot(disk, DATA, make(1))
    disk.rename(f"{DATA}/meta/{snap.snapshot_name(0, 1)}", f"{DATA}/meta/{snap.snapshot_name(1, 1)}")
    found, skipped = snap.load_snapshots(disk, DATA)
    assert (found, len(skipped)) == ([], 1)


def test_a_directory_without_snapshots_has_none(tmp_path):
    assert snap.load_snapshots(SimulatedDisk(DATA), DATA) == ([], [])


def test_a_snapshot_number_is_never_reused(disk):
    """Numbers of temporary files count as used."""
    snap.write_snapshot(disk, DATA, make(4))
    assert snap.next_snapshot_number(disk, DATA, 0, 2) == 5
    fd = disk.create(f"{DATA}/meta/{snap.snapshot_name(0, 9)}.tmp")
    disk.close(fd)
    assert snap.next_snapshot_number(disk, DATA, 0, 2) == 10
    assert snap.next_snapshot_number(disk, DATA, 0, 2, 30) == 31


def test_snapshot_numbers_increase_and_a_new_shard_count_starts_above_all(disk):
    snap.write_snapshot(disk, DATA, make(4, shard=0))
    snap.write_snapshot(disk, DATA, make(20, shard=1))
    assert snap.next_snapshot_number(disk, DATA, 0, 2) == 5
    assert snap.next_snapshot_number(disk, DATA, 0, 3) == 21
    snap.write_snapshot(disk, DATA, make(21, shard=0, shards=3))
    assert snap.next_snapshot_number(disk, DATA, 0, 3) == 22
    assert snap.next_snapshot_number(disk, DATA, 2, 3) == 22
    assert snap.next_snapshot_number(disk, DATA, 1, 2) == 22, "back to an earlier layout"


def test_a_crash_at_any_call_leaves_the_old_or_the_new_snapshot(disk):
    """After every crash the old snapshot is still valid, and the next write succeeds."""
    for nth in range(1, 60):
        world = SimulatedDisk(DATA)
        world.make_dir(f"{DATA}/meta")
        world.sync_dir(DATA)
        snap.write_snapshot(world, DATA, make(1))
        faulty = FaultyDisk(world, DiskFault("any", nth, "halt"))
        try:
            snap.write_snapshot(faulty, DATA, make(2))
        except Halted:
            world.power_loss(nth)
            found, skipped = snap.load_snapshots(world, DATA)
            assert [each.number for each in found] in ([1], [2, 1])
            assert not skipped
            snap.write_snapshot(world, DATA, make(3))
            assert snap.load_snapshots(world, DATA)[0][0].number == 3
            continue
        assert nth > 5
        return
    pytest.fail("it never got through")


@pytest.mark.parametrize("op", ["open", "write", "full_sync", "rename"])
def test_a_failed_call_leaves_no_snapshot_under_the_name(disk, op):
    with pytest.raises(DiskError):
        snap.write_snapshot(FaultyDisk(disk, DiskFault(op, 1, "EIO")), DATA, make(2))
    assert snap.snapshot_numbers(disk, DATA) == []


# -- rows -------------------------------------------------------------------------------------------------


def merged(base, changes):
    """Return merge_rows for a list of (id, row). An empty row removes the id."""
    ids = np.array([each for each, _ in changes], dtype=np.uint64)
    lengths = np.array([len(row) for _, row in changes], dtype=np.uint64)
    result = snap.merge_rows(base, ids, lengths, b"".join(row for _, row in changes))
    return rows_of(base._replace(ids=result[0], starts=result[1], rows=result[2]))


def test_rows_are_replaced_added_and_removed():
    base = make(rows={1: b"one", 2: b"two", 3: b"three", 5: b"five"})
    found = merged(base, [(4, b"four"), (2, b""), (3, b"drei"), (9, b""), (0, b"null")])
    assert found == {0: b"null", 1: b"one", 3: b"drei", 4: b"four", 5: b"five"}


def test_the_last_of_several_rows_of_one_topic_wins():
    assert merged(make(rows={}), [(1, b"a"), (2, b"b"), (1, b"c"), (2, b"")]) == {1: b"c"}


def test_merging_agrees_with_a_dictionary():
    rng = random.Random(3)
    for _ in range(200):
        base = {rng.randrange(30): rng.randbytes(rng.randint(1, 9)) for _ in range(rng.randrange(20))}
        changes = [(rng.randrange(30), rng.randbytes(rng.randrange(5))) for _ in range(rng.randrange(12))]
        wanted = base | dict(changes)
        assert merged(make(rows=base), changes) == {key: row for key, row in wanted.items() if row}
