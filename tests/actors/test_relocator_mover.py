"""Moves to the cold tier over real bytes: copy, verify, switch, remove. An end at any step is harmless."""

from __future__ import annotations

from itertools import chain, repeat

import pytest

from ringlog.actors.relocator.mover import Mover
from ringlog.config import ColdConfig
from ringlog.envelope import messages as m
from ringlog.errors import ColdUnavailable
from ringlog.segment.layout import DATA, DEL, IDX
from ringlog.testing import ManualClock
from ringlog.testing.disk import DiskFault, FaultyDisk, Halted, SimulatedDisk
from ringlog.tier.copies import SegmentCopies
from ringlog.tier.local import LocalStore
from ringlog.tier.ownership import OWNER_OBJECT, OwnedStore
from ringlog.tier.store import digest_of, object_pieces
from tests.support.disk_files import damage_file
from tests.support.segment_files import ENGINE_ID, FakeShards, make_segment, mark_deleted

NUMBER = 1 << 48
TOPIC = 7


class World:
    """One data directory, one cold directory, and fake shards that only know segments."""

    def __init__(self, disk=None, shards: int = 1) -> None:
        self.base = SimulatedDisk("/data", "/data/meta", "/cold")
        assert self.store().claim() == ENGINE_ID.hex()
        self.shards = FakeShards(shards)
        self.clock = ManualClock()
        self.refs = [
            make_segment(self.base, "/data", NUMBER + n, {TOPIC: range(n * 10 + 1, n * 10 + 11)})
            for n in range(3)
        ]
        self.shards.register(*self.refs)
        self.held = repeat(False)
        """Whether a backup runs, at each check."""

    def store(self, disk=None, store=None) -> OwnedStore:
        disk = disk or self.base
        return OwnedStore(store or LocalStore(disk, "/cold"), disk, "/data", ENGINE_ID.hex())

    def mover(self, disk=None, store=None, hot_segments: int = 1) -> Mover:
        disk = disk or self.base
        self.copies = SegmentCopies(disk, "/data", self.store(disk, store))
        return Mover(
            self.copies, ColdConfig(dir="/cold", hot_segments=hot_segments), shards=len(self.shards.refs),
            ask=lambda shard, message, wanted: self.shards.ask(shard, message)[0], clock=self.clock,
            jitter=lambda: 0.0, is_held=lambda: next(self.held),
        )  # fmt: skip

    def tiers(self, shard: int = 0) -> list[int]:
        return [self.shards.refs[shard][ref.number].tier for ref in self.refs]

    def has(self, root: str, n: int, suffix: str) -> bool:
        return self.base.exists(f"{root}/{self.refs[n].stem}{suffix}")

    def digest(self, n: int, suffix: str) -> str:
        """Return the digest of the cold part."""
        return digest_of(object_pieces(LocalStore(self.base, "/cold"), self.refs[n].stem + suffix))

    def write(self, path: str, at: int, data: bytes) -> None:
        """Overwrite bytes of a file, as bit rot does."""
        damage_file(self.base, path, at, data)

    def require_readable(self) -> None:
        """Check that every segment is intact in the tier to which its shard leads readers."""
        copies = SegmentCopies(self.base, "/data", self.store())
        for n, ref in enumerate(self.refs):
            if self.shards.refs[0][ref.number].tier == 2:
                copies.verify_cold(ref.stem)
            else:
                copies.verify_local(ref.stem)
            assert self.has("/data", n, IDX), "the index stays on the host"

    def wait(self) -> None:
        self.clock.advance(seconds=400)


@pytest.fixture
def world() -> World:
    return World()


def test_a_due_segment_moves_to_the_cold_tier_and_its_index_stays_on_the_host(world):
    """The cold data part has the same name and the same bytes. Only the data part leaves the host."""
    before = [digest_of([_contents(world.base, f"/data/{ref.stem}{DATA}")]) for ref in world.refs]
    mover = world.mover()
    mover.run_round()
    assert world.tiers() == [2, 2, 0]
    assert [world.has("/data", n, DATA) for n in range(3)] == [False, False, True]
    assert [world.has("/cold", n, DATA) for n in range(3)] == [True, True, False]
    assert [world.digest(n, DATA) for n in range(2)] == before[:2]
    assert mover.counts.moved == 2
    told = [message for _, message in world.shards.asked if isinstance(message, m.SegmentTier)]
    assert [(each.number - NUMBER, each.tier) for each in told] == [(0, 1), (0, 2), (1, 1), (1, 2)]
    world.require_readable()
    assert mover.counts.segments_due == 2
    mover.run_round()
    assert mover.counts.segments_due == 0


