"""Deletes, caps and TTL of a shard: tombstones case by case, and the state after each kind of restart."""

from __future__ import annotations

import pytest

from ringlog.actors.wal_shard import events as ev
from ringlog.actors.wal_shard.phases import Room
from ringlog.envelope import messages as m
from ringlog.errors import (
    InvalidRequest,
    NotReady,
    RecordTooLarge,
    StaleEpoch,
    TopicFull,
    TopicNotEmpty,
    TopicNotFound,
)
from ringlog.limits import STALE_DUES_MAX
from ringlog.testing.disk import DiskFault, FaultyDisk, SimulatedDisk
from ringlog.topic.tombstone import Gap
from tests.support.removal_world import append, delete, read, state
from tests.support.shard_world import DATA, World, refusals
from tests.support.shard_worlds import restart, started

CLASSES = ("fsync", "disk", "memory", "ephemeral")
EXPIRIES = 600
"""Times at which records expire, while the end of a log has room for fewer removals."""


def write(world: World, name: str, *numbers: int) -> None:
    """Append records of one byte, one in each write, and check their seqs."""
    for number in numbers:
        assert world.append(name, [b"x"]) == number


def again(world: World) -> World:
    """Restart after kill -9 with the same data."""
    restart(world)
    return world


# -- tombstones, case by case; each holds after a restart as well ----------------------------------------


@pytest.mark.parametrize("durability", CLASSES)
def test_a_delete_of_the_oldest_records_leaves_no_tombstone(world, durability):
    """A delete moves no floor of involuntary loss (X5)."""
    world.put_topic("t", durability=durability)
    write(world, "t", 1, 2, 3, 4, 5)
    reply = delete(world, "t", before=4)
    assert (reply.deleted, reply.earliest_seq, reply.head_seq, reply.count, reply.bytes) == (3, 4, 5, 2, 2)
    assert read(world, "t") == (None, [4, 5])
    assert state(world, "t").evict_floor == 1


@pytest.mark.parametrize("durability", CLASSES)
def test_an_eviction_by_a_cap_leaves_a_tombstone_and_a_later_delete_does_not(world, durability):
    """The tombstone covers exactly the evicted seqs."""
    world.put_topic("t", durability=durability, cap_records=3)
    write(world, "t", 1, 2, 3, 4, 5)
    assert read(world, "t", 0) == (Gap(1, 2, "cap"), [3, 4, 5])
    assert read(world, "t", 1) == (Gap(2, 2, "cap"), [3, 4, 5])
    assert read(world, "t", 2) == (None, [3, 4, 5])
    assert delete(world, "t", seqs=[3]).earliest_seq == 4
    assert read(world, "t", 0) == (Gap(1, 2, "cap"), [4, 5])
    assert read(world, "t", 2) == (None, [4, 5])
    if durability != "ephemeral":
        assert read(again(world), "t", 0) == (Gap(1, 2, "cap"), [4, 5])


@pytest.mark.parametrize("durability", CLASSES)
def test_caps_count_live_records_only(world, durability):
    """Deleted records do not count, and a reader passes them without a tombstone."""
    world.put_topic("t", durability=durability, cap_records=4)
    write(world, "t", 1, 2, 3, 4)
    delete(world, "t", before=3)
    write(world, "t", 5, 6)
    assert (read(world, "t"), state(world, "t").count) == ((None, [3, 4, 5, 6]), 4)
    write(world, "t", 7)
    assert read(world, "t") == (Gap(1, 3, "cap"), [4, 5, 6, 7])
    assert state(world, "t").evict_floor == state(world, "t").earliest_seq == 4


