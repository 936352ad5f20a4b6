"""Effects of the shard's core: writes, syncs, publications and settlements, and their order (W1 to W8)."""

from __future__ import annotations

import itertools
from typing import Any

import pytest

from ringlog.actors.wal_shard import events as ev
from ringlog.actors.wal_shard.commit.batch_intake import BatchIntake
from ringlog.actors.wal_shard.phases import AwaitedCompletion, Room, ShardPhase
from ringlog.contract import DrainRequested, Reply, Stop, Tick
from ringlog.envelope import messages as m
from ringlog.errors import DiskError, InvariantViolation, Status
from ringlog.frame import batch as frames
from ringlog.frame import encode_records, frame
from ringlog.frame.layout import FrameType
from ringlog.frame.settle_entry import S_COUNT_STATUS, S_FIRST_SEQ, S_HEAD_SEQ, S_POSITION, STATUS_SHIFT
from ringlog.limits import UNSYNCED_BYTES_MAX, WAL_HEADER_BYTES
from ringlog.storage.layout import MARK_COPIED, MARK_ORDERLY, decode_wal_header
from ringlog.storage.recovery import FileScan, read_mark
from ringlog.testing.disk import DiskFault, FaultyDisk, SimulatedDisk
from ringlog.types import Durability
from tests.support.shard_world import DATA, ShardRun, World, refusals
from tests.support.shard_worlds import restart, started

MIB = 1 << 20


def world_with(**options: Any) -> World:
    """Return a started world with a topic `f` of class `fsync` and a topic `d` of class `disk`."""
    return started({"f": "fsync", "d": "disk"}, **options)


@pytest.fixture
def world() -> World:
    return world_with()


def kinds(run: ShardRun, *events: Any) -> list[str]:
    """Return the names of the effects of one call of `handle`, without performing them."""
    effects = run.core.handle([run._tick(), *events])
    return [type(effect).__name__ for effect in effects]


def traced(world: World) -> list[Any]:
    """Return a list that receives every later effect, in the order of performance."""
    seen: list[Any] = []
    world.effect_observer = lambda shard, effect: seen.append(effect)
    return seen


def names(effects: list[Any]) -> list[str]:
    """Return the names of effects without replies, because finding a topic takes a request."""
    return [type(effect).__name__ for effect in effects if not isinstance(effect, Reply)]


def marks(world: World, n: int = 0, incarnation: int = 1) -> list[Any]:
    """Return the chain marks of one WAL file, in order."""
    path = f"{DATA}/wal/shard-00/wal-{incarnation}-{n}.log"
    fd = world.disk.open_read(path)
    data = world.disk.read_at(fd, world.disk.size(fd), 0)
    world.disk.close(fd)
    scan = FileScan(
        decode_wal_header(data[:WAL_HEADER_BYTES], path), len(data), lambda at, n: data[at : at + n]
    )
    found = []
    for piece in scan.iter_chunks():
        rows = (frames.types_of(piece.batch.words) == FrameType.GROUP_MARK).nonzero()[0].tolist()
        batch = piece.batch
        found += [read_mark(piece.buffer, int(batch.offsets[row]), batch.words[row]) for row in rows]
    return found


# -- order of effects --------------------------------------------------------------------------------------


def test_an_fsync_frame_is_settled_after_write_sync_and_publication(world):
    """The shard acks an fsync frame after its sync (W2) and publishes the head before the ack (W3). The
    published mark moves before the head."""
    run = world.runs[0]
    event = run.frames(1, world.frame_for("f", [b"a"]))
    assert kinds(run, event) == ["WriteBatch"]
    assert run.core.directory.find("f").head_seq == 0, "a staged frame must not be published"
    assert kinds(run, ev.BatchWritten()) == [
        "Sync",
        "PublishMarks",
        "PublishTopics",
        "Settle",
        "BatchCommitted",
    ]
    assert kinds(run, ev.Synced()) == []
    assert run.core.directory.find("f").head_seq == 1