def _contents(disk, path: str) -> bytes:
    fd = disk.open_read(path)
    try:
        return disk.read_at(fd, disk.size(fd), 0)
    finally:
        disk.close(fd)


def test_a_crash_at_any_call_leaves_an_intact_copy_and_the_next_relocator_completes_the_move():
    """A power loss follows the crash (RF-6)."""
    counting = World()
    disk = FaultyDisk(counting.base)
    counting.mover(disk).run_round()
    assert disk.calls["any"] > 20
    for nth in range(1, disk.calls["any"] + 1):
        world = World()
        with pytest.raises(Halted):
            world.mover(FaultyDisk(world.base, DiskFault("any", nth, "halt"))).run_round()
        world.base.process_kill()
        world.require_readable()
        world.base.power_loss(nth)
        world.require_readable()
        if nth % 2:  # a restarted shard derives the tier from the files on disk
            for n, ref in enumerate(world.refs):
                hot = world.has("/data", n, DATA)
                world.shards.register(m.SegmentRef(*_with_tier(ref, 0 if hot else 2)))
        world.mover().run_round()
        assert world.tiers() == [2, 2, 0], nth
        assert [world.has("/data", n, DATA) for n in range(3)] == [False, False, True], nth
        world.require_readable()


def _with_tier(ref: m.SegmentRef, tier: int) -> list:
    return [ref.number, ref.stem, ref.salt, ref.data_bytes, ref.records, ref.frames, ref.topics, tier, 0]


@pytest.mark.parametrize("kind", ["EIO", "ENOSPC"])
@pytest.mark.parametrize("op", ["write", "full_sync", "rename", "dir_sync", "make_dir", "unlink"])
def test_a_disk_error_leaves_the_hot_copy_and_the_move_is_retried(world, op, kind):
    """After the retries every due segment is cold."""
    faulty = FaultyDisk(world.base, DiskFault(op, 1, kind))
    mover = world.mover(faulty)
    mover.run_round()
    world.require_readable()
    assert mover.counts.failed == 1
    world.wait()
    mover.run_round()
    world.wait()
    mover.run_round()
    assert world.tiers() == [2, 2, 0]
    assert not world.has("/data", 0, DATA)
    world.require_readable()


def test_deletion_marks_made_between_copy_and_switch_are_in_the_cold_copy(world):
    """The mover copies changed marks again before the last switch."""
    ref = world.refs[0]

    def delete(_shard, message):
        if (message.number, message.tier) == (ref.number, 1):
            mark_deleted(world.base, "/data", ref.stem, TOPIC, [3, 5])

    world.shards.before[m.SegmentTier] = delete
    world.mover().run_round()
    assert world.digest(0, DEL) == digest_of([_contents(world.base, f"/data/{ref.stem}{DEL}")])


def test_deletion_marks_made_after_the_switch_are_copied_with_the_next_snapshot(world):
    """The marks on the host are authoritative. The marks in the store follow them."""
    ref, mover = world.refs[0], world.mover()
    mover.run_round()
    mark_deleted(world.base, "/data", ref.stem, TOPIC, [4])
    mover.run_round()
    assert not world.has("/cold", 0, DEL), "no shard has a new snapshot"
    world.shards.snapshots[0] += 1
    mover.run_round()
    assert world.digest(0, DEL) == digest_of([_contents(world.base, f"/data/{ref.stem}{DEL}")])


def test_a_damaged_hot_segment_is_not_moved_and_does_not_block_others(world):
    """The segment is quarantined."""
    world.write(f"/data/{world.refs[0].stem}{DATA}", 4_500, b"\xff" * 40)
    mover = world.mover()
    mover.run_round()
    assert world.tiers() == [0, 2, 0]
    assert mover.backoff.quarantined == {world.refs[0].number}
    assert not world.has("/cold", 0, DATA)