def test_a_tombstone_distinguishes_cap_and_ttl(world):
    """A gap with both reasons is `mixed`. This holds across a restart."""
    world.put_topic("t", durability="fsync", ttl_ms=1_000)
    write(world, "t", 1, 2)
    world.clock.advance(1.5)
    write(world, "t", 3, 4, 5, 6, 7, 8)
    world.put_topic("t", mode="merge", cap_records=4)
    for each in (world, again(world)):
        topic = each.topic("t")
        assert read(each, "t", 0) == (Gap(1, 4, "mixed"), [5, 6, 7, 8])
        assert read(each, "t", 2) == (Gap(3, 4, "cap"), [5, 6, 7, 8])
        assert (topic.ttl_floor, topic.cap_floor) == (3, 5)


@pytest.mark.parametrize("durability", CLASSES)
def test_when_every_record_expires_the_head_stays(world, durability):
    """The next append gets the next seq."""
    world.put_topic("t", durability=durability, ttl_ms=1_000)
    write(world, "t", 1, 2, 3, 4, 5)
    world.clock.advance(1.000_001)
    assert read(world, "t") == (Gap(1, 5, "ttl"), [])
    found = state(world, "t")
    assert (found.evict_floor, found.earliest_seq, found.head_seq) == (6, 6, 5)
    assert (found.count, found.bytes) == (0, 0)
    write(world, "t", 6)


def test_a_recreated_topic_starts_at_seq_1(world):
    """A reader with an old cursor gets a tombstone with the reason `recreated`."""
    world.put_topic("t", durability="fsync")
    write(world, "t", 1)
    epoch = world.topic("t").epoch
    world.request(m.TopicDelete("t"))
    world.put_topic("t", durability="fsync")
    world._producer_seqs.clear()
    write(world, "t", 1, 2, 3, 4, 5)
    assert world.topic("t").epoch > epoch
    assert read(world, "t", 9) == (Gap(1, 5, "recreated"), [1, 2, 3, 4, 5])


def test_a_lost_range_is_reported_between_the_remaining_records(world):
    """Lost positions do not count for a cap."""
    world.put_topic("t", durability="disk", cap_records=34)
    for number in range(1, 34):
        write(world, "t", number)
    world.tick(0.2)
    world.tick(0.2)
    for number in range(34, 41):
        write(world, "t", number)
    world.power_loss(seed=3, damage=lambda *given: None)
    world.start()
    topic = world.topic("t")
    (first, last), kept = topic.lost[0], topic.count
    assert kept == len(read(world, "t")[1]) == topic.staged_count
    seq = world.append("t", [b"x"], producer=2)
    assert seq == last + 1
    gap, found = read(world, "t", first - 1)
    assert gap == Gap(first, last, "restart_loss")
    assert found == [seq]
    assert state(world, "t").count == min(kept + 1, 34)


@pytest.mark.parametrize("durability", CLASSES)
def test_a_delete_of_everything_by_tag_leaves_no_tombstone(world, durability):
    """The earliest seq becomes the next seq."""
    world.put_topic("t", durability=durability)
    for _ in range(5):
        append(world, "t", [b"x"], tags=["a"])
    assert delete(world, "t", match="a").deleted == 5
    found = state(world, "t")
    assert (found.evict_floor, found.earliest_seq, found.count, found.bytes) == (1, 6, 0, 0)
    assert read(world, "t") == (None, [])


def test_a_lifted_cap_restores_no_records(world):
    """No removed record returns with a laxer configuration (X3)."""
    world.put_topic("t", durability="fsync", cap_records=2)
    write(world, "t", 1, 2, 3)
    world.put_topic("t", mode="merge", cap_records=0)
    for each in (world, again(world)):
        assert read(each, "t") == (Gap(1, 1, "cap"), [2, 3])


# -- deletes ---------------------------------------------------------------------------------------------


@pytest.fixture
def tagged(world) -> World:
    """Append six records in frames of three, with the tags: 1 a, 2 b, 3 none, 4 ab, 5 a*, 6 a."""
    world.put_topic("t", durability="fsync")
    append(world, "t", [b"1", b"22", b"333"], tags=["a", "b", None])
    append(world, "t", [b"4444", b"55555", b"666666"], tags=["ab", "a*", "a"], metas=[b"{}", None, None])
    return world