def test_a_disk_frame_below_its_reservation_is_settled_without_a_sync(world):
    """The first frame reserves seqs, which needs a sync. The next frame does not wait for the device."""
    seen = traced(world)
    world.append("d", [b"a"])
    assert "Sync" in names(seen)
    seen.clear()
    world.append("d", [b"b"])
    assert names(seen) == ["WriteBatch", "PublishMarks", "PublishTopics", "Settle", "BatchCommitted"]


def test_one_fsync_frame_makes_its_whole_commit_batch_wait(world):
    """A commit batch is one write and one sync, whatever its classes."""
    world.append("d", [b"a"])
    run, seen = world.runs[0], traced(world)
    run.step(
        run.frames(1, world.frame_for("d", [b"b"])), run.frames(2, world.frame_for("f", [b"c"], producer=2))
    )
    assert names(seen).count("WriteBatch") == 1
    assert names(seen).index("Sync") < names(seen).index("PublishMarks") < names(seen).index("Settle")
    assert [source for source, _, _ in run.settled[-2:]] == [1, 2]


def test_a_frame_may_request_a_stronger_class_than_its_topic_but_not_a_weaker_one(world):
    """The stronger of the two classes applies. An ephemeral topic always keeps its own class."""
    world.put_topic("m", durability="memory")
    world.put_topic("e", durability="ephemeral")
    for topic in ("d", "m", "e"):
        world.append(topic, [b"reserve"])
    for topic, asked, has_sync, has_write in (
        ("m", Durability.EPHEMERAL, False, True),
        ("m", Durability.FSYNC, True, True),
        ("d", Durability.FSYNC, True, True),
        ("f", Durability.EPHEMERAL, True, True),
        ("e", Durability.FSYNC, False, False),
    ):
        seen = traced(world)
        world.append(topic, [b"x"], durability=asked)
        assert ("Sync" in names(seen), "WriteBatch" in names(seen)) == (has_sync, has_write), (topic, asked)


@pytest.mark.parametrize("durability", ["memory", "ephemeral"])
def test_seqs_are_reserved_also_for_classes_that_a_crash_can_lose(world, durability):
    """No seq is assigned twice, whatever the class."""
    world.put_topic("m", durability=durability)
    seen = traced(world)
    world.append("m", [b"a"])
    assert names(seen).count("Sync") == 1
    for _ in range(254):
        world.append("m", [b"b"])
    assert names(seen).count("Sync") == 1, "few syncs"
    assert world.topic("m").reservation.reserved == 257
    world.append("m", [b"c"])
    world.append("m", [b"d"])
    assert world.topic("m").reservation.reserved > 258


def test_nothing_is_settled_when_the_write_or_the_sync_fails():
    """After a failed write or sync the shard acks nothing more (W7). The error ends the shard."""
    for op in ("write", "data_sync"):
        disk = FaultyDisk(SimulatedDisk(DATA))
        world = started({"f": "fsync"}, disk=disk)
        disk.plan = [DiskFault(op, disk.calls[op] + 1, "EIO")]  # type: ignore[arg-type]
        seen = traced(world)
        with pytest.raises(DiskError):
            world.append("f", [b"a"])
        assert "Settle" not in names(seen)
        assert "PublishTopics" not in names(seen)


def test_frames_of_one_commit_batch_get_dense_seqs_in_order(world):
    """Seqs of a topic are dense (W1). The head moves once for the whole batch."""
    run, seen = world.runs[0], traced(world)
    run.step(
        run.frames(1, *[world.frame_for("f", [b"%d" % i] * (i + 1)) for i in range(4)]),
        run.frames(2, world.frame_for("f", [b"x"], producer=2)),
    )
    entries = [entry for _, part, _ in run.settled for entry in part.tolist()]
    assert [entry[S_FIRST_SEQ] for entry in entries] == [1, 2, 4, 7, 11]
    assert [seq for seq, _ in world.records("f")] == list(range(1, 12))
    assert names(seen).count("PublishTopics") == 1