def test_a_damaged_hot_segment_is_repaired_from_an_intact_cold_copy(world):
    """The cold tier contains a copy from an earlier attempt."""
    stem = world.refs[0].stem
    world.mover()
    world.copies.upload_part(stem + DATA)
    world.write(f"/data/{stem}{DATA}", 4_500, b"\xff" * 40)
    mover = world.mover()
    mover.run_round()
    assert mover.counts.healed == 1
    assert world.tiers() == [2, 2, 0]
    world.require_readable()


def test_a_damaged_copy_of_an_earlier_attempt_is_overwritten(world):
    """The hot copy is intact."""
    stem = world.refs[0].stem
    world.mover()
    world.copies.upload_part(stem + DATA)
    world.write(f"/cold/{stem}{DATA}", 4_500, b"\xff" * 40)
    world.mover().run_round()
    assert world.tiers() == [2, 2, 0]
    world.require_readable()


@pytest.mark.parametrize("rotten", ["/cold", "/data"])
def test_a_hot_part_of_a_cold_segment_never_replaces_an_intact_copy_by_a_damaged_one(world, rotten):
    """The relocator died after the switch and before it removed the hot part."""
    stem = world.refs[0].stem
    world.mover()
    world.copies.upload_part(stem + DATA)
    world.shards.register(m.SegmentRef(*_with_tier(world.refs[0], 2)))
    world.write(f"{rotten}/{stem}{DATA}", 4_500, b"\xff" * 40)
    world.mover().run_round()
    assert not world.has("/data", 0, DATA)
    world.require_readable()


class Wrapped:
    """A store with one kind of fault."""

    def __init__(self, inner) -> None:
        self.inner = inner

    def __getattr__(self, name):
        return getattr(self.inner, name)


class LosesObjects(Wrapped):
    def put(self, name, source):
        digest = self.inner.put(name, source)
        self.inner.delete(name)
        return digest


class ReturnsOtherBytes(Wrapped):
    def get_range(self, name, start, stop):
        data = bytearray(self.inner.get_range(name, start, stop))
        if data and name != OWNER_OBJECT:
            data[-1] ^= 1
        return bytes(data)


class LiesAboutSize(Wrapped):
    def size(self, name):
        return self.inner.size(name) + 8


class CutsShort(Wrapped):
    def get_range(self, name, start, stop):
        cut = 0 if name == OWNER_OBJECT else 9
        return self.inner.get_range(name, start, max(start, min(stop, self.inner.size(name)) - cut))


@pytest.mark.parametrize("kind", [LosesObjects, ReturnsOtherBytes, LiesAboutSize, CutsShort])
def test_a_faulty_store_receives_no_segment(world, kind):
    """The mover reads the destination back before it removes the source."""
    mover = world.mover(store=kind(LocalStore(world.base, "/cold")))
    for _ in range(3):
        mover.run_round()
        world.wait()
    assert world.tiers() == [0, 0, 0]
    assert all(world.has("/data", n, DATA) for n in range(3))
    world.mover().run_round()
    assert world.tiers() == [2, 2, 0], "a working store must receive the due segments"


class IsRemovedMeanwhile(Wrapped):
    """After the first copy, the shards drop the segment and the reclaimer removes all its files."""

    def __init__(self, inner, world, listing) -> None:
        super().__init__(inner)
        self.world, self.listing = world, listing

    def put(self, name, source):
        digest, ref = self.inner.put(name, source), self.world.refs[0]
        if name.startswith(ref.stem):
            if not self.listing:
                self.world.shards.refs[0].pop(ref.number, None)
            self.world.copies.drop_local(ref.stem, (DATA, DEL))
            self.world.copies.drop_cold(ref.stem)
        return digest


@pytest.mark.parametrize("listing", [False, True])
def test_a_segment_that_is_removed_during_the_copy_is_not_damaged(world, listing, caplog):
    """A segment is damaged only if a shard leads readers to it and no copy is intact."""
    mover = world.mover(store=IsRemovedMeanwhile(LocalStore(world.base, "/cold"), world, listing))
    mover.run_round()
    assert mover.backoff.quarantined == ({world.refs[0].number} if listing else set())
    assert ("damaged segment not moved" in caplog.text) == listing
    assert world.shards.refs[0][world.refs[1].number].tier == 2, "other segments must move"