@pytest.mark.parametrize(
    ("match", "before", "left"),
    [
        ("a", 0, [2, 3, 4, 5]),
        ("a*", 0, [2, 3]),
        (["tag", "Eq", "a*"], 0, [1, 2, 3, 4, 6]),
        (["tag", "Eq", "a"], 0, [2, 3, 4, 5]),
        (["tag", "Glob", "a*"], 5, [2, 3, 5, 6]),
        (["tag", "Glob", "a**"], 0, [1, 2, 3, 4, 6]),
        ("*", 0, [3]),
        ("zz", 0, [1, 2, 3, 4, 5, 6]),
        ("", 0, [1, 2, 3, 4, 5, 6]),
        ("a", 6, [2, 3, 4, 5, 6]),
    ],
)
def test_a_filter_selects_exactly_its_records_and_never_untagged_ones(tagged, match, before, left):
    """A repeated delete removes nothing."""
    sizes = [1, 2, 3, 6, 5, 6]
    reply = delete(tagged, "t", before, match)
    assert reply.deleted == 6 - len(left)
    assert (reply.count, reply.bytes) == (len(left), sum(sizes[seq - 1] for seq in left))
    assert read(tagged, "t") == (None, left)
    assert delete(tagged, "t", before, match).deleted == 0
    again(tagged)
    assert read(tagged, "t") == (None, left)
    assert (state(tagged, "t").count, state(tagged, "t").bytes) == (reply.count, reply.bytes)


@pytest.mark.parametrize(
    "match",
    [["tag", "Eq"], ["node", "Eq", "a"], ["tag", "Ne", "a"], ["tag", "Glob", "a"], 7, ["tag", "Eq", 1]],
)
def test_an_invalid_filter_is_refused(tagged, match):
    """Only `Eq` and `Glob` of tags are valid."""
    with pytest.raises(InvalidRequest):
        delete(tagged, "t", match=match)


def test_an_invalid_delete_is_refused(tagged):
    """A delete needs a bound, an existing topic, one kind of selection, and the current epoch."""
    with pytest.raises(InvalidRequest):
        delete(tagged, "t")
    with pytest.raises(TopicNotFound):
        delete(tagged, "none", before=3)
    with pytest.raises(InvalidRequest):
        delete(tagged, "t", before=3, seqs=[1])
    with pytest.raises(InvalidRequest):
        tagged.request(m.RecordsDelete("t", seqs=b"no bitmap"))
    with pytest.raises(StaleEpoch):
        tagged.request(m.RecordsDelete("t", before_seq=3, epoch=77))


def test_a_bound_beyond_the_head_deletes_everything_and_one_below_the_first_record_nothing(tagged):
    """A delete that selects nothing is not logged."""
    assert delete(tagged, "t", before=3).deleted == 2
    offset, version = tagged.runs[0].core.log.offset, tagged.topic("t").version
    assert delete(tagged, "t", before=3).deleted == 0
    assert delete(tagged, "t", match="nobody").deleted == 0
    assert delete(tagged, "t", seqs=[1, 2, 99]).deleted == 0
    assert (tagged.runs[0].core.log.offset, tagged.topic("t").version) == (offset, version)
    assert delete(tagged, "t", before=1 << 40).deleted == 4
    assert tagged.append("t", [b"x"], producer=9) == 7
    assert read(tagged, "t") == (None, [7])


def test_a_delete_removes_earlier_records_and_no_later_ones(world):
    """This includes staged records, and holds after a crash (X4)."""
    world.put_topic("t", durability="fsync")
    run = world.runs[0]
    first = world.frame_for("t", [b"1", b"2"])
    later = world.frame_for("t", [b"3"])
    run.step(
        run.frames(1, first), run.request(900, m.RecordsDelete("t", before_seq=1 << 60)), run.frames(1, later)
    )
    assert run.replies.pop(900).deleted == 2
    assert read(world, "t") == (None, [3])
    assert read(again(world), "t") == (None, [3])