def test_settlements_have_ring_order_and_positions_and_move_the_tail_past_all_frames(world):
    """The tail of a ring never passes an unsettled frame (W6)."""
    run = world.runs[0]
    first = world.frame_for("f", [b"a"])
    run.step(run.frames(5, first, world.frame_for("f", [b"b"])))
    run.step(run.frames(5, world.frame_for("f", [b"c"])))
    positions = [
        entry[S_POSITION] for source, part, _ in run.settled if source == 5 for entry in part.tolist()
    ]
    assert positions == [0, len(first), 2 * len(first)]
    assert [tail for source, _, tail in run.settled if source == 5] == [2 * len(first), 3 * len(first)]


def test_the_shard_takes_no_frames_while_a_commit_batch_is_in_flight_and_loses_none(world):
    """At most one batch is in flight. Frames that arrive meanwhile form the next batch."""
    run = world.runs[0]
    assert run.core.wants_intake
    early, late = (run.frames(1, world.frame_for("f", [payload])) for payload in (b"a", b"b"))
    effects = run.core.handle([run._tick(), early])
    assert not run.core.wants_intake
    assert run.core.handle([run._tick(), late]) == []
    run._pump(effects)
    assert [payload for _, payload in world.records("f")] == [b"a", b"b"]
    assert run.core.wants_intake


def test_an_unknown_event_raises_an_invariant_violation():
    """The core must not ignore an event that it does not know."""
    with pytest.raises(InvariantViolation, match="unknown event type"):
        world_with().runs[0].core.handle([object()])


# -- syncs in the background -------------------------------------------------------------------------------


def test_disk_bytes_are_synced_within_the_flush_interval(world):
    """The flush interval is 100 ms."""
    world.append("d", [b"a"])
    world.append("d", [b"b"])
    run, seen = world.runs[0], traced(world)
    assert run.core.log.durable < run.core.log.offset
    deadline = run.core.next_deadline_ns()
    assert deadline is not None
    assert deadline - world.clock.monotonic_ns() <= 100_000_000
    world.tick(0.099)
    assert "Flush" not in names(seen)
    world.tick(0.002)
    assert names(seen) == ["Flush"]
    run.step()
    assert run.core.log.durable == run.core.log.offset
    assert names(seen)[1:] == ["PublishMarks"]


def test_appends_continue_during_a_flush_and_only_earlier_bytes_become_durable(world):
    """`Flushed` covers the bytes that were written before the flush began."""
    world.append("d", [b"a"])
    world.append("d", [b"b"])
    run = world.runs[0]
    run.has_slow_flushes = True
    world.tick(0.2)
    stop = run.core.log.offset
    world.append("d", [b"c"])
    assert run.core.log.durable < stop
    run.finish_flush()
    assert run.core.log.durable == stop < run.core.log.offset
    world.tick(0.2)
    run.finish_flush()
    assert run.core.log.durable == run.core.log.offset


