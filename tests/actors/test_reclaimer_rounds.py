"""Rounds of the reclaimer over real bytes keep every live record and remove dead ones, also after a crash."""

from __future__ import annotations

import itertools

import pytest
from pyroaring import BitMap64

from ringlog.actors.reclaimer.orphan_files import SNAPSHOTS_BEFORE_REMOVAL
from ringlog.actors.reclaimer.plan import TopicLiveness
from ringlog.actors.reclaimer.rate_limiter import ByteRateLimiter
from ringlog.actors.reclaimer.reclaim_round import Reclaimer
from ringlog.actors.reclaimer.rewriter import Rewriter
from ringlog.config import StorageConfig
from ringlog.envelope import messages as m
from ringlog.errors import NotReady, ShuttingDown
from ringlog.limits import KIB, SHARED_SEGMENTS_MAX, SMALL_SEGMENTS_MAX
from ringlog.segment.index_rebuild import verify_segment
from ringlog.segment.layout import CREATOR_RECLAIMER, DATA, DEL, IDX, NumberAllocator, topic_stem
from ringlog.segment.parts import part_names
from ringlog.segment.segment import Segment
from ringlog.storage.segment_hold import SegmentHold, hold_segments
from ringlog.testing import ManualClock
from ringlog.testing.disk import DiskFault, FaultyDisk, Halted, SimulatedDisk
from ringlog.tier.copies import SegmentCopies
from ringlog.tier.local import LocalStore
from ringlog.tier.ownership import OwnedStore
from tests.support.disk_files import damage_file
from tests.support.segment_files import ENGINE_ID, FakeShards, make_segment, seqs_of

FIRST = 1 << 48
SETTINGS = StorageConfig(segment_bytes=64 * KIB, own_segment_bytes=16 * KIB, segment_records=10_000)


class World:
    def __init__(self, shards: int = 1, cold: bool = False) -> None:
        self.base = SimulatedDisk("/data", "/data/meta", "/cold")
        self.shards = FakeShards(shards)
        self.clock = ManualClock()
        self.cold = cold
        if cold:
            assert self.store().claim() == ENGINE_ID.hex()
        self.lives = 0
        self.quarantined: set[int] = set()
        self.is_held = lambda: False
        self.asked_for_checkpoint = 0

    def segment(self, n: int, topics, *, shard: int = 0, **facts) -> m.SegmentRef:
        ref = make_segment(self.base, "/data", FIRST + n, topics, **facts)
        self.shards.register(ref, shard=shard)
        for topic in topics:
            self.shards.topics.setdefault(topic, (1, 1, BitMap64()))
        return ref

    def store(self, disk=None, root: str = "/cold") -> OwnedStore:
        disk = disk or self.base
        return OwnedStore(LocalStore(disk, root), disk, "/data", ENGINE_ID.hex())

    def set(self, topic: int, *, epoch: int = 1, earliest: int = 1, deleted=()) -> None:
        self.shards.topics[topic] = (epoch, earliest, BitMap64(deleted))

    def reclaimer(self, disk=None) -> Reclaimer:
        disk = disk or self.base
        self.lives += 1
        numbers = NumberAllocator(CREATOR_RECLAIMER, [(CREATOR_RECLAIMER << 48) | self.lives << 20])
        self.pace = ByteRateLimiter(1 << 40, self.clock, lambda: False)
        store = self.store(disk) if self.cold else None

        def later(job) -> bool:
            job()
            return True

        def checkpoint() -> None:
            self.asked_for_checkpoint += 1

        return Reclaimer(
            disk, "/data", SETTINGS, copies=SegmentCopies(disk, "/data", store),
            rewriter=Rewriter(disk, "/data", SETTINGS, numbers, self.pace), shards=len(self.shards.refs),
            engine_id=ENGINE_ID, ask=self.shards.ask, clock=self.clock,
            quarantined=lambda: self.quarantined, want_checkpoint=checkpoint, submit_cold_job=later,
            is_held=self.is_held,
        )  # fmt: skip

    def snapshots(self, count: int = SNAPSHOTS_BEFORE_REMOVAL) -> None:
        """Let the compactor make this many snapshots of every shard."""
        for shard in self.shards.snapshots:
            self.shards.snapshots[shard] += count
        self.clock.advance(seconds=61)

    def settle(self, disk=None) -> None:
        """Start a new reclaimer and run rounds until nothing is left to do."""
        reclaimer = self.reclaimer(disk)
        for _ in range(3):
            reclaimer.run_round()
            self.snapshots()
        reclaimer.run_round()

    def files(self, root: str = "/data") -> list[str]:
        return part_names(self.base, root)

    def stems(self) -> list[str]:
        return sorted({name.rpartition(".")[0] for name in self.files()})

    def registered(self, shard: int = 0) -> list[str]:
        return sorted(ref.stem for ref in self.shards.refs[shard].values())

    def readable(self) -> dict[int, list[int]]:
        """Return topic -> seqs of the live records for readers. Verify every registered segment."""
        found: dict[int, set[int]] = {}
        for refs in self.shards.refs.values():
            for ref in refs.values():
                assert verify_segment(self.base, "/data", ref.stem) == []
                segment = Segment.open(self.base, "/data", ref.stem)
                topics = segment.topics[["topic_id", "epoch"]].tolist()
                segment.close()
                for topic, own_epoch in topics:
                    epoch, earliest, deleted = self.shards.topics.get(topic, (0, 1, BitMap64()))
                    seqs = seqs_of(self.base, "/data", ref.stem, topic) if epoch == own_epoch else []
                    found.setdefault(topic, set()).update(
                        seq for seq in seqs if seq >= earliest and seq not in deleted
                    )
        return {topic: sorted(seqs) for topic, seqs in sorted(found.items()) if seqs}