def test_a_delete_is_synced_before_its_reply_only_in_an_fsync_topic(world):
    """In other classes a kill of processes does not undo the delete."""
    for durability in ("fsync", "disk", "memory"):
        world.put_topic(durability, durability=durability)
        write(world, durability, 1, 2, 3)
        log = world.runs[0].core.log
        delete(world, durability, before=2)
        assert (log.durable == log.offset) == (durability == "fsync")
        assert read(again(world), durability)[1] == [2, 3], "a kill must not undo a delete"


def test_every_removal_increases_the_version_of_its_topic(world):
    """A later incarnation has greater versions (X7)."""
    world.put_topic("t", durability="fsync", cap_records=5)
    seen = [world.topic("t").version]
    for number in range(1, 8):
        write(world, "t", number)
    seen.append(world.topic("t").version)
    delete(world, "t", before=5)
    seen.append(world.topic("t").version)
    again(world)
    assert world.topic("t").version == seen[-1]
    delete(world, "t", before=6)
    seen.append(world.topic("t").version)
    assert seen == sorted(set(seen))
    assert seen[-1] >> 32 > seen[-2] >> 32


def test_located_contains_the_seqs_of_single_deletes(tagged):
    delete(tagged, "t", match="a")
    located = tagged.request(m.Locate("t", 0))
    assert located.version == tagged.topic("t").version
    assert read(tagged, "t") == (None, [2, 3, 4, 5])
    assert located.deleted_to == 0
    assert tagged.request(m.Locate("t", 6)).deleted == b""


def test_deletes_succeed_on_a_full_disk(world):
    """A delete frees space, so it must not need free space."""
    world.put_topic("t", durability="fsync")
    write(world, "t", 1, 2, 3)
    world.runs[0].core.log_roll.failure = "no space"
    world.runs[0].core.log_roll.retry_at_ns = 1 << 62
    assert delete(world, "t", before=2).deleted == 1
    assert delete(world, "t", seqs=[3]).deleted == 1
    assert read(world, "t") == (None, [2])


def test_records_that_expire_on_a_full_disk_leave_room_for_requests():
    """No log file can be created for as long as hundreds of passes remove expired records."""
    disk = FaultyDisk(SimulatedDisk(DATA))
    world = started({"f": "fsync"}, disk=disk)
    world.put_topic("t", durability="fsync", ttl_ms=EXPIRIES * 300)
    world.put_topic("q", type="queue", durability="fsync")
    for _ in range(EXPIRIES):
        world.append("t", [b"x"])
        world.clock.advance(0.3)
    end_us = world.clock.now_us() + EXPIRIES * 300_000
    append(world, "q", [b"job", b"late"], expires_at=[end_us - 1, 1 << 60])
    disk.plan = [DiskFault("size", disk.calls["size"] + 1, "ENOSPC", always=True)]
    while not any(refusals(world.send("f", [world.frame_for("f", [b"x" * 30_000])]))):
        continue
    core = world.runs[0].core
    before = core.log.offset
    for _ in range(EXPIRIES):
        world.tick(0.3)
    assert core.log.offset > before, "expected removals while there is room"
    assert state(world, "f").count > 0
    assert delete(world, "f", before=2).deleted == 1
    assert world.request(m.Claim("q", "w", 2)).runs == [], "an expired job must not be leased"
    with pytest.raises(NotReady):
        world.request(m.TopicPut("t", {"ttl_ms": 1 << 40}, "merge"))
    disk.plan = []
    world.tick(20)
    assert state(world, "t").count == 0
    assert [run[0] for run in world.request(m.Claim("q", "w", 2)).runs] == [2]
    world.request(m.TopicPut("t", {"ttl_ms": 1 << 40}, "merge"))
    assert state(world, "t").count == 0