class TakesTheShardAway(Wrapped):
    """The shard goes down before the mover searches for an intact copy."""

    def __init__(self, inner, world) -> None:
        super().__init__(inner)
        self.world = world

    def size(self, name):
        self.world.shards.down.add(0)
        return self.inner.size(name)


def test_damage_is_reported_only_if_a_shard_confirms_the_segment(world):
    """While the shard is down, the move fails without a report. The next attempt finds the damage again."""
    world.write(f"/data/{world.refs[0].stem}{DATA}", 4_500, b"\xff" * 40)
    store = TakesTheShardAway(LocalStore(world.base, "/cold"), world)
    mover = world.mover(store=store)
    mover.run_round()
    assert not mover.backoff.quarantined
    assert mover.counts.failed
    world.shards.down.clear()
    store.size = store.inner.size
    world.wait()
    mover.run_round()
    assert mover.backoff.quarantined == {world.refs[0].number}


class LosesItsVolume(Wrapped):
    """The volume is unmounted when a segment's data was read back. The mount point stays."""

    def get_range(self, name, start, stop):
        data = self.inner.get_range(name, start, stop)
        if name.endswith(DATA):
            self.inner.root = "/bare"
        return data


def test_nothing_moves_to_a_mount_point_after_its_volume_was_unmounted(world):
    """The first segment is on the volume. The second one stays on the host, and moves when it returns."""
    world.base.make_dir("/bare")
    mover = world.mover(store=LosesItsVolume(LocalStore(world.base, "/cold")))
    mover.run_round()
    assert world.base.list_dir("/bare") == []
    assert world.tiers()[1:] == [0, 0]
    assert all(world.has("/data", n, DATA) for n in (1, 2))
    assert not mover.backoff.quarantined
    world.require_readable()
    world.mover().run_round()
    assert world.tiers() == [2, 2, 0]
    world.require_readable()


class IsAbsent(Wrapped):
    calls = 0

    def _fail(self, *_):
        self.calls += 1
        raise ColdUnavailable("store not available")

    put = get_range = size = exists = delete = _fail


def test_an_unavailable_store_is_tried_once_for_all_segments(world):
    """The mover waits for its backoff before the next attempt."""
    absent = IsAbsent(None)
    mover = world.mover(store=absent)
    mover.run_round()
    assert (absent.calls, mover.counts.failed, mover.counts.segments_due) == (1, 0, 2)
    mover.run_round()
    assert absent.calls == 1, "the backoff must delay the next attempt"
    world.wait()
    mover.run_round()
    assert absent.calls == 2
    assert not mover.backoff.quarantined
    world.require_readable()


def test_an_unavailable_store_is_asked_for_its_owner_less_and_less_often(world, caplog):
    """Rounds go on meanwhile, and count what is due."""
    absent = IsAbsent(None)
    mover = world.mover(store=absent)
    for _ in range(60):
        mover.run_round()
        world.clock.advance(seconds=5)
    assert 3 <= absent.calls <= 10
    assert caplog.text.count("cold store unavailable") == absent.calls
    del world.shards.refs[0][world.refs[0].number]
    mover.run_round()
    assert mover.counts.segments_due == 1


def test_nothing_moves_to_the_store_of_another_engine(world, caplog):
    world.write(f"/cold/{OWNER_OBJECT}", 0, b"bb" * 16)
    mover = world.mover()
    for _ in range(60):
        mover.run_round()
        world.clock.advance(seconds=5)
    assert 3 <= caplog.text.count("cold store belongs to another engine") <= 10
    assert world.tiers() == [0, 0, 0]
    assert mover.counts.segments_due == 2


def test_a_segment_of_two_shards_is_removed_only_after_both_switched():
    world = World(shards=2)
    world.shards.register(world.refs[0], shard=1)
    world.shards.refuses.add(1)
    world.mover().run_round()
    assert world.has("/data", 0, DATA)
    assert world.tiers()[:2] == [1, 2]
    world.shards.refuses.clear()
    world.mover().run_round()
    assert not world.has("/data", 0, DATA)
    assert world.shards.refs[1][world.refs[0].number].tier == 2


