"""Ephemeral records: in shared memory, evicted in whole files, and refused if memory is full."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest

from ringlog.actors.wal_shard import events as ev
from ringlog.actors.wal_shard.io.volatile_log import FILES_WANTED, VolatileLog
from ringlog.envelope import messages as m
from ringlog.envelope.boot import ActorBoot
from ringlog.errors import Status
from ringlog.frame import encode_records, frame
from ringlog.limits import FILL_CHUNK_BYTES, HEAD_RESERVATION_MIN, WAL_HEADER_BYTES
from tests.support.shard_world import World, refusals
from tests.support.shard_worlds import started


@pytest.fixture
def world() -> World:
    return started({"e": "ephemeral", "f": "fsync"})


def by_message(world: World, topic: str, payload: bytes, **options: Any) -> m.Message:
    sent = frame(encode_records([payload]), topic_id=0, producer_id=77, producer_seq=world._salt + 1)
    return world.ask(world.runs[0], m.Append(topic, 1, **options), sent)


def test_ephemeral_records_are_readable_and_never_touch_the_log(world):
    """The first append reserves seqs, which is logged. Later appends write nothing to the log."""
    run = world.runs[0]
    world.append("e", [b"a", b"b"])
    offset = run.core.log.offset
    world.append("e", [b"c"])
    assert world.records("e") == [(1, b"a"), (2, b"b"), (3, b"c")]
    assert run.core.log.offset == offset, "the first one reserved their numbers"


def test_ephemeral_and_durable_frames_of_one_buffer_keep_their_order(world):
    run = world.runs[0]
    sent = [world.frame_for(name, [b"%d" % i]) for i, name in enumerate(["e", "f", "e", "e", "f", "e"])]
    run.step(run.frames(1, *sent))
    assert [payload for _, payload in world.records("e")] == [b"0", b"2", b"3", b"5"]
    assert [payload for _, payload in world.records("f")] == [b"1", b"4"]
    entries = run.settled[-1][1]
    assert [int(entry[1]) for entry in entries] == [1, 1, 2, 3, 2, 4]


def test_single_frames_of_several_rings_share_a_commit_batch_whatever_their_class(world):
    """The durable frame of the first ring takes a shorter path through admission."""
    run = world.runs[0]
    sent = [world.frame_for(name, [b"%d" % i]) for i, name in enumerate(["f", "e", "f", "e"])]
    run.step(*(run.frames(ring, frame) for ring, frame in enumerate(sent, 1)))
    assert [payload for _, payload in world.records("e")] == [b"1", b"3"]
    assert [payload for _, payload in world.records("f")] == [b"0", b"2"]


def test_a_restart_of_the_shard_alone_loses_the_records_and_keeps_the_topic(world):
    """Existence and configuration of a topic are durable."""
    world.append("e", [b"a"])
    info = world.request(m.TopicResolve("e"))
    world.kill_shard(0)
    world.start_shard(0)
    again = world.request(m.TopicResolve("e"))
    assert (again.topic_id, again.epoch, again.config) == (info.topic_id, info.epoch, info.config)
    assert world.records("e") == []
    assert world.append("e", [b"b"], producer=2) > 1


@pytest.mark.parametrize("how", ["kill", "stop", "power", "twice", "reshard"])
def test_no_restart_reuses_a_seq_and_the_lost_range_is_reported(world, how):
    """A reader at any position neither misses later records nor takes them for older ones."""
    for payload in (b"a", b"b", b"c"):
        last = world.append("e", [payload])
    for _ in range(2 if how == "twice" else 1):
        if how == "stop":
            world.stop()
        elif how == "power":
            world.power_loss(seed=3)
        else:
            world.kill()
        world.start(2 if how == "reshard" else 1)
    topic = world.topic("e")
    assert topic.lost == [(1, topic.head_seq)]
    assert last <= topic.head_seq <= last + HEAD_RESERVATION_MIN
    assert (topic.count, topic.earliest_seq) == (0, topic.head_seq + 1)
    assert world.append("e", [b"d"]) == topic.head_seq == topic.earliest_seq


def test_the_oldest_file_is_evicted_and_floors_and_counts_follow(world):
    """The size of the volatile log is bounded."""
    payloads = [bytes([65 + i]) * 40_000 for i in range(12)]
    for payload in payloads:
        world.append("e", [payload])
        world.runs[0].core.check()
    topic = world.topic("e")
    assert topic.cap_floor > 1
    assert topic.earliest_seq == topic.cap_floor
    kept = world.records("e")
    assert kept == [(i + 1, payload) for i, payload in enumerate(payloads)][topic.cap_floor - 1 :]
    assert (topic.count, topic.bytes) == (len(kept), 40_000 * len(kept))
    state = world.ask(world.runs[0], m.TopicState("e"))
    assert isinstance(state, m.TopicStateReply)
    assert (state.evict_floor, state.head_seq) == (topic.cap_floor, 12)


def test_removals_from_deleted_topics_and_evicted_files_are_forgotten(world):
    """The shard counts them per volatile file, so that an evicted file does not remove records twice."""
    removals = world.runs[0].core.removals
    for number in range(20):
        name = f"short-{number}"
        world.put_topic(name, durability="ephemeral")
        for _ in range(3):
            world.append(name, [b"x"])
        world.request(m.RecordsDelete(name, before_seq=3))
        world.request(m.TopicDelete(name))
    assert not any(removals._left.values())
    files = set()
    for number in range(12):
        world.append("e", [b"y" * 40_000])
        world.request(m.RecordsDelete("e", before_seq=number + 1))
        files |= removals._left.keys()
    assert len(removals._left) < len(files)
    assert removals._left.keys() <= world.runs[0].core.volatile_files._topics_of.keys()


def test_frames_of_durable_topics_evict_no_ephemeral_records(world):
    """A large durable frame must not enter the volatile log."""
    world.append("e", [b"kept"])
    seen = []
    world.effect_observer = lambda _, effect: (
        seen.append(effect) if isinstance(effect, ev.OpenVolatile) else None
    )
    for _ in range(4):
        world.append("f", [b"x" * 900_000])
        by_message(world, "f", b"y" * 900_000)
    assert seen == []
    assert world.records("e") == [(1, b"kept")]


def test_ephemeral_frames_are_throttled_while_shared_memory_is_full(world):
    """They are throttled on every path, and the allocation is retried later. Durable topics continue."""
    world.is_shm_full = True
    run = world.runs[0]
    error = refusals(world.send("e", [world.frame_for("e", [b"a"])]))[0]
    assert error is not None
    assert error.status == Status.THROTTLED
    assert error.detail["retry_after_ms"] > 0
    answer = by_message(world, "e", b"b")
    assert isinstance(answer, m.Appended)
    assert int.from_bytes(answer.entries[24:32], "little") >> 32 == Status.THROTTLED
    assert world.append("f", [b"goes on"]) == 1
    assert run.core.directory.find("e").next_seq == 1
    world.is_shm_full = False
    assert refusals(world.send("e", [world.frame_for("e", [b"c"])]))[0] is not None, (
        "the allocation must not be retried each time"
    )
    world.tick(1.1)
    assert world.append("e", [b"d"]) == 1


def test_small_frames_continue_if_only_a_large_frame_found_no_space(world):
    """If a new file is not possible, the current file still accepts frames that fit."""
    world.append("e", [b"small"])
    world.is_shm_full = True
    assert refusals(world.send("e", [world.frame_for("e", [b"x" * 400_000])]))[0] is not None
    assert world.append("e", [b"fits"]) == 2


def test_ephemeral_frames_are_written_once_although_their_commit_batch_waits_for_a_file(world):
    """The batch grows while it waits. Frames that it already contained must not be written again."""
    run = world.runs[0]
    world.append("e", [b"first"])
    world.append("f", [b"x" * 60_000])
    mixed = run.frames(1, world.frame_for("e", [b"a"]), world.frame_for("f", [b"y" * 62_500]))
    late = run.frames(1, world.frame_for("e", [b"b"]))
    file_id, offset = run.core.log.file_id, run.core.volatile_files.log.offset
    effects = run.core.handle([run._tick(), mixed])
    assert "WriteBatch" not in [type(effect).__name__ for effect in effects], (
        "the batch must wait for a rotation"
    )
    assert run.core.handle([run._tick(), late]) == []
    run._pump(effects)
    assert run.core.log.file_id != file_id
    assert world.records("e") == [(1, b"first"), (2, b"a"), (3, b"b")]
    assert run.core.volatile_files.log.offset == offset + 2 * len(world.frame_for("e", [b"a"], seq=99))
    assert len(world.records("f")) == 2


# -- the volatile log itself, in a directory of the test -----------------------------------------------------


@pytest.fixture
def boot(tmp_path: Path) -> ActorBoot:
    return ActorBoot(
        kind="wal_shard", name="wal_shard-00", engine_id="00" * 16, incarnation=3, boot_incarnation=1,
        boot_id="00000000-0000-0000-0000-000000000001", slot=1, data_dir=str(tmp_path), shm_dir=str(tmp_path),
        supervisor_pid=1, shard=0, shards=1,
    )  # fmt: skip


def test_the_volatile_log_stays_within_its_budget_and_reports_dropped_files(boot, tmp_path):
    budget = FILES_WANTED * FILL_CHUNK_BYTES
    log = VolatileLog(boot, budget)
    opened = []
    for _ in range(20):
        opened.append(log.open(1_000, 5))
        assert isinstance(opened[-1], ev.VolatileOpened)
        assert sum(path.stat().st_size for path in tmp_path.iterdir()) <= budget
        log.append([b"x" * 100], WAL_HEADER_BYTES)
    dropped = [each for one in opened for each in one.dropped]  # type: ignore[union-attr]
    assert dropped == [one.file_id for one in opened][: len(dropped)]  # type: ignore[union-attr]
    assert len(dropped) == 20 - FILES_WANTED
    large = log.open(5 * FILL_CHUNK_BYTES, 5)
    assert isinstance(large, ev.VolatileOpened)
    assert len(large.dropped) == 5
    assert sum(path.stat().st_size for path in tmp_path.iterdir()) <= budget
    log.close()
    assert list(tmp_path.iterdir()) == []


def test_a_volatile_log_without_space_keeps_its_current_file(boot, tmp_path, monkeypatch):
    log = VolatileLog(boot, 2 * FILL_CHUNK_BYTES)
    first = log.open(1_000, 5)
    assert isinstance(first, ev.VolatileOpened)

    def descriptor_limit_message(fd: int, offset: int, length: int) -> None:
        raise OSError(28, os.strerror(28))

    monkeypatch.setattr(os, "posix_fallocate", descriptor_limit_message)
    failed = log.open(9 * FILL_CHUNK_BYTES, 5)
    assert isinstance(failed, ev.VolatileFailed)
    assert first.file_id not in failed.dropped
    assert len(list(tmp_path.iterdir())) == 1
    log.append([b"still there"], WAL_HEADER_BYTES)
    log.close()


def test_files_of_earlier_incarnations_are_removed(boot, tmp_path):
    """Files of other shards stay."""
    (tmp_path / "volatile-00-1-0.log").write_bytes(b"old")
    (tmp_path / "volatile-01-1-0.log").write_bytes(b"another shard's")
    VolatileLog(boot, FILL_CHUNK_BYTES).sweep()
    assert [path.name for path in tmp_path.iterdir()] == ["volatile-01-1-0.log"]