def test_a_cap_that_is_lowered_on_a_full_disk_applies_once_there_is_room():
    """Nothing of the topic expires, and other settings postpone nothing."""
    disk = FaultyDisk(SimulatedDisk(DATA))
    world = started({"f": "fsync"}, disk=disk)
    for name, config in (("q", {}), ("p", {"leases_durable": True}), ("e", {"ttl_ms": 1 << 40})):
        world.put_topic(name, type="queue", durability="fsync", **config)
        append(world, name, [b"job"] * 5)
    disk.plan = [DiskFault("size", disk.calls["size"] + 1, "ENOSPC", always=True)]
    while not any(refusals(world.send("f", [world.frame_for("f", [b"x" * 30_000])]))):
        continue
    core, rounds = world.runs[0].core, 0
    while core.log_roll.bytes_before_kept > 500:
        rounds += 1
        world.put_topic("f", "merge", ttl_ms=(1 << 40) + rounds)
    for name, change in (("q", {"lease_ms": 40_000}), ("p", {"cap_records": 3}), ("e", {"cap_records": 3})):
        world.put_topic(name, "merge", **change)
    assert [run[:2] for run in world.request(m.Claim("q", "w", 1)).runs] == [(1, 1)]
    disk.plan = []
    world.tick(20)
    world.tick(20)
    assert not core.log_roll.failure
    assert [state(world, name).count for name in "qpe"] == [5, 3, 3]
    for name, first in (("q", 2), ("p", 3), ("e", 3)):
        assert world.request(m.Claim(name, "w", 9)).runs[0][0] == first
        world.put_topic(name, "merge", cap_records=4)


# -- caps ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("durability", CLASSES)
def test_one_write_larger_than_the_cap_keeps_its_newest_records(world, durability):
    """A write may evict records that it appends."""
    world.put_topic("t", durability=durability, cap_records=3)
    world.append("t", [b"1", b"22", b"333", b"4444", b"55555"])
    assert read(world, "t") == (Gap(1, 2, "cap"), [3, 4, 5])
    assert state(world, "t").bytes == 12
    world.append("t", [b"666666"])
    assert (state(world, "t").earliest_seq, state(world, "t").bytes) == (4, 15)


@pytest.mark.parametrize("durability", CLASSES)
def test_a_byte_cap_evicts_the_fewest_records(world, durability):
    """A record that is larger than the cap is evicted as well."""
    world.put_topic("t", durability=durability, cap_bytes=10)
    world.append("t", [b"4444", b"", b"333", b"22"])
    assert state(world, "t").count == 4
    world.append("t", [b"22"])
    assert read(world, "t") == (Gap(1, 1, "cap"), [2, 3, 4, 5])
    world.append("t", [b"much larger than the cap"])
    assert (state(world, "t").count, state(world, "t").bytes) == (0, 0)


def test_tags_of_records_that_arrive_with_an_eviction_are_known(world):
    """The ledger reads such records from memory, not from the file."""
    world.put_topic("t", durability="fsync", cap_records=3)
    append(world, "t", [b"1"], tags=["a"])
    assert delete(world, "t", match="none").deleted == 0
    append(world, "t", [b"2", b"3", b"4"], tags=["a", "b", "a"])
    append(world, "t", [b"5"], tags=["a"])
    assert delete(world, "t", match="a").deleted == 2
    assert read(world, "t") == (Gap(1, 2, "cap"), [3])


def test_damaged_records_do_not_prevent_appends(world):
    """A cap that cannot be applied is retried later, and not with every append."""
    world.put_topic("t", durability="fsync")
    append(world, "t", [b"precious"])
    run = world.runs[0]
    at = run.read("wal/shard-00/wal-1-0.log").index(b"precious")
    world.disk.write_at(run.writer._fd, [b"X"], at)
    asked, consult = [], run._perform[ev.QueryStorage]
    run._perform[ev.QueryStorage] = lambda effect: asked.append(1) or consult(effect)
    write(world, "t", 2)
    world.put_topic("t", mode="merge", cap_records=1)
    write(world, "t", 3, 4)
    assert len(asked) == 1
    world.clock.advance(11)
    write(world, "t", 5)
    assert len(asked) == 2
    assert state(world, "t").count == 5


