"""Deletes, caps and TTL of a shard: the worked cases of tombstones, and what survives which end of a life."""

from __future__ import annotations

import pytest
from removal_world import append, delete, read, started, state

from actors.wal_shard import events as ev
from actors.wal_shard.phases import Room
from ringlog.envelope import messages as m
from ringlog.errors import (
    InvalidRequest,
    RecordTooLarge,
    StaleEpoch,
    TopicFull,
    TopicNotEmpty,
    TopicNotFound,
)
from ringlog.testing.disk import SimulatedDisk
from ringlog.testing.shard_world import World
from ringlog.topic.tombstone import Gap

CLASSES = ("fsync", "disk", "memory", "ephemeral")


@pytest.fixture
def world() -> World:
    return started()


def write(world: World, name: str, *numbers: int) -> None:
    """One record a write, each of one byte, so that the numbers come out as given."""
    for number in numbers:
        assert world.append(name, [b"x"]) == number


def again(world: World) -> World:
    """The same data after kill -9."""
    world.kill()
    world.start()
    return world


# -- TB-17, case by case; each holds after a restart, too ------------------------------------------------


@pytest.mark.parametrize("durability", CLASSES)
def test_case_a_a_delete_of_the_front_is_silent(world, durability):
    """TB-17 A, DL-10, DL-7."""
    world.put_topic("t", durability=durability)
    write(world, "t", 1, 2, 3, 4, 5)
    reply = delete(world, "t", before=4)
    assert (reply.deleted, reply.earliest_seq, reply.head_seq, reply.count, reply.bytes) == (3, 4, 5, 2, 2)
    assert read(world, "t") == (None, [4, 5])
    assert state(world, "t").evict_floor == 1


@pytest.mark.parametrize("durability", CLASSES)
def test_cases_b_and_c_a_cap_is_announced_and_a_later_delete_is_not(world, durability):
    """TB-17 B, C."""
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
def test_case_d_caps_count_live_records_only(world, durability):
    """TB-17 D, X-6, X-7: what was deleted costs nothing, and passing over it announces nothing."""
    world.put_topic("t", durability=durability, cap_records=4)
    write(world, "t", 1, 2, 3, 4)
    delete(world, "t", before=3)
    write(world, "t", 5, 6)
    assert (read(world, "t"), state(world, "t").count) == ((None, [3, 4, 5, 6]), 4)
    write(world, "t", 7)
    assert read(world, "t") == (Gap(1, 3, "cap"), [4, 5, 6, 7])
    assert state(world, "t").evict_floor == state(world, "t").earliest_seq == 4


def test_case_e_both_reasons_are_told_apart(world):
    """TB-17 E, TB-7, X-3: across a restart, too."""
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
def test_case_f_everything_expires(world, durability):
    """TB-17 F, X-18: the head and its numbers stay."""
    world.put_topic("t", durability=durability, ttl_ms=1_000)
    write(world, "t", 1, 2, 3, 4, 5)
    world.clock.advance(1.000_001)
    assert read(world, "t") == (Gap(1, 5, "ttl"), [])
    found = state(world, "t")
    assert (found.evict_floor, found.earliest_seq, found.head_seq) == (6, 6, 5)
    assert (found.count, found.bytes) == (0, 0)
    write(world, "t", 6)


def test_case_g_a_recreated_topic_starts_over(world):
    """TB-17 G."""
    world.put_topic("t", durability="fsync")
    write(world, "t", 1)
    epoch = world.topic("t").epoch
    world.request(m.TopicDelete("t"))
    world.put_topic("t", durability="fsync")
    world._producer_seqs.clear()
    write(world, "t", 1, 2, 3, 4, 5)
    assert world.topic("t").epoch > epoch
    assert read(world, "t", 9) == (Gap(1, 5, "recreated"), [1, 2, 3, 4, 5])


def test_case_h_a_lost_range_is_announced_between_what_is_left(world):
    """TB-17 H, D-19: with a cap in force its positions count for nothing."""
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
def test_case_i_everything_deleted_by_tag_is_silent(world, durability):
    """TB-17 I."""
    world.put_topic("t", durability=durability)
    for _ in range(5):
        append(world, "t", [b"x"], tags=["a"])
    assert delete(world, "t", match="a").deleted == 5
    found = state(world, "t")
    assert (found.evict_floor, found.earliest_seq, found.count, found.bytes) == (1, 6, 0, 0)
    assert read(world, "t") == (None, [])