@pytest.fixture
def world() -> World:
    return World()


def test_a_segment_below_the_floor_is_dropped_and_its_files_are_removed_three_snapshots_later(world):
    """The shard forgets the segment first. The files stay while a kept snapshot may name them."""
    old, new = world.segment(1, {7: range(1, 11)}), world.segment(2, {7: range(11, 21)})
    world.set(7, earliest=11)
    reclaimer = world.reclaimer()
    reclaimer.run_round()
    assert world.registered() == [new.stem]
    assert old.stem in world.stems()
    assert world.asked_for_checkpoint == 1
    world.snapshots(SNAPSHOTS_BEFORE_REMOVAL - 1)
    reclaimer.run_round()
    assert old.stem in world.stems()
    world.snapshots(1)
    reclaimer.run_round()
    assert world.stems() == [new.stem]
    assert reclaimer.counts.dropped == 1
    assert reclaimer.counts.reclaimed_bytes == old.data_bytes


def test_no_part_of_a_dropped_segment_is_removed_while_a_backup_holds_the_segments(world):
    old, new = world.segment(1, {7: range(1, 11)}), world.segment(2, {7: range(11, 21)})
    world.set(7, earliest=11)
    before = world.files()
    world.is_held = lambda: True
    world.settle()
    assert world.registered() == [new.stem]
    assert world.files() == before, old.stem
    world.is_held = lambda: False
    world.settle()
    assert world.stems() == [new.stem]


def test_a_dropped_segment_is_removed_despite_a_backup_while_the_disk_is_low(world, tmp_path):
    """Writes need the space, and a backup can be repeated."""
    (tmp_path / "meta").mkdir()
    _, new = world.segment(1, {7: range(1, 11)}), world.segment(2, {7: range(11, 21)})
    world.set(7, earliest=11)
    world.is_held = SegmentHold(str(tmp_path), world.clock, min_free_bytes=1 << 62).is_held
    with hold_segments(str(tmp_path)):
        world.settle()
    assert world.stems() == [new.stem]


def test_every_round_looks_for_a_backup(world):
    """Otherwise a backup would take over the age of an earlier one, and not hold the segments."""
    looks = []
    world.is_held = lambda: bool(looks.append(None))
    reclaimer = world.reclaimer()
    for shard_is_down in (False, True):
        world.shards.down.update([0] if shard_is_down else [])
        looks.clear()
        reclaimer.run_round()
        assert looks, "nothing is due"


