"""The scrub verifies all stored data. Damage is reported, and quarantined or repaired."""

from __future__ import annotations

import numpy as np
import pytest

from ringlog.actors.reclaimer.scrub_pass import ScrubItem, ScrubPass, pass_seconds, scrub_items
from ringlog.actors.reclaimer.scrubber import Scrubber
from ringlog.envelope import messages as m
from ringlog.errors import ColdUnavailable
from ringlog.limits import SCRUB_FINDINGS_MAX
from ringlog.segment.index_rebuild import verify_segment
from ringlog.segment.layout import DATA, DEL, IDX
from ringlog.storage.snapshot import Snapshot, write_snapshot
from ringlog.testing.disk import SimulatedDisk
from ringlog.tier.copies import SegmentCopies
from ringlog.tier.local import LocalStore
from ringlog.tier.ownership import OwnedStore
from tests.support.segment_files import ENGINE_ID, make_segment, mark_deleted

NUMBER = 1 << 48


class World:
    def __init__(self) -> None:
        self.disk = SimulatedDisk("/data", "/data/meta", "/cold")
        self.ref = make_segment(self.disk, "/data", NUMBER, {7: range(1, 101), 8: range(1, 11)})
        self.store = OwnedStore(LocalStore(self.disk, "/cold"), self.disk, "/data", ENGINE_ID.hex())
        assert self.store.claim() == ENGINE_ID.hex()
        self.copies = SegmentCopies(self.disk, "/data", self.store)
        self.current = True
        self.paced: list[int] = []
        self.scrubber = Scrubber(
            self.disk,
            "/data",
            self.copies,
            rate_limiter=self.paced.append,
            is_current=lambda ref: self.current,
        )

    def rot(self, path: str, at: int) -> None:
        fd = self.disk.open_for_overwrite(path)
        byte = self.disk.read_at(fd, 1, at)[0]
        self.disk.write_at(fd, [bytes([byte ^ 0x10])], at)
        self.disk.sync_file(fd)
        self.disk.close(fd)

    def part(self, suffix: str, root: str = "/data") -> str:
        return f"{root}/{self.ref.stem}{suffix}"

    def make_cold(self) -> m.SegmentRef:
        self.copies.upload_index_parts(self.ref.stem)
        self.copies.upload_part(self.ref.stem + DATA)
        self.copies.drop_local(self.ref.stem, (DATA,))
        ref = self.ref
        return m.SegmentRef(ref.number, ref.stem, ref.salt, ref.data_bytes, ref.records, ref.frames, 2, 2)

    def verify(self, *, heals: bool = True, ref: m.SegmentRef | None = None) -> list[str]:
        ref = ref or self.ref
        return self.scrubber.verify_item(ScrubItem(ref.stem, ref.data_bytes, ref), heals=heals)


def test_intact_segments_of_both_tiers_have_no_findings_and_are_rate_limited():
    world = World()
    mark_deleted(world.disk, "/data", world.ref.stem, 7, [3])
    assert world.verify() == []
    assert world.verify(ref=world.make_cold()) == []
    assert world.paced[0] == world.ref.data_bytes
    assert world.scrubber.counts.findings == 0


def test_every_flipped_bit_of_a_data_part_is_found_and_quarantined():
    """The damage is reported and counted, and the file stays unchanged."""
    world = World()
    for at in range(40, world.ref.data_bytes, 997):
        world.rot(world.part(DATA), at)
        (finding,) = world.verify(heals=False)
        assert finding.startswith(world.ref.stem + DATA), at
        assert world.scrubber.quarantined == {world.ref.number}
        world.rot(world.part(DATA), at)
    assert world.verify() == []
    assert world.scrubber.quarantined == set()


def test_a_damaged_hot_part_is_repaired_from_an_intact_cold_copy():
    """The segment is not quarantined."""
    world = World()
    world.copies.upload_part(world.ref.stem + DATA)
    world.rot(world.part(DATA), 5_000)
    assert world.verify() == []
    assert verify_segment(world.disk, "/data", world.ref.stem) == []
    assert world.scrubber.counts.healed == 1
    assert world.scrubber.quarantined == set()


def test_a_damaged_part_is_not_replaced_by_a_damaged_copy():
    world = World()
    world.copies.upload_part(world.ref.stem + DATA)
    world.rot(world.part(DATA), 5_000)
    world.rot(world.part(DATA, "/cold"), 6_000)
    assert len(world.verify()) == 1
    assert world.scrubber.quarantined == {world.ref.number}
    world.rot(world.part(DATA), 5_000)
    assert world.verify() == [], "the file was changed"


def test_a_damaged_index_is_rebuilt_from_the_data():
    """A damaged index does not quarantine its segment."""
    world = World()
    world.rot(world.part(IDX), 200)
    assert len(world.verify(heals=False)) == 1
    assert world.scrubber.quarantined == set(), "the data part is intact"
    assert world.verify() == []
    assert verify_segment(world.disk, "/data", world.ref.stem) == []


