"""Jobs that a shard reads ahead for claims: exactly those of the log or none, with few unneeded reads."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from ringlog.actors.wal_shard.commit.hot_tail import HotTail
from ringlog.actors.wal_shard.leases.job_prefetcher import JobPrefetcher
from ringlog.actors.wal_shard.leases.job_sizes import JobSizes
from ringlog.envelope import messages as m
from ringlog.frame import encode_records, frame
from ringlog.limits import INLINE_AHEAD_MIN, INLINE_BYTES_MAX, INLINE_QUEUES_MAX, INLINE_WINDOWS_PER_CLAIM
from tests.support.shard_world import DATA, SHM, World
from tests.support.shard_worlds import started

Run = tuple[int, int, int, int]


class CountingDisk:
    """A disk that counts reads and open files."""

    def __init__(self, disk: Any) -> None:
        self._disk = disk
        self.reads = 0
        self.open = 0

    def open_read(self, path: str) -> int:
        self.open += 1
        return int(self._disk.open_read(path))

    def close(self, fd: int) -> None:
        self.open -= 1
        self._disk.close(fd)

    def read_into(self, fd: int, buffer: Any, offset: int) -> int:
        self.reads += 1
        return int(self._disk.read_into(fd, buffer, offset))

    def __getattr__(self, name: str) -> Any:
        return getattr(self._disk, name)


@pytest.fixture
def world() -> World:
    made = started()
    made.put_topic("q", type="queue", durability="disk")
    return made


def shelf_of(world: World) -> tuple[JobPrefetcher, CountingDisk]:
    run = world.run_of("q")
    disk: Any = CountingDisk(run.disk)
    return JobPrefetcher(
        disk, DATA, SHM, run._published, run.core.requests.locations.locate_records, HotTail(0), JobSizes()
    ), disk


def run_of(first: int, count: int = 1) -> list[Run]:
    return [(first, count, 1, 7)]


def payloads(shelf: JobPrefetcher, world: World, runs: list[Run], name: str = "q") -> list[bytes] | None:
    found = shelf.find(world.topic(name), runs)
    if found is None:
        return None
    assert len(found.stamps) == 8 * len(found.payloads)
    assert not found.frames
    return found.payloads


def named(first: int, stop: int) -> list[bytes]:
    return [b"job %d" % n for n in range(first, stop)]


@pytest.mark.parametrize("each", [1, 7, 100])
@pytest.mark.parametrize("claimed", [1, 3, 64])
def test_every_prefetched_job_equals_the_one_in_the_log(world: World, each: int, claimed: int) -> None:
    world.put_topic("other", durability="disk")
    jobs = named(1, 701)
    for at in range(0, 700, each):
        world.append("q", jobs[at : at + each])
        world.append("other", [b"between"])
    shelf, _ = shelf_of(world)
    found = {
        first: payloads(shelf, world, run_of(first, claimed)) for first in range(1, 700 - claimed, claimed)
    }
    got = {first: each for first, each in found.items() if each is not None}
    assert all(each == jobs[first - 1 : first - 1 + claimed] for first, each in got.items())
    assert len(got) > len(found) // 2


def test_stamps_are_those_of_the_commits(world: World) -> None:
    for n in range(2 * INLINE_AHEAD_MIN):
        world.append("q", [b"%d" % n])
        world.tick(0.5)
    shelf, _ = shelf_of(world)
    found = shelf.find(world.topic("q"), run_of(1, 5))
    assert found is not None
    stamps = np.frombuffer(found.stamps, "<i8")
    assert set(np.diff(stamps).tolist()) == {500_000}


def test_jobs_in_the_next_file_are_found(world: World) -> None:
    jobs = [b"%05d" % n + bytes(200) for n in range(2_000)]
    for at in range(0, len(jobs), 20):
        world.append("q", jobs[at : at + 20])
    assert len(world.run_of("q").core.log_files.paths) > 2
    shelf, _ = shelf_of(world)
    found = [payloads(shelf, world, run_of(first, 10)) for first in range(1, 1_900, 10)]
    assert [each for each in found if each is not None] == [
        jobs[10 * n : 10 * n + 10] for n, each in enumerate(found) if each is not None
    ]
    assert sum(each is not None for each in found) > 150


def test_no_file_stays_open(world: World) -> None:
    world.append("q", named(1, 200))
    shelf, disk = shelf_of(world)
    assert payloads(shelf, world, run_of(1, 50)) == named(1, 51)
    assert disk.open == 0


def test_returned_jobs_cause_no_reads(world: World) -> None:
    for _ in range(50):
        world.append("q", [bytes(1_000)] * 10)
    shelf, disk = shelf_of(world)
    for first in range(1, 400, 10):
        payloads(shelf, world, run_of(first, 10))
    before = disk.reads
    assert payloads(shelf, world, run_of(1)) is None
    assert disk.reads == before


@pytest.mark.parametrize("kind", ["few", "large", "tagged", "apart"])
def test_few_reads_happen_where_prefetching_does_not_help(world: World, kind: str) -> None:
    world.put_topic("other", durability="disk")
    topic_id = world.topic("q").topic_id
    for n in range(120):
        if kind == "few":
            n < INLINE_AHEAD_MIN - 1 and world.append("q", [b"x"])
        elif kind == "large":
            world.append("q", [bytes(INLINE_BYTES_MAX)])
        elif kind == "tagged":
            columns = encode_records([b"x"], tags=["t"])
            world.send("q", [frame(columns, topic_id=topic_id, producer_id=1, producer_seq=n + 1)])
        else:
            world.append("q", [b"x"])
            world.append("other", [bytes(70_000)])
    shelf, disk = shelf_of(world)
    found = [payloads(shelf, world, run_of(first)) for first in range(1, 100)]
    assert found.count(None) >= 90
    assert disk.reads <= 4 * INLINE_WINDOWS_PER_CLAIM


def test_damage_is_left_to_the_reader_of_the_job(world: World) -> None:
    world.append("q", named(1, 100))
    run = world.run_of("q")
    (path,) = run.core.log_files.paths.values()
    fd = run.disk.open_read(f"{DATA}/{path}")
    whole = bytearray(run.core.log.offset)
    run.disk.read_into(fd, whole, 0)
    run.disk.close(fd)
    at = whole.index(b"job 50")

    class Rotten(CountingDisk):
        def read_into(self, fd: int, buffer: Any, offset: int) -> int:
            count = super().read_into(fd, buffer, offset)
            view = memoryview(buffer).cast("B")
            if offset <= at < offset + count:
                view[at - offset] ^= 1
            return count

    disk: Any = Rotten(run.disk)
    shelf = JobPrefetcher(
        disk, DATA, SHM, run._published, run.core.requests.locations.locate_records, HotTail(0), JobSizes()
    )
    assert payloads(shelf, world, run_of(1)) is None
    assert payloads(shelf, world, run_of(2)) is None


def test_a_recreated_topic_is_read_again(world: World) -> None:
    world.append("q", named(1, 100))
    shelf, _ = shelf_of(world)
    assert payloads(shelf, world, run_of(1, 2)) == named(1, 3)
    world.request(m.TopicDelete("q"))
    world.put_topic("q", type="queue", durability="disk")
    world.append("q", named(501, 600))
    assert payloads(shelf, world, run_of(1, 2)) == named(501, 503)


def test_prefetching_covers_a_bounded_number_of_queues(world: World) -> None:
    shelf, _ = shelf_of(world)
    names = [f"q{n}" for n in range(INLINE_QUEUES_MAX + 3)]
    for name in names:
        world.put_topic(name, type="queue", durability="disk")
        world.append(name, named(1, 40))
        assert payloads(shelf, world, run_of(1, 2), name) == named(1, 3)
    assert len(shelf._of) == INLINE_QUEUES_MAX