def test_case_j_a_cap_that_is_lifted_brings_nothing_back(world):
    """TB-17 J, C-12, X-13."""
    world.put_topic("t", durability="fsync", cap_records=2)
    write(world, "t", 1, 2, 3)
    world.put_topic("t", mode="merge", cap_records=0)
    for each in (world, again(world)):
        assert read(each, "t") == (Gap(1, 1, "cap"), [2, 3])


# -- deletes ---------------------------------------------------------------------------------------------


@pytest.fixture
def tagged(world) -> World:
    """1 a, 2 b, 3 -, 4 ab, 5 a*, 6 a, in frames of three."""
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
def test_a_filter_selects_exactly_what_it_says_and_untagged_records_never(tagged, match, before, left):
    """DL-2, DL-3, DL-4, DL-6, DL-7: a repeat deletes nothing."""
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
def test_a_filter_that_is_none_is_refused(tagged, match):
    """DL-2, DL-3."""
    with pytest.raises(InvalidRequest):
        delete(tagged, "t", match=match)


def test_a_delete_without_a_bound_or_of_nothing_known_is_refused(tagged):
    """DL-1."""
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


def test_a_bound_beyond_the_head_means_everything_and_one_below_the_front_nothing(tagged):
    """DL-5, DL-24: no record of a delete that selects nothing."""
    assert delete(tagged, "t", before=3).deleted == 2
    offset, version = tagged.runs[0].core.log.offset, tagged.topic("t").version
    assert delete(tagged, "t", before=3).deleted == 0
    assert delete(tagged, "t", match="nobody").deleted == 0
    assert delete(tagged, "t", seqs=[1, 2, 99]).deleted == 0
    assert (tagged.runs[0].core.log.offset, tagged.topic("t").version) == (offset, version)
    assert delete(tagged, "t", before=1 << 40).deleted == 4
    assert tagged.append("t", [b"x"], producer=9) == 7
    assert read(tagged, "t") == (None, [7])


def test_a_delete_covers_what_was_ordered_before_it_and_nothing_else(world):
    """DL-11, DL-13: staged records included, later ones under the tag not, also after a crash."""
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


def test_a_deletes_frame_is_synced_before_its_answer_on_a_durable_topic_only(world):
    """DL-12, DL-14."""
    for durability in ("fsync", "disk", "memory"):
        world.put_topic(durability, durability=durability)
        write(world, durability, 1, 2, 3)
        log = world.runs[0].core.log
        delete(world, durability, before=2)
        assert (log.durable == log.offset) == (durability == "fsync")
        assert read(again(world), durability)[1] == [2, 3], "never undone by killing processes"


def test_every_removal_grows_the_topics_version_and_a_later_incarnations_are_greater(world):
    """A reader that compares versions sees every removal."""
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


def test_located_names_what_was_deleted_one_by_one(tagged):
    delete(tagged, "t", match="a")
    located = tagged.request(m.Locate("t", 0))
    assert located.version == tagged.topic("t").version
    assert read(tagged, "t") == (None, [2, 3, 4, 5])
    assert located.deleted_to == 0
    assert tagged.request(m.Locate("t", 6)).deleted == b""


def test_deletes_go_through_on_a_full_disk(world):
    """ST-13."""
    world.put_topic("t", durability="fsync")
    write(world, "t", 1, 2, 3)
    world.runs[0].core._file_failed = "no space"
    world.runs[0].core._file_retry_ns = 1 << 62
    assert delete(world, "t", before=2).deleted == 1
    assert delete(world, "t", seqs=[3]).deleted == 1
    assert read(world, "t") == (None, [2])


# -- caps ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("durability", CLASSES)
def test_one_write_larger_than_the_cap_leaves_its_newest_records(world, durability):
    """X-7: records may be evicted by the very write that brings them."""
    world.put_topic("t", durability=durability, cap_records=3)
    world.append("t", [b"1", b"22", b"333", b"4444", b"55555"])
    assert read(world, "t") == (Gap(1, 2, "cap"), [3, 4, 5])
    assert state(world, "t").bytes == 12
    world.append("t", [b"666666"])
    assert (state(world, "t").earliest_seq, state(world, "t").bytes) == (4, 15)


