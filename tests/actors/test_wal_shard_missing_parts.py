"""Segment parts that are missing or unreadable at a start: their topic is halted, and no record is lost."""

from __future__ import annotations

import errno
from typing import Any

import pytest

from ringlog.envelope import messages as m
from ringlog.errors import Refused, TopicHalted
from ringlog.segment.layout import DATA as DATA_SUFFIX
from ringlog.segment.layout import IDX
from ringlog.storage.disk import disk_error
from ringlog.tier.copies import SegmentCopies
from ringlog.tier.local import LocalStore
from ringlog.tier.ownership import OwnedStore
from tests.support.checkpoint_world import checkpoint, fill, state
from tests.support.disk_files import create_file
from tests.support.shard_world import DATA, ENGINE_ID, World, refusals
from tests.support.shard_worlds import new_world

OWN = {"own_segment_bytes": 0}
"""A segment for each topic."""


def sealed_world(**storage: Any) -> World:
    """Return a world with topics a, b and c in segments and in the log.

    Each topic has three segments of its own, or all topics share three.
    """
    world = new_world()
    fill(world)
    for _ in range(3):
        checkpoint(world, **storage)
        fill(world, rounds=1)
    return world


def segments_of(world: World, name: str) -> list[str]:
    """Return the stems of a topic's segments, the oldest records first."""
    run = world.run_of(name)
    return [each.path.removesuffix(DATA_SUFFIX)
            for each in run.core.checkpoint.segments.ranges(world.topic(name).topic_id, 0)]  # fmt: skip


def take_away(world: World, *paths: str) -> dict[str, bytes]:
    """Remove files of the data directory. Return their contents."""
    held = {}
    for path in paths:
        fd = world.disk.open_read(f"{DATA}/{path}")
        held[path] = world.disk.read_at(fd, world.disk.size(fd), 0)
        world.disk.close(fd)
        world.disk.unlink(f"{DATA}/{path}")
    return held


def put_back(world: World, held: dict[str, bytes]) -> None:
    """Create the files again."""
    for path, data in held.items():
        create_file(world.disk, f"{DATA}/{path}", data)


def require_halted(world: World, name: str, stem: str) -> None:
    """Check that every request about the topic fails with the error that names the part."""
    for message in (
        m.Locate(name, 0), m.TopicPut(name, {"ttl_ms": 5}, "merge"),
        m.TopicPut(name, {}, "create"), m.TopicDelete(name), m.RecordsDelete(name, before_seq=5),
        m.GroupList(name),
    ):  # fmt: skip
        answer = world.ask(world.runs[0], message)
        assert isinstance(answer, m.ErrorReply), answer
        assert answer.status == TopicHalted.status, (message, answer)
        assert answer.detail["part"].startswith(stem)
        assert "put the file back" in answer.message
    listed = world.ask(world.runs[0], m.TopicList("", "", 10))
    assert {each.topic for each in listed.topics if each.missing_part} == {name}
    shown = world.ask(world.runs[0], m.TopicState(name))
    assert shown.missing_part.startswith(stem)


def ring_refusal(world: World, name: str, topic_id: int, seq: int) -> Refused | None:
    """Return the refusal that a producer receives for one frame."""
    frame = world.frame_for("b", [b"x"], seq=seq)
    frame[8:16] = topic_id.to_bytes(8, "little")
    run = world.runs[0]
    run.step(run.frames(1, frame))
    return refusals(run.settled[-1][1], name)[0]