@pytest.mark.parametrize("reason", ["backup", "unreadable"])
def test_orphans_that_are_kept_for_another_reason_need_no_further_snapshots(world, reason):
    """Each request for one makes every shard begin a new log file."""
    old, _ = world.segment(1, {7: range(1, 11)}), world.segment(2, {7: range(11, 21)})
    world.set(7, earliest=11)
    if reason == "backup":
        world.is_held = lambda: True
    reclaimer = world.reclaimer()
    reclaimer.run_round()
    assert world.asked_for_checkpoint == 1
    if reason == "unreadable":
        damage_file(world.base, f"/data/{old.stem}{IDX}", 0, b"\xff" * 64)
    for _ in range(5):
        world.snapshots()
        reclaimer.run_round()
    assert old.stem in world.stems()
    assert world.asked_for_checkpoint == 1


@pytest.mark.parametrize(
    ("facts", "is_dropped"),
    [
        ({"epoch": 0}, True),
        ({"epoch": 2}, True),
        ({"earliest": 11}, True),
        ({"earliest": 10}, False),
        ({"deleted": range(1, 11)}, True),
        ({"deleted": range(1, 10)}, False),
        ({"earliest": 5, "deleted": range(5, 11)}, True),
    ],
)
def test_only_a_completely_dead_segment_is_dropped(world, facts, is_dropped):
    """The cases are a deleted topic, a recreated topic, records below the floor, and single deletes."""
    world.segment(1, {7: range(1, 11)})
    world.set(7, **facts)
    before = world.readable()
    world.settle()
    assert (world.registered() == []) is is_dropped
    assert world.stems() == world.registered()
    assert world.readable() == before


def test_topics_of_an_unreachable_shard_count_as_alive():
    """While a shard is down, no files are removed either."""
    world = World(shards=2)
    ref = world.segment(1, {7: range(1, 11), 8: range(1, 11), 9: range(1, 11)})
    world.shards.register(ref, shard=1)
    for topic in (7, 8, 9):
        world.set(topic, epoch=0)
    world.shards.down.add(1)
    reclaimer = world.reclaimer()
    for _ in range(4):
        reclaimer.run_round()
        world.snapshots()
    assert ref.stem in world.stems()
    assert ref.number in world.shards.refs[0]
    world.shards.down.clear()
    world.settle()
    assert world.stems() == []


def test_a_sparse_segment_is_rewritten_and_live_records_keep_their_seq_and_content(world):
    """The files of the old segment are removed."""
    world.segment(1, {7: range(1, 101)})
    world.set(7, earliest=20, deleted=[*range(30, 100)])
    before = world.readable()
    size = len(world.files())
    world.settle()
    assert world.readable() == before
    (stem,) = world.registered()
    assert stem != topic_stem(7, 1, FIRST + 1)
    assert world.stems() == [stem]
    assert len(world.files()) <= size + 1
    assert set(seqs_of(world.base, "/data", stem, 7)) >= {*range(20, 30), 100}


def test_a_delete_during_a_rewrite_is_marked_in_the_new_segment(world):
    """The rewrite must not bring back records that are deleted meanwhile."""
    world.segment(1, {7: range(1, 101)})
    world.set(7, earliest=60)

    def delete(_shard, _message):
        world.set(7, earliest=60, deleted=[70, 80])

    world.shards.before[m.SegmentsChange] = delete
    world.reclaimer().run_round()
    (stem,) = world.registered()
    segment = Segment.open(world.base, "/data", stem)
    assert list(segment.deleted(0)) == [70, 80]
    segment.close()


def test_many_small_segments_of_a_topic_become_one(world):
    for n in range(SMALL_SEGMENTS_MAX + 1):
        world.segment(n, {7: range(n * 10 + 1, n * 10 + 11)})
    before = world.readable()
    world.settle()
    assert world.readable() == before
    assert len(world.registered()) == 1
    assert world.stems() == world.registered()


def test_many_shared_segments_become_few_and_a_topic_that_grew_gets_its_own(world):
    for n in range(SHARED_SEGMENTS_MAX + 1):
        world.segment(
            n, {7: range(n * 30 + 1, n * 30 + 31), 8: [n + 1], 9: [n + 1]}, payload_bytes=200
        )  # fmt: skip
    before = world.readable()
    world.settle()
    assert world.readable() == before
    packs = [stem for stem in world.registered() if stem.startswith("packs")]
    owns = [stem for stem in world.registered() if stem.startswith("topics")]
    assert len(packs) <= SHARED_SEGMENTS_MAX // 2
    assert owns[0].startswith("topics/0000000000000007/")