def test_an_eviction_is_synced_with_the_append_that_causes_it(world):
    """An eviction is synced, whatever the class (X2)."""
    world.put_topic("t", durability="memory", cap_records=2)
    write(world, "t", 1, 2)
    log = world.runs[0].core.log
    assert log.durable < log.offset
    write(world, "t", 3)
    assert log.durable == log.offset
    world.power_loss(seed=1)
    world.start()
    assert world.topic("t").cap_floor == 2


def test_a_tighter_cap_evicts_at_once_and_permanently(world):
    """No removed record returns with a laxer configuration (X3)."""
    world.put_topic("t", durability="fsync")
    write(world, "t", 1, 2, 3, 4)
    world.put_topic("t", mode="merge", cap_records=1)
    assert read(world, "t") == (Gap(1, 3, "cap"), [4])
    world.put_topic("t", mode="merge", cap_records=100)
    assert read(again(world), "t") == (Gap(1, 3, "cap"), [4])


@pytest.mark.interpreted
def test_a_cap_tightened_just_before_a_crash_is_applied_at_the_start(world, monkeypatch):
    """Its control frame is durable, and its evictions are not."""
    world.put_topic("t", durability="fsync")
    write(world, "t", 1, 2, 3, 4)
    removals = world.runs[0].core.removals
    removals.schedule.request = lambda topic: None
    world.put_topic("t", mode="merge", cap_records=1)
    assert world.topic("t").count == 4
    again(world)
    assert read(world, "t") == (Gap(1, 3, "cap"), [4])


def test_a_topic_with_discard_reject_never_evicts_and_has_space_after_a_delete(world):
    """A tighter cap evicts nothing either."""
    world.put_topic("t", durability="fsync", cap_records=2, discard="reject")
    write(world, "t", 1, 2)
    with pytest.raises(TopicFull):
        world.append("t", [b"x"])
    world.put_topic("t", mode="merge", cap_records=1)
    assert state(world, "t").count == 2
    delete(world, "t", before=3)
    assert world.append("t", [b"x"], producer=3) == 3
    with pytest.raises(RecordTooLarge):
        world.append("t", [b"x", b"x"], producer=3)


@pytest.mark.parametrize("by_message", [False, True])
def test_expired_records_make_space_in_a_topic_with_discard_reject(world, by_message):
    """Due removals are applied before the cap is checked."""
    world.put_topic("t", durability="fsync", cap_records=2, discard="reject", ttl_ms=1_000)
    write(world, "t", 1, 2)
    world.clock.advance(1.1)
    if by_message:
        sent = world.frame_for("t", [b"x"], producer=5)
        world.request(m.Append("t", 1), sent)
    else:
        assert world.append("t", [b"x"], producer=5) == 3
    assert (state(world, "t").count, state(world, "t").earliest_seq) == (1, 3)


# -- TTL -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("durability", CLASSES)
def test_a_record_lives_as_long_as_its_ttl_and_not_a_microsecond_longer(world, durability):
    """No view of contents or counts shows an expired record (X6)."""
    world.put_topic("t", durability=durability, ttl_ms=1_000)
    write(world, "t", 1)
    world.clock.advance(0.5)
    write(world, "t", 2, 3)
    world.clock.advance(0.5)
    assert state(world, "t").count == 3
    world.clock.advance(0.000_001)
    assert (state(world, "t").count, state(world, "t").bytes) == (2, 2)
    world.clock.advance(0.5)
    assert world.ask(world.runs[0], m.TopicList()).topics[0].count == 0
    write(world, "t", 4)
    world.clock.advance(1.1)
    assert world.request(m.TopicDelete("t", if_empty=True)).deleted


def test_delete_if_empty_refuses_a_topic_with_records(world):
    world.put_topic("t", durability="fsync", ttl_ms=1_000)
    write(world, "t", 1)
    with pytest.raises(TopicNotEmpty):
        world.request(m.TopicDelete("t", if_empty=True))