@pytest.mark.parametrize("at", [0, 1, -1], ids=["first", "middle", "newest"])
@pytest.mark.parametrize("suffixes", [(DATA_SUFFIX,), (DATA_SUFFIX, IDX)], ids=["data", "data and index"])
def test_a_topic_is_halted_while_its_segment_is_missing(at, suffixes):
    world = sealed_world(**OWN)
    before = state(world)
    stem, topic_id = segments_of(world, "a")[at], world.topic("a").topic_id
    world.kill()
    held = take_away(world, *[stem + suffix for suffix in suffixes])
    for _ in range(2):
        world.start()
        require_halted(world, "a", stem)
        error = ring_refusal(world, "a", topic_id, 99)
        assert isinstance(error, TopicHalted)
        assert error.detail["part"] == stem
        assert error.outcome == "not_applied"
        stored = ring_refusal(world, "a", topic_id, 1)
        assert isinstance(stored, TopicHalted)
        assert stored.outcome == "unknown", "the frame is in the log or in a segment"
        assert not any(run.found.announced for run in world.runs.values())
        world.append("b", [b"goes on"])
        world.put_topic("new", durability="fsync")
        # Snapshots made meanwhile contain the topic and the missing segment.
        for _ in range(4):
            checkpoint(world, **OWN)
            world.append("b", [b"goes on"])
        world.tick(60)
        world.kill()
    put_back(world, held)
    world.start()
    after = state(world)
    assert {name: after[name] for name in "ac"} == {name: before[name] for name in "ac"}
    assert after["b"][9][: len(before["b"][9])] == before["b"][9]
    head = world.topic("a").head_seq
    assert world.append("a", [b"the next"], producer=9) == head + 1


def test_topics_of_a_missing_shared_segment_are_halted_and_others_are_not():
    world = sealed_world()
    world.put_topic("young", durability="fsync")
    world.append("young", [b"in the log"])
    before = state(world)
    stem = segments_of(world, "a")[1]
    assert stem.startswith("packs/")
    world.kill()
    held = take_away(world, stem + DATA_SUFFIX, stem + IDX)
    world.start()
    for name in "abc":
        answer = world.ask(world.runs[0], m.Locate(name, 0))
        assert answer.status == TopicHalted.status
        assert answer.detail["part"].startswith(stem)
    assert world.records("young") == [(1, b"in the log")]
    world.append("young", [b"more"], producer=2)
    for _ in range(4):
        checkpoint(world)
        world.append("young", [b"more"], producer=2)
    world.kill()
    put_back(world, held)
    world.start()
    after = state(world)
    assert {name: after[name] for name in "abc"} == {name: before[name] for name in "abc"}


@pytest.mark.parametrize("code", [errno.EIO, errno.EACCES])
@pytest.mark.parametrize("suffix", [DATA_SUFFIX, IDX])
def test_a_part_that_cannot_be_opened_halts_only_its_topic(code, suffix):
    world = sealed_world(**OWN)
    before = state(world)
    stem = segments_of(world, "a")[0]
    path = f"{DATA}/{stem}{suffix}"

    class Unreadable:
        def __getattr__(self, name: str) -> Any:
            return getattr(world.disk, name)

        def open_read(self, wanted: str) -> int:
            if wanted == path:
                raise disk_error("open_read", wanted, code)
            return world.disk.open_read(wanted)

    world.kill()
    world.disk_of = lambda incarnation: Unreadable()  # type: ignore[assignment, return-value]
    world.start()
    require_halted(world, "a", stem)
    world.append("b", [b"goes on"])
    world.kill()
    world.disk_of = None
    world.start()
    assert state(world)["a"] == before["a"]


def test_a_read_only_shard_does_not_serve_a_halted_topic():
    world = sealed_world(**OWN)
    stem = segments_of(world, "a")[-1]
    world.kill()
    take_away(world, stem + DATA_SUFFIX)
    world.boot_incarnation = world.incarnation + 1
    world.start_shard(0, is_read_only=True)
    answer = world.ask(world.runs[0], m.Locate("a", 0))
    assert answer.status == TopicHalted.status
    assert len(world.records("b")) > 0


def test_a_missing_segment_with_only_deleted_records_halts_no_topic():
    world = sealed_world(**OWN)
    stem = segments_of(world, "a")[0]
    world.request(m.RecordsDelete("a", before_seq=20))
    world.kill()
    take_away(world, stem + DATA_SUFFIX, stem + IDX)
    world.start()
    assert world.append("a", [b"goes on"], producer=3)