def test_a_merge_of_shared_segments_never_spans_records_of_other_segments(world):
    """If two segments span a position, the one with the greater number is in force."""
    world.segment(1, {7: range(1, 6), 8: [1]})
    world.segment(2, {7: range(6, 500)})
    for n in range(3, SHARED_SEGMENTS_MAX + 4):
        world.segment(n, {7: [500 + n], 8: [n]})
    before = world.readable()
    world.settle()
    assert world.readable() == before
    ranges = []
    for stem in world.registered():
        seqs = seqs_of(world.base, "/data", stem, 7)
        if seqs:
            ranges.append((seqs[0], seqs[-1]))
    ranges.sort()
    assert all(a[1] < b[0] for a, b in itertools.pairwise(ranges))


def test_a_segment_that_a_crash_left_next_to_its_successor_is_dropped(world):
    """Recovery adopted both; the greater number is in force."""
    old = world.segment(1, {7: range(1, 101)})
    new = world.segment(50, {7: range(31, 101)})
    world.set(7, earliest=31)
    world.settle()
    assert world.registered() == [new.stem]
    assert old.stem not in world.stems()


def test_records_in_a_gap_of_a_greater_segment_are_not_dropped(world):
    """A segment hides only records that it contains."""
    world.segment(1, {7: range(11, 21)})
    world.segment(2, {7: [*range(1, 11), *range(21, 31)]})
    world.settle()
    assert world.readable() == {7: list(range(1, 31))}


def test_a_damaged_segment_supersedes_nothing(world):
    """The segment with the smaller number contains the intact copy."""
    world.segment(1, {7: range(1, 11)})
    damaged = world.segment(2, {7: range(1, 11)})
    world.quarantined.add(damaged.number)
    world.settle()
    assert len(world.registered()) == 2


def test_leftovers_of_every_kind_are_removed_and_foreign_files_stay(world):
    """A leftover segment is found from either of its parts."""
    kept = world.segment(1, {7: range(1, 11)})
    dead = make_segment(world.base, "/data", FIRST + 2, {9: range(1, 5)})  # a deleted topic
    # A registered segment contains its records.
    covered = make_segment(world.base, "/data", FIRST + 3, {7: range(3, 8)})
    lone = make_segment(world.base, "/data", FIRST + 4, {9: range(5, 9)})
    world.base.unlink(f"/data/{lone.stem}{DATA}")
    for name in ("packs/0001000000000003.idx.tmp", "packs/notes.txt", "topics/README.tmp"):
        world.base.close(world.base.create(f"/data/{name}"))
    world.settle()
    assert world.stems() == sorted([kept.stem, "packs/notes"]), (dead, covered)
    assert world.base.exists("/data/packs/notes.txt")
    assert world.base.exists("/data/topics/README.tmp")


def test_directories_of_deleted_topics_are_removed_when_no_snapshot_can_name_the_topic(world):
    world.segment(1, {7: range(1, 51)})
    world.segment(2, {8: range(1, 51)})
    world.segment(3, {10: range(1, 51)})
    world.set(7, epoch=0)
    world.set(10, epoch=0)
    missing = world.shards.refs[0].pop(FIRST + 3)
    world.shards.missing = [missing]  # an operator may put it back
    for suffix in (DATA, IDX):
        world.base.unlink(f"/data/{missing.stem}{suffix}")
    for name in ("notes", "00000000000000ff.old"):
        world.base.make_dir(f"/data/topics/{name}")
    reclaimer = world.reclaimer()
    for _ in range(2):
        reclaimer.run_round()
        assert world.base.exists(f"/data/topics/{7:016x}"), "a snapshot names it"
        world.snapshots()
    reclaimer.run_round()
    world.snapshots()
    reclaimer.run_round()
    world.base.power_loss(1)
    assert world.base.list_dir("/data/topics") == [
        f"{8:016x}", f"{10:016x}", "00000000000000ff.old", "notes"
    ]  # fmt: skip