def test_records_expire_without_a_request(world):
    """The shard sets a deadline for it, and the topic has the time of its next expiry."""
    world.put_topic("t", durability="fsync", ttl_ms=1_000)
    write(world, "t", 1)
    topic, core = world.topic("t"), world.runs[0].core
    assert topic.due_us == world.clock.now_us() + 1_000_001
    assert core.next_deadline_ns() <= world.clock.monotonic_ns() + 1_000_001_000
    world.tick(1.1)
    assert (topic.ttl_floor, topic.count, topic.due_us) == (2, 0, 0)
    world.tick(1.0)
    world.tick(1.0)
    assert core.next_deadline_ns() is None


def _dues_of(world: World, name: str) -> list[int]:
    schedule = world.run_of(name).core.removals.schedule
    return [len(schedule.dues), len(schedule.strict_dues)]


@pytest.mark.parametrize("discard", ["old", "reject"])
def test_a_topic_that_evicts_with_every_write_has_one_time_in_the_schedule(world, discard):
    """The time of its oldest record moves with every write. The records still expire at their time."""
    world.put_topic("t", cap_records=5, ttl_ms=7 * 86_400_000, discard=discard)
    for number in range(1, 201):
        if discard == "reject" and number > 5:
            delete(world, "t", before=number - 4)
        write(world, "t", number)
        world.clock.advance(1)
    assert max(_dues_of(world, "t")) == 1
    world.tick(7 * 86_400 - 6)
    assert world.topic("t").count == 5
    world.tick(6)
    assert world.topic("t").count == 0


def test_the_schedule_keeps_a_bounded_number_of_times_that_are_not_in_force(world):
    """The topic expires earlier and earlier. It is due at the earliest time only."""
    world.put_topic("t", ttl_ms=86_400_000)
    write(world, "t", 1)
    topic, schedule = world.topic("t"), world.run_of("t").core.removals.schedule
    for _ in range(3 * STALE_DUES_MAX):
        topic.due_us -= 1
        schedule.add(topic)
        assert len(schedule.dues) <= 1 + STALE_DUES_MAX
    assert schedule.next_due_us == topic.due_us
    assert schedule.dues.take(topic.due_us - 1) == []
    assert schedule.dues.take(topic.due_us) == [topic]
    assert schedule.dues.take(topic.due_us + 86_400_000_000) == []
    assert len(schedule.dues) == 0


def test_expired_records_stay_expired_with_an_earlier_clock_and_a_longer_ttl(world):
    """Floors only rise, also with an earlier clock or a laxer configuration (X3)."""
    world.put_topic("t", durability="fsync", ttl_ms=1_000)
    write(world, "t", 1, 2)
    world.clock.advance(2)
    assert state(world, "t").count == 0
    world.clock.step(-100)
    world.put_topic("t", mode="merge", ttl_ms=0)
    assert read(again(world), "t") == (Gap(1, 2, "ttl"), [])


def test_lifting_a_ttl_restores_no_expired_records(world):
    """This holds even if the records were not removed yet."""
    world.put_topic("t", durability="fsync", ttl_ms=1_000)
    write(world, "t", 1)
    world.runs[0].core._retain_at_ns = None
    world.clock.advance(2)
    world.put_topic("t", mode="merge", ttl_ms=0)
    assert read(world, "t") == (Gap(1, 1, "ttl"), [])


def test_a_ttl_that_is_set_later_applies_to_old_records(world):
    """Records that are older than the TTL expire at once."""
    world.put_topic("t", durability="fsync")
    write(world, "t", 1)
    world.clock.advance(10)
    write(world, "t", 2)
    world.put_topic("t", mode="merge", ttl_ms=5_000)
    assert read(world, "t") == (Gap(1, 1, "ttl"), [2])