def test_a_damaged_index_of_a_cold_segment_is_fetched_from_the_store():
    world = World()
    ref = world.make_cold()
    world.rot(world.part(IDX), 200)
    assert world.verify(ref=ref) == []
    assert world.scrubber.counts.healed == 1


def test_damage_in_the_only_cold_copy_is_reported_and_left_unchanged():
    world = World()
    ref = world.make_cold()
    world.rot(world.part(DATA, "/cold"), 5_000)
    (finding,) = world.verify(ref=ref)
    assert finding.startswith(ref.stem + DATA)
    assert world.scrubber.quarantined == {ref.number}


def test_invalid_deletion_marks_are_a_finding():
    """They do not quarantine their segment."""
    world = World()
    mark_deleted(world.disk, "/data", world.ref.stem, 7, [3])
    world.rot(world.part(DEL), 60)
    assert len(world.verify()) == 1
    assert world.scrubber.quarantined == set()


def test_a_segment_that_moves_or_disappears_during_the_scrub_is_no_finding():
    world = World()
    world.disk.unlink(world.part(DATA))
    world.current = False
    assert world.verify() == []
    assert world.scrubber.quarantined == set()


def test_an_unavailable_store_is_no_damage():
    """The scrub reports no finding for the segment."""
    world = World()
    ref = world.make_cold()

    class Absent:
        def get_range(self, name, start, stop):
            raise ColdUnavailable("store not available")

    world.copies.store = OwnedStore(Absent(), world.disk, "/data", ENGINE_ID.hex())
    assert world.verify(ref=ref) == []


def test_an_empty_mount_point_is_no_damage():
    """The volume of the cold tier is not mounted, so the segment is not verified."""
    world = World()
    ref = world.make_cold()
    world.disk.make_dir("/bare")
    bare = LocalStore(world.disk, "/bare")
    world.copies.store = OwnedStore(bare, world.disk, "/data", ENGINE_ID.hex())
    assert world.verify(ref=ref) == []
    assert world.scrubber.quarantined == set()


def test_a_damaged_part_is_not_replaced_by_a_segment_of_another_engine():
    """Both engines have given their segments the same name, and the other one owns the store."""
    world = World()
    world.copies.upload_part(world.ref.stem + DATA)
    world.rot(world.part(DATA), 5_000)
    other = OwnedStore(LocalStore(world.disk, "/cold"), world.disk, "/data", "bb" * 16)
    world.copies.store = other
    assert len(world.verify()) == 1
    assert world.scrubber.quarantined == {world.ref.number}


def test_a_damaged_index_of_a_cold_segment_is_reported_while_no_cold_tier_is_configured():
    """The scrub cannot repair it, and goes on."""
    world = World()
    ref = world.make_cold()
    world.rot(world.part(IDX), 200)
    world.copies.store = None
    assert len(world.verify(ref=ref)) == 1


def snapshot(number: int) -> Snapshot:
    ids = np.array([7], dtype=np.uint64)
    return Snapshot(number, 0, 1, 1, 5, b"facts", ids, np.array([0, 4], dtype=np.uint64), b"rows")


def test_a_damaged_snapshot_is_a_finding_and_a_deleted_one_is_not():
    """The scrub verifies snapshots as well."""
    world = World()
    sound, rotten = (write_snapshot(world.disk, "/data", snapshot(n)) for n in (1, 2))
    world.rot(f"/data/{rotten}", 100)
    found = world.scrubber.list_snapshots()
    assert [path for path, size in found if size > 90] == sorted([sound, rotten])
    for item in scrub_items([], found):
        findings = world.scrubber.verify_item(item, heals=True)
        assert bool(findings) is (item.path == rotten)
    world.disk.unlink(f"/data/{rotten}")
    assert world.scrubber.verify_item(ScrubItem(rotten, 100), heals=True) == []


def test_a_pass_reports_its_progress_and_a_bounded_number_of_findings():
    refs = [make_ref(n) for n in range(3)]
    whole = ScrubPass.from_items(scrub_items(refs, [("meta/snapshot-00.1", 50)]))
    assert next(item.path for item in whole.pending) == "meta/snapshot-00.1"
    assert whole.remaining_bytes == 350
    item = whole.pending.popleft()
    whole.record(item, [f"x: {n}" for n in range(SCRUB_FINDINGS_MAX + 5)])
    report = whole.report()
    assert (report.files, report.bytes, len(report.findings)) == (1, 50, SCRUB_FINDINGS_MAX + 1)
    assert report.findings[-1] == "and 5 more findings"
    assert whole.remaining_bytes == 300


@pytest.mark.parametrize(("size", "pace", "seconds"), [(100, 10, 10), (1, 10, 1), (100, 0, 0)])
def test_the_duration_of_a_whole_pass_follows_from_size_and_rate(size, pace, seconds):
    """A rate of 0 gives 0 seconds."""
    assert pass_seconds(size, pace) == seconds


def make_ref(n: int) -> m.SegmentRef:
    return m.SegmentRef(NUMBER + n, f"packs/pack-{NUMBER + n:016x}", 1, 100, 10, 1, 2)