def test_an_empty_topic_directory_stays_while_its_topic_lives_or_its_shard_is_silent(world):
    world.segment(1, {7: range(1, 51)})
    world.set(9)  # has no segment yet
    for topic in (9, 11):
        world.base.make_dir(f"/data/topics/{topic:016x}")
    world.base.sync_dir("/data/topics")
    reclaimer = world.reclaimer()

    def silent(shard: int, _message: m.Message) -> None:
        raise NotReady("shard is not there", shard=shard)

    world.shards.before[m.ListLiveRecords] = silent
    for _ in range(3):
        reclaimer.run_round()
        world.snapshots()
    assert world.base.list_dir("/data/topics") == [f"{topic:016x}" for topic in (7, 9, 11)]
    world.shards.before.clear()
    for _ in range(3):
        reclaimer.run_round()
        world.snapshots()
    assert world.base.list_dir("/data/topics") == [f"{topic:016x}" for topic in (7, 9)]


def test_unregistered_segments_with_live_records_or_damage_are_kept(world):
    """The reclaimer never guesses. An operator decides about these files."""
    world.set(7)
    alive = make_segment(world.base, "/data", FIRST + 2, {7: range(1, 5)})
    damaged = make_segment(world.base, "/data", FIRST + 3, {9: range(1, 5)})
    damage_file(world.base, f"/data/{damaged.stem}{IDX}", 8, b"\xff" * 20)
    world.settle()
    assert world.stems() == sorted([alive.stem, damaged.stem])


def test_a_segment_that_is_not_registered_yet_is_not_removed(world):
    """Its shard makes no snapshot between the write of the segment and its registration."""
    world.set(7)
    reclaimer = world.reclaimer()
    made = make_segment(world.base, "/data", FIRST + 2, {7: range(1, 5)})
    reclaimer.run_round()
    world.shards.register(made)
    for _ in range(3):
        world.snapshots()
        reclaimer.run_round()
    assert world.stems() == [made.stem]


def test_quarantined_segments_are_not_rewritten(world):
    """A quarantined segment is not rewritten until it verifies again."""
    ref = world.segment(1, {7: range(1, 101)})
    world.set(7, earliest=90)
    world.quarantined.add(ref.number)
    world.settle()
    assert world.registered() == [ref.stem]


def test_a_damaged_source_is_left_unchanged_and_other_segments_are_rewritten(world):
    """The rewriter verifies the data that it copies."""
    bad, good = world.segment(1, {7: range(1, 101)}), world.segment(2, {8: range(1, 101)})
    damage_file(world.base, f"/data/{bad.stem}{DATA}", bad.data_bytes - 60, b"\xff" * 20)
    world.set(7, earliest=90)
    world.set(8, earliest=90)
    world.settle()
    assert bad.stem in world.registered()
    assert good.stem not in world.registered()
    assert len(world.stems()) == 2


def test_a_change_that_the_shard_refuses_leaves_all_files_unchanged(world):
    ref = world.segment(1, {7: range(1, 101)})
    world.set(7, earliest=90)
    world.shards.refuses.add(0)
    world.settle()
    assert world.registered() == [ref.stem]
    assert world.stems() == [ref.stem]


def test_a_dead_cold_segment_is_removed_from_both_tiers():
    """No file of it remains, neither in the data directory nor in the cold tier."""
    world = World(cold=True)
    ref = world.segment(1, {7: range(1, 11)})
    copies = SegmentCopies(world.base, "/data", world.store())
    copies.upload_index_parts(ref.stem)
    copies.upload_part(ref.stem + DATA)
    copies.drop_local(ref.stem, (DATA,))
    world.shards.register(m.SegmentRef(ref.number, ref.stem, 1, 1, 10, 1, 1, 2))
    world.set(7, epoch=0)
    world.settle()
    assert world.files() == []
    assert world.files("/cold") == []


def test_a_dead_segment_leaves_the_object_of_another_engine_in_its_store():
    """Both engines use the same cold directory by mistake, and their segments have the same names."""
    world = World(cold=True)
    ref = world.segment(1, {7: range(1, 11)})
    theirs = OwnedStore(LocalStore(world.base, "/cold"), world.base, "/theirs", ENGINE_ID.hex())
    SegmentCopies(world.base, "/data", theirs).upload_part(ref.stem + DATA)
    world.store = lambda disk=None: OwnedStore(
        LocalStore(world.base, "/cold"), world.base, "/ours", "bb" * 16
    )
    world.set(7, epoch=0)
    world.settle()
    assert world.files() == []
    assert world.files("/cold") == [ref.stem + DATA]