def test_segments_of_a_shard_that_is_down_stay_and_others_move():
    world = World(shards=2)
    other = make_segment(world.base, "/data", NUMBER + 50, {9: range(1, 5)})
    newest = make_segment(world.base, "/data", NUMBER + 51, {9: range(5, 9)})
    world.shards.register(other, newest, shard=1)
    world.shards.down.add(0)
    world.mover().run_round()
    assert world.tiers() == [0, 0, 0]
    assert world.shards.refs[1][other.number].tier == 2


def test_a_pack_stays_while_a_shard_that_may_know_it_does_not_answer():
    """The simulated world found this case after a change of the number of shards."""
    world = World(shards=2)
    packs = [
        make_segment(
            world.base, "/data", NUMBER + 60 + n, {8: range(n + 1, n + 2), 9: range(n + 1, n + 2)}
        )
        for n in range(3)
    ]  # fmt: skip
    for shard in (0, 1):
        world.shards.register(*packs, shard=shard)
    world.shards.down.add(0)
    mover = world.mover()
    mover.run_round()
    mover.run_round()
    assert all(world.base.exists(f"/data/{pack.stem}{DATA}") for pack in packs), "shard 0 leads readers there"
    assert [world.shards.refs[1][pack.number].tier for pack in packs] == [0, 0, 0]
    world.shards.down.clear()
    mover.run_round()
    assert not world.base.exists(f"/data/{packs[0].stem}{DATA}")
    assert [world.shards.refs[shard][packs[0].number].tier for shard in (0, 1)] == [2, 2]


def test_the_copy_of_a_dropped_segment_is_removed(world):
    """A kept snapshot may still list the segment, so the copy stays until the local index is removed."""
    ref, mover = world.refs[0], world.mover()

    def drop(_shard, message):
        if message.number == ref.number:
            world.shards.refs[0].pop(ref.number, None)

    world.shards.before[m.SegmentTier] = drop
    mover.run_round()
    assert world.has("/cold", 0, DATA)
    world.shards.before.clear()
    mover.run_round()
    assert world.has("/cold", 0, DATA), "a snapshot may still list the segment"
    world.base.unlink(f"/data/{ref.stem}{IDX}")
    mover.run_round()
    assert not world.has("/cold", 0, DATA)
    assert not world.has("/cold", 0, IDX)


def test_a_hot_part_that_cannot_be_removed_is_retried(world):
    """The segment is already cold, and only its hot part remains."""
    faulty = FaultyDisk(world.base, DiskFault("unlink", 1, "EIO"))
    mover = world.mover(faulty)
    mover.run_round()
    assert world.tiers() == [2, 2, 0]
    assert world.has("/data", 0, DATA)
    world.wait()
    mover.run_round()
    assert not world.has("/data", 0, DATA)


def test_nothing_is_moved_while_a_backup_holds_the_segments(world):
    world.held = repeat(True)
    mover = world.mover()
    mover.run_round()
    assert world.tiers() == [0, 0, 0]
    world.held = repeat(False)
    mover.run_round()
    assert world.tiers() == [2, 2, 0]


def test_every_round_looks_for_a_backup(world):
    """Otherwise a backup would take over the age of an earlier one, and not hold the segments."""
    looks = []
    world.held = (bool(looks.append(None)) for _ in repeat(None))
    for mover in (world.mover(hot_segments=9), world.mover(store=IsAbsent(None))):
        for _ in range(2):
            looks.clear()
            mover.run_round()
            assert looks


def test_a_hot_part_stays_if_a_backup_begins_during_its_move(world):
    """Its shard already leads readers to the cold copy. A later round removes the hot part."""
    world.held = chain([False, False], repeat(True))
    mover = world.mover()
    mover.run_round()
    assert world.tiers() == [2, 0, 0]
    assert world.has("/data", 0, DATA)
    world.held = repeat(False)
    mover.run_round()
    assert [world.has("/data", n, DATA) for n in range(3)] == [False, False, True]