def test_truncate_gives_up_missing_records_and_reports_them():
    world = sealed_world(**OWN)
    stem = segments_of(world, "a")[-1]
    before = world.records("a")
    world.kill()
    held = take_away(world, stem + DATA_SUFFIX, stem + IDX)
    world.is_lenient = True
    world.start()
    ((topic, first, last),) = world.runs[0].found.announced
    assert topic == "a"
    assert world.topic("a").lost == [(first, last)]
    assert world.records("a") == [each for each in before if not first <= each[0] <= last]
    world.is_lenient = False
    world.kill()
    put_back(world, held)
    world.start()
    assert world.topic("a").lost == [(first, last)], "the loss must be permanent"


def relocated_world() -> tuple[World, str, Any]:
    """Return a world with one cold segment, the stem of this segment, and the state before.

    The segment moved to the cold tier after the last snapshot.
    """
    world = sealed_world(**OWN)
    world.has_cold, world.cold = True, f"{DATA}/cold"
    before = state(world)
    stem = segments_of(world, "a")[1]
    world.disk.make_dir(world.cold)
    world.disk.sync_dir(DATA)
    store = OwnedStore(LocalStore(world.disk, world.cold), world.disk, DATA, ENGINE_ID.hex())
    assert store.claim() == ENGINE_ID.hex()
    copies = SegmentCopies(world.disk, DATA, store)
    copies.upload_index_parts(stem)
    copies.upload_part(stem + DATA_SUFFIX)
    number = int(stem.rpartition("-")[2], 16)
    for tier in (m.TIER_BOTH, m.TIER_COLD):
        assert world.ask(world.runs[0], m.SegmentTier(number, tier)).accepted
    copies.drop_local(stem, (DATA_SUFFIX,))
    return world, stem, before


@pytest.mark.parametrize("is_lenient", [False, True], ids=["halt", "truncate"])
def test_a_start_without_the_cold_tier_loses_no_record(is_lenient):
    """The topic is not halted either. Only reads of cold records fail."""
    world, stem, before = relocated_world()
    world.kill()
    world.has_cold, world.is_lenient = False, is_lenient
    for _ in range(2):
        world.start()
        assert not any(run.found.announced for run in world.runs.values())
        located = world.request(m.Locate("a", 0))
        assert [each.tier for each in located.extents if each.path.startswith(stem)] == [m.TIER_COLD]
        assert not located.lost
        assert world.append("a", [b"goes on"], producer=9)
        for _ in range(4):
            checkpoint(world, **OWN)
            world.append("b", [b"goes on"])
        world.kill()
    world.has_cold = True
    world.start()
    after = state(world)
    assert after["a"][9][: len(before["a"][9])] == before["a"][9]
    assert not after["a"][6]


@pytest.mark.parametrize("is_lenient", [False, True], ids=["halt", "truncate"])
def test_a_missing_index_of_a_cold_segment_halts_its_topic(is_lenient):
    """Without the index no reader finds the records in the cold tier, and these are never given up."""
    world, stem, before = relocated_world()
    checkpoint(world, **OWN)
    world.kill()
    held = take_away(world, stem + IDX)
    world.is_lenient = is_lenient
    world.start()
    require_halted(world, "a", stem + IDX)
    assert not any(run.found.announced for run in world.runs.values())
    world.kill()
    put_back(world, held)
    world.start()
    assert state(world)["a"][9] == before["a"][9]


def test_a_local_data_part_is_used_whatever_a_snapshot_says():
    """A start without the part takes it for moved, because there is a cold tier. Then the part is back."""
    world = sealed_world(**OWN)
    world.has_cold, world.cold = True, f"{DATA}/cold"
    before = state(world)
    stem = segments_of(world, "a")[1]
    world.kill()
    held = take_away(world, stem + DATA_SUFFIX)
    world.start()
    checkpoint(world, **OWN)
    world.kill()
    put_back(world, held)
    world.start()
    assert state(world)["a"] == before["a"]