def test_an_index_stays_while_the_volume_of_its_cold_segment_is_not_mounted():
    """The mount point exists and is empty. The segment is removed when the volume returns."""
    world = World(cold=True)
    ref = world.segment(1, {7: range(1, 11)})
    copies = SegmentCopies(world.base, "/data", world.store())
    copies.upload_part(ref.stem + DATA)
    copies.drop_local(ref.stem, (DATA,))
    world.shards.register(m.SegmentRef(ref.number, ref.stem, 1, 1, 10, 1, 1, 2))
    world.set(7, epoch=0)
    world.base.make_dir("/bare")
    mounted = world.store
    world.store = lambda disk=None: mounted(disk, "/bare")
    world.settle()
    assert world.files() == [ref.stem + IDX]
    assert world.files("/cold") == [ref.stem + DATA]
    world.store = mounted
    world.settle()
    assert world.files() == world.files("/cold") == []


@pytest.mark.slow
def test_a_crash_at_any_disk_call_loses_nothing_and_the_next_reclaimer_completes_the_work():
    """The work contains a drop, a rewrite and a merge. A power loss follows the crash (RF-6)."""

    def build() -> World:
        world = World(cold=True)
        world.segment(1, {7: range(1, 51)})
        world.segment(2, {8: range(1, 101)})
        for n in range(3, 4 + SHARED_SEGMENTS_MAX):
            world.segment(n, {9: [n], 10: [n], 11: [n]})
        world.set(7, epoch=0)
        world.set(8, earliest=90)
        world.set(11, deleted=[4, 5, 6])
        return world

    whole = build()
    before = whole.readable()
    counting = FaultyDisk(whole.base)
    whole.settle(counting)
    assert whole.readable() == before
    end = len(whole.stems())
    calls = counting.calls["any"]
    assert calls > 40
    for nth in range(1, calls + 1):
        world = build()
        with pytest.raises(Halted):
            world.settle(FaultyDisk(world.base, DiskFault("any", nth, "halt")))
        world.base.process_kill()
        assert world.readable() == before, nth
        world.base.power_loss(nth)
        assert world.readable() == before, nth
        world.settle()
        assert world.readable() == before, nth
        assert len(world.stems()) == end, nth
        assert set(world.stems()) == set(world.registered()), nth


@pytest.mark.parametrize("kind", ["EIO", "ENOSPC"])
@pytest.mark.parametrize("op", ["open", "write", "full_sync", "rename", "dir_sync", "unlink"])
def test_a_disk_error_loses_nothing_and_the_work_is_done_later(world, op, kind):
    """All live records stay readable."""
    world.segment(1, {7: range(1, 51)})
    world.segment(2, {8: range(1, 101)})
    world.set(7, epoch=0)
    world.set(8, earliest=90)
    before = world.readable()
    disk = FaultyDisk(world.base)
    disk.plan = [DiskFault(op, disk.calls[op] + 1, kind)]
    world.settle(disk)
    assert world.readable() == before
    world.settle()
    assert world.readable() == before
    assert world.stems() == world.registered()
    assert len(world.stems()) == 1


def test_the_rate_limiter_sleeps_and_raises_when_the_process_stops():
    """The limit is in bytes per second. The error is `ShuttingDown`."""
    clock, stopping = ManualClock(), []
    pace = ByteRateLimiter(1_000, clock, lambda: bool(stopping))
    start = clock.monotonic_ns()
    for _ in range(5):
        pace(1_000)
    assert (clock.monotonic_ns() - start) / 1e9 == pytest.approx(5, abs=0.2)
    clock.advance(seconds=100)
    pace(1_000)
    stopping.append(True)
    with pytest.raises(ShuttingDown):
        pace(10_000)


def test_deletion_marks_are_written_only_for_topics_with_deleted_records(world):
    ref = world.segment(1, {7: range(1, 11), 8: range(1, 11)})
    world.reclaimer()
    numbers = NumberAllocator(CREATOR_RECLAIMER)
    rewriter = Rewriter(world.base, "/data", SETTINGS, numbers, world.pace)
    assert (
        rewriter.mark_deleted([ref], {7: TopicLiveness(1, 1, BitMap64([3, 99])), 8: TopicLiveness(1, 1)}) == 1
    )
    assert rewriter.mark_deleted([ref], {7: TopicLiveness(1, 1, BitMap64([3]))}) == 0
    assert world.base.exists(f"/data/{ref.stem}{DEL}")
