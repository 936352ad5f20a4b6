"""Checkpoints from the view of the shard: plans, rows, segments in force, and starts from their results."""

from __future__ import annotations

import contextlib
import errno
import random

import numpy as np
import pytest
from pyroaring import BitMap64

from ringlog.actors.compactor.shard_client import CompactorShardClient
from ringlog.envelope import messages as m
from ringlog.errors import CorruptData, DiskError, Internal
from ringlog.limits import CHECKPOINT_REPLY_BYTES
from ringlog.storage.snapshot import load_snapshots
from ringlog.testing.disk import DiskFault, FaultyDisk, Halted, SimulatedDisk
from ringlog.topic.dedup import ProducerSeqRun
from ringlog.types import SESSION_BIT
from tests.support.checkpoint_world import (
    WorldShardRequests,
    checkpoint,
    checkpoint_all,
    checkpoint_dies,
    fill,
    state,
    wal_files,
)
from tests.support.disk_files import create_file, overwrite
from tests.support.shard_world import DATA
from tests.support.shard_worlds import new_world, restart


@pytest.fixture
def world():
    return new_world()


ENDS = pytest.mark.parametrize("how", ["stop", "kill", "power"])


def test_a_reader_is_directed_to_segments_first_and_then_to_the_log(world):
    """Together they cover every live position once, without a gap."""
    fill(world)
    made = checkpoint(world)
    assert made.records == 36
    located = world.request(m.Locate("a", 0))
    assert [bool(each.segment) for each in located.extents] == [True, False]
    assert located.extents[-1].stop == 0, "the open end"
    world.append("a", [b"later"])
    assert [seq for seq, _ in world.records("a")] == list(range(1, 14))
    assert [seq for seq, _ in world.records("a", after=11)] == [12, 13]


@ENDS
def test_a_start_from_a_snapshot_equals_a_start_from_the_complete_log(world, how):
    """Clients observe the same state."""
    fill(world)
    checkpoint(world)
    world.append("a", [b"behind"])
    world.put_topic("new", durability="fsync")
    world.append("new", [b"first"])
    world.request(m.TopicDelete("c"))
    before = state(world)
    restart(world, how)
    assert state(world) == before
    assert "c" not in before
    world.append("a", [b"goes on"])
    assert world.records("a")[-1] == (14, b"goes on")


@ENDS
def test_many_checkpoints_and_starts_lose_nothing_and_shorten_the_log(world, how):
    """Two snapshots are kept, and the log that the older one needs. The other log files are deleted (C4)."""
    for round in range(5):
        fill(world, rounds=2)
        checkpoint(world)
        assert len(wal_files(world)) <= 8, round
        before = state(world)
        restart(world, how)
        assert state(world) == before
    snapshots, skipped = load_snapshots(world.disk, DATA)
    assert (len(snapshots), skipped) == (2, [])
    assert len(wal_files(world)) < 6


def test_the_previous_snapshot_and_its_log_are_sufficient(world):
    """One damaged file is never the only copy."""
    for _ in range(3):
        fill(world)
        checkpoint(world)
    fill(world, rounds=1)
    before = state(world)
    world.kill()
    rot(world, -1)
    world.start()
    assert state(world) == before