def test_a_record_expires_by_ttl_although_a_later_expiry_was_stored(world):
    """The stored time may be the own expiry of a record that was removed."""
    world.put_topic("t", durability="fsync", ttl_ms=1_000)
    append(world, "t", [b"1"], expires_at=[world.clock.now_us() + 9_000_000])
    world.clock.advance(2)
    assert state(world, "t").count == 0
    write(world, "t", 2)
    world.clock.advance(1.1)
    assert state(world, "t").count == 0


def test_the_ttl_is_applied_after_a_restart(world):
    world.put_topic("t", durability="fsync", ttl_ms=1_000)
    write(world, "t", 1)
    again(world)
    world.tick(1.1)
    assert world.topic("t").count == 0


@pytest.mark.parametrize("durability", CLASSES)
def test_a_record_expires_at_its_own_time_between_others(world, durability):
    """A tombstone covers it only when the expired prefix reaches it."""
    world.put_topic("t", durability=durability)
    now = world.clock.now_us()
    append(world, "t", [b"1", b"22", b"333"], expires_at=[None, now + 1_000_000, now + 3_000_000])
    write(world, "t", 4)
    world.clock.advance(0.999_999)
    assert state(world, "t").count == 4
    world.clock.advance(0.000_001)
    assert read(world, "t") == (None, [1, 3, 4])
    assert (state(world, "t").count, state(world, "t").bytes) == (3, 5)
    assert world.topic("t").due_us == now + 3_000_000
    if durability == "fsync":
        again(world)
    world.clock.advance(2)
    assert read(world, "t") == (None, [1, 4])
    assert world.topic("t").due_us == 0


def test_own_expiry_of_the_oldest_records_is_reported_as_ttl(world):
    """The second record expires before the first one."""
    world.put_topic("t", durability="fsync")
    now = world.clock.now_us()
    append(world, "t", [b"1", b"2"], expires_at=[now + 2_000_000, now + 1_000_000])
    write(world, "t", 3)
    world.clock.advance(1.5)
    assert read(world, "t") == (None, [1, 3])
    world.clock.advance(1)
    assert read(world, "t") == (Gap(1, 2, "ttl"), [3])


def test_damage_refuses_a_delete_by_tag_and_nothing_else(world):
    """The error reports the damaged record, and the shard continues."""
    disk: SimulatedDisk = world.disk
    world.put_topic("t", durability="fsync")
    append(world, "t", [b"precious"], tags=["a"])
    append(world, "t", [b"precious"], tags=["b"])
    run = world.runs[0]
    at = run.read("wal/shard-00/wal-1-0.log").index(b"precious")
    disk.write_at(run.writer._fd, [b"X"], at)
    reply = world.ask(run, m.RecordsDelete("t", match="b"))
    assert isinstance(reply, m.ErrorReply)
    assert "damaged" in reply.message
    assert world.append("t", [b"x"], producer=4) == 3
    assert delete(world, "t", before=100).deleted == 3, "a delete by seq must not read the records"


@pytest.mark.interpreted
def test_the_records_of_a_delete_are_selected_again_after_retention(world, monkeypatch):
    """Some of them expired while the delete waited for space in the log. They must not be removed twice."""
    world.put_topic("t", ttl_ms=10_000)
    write(world, "t", 1, 2, 3)
    world.clock.advance(8.0)
    write(world, "t", 4, 5, 6)
    core = world.run_of("t").core
    find_room, kept = core.intake._room_for, []

    def no_room_at_first(event):
        room = find_room(event)
        if room is Room.NOW and isinstance(event.message, m.RecordsDelete) and not kept:
            # The delete is decided and waits for a file. Meanwhile the first three records expire.
            kept.append(room)
            world.clock.advance(4.0)
            core.removals.schedule.request(core.directory.find("t"))
            return Room.LATER
        return room

    monkeypatch.setattr(core.intake, "_room_for", no_room_at_first)
    assert delete(world, "t", seqs=[2, 3, 4]).deleted == 1
    assert kept
    found = state(world, "t")
    assert (found.count, found.bytes) == (2, 2)
    assert read(world, "t") == (Gap(1, 3, "ttl"), [5, 6])