@pytest.mark.parametrize("durability", CLASSES)
def test_a_byte_cap_takes_the_fewest_records_that_make_it_hold(world, durability):
    """X-6, X-7, R-10."""
    world.put_topic("t", durability=durability, cap_bytes=10)
    world.append("t", [b"4444", b"", b"333", b"22"])
    assert state(world, "t").count == 4
    world.append("t", [b"22"])
    assert read(world, "t") == (Gap(1, 1, "cap"), [2, 3, 4, 5])
    world.append("t", [b"much larger than the cap"])
    assert (state(world, "t").count, state(world, "t").bytes) == (0, 0)


def test_tags_of_records_that_came_with_an_eviction_are_known(world):
    """DL-9: such records reach the ledger from memory, not from the file."""
    world.put_topic("t", durability="fsync", cap_records=3)
    append(world, "t", [b"1"], tags=["a"])
    assert delete(world, "t", match="none").deleted == 0
    append(world, "t", [b"2", b"3", b"4"], tags=["a", "b", "a"])
    append(world, "t", [b"5"], tags=["a"])
    assert delete(world, "t", match="a").deleted == 2
    assert read(world, "t") == (Gap(1, 2, "cap"), [3])


def test_damage_does_not_keep_a_topic_from_being_written(world):
    """What cannot be decided is tried again later, and not with every write."""
    world.put_topic("t", durability="fsync")
    append(world, "t", [b"precious"])
    run = world.runs[0]
    at = run.read("wal/shard-00/wal-1-0.log").index(b"precious")
    world.disk.write_at(run.writer._fd, [b"X"], at)
    asked, consult = [], run._perform[ev.QueryLedger]
    run._perform[ev.QueryLedger] = lambda effect: asked.append(1) or consult(effect)
    write(world, "t", 2)
    world.put_topic("t", mode="merge", cap_records=1)
    write(world, "t", 3, 4)
    assert len(asked) == 1
    world.clock.advance(11)
    write(world, "t", 5)
    assert len(asked) == 2
    assert state(world, "t").count == 5


def test_an_eviction_is_synced_with_the_append_that_made_it_necessary(world):
    """X-9: on a topic whose records are not, too."""
    world.put_topic("t", durability="memory", cap_records=2)
    write(world, "t", 1, 2)
    log = world.runs[0].core.log
    assert log.durable < log.offset
    write(world, "t", 3)
    assert log.durable == log.offset
    world.power_loss(seed=1)
    world.start()
    assert world.topic("t").cap_floor == 2


def test_a_tighter_cap_evicts_at_once_and_for_good(world):
    """C-8, C-9, C-12."""
    world.put_topic("t", durability="fsync")
    write(world, "t", 1, 2, 3, 4)
    world.put_topic("t", mode="merge", cap_records=1)
    assert read(world, "t") == (Gap(1, 3, "cap"), [4])
    world.put_topic("t", mode="merge", cap_records=100)
    assert read(again(world), "t") == (Gap(1, 3, "cap"), [4])


@pytest.mark.interpreted
def test_a_cap_that_was_tightened_just_before_a_crash_is_applied_at_the_start(world, monkeypatch):
    """C-9: its frame is durable, its evictions were not."""
    world.put_topic("t", durability="fsync")
    write(world, "t", 1, 2, 3, 4)
    removals = world.runs[0].core.removals
    removals.request_retention = lambda topic: None
    world.put_topic("t", mode="merge", cap_records=1)
    assert world.topic("t").count == 4
    again(world)
    assert read(world, "t") == (Gap(1, 3, "cap"), [4])


def test_a_topic_that_refuses_never_evicts_and_has_room_again_after_a_delete(world):
    """W-12, W-13, W-15."""
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
def test_expired_records_make_room_in_a_topic_that_refuses(world, by_message):
    """W-2 (7), W-15: pending retention comes first."""
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
    """X-4, X-8, X-10: every operation that shows contents or counts sees it at once."""
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


def test_a_topic_that_is_not_empty_is_not_deleted_as_empty(world):
    world.put_topic("t", durability="fsync", ttl_ms=1_000)
    write(world, "t", 1)
    with pytest.raises(TopicNotEmpty):
        world.request(m.TopicDelete("t", if_empty=True))