def test_unsynced_bytes_are_bounded():
    """Beyond `UNSYNCED_BYTES_MAX` a commit batch waits for a sync."""
    world = world_with(file_bytes=80 * MIB)
    world.append("d", [b"reserve"])
    run = world.runs[0]
    run.has_slow_flushes = True
    seen = traced(world)
    payload, largest = b"x" * MIB, 0
    for _ in range(UNSYNCED_BYTES_MAX // MIB + 4):
        world.append("d", [payload])
        largest = max(largest, run.core.log.offset - run.core.log.durable)
    assert "Flush" in names(seen)
    assert "Sync" in names(seen)
    assert largest <= UNSYNCED_BYTES_MAX + 2 * MIB


def test_an_idle_shard_writes_its_durable_end_once_and_then_sleeps(world):
    """One chain mark follows the last commit batch, however long the shard is idle."""
    world.append("f", [b"a"])
    stop = world.runs[0].core.log.offset
    seen = traced(world)
    for _ in range(50):
        world.tick(0.2)
    assert names(seen).count("WriteBatch") == 1
    assert marks(world)[-1].durable_stop == stop
    assert world.runs[0].core.next_deadline_ns() is None, "nothing is due any more: an idle shard sleeps"


def test_a_chain_mark_follows_recovery():
    """`MARK_COPIED` must not stay the last mark for long."""
    world = started()
    stop = world.runs[0].core.log.offset
    for _ in range(3):
        world.tick(0.2)
    assert [mark.flags for mark in marks(world)] == [MARK_COPIED, 0]
    assert marks(world)[-1].durable_stop == stop


def test_each_chain_mark_names_the_end_and_the_seal_of_the_previous_batch(world):
    """Recovery follows this chain to find the end of the log."""
    for i in range(3):
        world.append("f", [b"%d" % i])
    found = marks(world)
    assert [mark.group for mark in found] == list(range(len(found)))
    assert found[0].prev_seal == 0
    for before, after in itertools.pairwise(found):
        assert after.prev_stop == before.prev_stop + before.group_bytes
        assert after.prev_seal


# -- files -------------------------------------------------------------------------------------------------


def test_a_commit_batch_never_spans_files_and_the_old_file_is_synced_first(world):
    """Eight batches of 40,000 bytes need several files (W8)."""
    seen = traced(world)
    for i in range(8):
        world.append("d", [b"%d" % i * 40_000])
    order = [name for name in names(seen) if name in {"Sync", "OpenFile", "WriteBatch", "PrepareFile"}]
    rolls = [i for i, name in enumerate(order) if name == "OpenFile"]
    assert len(rolls) >= 2
    assert all(order[i - 1] == "Sync" or order[i - 2] == "Sync" for i in rolls)
    found = world.records("d")
    assert [payload[:1] for _, payload in found] == [b"%d" % i for i in range(8)]


def test_the_next_file_is_created_when_the_current_one_is_half_full():
    """No append waits for the creation."""
    world = world_with(file_bytes=256 << 10)
    world.append("f", [b"x" * 100_000])
    seen = traced(world)
    world.append("f", [b"x" * 60_000])
    assert "PrepareFile" not in names(seen), "one is ready since the start"
    world.append("f", [b"x" * 60_000])
    world.append("f", [b"x" * 90_000])
    assert "OpenFile" in names(seen)
    world.append("f", [b"x" * 90_000])
    assert "PrepareFile" in names(seen)


def test_frames_wait_until_the_next_file_is_ready(world):
    """A slow creation delays appends and loses none of them."""
    run = world.runs[0]
    world.append("f", [b"x" * 60_000])
    world.append("f", [b"y" * 60_000])
    run.has_slow_files = True
    run.core.log_roll.ready_capacity = 0
    before = len(run.settled)
    first, second = world.frame_for("f", [b"z" * 60_000]), world.frame_for("f", [b"q" * 10], producer=2)
    run.step(run.frames(1, first))
    run.step(run.frames(2, second))
    assert len(run.settled) == before
    run.make_file()
    assert len(run.settled) == before + 2
    assert [payload[:1] for _, payload in world.records("f")] == [b"x", b"y", b"z", b"q"]


def test_a_frame_larger_than_a_file_gets_a_file_of_its_own_size(world):
    """This also holds while a file of the usual size is ready and a small batch is being collected."""
    world.append("f", [b"s" * 60_000])
    run = world.runs[0]
    small = run.frames(1, world.frame_for("f", [b"a" * 60_000]))
    large = run.frames(2, world.frame_for("f", [b"b" * 900_000, b"c" * 900_000], producer=2))
    run.step(small, large)
    world.append("f", [b"after"])
    assert [payload[:1] for _, payload in world.records("f")] == [b"s", b"a", b"b", b"c", b"a"]
    world.power_loss(1)
    world.start()
    assert [len(payload) for _, payload in world.records("f")] == [60_000, 60_000, 900_000, 900_000, 5]


def test_a_full_disk_refuses_appends_serves_other_requests_and_needs_no_restart():
    """The file system has no room at a rotation, and later has room again (RF-46, RF-47)."""
    disk = FaultyDisk(SimulatedDisk(DATA))
    world = started({"f": "fsync", "victim": "fsync"}, disk=disk)
    world.append("f", [b"before"])
    disk.plan = [DiskFault("size", disk.calls["size"] + 1, "ENOSPC", always=True)]
    outcomes = [refusals(world.send("f", [world.frame_for("f", [b"x" * 30_000])]))[0] for _ in range(12)]
    accepted = sum(1 for each in outcomes if each is None)
    assert 1 <= accepted < 12
    assert {each.status for each in outcomes if each is not None} == {Status.INTERNAL}
    assert all(each is not None for each in outcomes[accepted:]), (
        "after a refusal all appends must be refused until space is free"
    )
    run = world.runs[0]
    assert run.core.state.awaited is AwaitedCompletion.NOTHING
    assert world.request(m.TopicDelete("victim")).deleted, "the end of the file is reserved for deletes"
    assert world.ask(run, m.TopicState("f")).head_seq == 1 + accepted, "reads must continue"
    refused = world.ask(
        run,
        m.Append("f", 1),
        frame(encode_records([b"y" * 30_000]), topic_id=0, producer_id=5, producer_seq=1),
    )
    assert isinstance(refused, m.ErrorReply)
    assert refused.status == Status.INTERNAL
    deadline = run.core.next_deadline_ns()
    assert deadline is not None
    assert deadline > world.clock.monotonic_ns(), "the shard spins"
    disk.plan = []
    world.tick(1.1)
    assert world.append("f", [b"after"]) == 2 + accepted
    assert len(world.records("f")) == 2 + accepted


def test_a_rotation_without_disk_space_is_retried():
    """A commit batch that is already staged is written when space is available, and not before."""
    disk = FaultyDisk(SimulatedDisk(DATA))
    world = started({"f": "fsync"}, disk=disk)
    run = world.runs[0]
    world.append("f", [b"x" * 60_000])
    run.has_slow_files = True
    run.core.log_roll.ready_capacity = 0
    disk.plan = [DiskFault("size", disk.calls["size"] + 1, "ENOSPC", always=True)]
    before = len(run.settled)
    run.step(run.frames(1, world.frame_for("f", [b"y" * 60_000])))
    run.make_file()
    for _ in range(5):
        world.tick(0.5)
        run.make_file()
    disk.plan = []
    for _ in range(4):
        world.tick(0.5)
        run.make_file()
    assert len(run.settled) == before + 1
    assert run.core.state.awaited is AwaitedCompletion.NOTHING
    run.has_slow_files = False
    assert len(world.records("f")) in (1, 2), "written or refused, but decided"


def test_a_prepared_file_that_cannot_be_removed_does_not_block_the_next_one():
    """A failed attempt uses up its file number."""
    disk = FaultyDisk(SimulatedDisk(DATA))
    world = started({"f": "fsync"}, disk=disk)
    disk.plan = [
        DiskFault("size", disk.calls["size"] + 1, "EIO"), DiskFault("unlink", disk.calls["unlink"] + 1,
        "EIO"),
    ]  # fmt: skip
    for _ in range(6):
        world.send("f", [world.frame_for("f", [b"x" * 30_000])])
        world.tick(1.1)
    assert world.append("f", [b"x" * 30_000]) > 3
    restart(world)
    assert world.append("f", [b"y"], producer=2) == world.topic("f").head_seq


# -- drain -------------------------------------------------------------------------------------------------


def test_a_drain_settles_everything_and_ends_with_an_orderly_mark(world):
    """The shard settles held frames, then syncs the mark, then stops."""
    world.append("d", [b"a"])
    world.append("d", [b"b"])
    run, seen = world.runs[0], traced(world)
    run.step(run.frames(1, world.frame_for("d", [b"c"])), DrainRequested())
    for _ in range(3):
        run.step()
    assert run.stopped is not None
    assert (run.stopped.code, run.core.state.phase) == (0, ShardPhase.STOPPED)
    assert names(seen).index("Settle") < names(seen).index("Stop")
    assert marks(world)[-1].flags == MARK_ORDERLY
    assert run.core.log.durable == run.core.log.offset


def test_a_drain_while_a_flush_runs_waits_for_it(world):
    world.append("d", [b"a"])
    world.append("d", [b"b"])
    run = world.runs[0]
    run.has_slow_flushes = True
    world.tick(0.2)
    run.step(DrainRequested())
    assert run.stopped is None
    run.finish_flush()
    assert run.stopped == Stop(0, "drained")


def test_the_orderly_mark_fits_into_a_completely_full_file(world, monkeypatch):
    """An orderly stop must not skip seqs because a file happens to be full."""
    run = world.runs[0]
    room = run.core.log.capacity - run.core.log.offset
    monkeypatch.setattr(BatchIntake, "_room_for", lambda self, event: Room.NOW)
    was_full = 0
    for size in range(room - 4_500, room - 4_000, 8):
        world = world_with()
        run = world.runs[0]
        run.step(run.frames(1, world.frame_for("f", [b"x" * size])))
        was_full += run.core.log.file_id & 0xFFFFFF == 0 and not run.core.log.fits(0)
        run.drain()
        assert marks(world, n=run.core.log.file_id & 0xFFFFFF)[-1].flags == MARK_ORDERLY
    assert was_full > 5


def test_replies_to_changes_wait_for_the_sync_and_reads_do_not(world):
    """The created topic is published before the reply."""
    run = world.runs[0]
    put = run.request(1, m.TopicPut("new", {"durability": "disk"}))
    assert kinds(run, put) == ["WriteBatch"]
    after = kinds(run, ev.BatchWritten())
    assert after[0] == "Sync"
    assert kinds(run, ev.Synced()) == []
    assert after.index("PublishTopics") < after.index("Reply")
    effects = run.core.handle([run._tick(), run.request(2, m.TopicState("new"))])
    assert [type(effect) for effect in effects] == [Reply]


def test_a_state_reply_never_shows_staged_appends(world):
    """Head, count and bytes belong to the same published state."""
    world.append("f", [b"a"])
    run = world.runs[0]
    run.step(run.frames(1, world.frame_for("f", [b"b", b"c"])), run.request(77, m.TopicState("f")))
    state = run.replies[77]
    assert isinstance(state, m.TopicStateReply)
    assert (state.head_seq, state.count, state.bytes) == (1, 1, 1)
    after = world.ask(run, m.TopicState("f"))
    assert isinstance(after, m.TopicStateReply)
    assert (after.head_seq, after.count, after.bytes) == (3, 3, 3)


def test_the_head_in_a_settlement_is_the_head_after_the_commit_batch(world):
    """All frames of the batch report the same head."""
    entries = world.send("f", [world.frame_for("f", [b"a"]), world.frame_for("f", [b"b"])])
    assert [int(entry[S_HEAD_SEQ]) for entry in entries] == [2, 2]
    assert [int(entry[S_COUNT_STATUS]) >> STATUS_SHIFT for entry in entries] == [0, 0]


def test_a_tick_alone_does_nothing(world):
    run = world.runs[0]
    assert run.core.handle([Tick(1, 1)]) == []


def test_no_deadline_is_due_while_the_shard_waits_for_a_completion():
    """Otherwise the shell would spin until a slow device answers."""
    world = started()
    world.put_topic("d", durability="disk", ttl_ms=1_000)
    run = world.run_of("d")
    run.step()
    run.has_slow_flushes = True
    world.append("d", [b"its number is reserved, which is synced"])
    world.append("d", [b"old"])
    world.tick(0.2)
    run.step(run.request(77, m.CheckpointOpen(roll=True)))
    assert run.core.state.awaited is AwaitedCompletion.FLUSH
    world.clock.advance(5)
    assert run.core.next_deadline_ns() is None
    run.finish_flush()
    assert run.replies[77].files
    assert run.core.next_deadline_ns() is not None