def rot(world, which):
    names = sorted(name for name in world.disk.list_dir(f"{DATA}/meta") if name.startswith("snapshot-"))
    path = f"{DATA}/meta/{names[which]}"
    fd = world.disk.open_read(path)
    data = bytearray(world.disk.read_at(fd, world.disk.size(fd), 0))
    world.disk.close(fd)
    data[len(data) // 2] ^= 0x40
    overwrite(world.disk, path, bytes(data))


def test_a_start_with_two_damaged_snapshots_is_refused_and_names_the_missing_part(world):
    """A state with a gap in the middle is never served."""
    for _ in range(3):
        fill(world)
        checkpoint(world)
    world.kill()
    rot(world, -1)
    rot(world, -2)
    with pytest.raises(CorruptData, match="missing") as refused:
        world.start()
    assert len(refused.value.detail["snapshots_skipped"]) == 2


def test_a_damaged_snapshot_loses_nothing_while_the_complete_log_exists(world):
    """Without a valid snapshot, replay starts at the first frame that exists."""
    fill(world)
    checkpoint(world)
    before = state(world)
    world.kill()
    rot(world, -1)
    world.start()
    assert state(world) == before


def test_with_truncate_a_missing_segment_is_a_reported_loss(world):
    """The loss is named, and later starts report the same loss (C3)."""
    fill(world)
    for _ in range(2):
        checkpoint(world)
        fill(world, rounds=1)
    checkpoint(world)
    stem = next(iter(world.runs[0].core.checkpoint.segments.refs.values())).stem
    world.kill()
    for suffix in (".data", ".idx"):
        world.disk.unlink(f"{DATA}/{stem}{suffix}")
    world.is_lenient = True
    world.start()
    lost = {name: world.topic(name).lost for name in "abc"}
    assert lost == {name: [(1, 12)] for name in "abc"}
    assert [seq for seq, _ in world.records("a")] == list(range(13, 21))
    assert world.topic("a").count == 8
    world.is_lenient = False
    restart(world, "kill")
    assert {name: world.topic(name).lost for name in "abc"} == lost
    assert world.topic("a").count == 8


def test_a_missing_index_is_rebuilt(world):
    """An index can be rebuilt from its data (S2)."""
    fill(world)
    checkpoint(world)
    before = state(world)
    stem = next(iter(world.runs[0].core.checkpoint.segments.refs.values())).stem
    world.kill()
    world.disk.unlink(f"{DATA}/{stem}.idx")
    world.start()
    assert state(world) == before


def test_log_files_that_survive_their_removal_are_ignored_and_removed(world):
    """The start does not replay them."""
    fill(world)
    kept = {}
    for name in wal_files(world):
        path = f"{DATA}/wal/shard-00/{name}"
        fd = world.disk.open_read(path)
        kept[path] = world.disk.read_at(fd, world.disk.size(fd), 0)
        world.disk.close(fd)
    for _ in range(3):
        checkpoint(world)
        fill(world)
    gone = [path for path in kept if not world.disk.exists(path)]
    assert gone
    before = state(world)
    world.kill()
    for path in gone:
        create_file(world.disk, path, kept[path])
    world.start()
    assert state(world) == before
    assert not any(world.disk.exists(path) for path in gone)


def test_a_topic_deleted_between_plan_and_rows_is_no_corruption(world):
    """The log that is replayed mentions the topic, and the rows do not."""
    fill(world)
    asking = WorldShardRequests(world)

    def before(message):
        if isinstance(message, m.CheckpointRows) and world.runs[0].core.directory.find("b"):
            world.append("b", [b"last words"])
            world.request(m.TopicDelete("b"))
            world.put_topic("b", durability="fsync")
            world.append("b", [b"another life"])
            world.request(m.TopicDelete("b"))

    asking.before = before
    checkpoint(world, asking=asking)
    expected = state(world)
    restart(world, "kill")
    assert state(world) == expected
    assert sorted(expected) == ["a", "c"]


def test_changes_during_the_handover_of_rows_survive_a_restart(world, monkeypatch):
    """Rows may be newer than the positions of the plan. Replay applies each change once."""
    monkeypatch.setattr("ringlog.actors.wal_shard.retention.checkpoint.CHECKPOINT_ROWS_PER_REPLY", 2)
    names = [f"t{i:02d}" for i in range(9)]
    fill(world, names)
    asking, step = WorldShardRequests(world), iter(range(100))

    def before(message):
        if isinstance(message, m.CheckpointRows):
            n = next(step) % 8
            for name in names:
                if world.runs[0].core.directory.find(name) is not None:
                    world.append(name, [b"during %d" % n])
            world.request(m.TopicDelete(names[n]))
            world.put_topic(f"new{n}", durability="fsync", ttl_ms=1_000_000 + n)
            world.append(f"new{n}", [b"x"])
            world.request(m.TopicPut(names[-1], {"durability": "disk", "cap_records": 1_000 + n}))

    asking.before = before
    for _ in range(2):
        checkpoint(world, asking=asking)
        expected = state(world)
        restart(world, "kill")
        assert state(world) == expected


def test_a_row_of_any_size_is_handed_over_in_bounded_replies(world):
    """A topic's row has no largest size, but a message has: the rest of a row follows in the next replies."""
    fill(world)
    for each in range(1, 12):
        producer = world.topic("b").producers.admit(SESSION_BIT | each)
        producer.add_runs([ProducerSeqRun(2 * n, 1, (each << 40) + 2 * n, 1) for n in range(1, 16_000)])
    expected = state(world)
    sizes = []

    class SizedRequests(WorldShardRequests):
        def ask(self, shard, message, wanted, *, attachment=None):
            answer = super().ask(shard, message, wanted, attachment=attachment)
            if isinstance(message, m.CheckpointRows):
                sizes.append(len(answer.attachment) - 16 * answer.message.topics)
            return answer

    checkpoint(world, asking=SizedRequests(world))
    assert max(sizes) == CHECKPOINT_REPLY_BYTES
    assert sum(sizes) > 2 * CHECKPOINT_REPLY_BYTES
    restart(world, "kill")
    assert state(world) == expected


def test_a_checkpoint_that_begins_again_drops_the_rest_of_the_earlier_rows(world, monkeypatch):
    """The compactor may die between two parts of one row. The shard does not finish such a checkpoint."""
    monkeypatch.setattr("ringlog.actors.wal_shard.retention.checkpoint.CHECKPOINT_REPLY_BYTES", 50)
    fill(world)
    run = world.runs[0]
    plan = world.ask(run, m.CheckpointOpen(True))
    assert not world.ask(run, m.CheckpointRows(True)).done
    assert isinstance(
        world.ask(run, m.CheckpointDone(1, [each.file_id for each in plan.files])), m.ErrorReply
    )
    checkpoint(world)
    expected = state(world)
    restart(world, "kill")
    assert state(world) == expected


def test_rows_are_captured_only_when_nothing_is_staged(world):
    """A row that is requested in the pass of a write contains the published write, or nothing of it (C2)."""
    fill(world)
    run = world.runs[0]
    world.ask(run, m.CheckpointOpen())
    run.has_slow_flushes = True
    frame = world.frame_for("a", [b"staged"])
    world._corr += 1
    corr = world._corr
    run.step(run.frames(7, frame), run.request(corr, m.CheckpointRows(True)))
    assert run.replies.pop(corr).done
    topic = world.topic("a")
    assert topic.head_seq == topic.next_seq - 1 == 13
    assert run.core.log.durable == run.core.log.offset


def test_a_row_never_contains_state_that_a_power_loss_can_take(world):
    """Records of class `disk` are synced before the last page is answered (C2)."""
    fill(world, ["d"], durability="disk")
    run = world.runs[0]
    run.has_slow_flushes = True
    world.append("d", [b"not synced"])
    assert run.core.log.durable < run.core.log.offset
    world.ask(run, m.CheckpointOpen())
    assert world.ask(run, m.CheckpointRows(True)).done
    assert run.core.log.durable == run.core.log.offset


def test_only_changed_topics_are_handed_over_again(world):
    """A checkpoint of an idle shard has no rows."""
    fill(world)
    checkpoint(world)
    changed = world.runs[0].core.checkpoint.changed
    assert changed == set()
    world.append("b", [b"x"])
    assert changed == set() or world.runs[0].core.checkpoint.changed == {world.topic("b").topic_id}
    answers = [world.ask(world.runs[0], message) for message in (m.CheckpointOpen(), m.CheckpointRows(True))]
    assert answers[1].topics == 1
    assert not answers[1].everything
    restarted = world.ask(world.runs[0], m.CheckpointRows(True))
    assert restarted.topics == 1, "an unfinished checkpoint hands them over again"


def test_a_segment_goes_cold_only_when_a_snapshot_names_it(world):
    """A start finds the segments of the snapshot in either tier, and other segments only in the hot tier."""
    fill(world)
    checkpoint(world)
    run = world.runs[0]
    listed = world.ask(run, m.CheckpointOpen()).segments[0].number
    other = run.core.checkpoint.segments.refs[listed]
    run.core.checkpoint.segments.refs[listed + 1] = other
    refused = world.ask(run, m.SegmentTier(listed + 1, m.TIER_COLD))
    assert (refused.accepted, "no snapshot names" in refused.reason) == (False, True)
    assert world.ask(run, m.SegmentTier(listed, m.TIER_COLD)).accepted
    del run.core.checkpoint.segments.refs[listed + 1]
    restart(world, "kill")
    assert world.ask(world.runs[0], m.SegmentTier(listed, m.TIER_COLD)).accepted, (
        "the snapshot must be known after a restart"
    )


def test_invalid_checkpoint_messages_are_refused(world):
    """Files outside the plan, rows out of order, and a wrong number of files."""
    fill(world)
    run = world.runs[0]

    def refused(message, attachment=None):
        answer = world.ask(run, message, attachment)
        return isinstance(answer, m.ErrorReply)

    assert refused(m.CheckpointRows())
    assert refused(m.CheckpointRows(True, False, [12345]))
    assert refused(m.CheckpointDone(1, []))
    assert refused(m.ListLiveRecords(2), bytearray(8))
    assert refused(m.ListLiveRecords(70_000), bytearray(560_000))
    assert not world.ask(run, m.SegmentTier(77, 1)).accepted
    assert not world.ask(run, m.SegmentsChange([], [77])).accepted
    ref = m.SegmentRef(5, "packs/pack-0000000000000005", 1, 1, 1, 1, 1)
    answer = world.ask(run, m.SegmentsChange([ref], []))
    assert not answer.accepted
    assert "pack-0000000000000005" in answer.reason
    for stem in ("", "a\0b", "../packs/pack-0000000000000005", "/etc/passwd"):
        answer = world.ask(run, m.SegmentsChange([m.SegmentRef(5, stem, 1, 1, 1, 1, 1)], []))
        assert "invalid segment name" in answer.reason
    plan = world.ask(run, m.CheckpointOpen(True))
    assert plan.files
    assert world.ask(run, m.CheckpointRows(True)).done
    assert refused(m.CheckpointDone(1, []))
    assert world.ask(run, m.CheckpointDone(1, [each.file_id for each in plan.files])).unlink == []
    assert world.ask(run, m.CheckpointDone(1, [])).unlink == [], "the request was repeated"


def test_a_roll_closes_a_file_with_records_and_no_other(world):
    """The request is `CheckpointOpen` with `roll`."""
    run = world.runs[0]
    assert world.ask(run, m.CheckpointOpen(True)).files == []
    fill(world, ["a"])
    assert world.ask(run, m.CheckpointOpen()).files == []
    (file,) = world.ask(run, m.CheckpointOpen(True)).files
    assert (file.stop, file.salt) == (
        run.core.log_files.stops[file.file_id],
        run.core.log_files.salts[file.file_id],
    )
    assert world.ask(run, m.CheckpointOpen(True)).files == [file]
    fill(world, ["a"], rounds=1)
    assert len(world.ask(run, m.CheckpointOpen(True)).files) == 2


def test_commits_continue_while_the_next_file_is_created_for_a_roll(world):
    """The reply follows when the file exists."""
    fill(world, ["a"])
    run = world.runs[0]
    run.make_file()
    run.has_slow_files = True
    run.core.log_roll.ready_capacity = 0
    world._corr += 1
    corr = world._corr
    run.step(run.request(corr, m.CheckpointOpen(True)))
    assert corr not in run.replies
    world.append("a", [b"goes on"])
    run.make_file()
    assert len(run.replies.pop(corr).files) == 1


def test_a_live_reply_contains_the_deleted_seqs(world):
    """Epoch 0 means a deleted topic. Deletions that are not durable yet are made durable before the reply."""
    fill(world)
    topic, run = world.topic("a"), world.runs[0]
    world.request(m.RecordsDelete("a", seqs=BitMap64([5, 7]).serialize()))
    world.request(m.RecordsDelete("a", before_seq=3))
    ids = np.array([topic.topic_id, 999], dtype="<u8")
    reply = world.ask(run, m.ListLiveRecords(2), bytearray(ids.tobytes()))
    rows = np.frombuffer(run.attached, dtype="<u8").reshape(2, 5).tolist()
    assert rows[1] == [999, 0, 0, 0, 0]
    topic_id, epoch, earliest, start, stop = rows[0]
    assert (topic_id, epoch, earliest) == (topic.topic_id, topic.epoch, 3)
    assert BitMap64.deserialize(reply.deleted[start:stop]) == BitMap64([5, 7])


@ENDS
def test_deleted_records_stay_deleted_after_any_start(world, how):
    """Records are deleted before, in and after a checkpoint, and none of them returns (X3)."""
    fill(world, rounds=6)
    world.request(m.RecordsDelete("a", seqs=BitMap64([5, 7]).serialize()))
    checkpoint(world)
    world.request(m.RecordsDelete("a", seqs=BitMap64([9, 20]).serialize()))
    world.request(m.RecordsDelete("b", before_seq=10))
    before = state(world)
    assert [seq for seq, _ in world.records("a") if seq in (5, 7, 9, 20)] == []
    for _ in range(2):
        restart(world, how)
        assert state(world) == before
        checkpoint(world)
        assert state(world) == before


def test_ephemeral_records_end_with_their_shard_and_their_seqs_are_not_reused(world):
    """The lost range is reported."""
    world.put_topic("e", durability="ephemeral")
    world.append("e", [b"1", b"2", b"3"])
    checkpoint(world)
    restart(world, "kill")
    topic = world.topic("e")
    reserved = topic.head_seq
    assert (topic.count, topic.lost) == (0, [(1, reserved)])
    assert world.append("e", [b"4"]) == reserved + 1 > 4


def test_a_topic_deleted_after_an_unconfirmed_snapshot_stays_deleted(world):
    """The shard hands over every row, and topics of the snapshot without a row are dropped."""
    fill(world)
    checkpoint_dies(world, m.CheckpointDone)
    assert [each.number for each in load_snapshots(world.disk, DATA)[0]] == [1]
    world.request(m.TopicDelete("c"))
    for _ in range(2):
        world.append("a", [b"has the log file closed that tells of it"])
        checkpoint(world)
    expected = state(world)
    assert set(expected) == {"a", "b"}
    restart(world, "kill")
    assert state(world) == expected


def test_a_lost_tail_of_the_log_refuses_the_start_and_with_truncate_is_a_reported_loss(world):
    """With truncate, the state of the snapshot is served and the missing log is reported as lost (C3)."""
    fill(world)
    asking = WorldShardRequests(world)

    def before(message):
        if isinstance(message, m.CheckpointRows):
            world.append("a", [b"newer than the positions"])

    asking.before = before
    checkpoint(world, asking=asking)
    last = wal_files(world)[-2:]
    world.kill()
    for name in last:
        world.disk.unlink(f"{DATA}/wal/shard-00/{name}")
    with pytest.raises(CorruptData, match="WAL file is missing"):
        world.start()
    world.is_lenient = True
    world.start()
    topic = world.topic("a")
    head = topic.head_seq
    assert (topic.lost, topic.count) == ([(13, head)], 12)
    assert head >= 13, "the content of the lost log is unknown"
    assert world.append("a", [b"goes on"]) == head + 1
    world.is_lenient = False
    for _ in range(2):
        restart(world, "kill")
        assert [seq for seq, _ in world.records("a")] == [*range(1, 13), head + 1]
        assert world.topic("a").lost == [(13, head)]


def test_a_checkpoint_succeeds_while_the_disk_has_no_space_for_a_new_file():
    """A checkpoint frees space on a full disk, so its requests to the shard must not need a new file."""
    disk = FaultyDisk(SimulatedDisk(DATA))
    world = new_world(disk=disk)
    fill(world)
    run = world.runs[0]
    world.ask(run, m.CheckpointOpen(True))  # uses the file that was created ahead
    world.append("a", [b"in the last file"])
    disk.plan = [DiskFault("size", disk.calls["size"] + 1, "ENOSPC", always=True)]
    assert len(world.ask(run, m.CheckpointOpen(True)).files) == 1, "the current file cannot be closed"
    assert run.core.log_roll.failure
    world.append("a", [b"x"])
    ids = np.array([1], dtype="<u8")
    assert world.ask(run, m.ListLiveRecords(1), bytearray(ids.tobytes())).topics == 1
    assert world.ask(run, m.CheckpointRows(True)).done


@pytest.mark.slow
@pytest.mark.timeout(120)
@pytest.mark.parametrize("seed", range(6))
def test_random_histories_with_checkpoints_equal_histories_without_them(seed):
    """All kinds of requests, complete and interrupted checkpoints, restarts, and other shard counts.

    All topics have class `fsync`, so every record must survive.
    """
    rng = random.Random(seed)
    world, names = new_world(rng.choice((1, 2))), [f"t{i}" for i in range(6)]
    for _ in range(120):
        live = [name for name in names if world.run_of(name).core.directory.find(name) is not None]
        name = rng.choice(names)
        match rng.randrange(12):
            case 0 | 1 | 2 | 3:
                if name not in live:
                    world.put_topic(name, durability="fsync")
                world.append(name, [b"%d" % rng.randrange(1_000)] * rng.randrange(1, 6))
            case 4 if name in live and world.topic(name).head_seq:
                some = [rng.randrange(1, world.topic(name).head_seq + 1) for _ in range(3)]
                world.request(m.RecordsDelete(name, seqs=BitMap64(some).serialize()))
            case 5 if name in live:
                world.request(m.RecordsDelete(name, before_seq=rng.randrange(1, 30)))
            case 6 if name in live and rng.random() < 0.4:
                world.request(m.TopicDelete(name))
            case 7 if name in live:
                world.put_topic(name, durability="fsync", cap_records=rng.randrange(5, 60))
            case 8 | 9:
                checkpoint(world, rng.randrange(world.shards), roll=rng.random() < 0.8)
            case 10:
                cut_short(world, rng)
            case 11:
                before = state(world)
                end_life(world, rng)
                assert state(world) == before
    checkpoint_all(world)


def cut_short(world, rng):
    """Run a checkpoint in which the compactor dies before a random message."""
    asking, left = WorldShardRequests(world), rng.randrange(1, 7)

    def before(message):
        nonlocal left
        left -= 1
        if not left:
            raise Halted("the compactor is dead")

    asking.before = before
    with contextlib.suppress(Halted):
        checkpoint(world, rng.randrange(world.shards), asking=asking)


def end_life(world, rng):
    match rng.randrange(4):
        case 0:
            world.stop()
        case 1:
            world.kill()
        case 2:
            world.power_loss(seed=rng.randrange(1_000))
        case 3:
            world.kill()
            world.start(rng.choice((1, 2, 3)))
            return
    world.start()


@pytest.mark.parametrize("how", ["kill", "power"])
def test_segments_that_are_half_removed_hide_no_record_of_the_log(how, monkeypatch):
    """If a shard cannot open a segment, it refuses the whole pass, and the compactor removes its segments.

    Once, a removal that failed in the middle left the later segments. The next start took them for the
    complete state up to their end. It neither read nor deleted the log before that end.
    """
    monkeypatch.setattr(
        CompactorShardClient, "register", lambda *_: m.SegmentsChanged(False, "it cannot be opened")
    )
    segments = {"segment_records": 10, "own_segment_bytes": 1}
    fails_at = removed = 0
    while removed >= fails_at:
        world, removed, fails_at = new_world(), 0, fails_at + 1
        fill(world, ["a"], rounds=12)
        before = state(world)

        def unlink(path, real=world.disk.unlink, fails_at=fails_at):
            nonlocal removed
            removed += 1
            if removed >= fails_at:
                raise DiskError("unlink failed", path=path, errno=errno.EIO)
            real(path)

        with monkeypatch.context() as patch:
            patch.setattr(world.disk, "unlink", unlink)
            with pytest.raises((DiskError, Internal)):
                checkpoint(world, **segments)
        restart(world, how)
        assert state(world) == before, f"the {fails_at}. removal failed"
    assert fails_at > 10, "several segments of several parts"