def test_time_alone_lets_records_expire(world):
    """TTL by a deadline: nobody has to ask, and the board says when to look again."""
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


def test_what_expired_stays_expired_with_an_earlier_clock_and_a_longer_ttl(world):
    """X-13, C-12."""
    world.put_topic("t", durability="fsync", ttl_ms=1_000)
    write(world, "t", 1, 2)
    world.clock.advance(2)
    assert state(world, "t").count == 0
    world.clock.step(-100)
    world.put_topic("t", mode="merge", ttl_ms=0)
    assert read(again(world), "t") == (Gap(1, 2, "ttl"), [])


def test_a_ttl_that_is_lifted_brings_nothing_back_that_expired_under_it(world):
    """C-12: even if nothing had removed it yet."""
    world.put_topic("t", durability="fsync", ttl_ms=1_000)
    write(world, "t", 1)
    world.runs[0].core._retain_at_ns = None
    world.clock.advance(2)
    world.put_topic("t", mode="merge", ttl_ms=0)
    assert read(world, "t") == (Gap(1, 1, "ttl"), [])


def test_a_ttl_set_later_takes_the_old_records(world):
    """C-8."""
    world.put_topic("t", durability="fsync")
    write(world, "t", 1)
    world.clock.advance(10)
    write(world, "t", 2)
    world.put_topic("t", mode="merge", ttl_ms=5_000)
    assert read(world, "t") == (Gap(1, 1, "ttl"), [2])


def test_a_record_is_due_by_ttl_although_a_later_time_was_known(world):
    """X-10: the time that was known may be the own expiry of a record that is gone."""
    world.put_topic("t", durability="fsync", ttl_ms=1_000)
    append(world, "t", [b"1"], expires_at=[world.clock.now_us() + 9_000_000])
    world.clock.advance(2)
    assert state(world, "t").count == 0
    write(world, "t", 2)
    world.clock.advance(1.1)
    assert state(world, "t").count == 0


def test_ttl_is_known_again_after_a_restart(world):
    world.put_topic("t", durability="fsync", ttl_ms=1_000)
    write(world, "t", 1)
    again(world)
    world.tick(1.1)
    assert world.topic("t").count == 0


@pytest.mark.parametrize("durability", CLASSES)
def test_a_record_expires_at_its_own_time_between_others_that_do_not(world, durability):
    """R-14: silently there, announced when the prefix comes to it."""
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


def test_own_expiry_at_the_front_is_announced_as_ttl(world):
    """R-14, X-8."""
    world.put_topic("t", durability="fsync")
    now = world.clock.now_us()
    append(world, "t", [b"1", b"2"], expires_at=[now + 2_000_000, now + 1_000_000])
    write(world, "t", 3)
    world.clock.advance(1.5)
    assert read(world, "t") == (None, [1, 3])
    world.clock.advance(1)
    assert read(world, "t") == (Gap(1, 2, "ttl"), [3])


def test_damage_refuses_the_delete_and_nothing_else(world):
    """A stored record that does not verify is told of; the shard goes on."""
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
    assert delete(world, "t", before=100).deleted == 3, "needs no look at the records"


@pytest.mark.interpreted
def test_what_a_delete_takes_is_found_anew_when_retention_came_between(world, monkeypatch):
    """DL-24, X-9: while there was no room for it some of the same expired, and would be taken away twice."""
    world.put_topic("t", ttl_ms=10_000)
    write(world, "t", 1, 2, 3)
    world.clock.advance(8.0)
    write(world, "t", 4, 5, 6)
    core = world.run_of("t").core
    find_room, kept = core._room_for, []

    def no_room_at_first(event):
        room = find_room(event)
        if room is Room.NOW and isinstance(event.message, m.RecordsDelete) and not kept:
            # It is decided, and has to wait for a file; meanwhile the first three expire.
            kept.append(room)
            world.clock.advance(4.0)
            core.removals.request_retention(core.directory.find("t"))
            return Room.LATER
        return room

    monkeypatch.setattr(core, "_room_for", no_room_at_first)
    assert delete(world, "t", seqs=[2, 3, 4]).deleted == 1
    assert kept
    found = state(world, "t")
    assert (found.count, found.bytes) == (2, 2)
    assert read(world, "t") == (Gap(1, 3, "ttl"), [5, 6])
