"""Routers at the shard of their destinations: forward requests, and their effects over crashes."""

from __future__ import annotations

import random

import pytest

from ringlog.envelope import messages as m
from ringlog.errors import InvalidRequest, TopicNotFound
from ringlog.frame import batch as frames
from ringlog.frame import encode_records, frame, layout
from ringlog.placement import shard_of
from ringlog.testing.disk import SimulatedDisk
from ringlog.topic.routers import RouterPassOutcome
from tests.support.routed_world import PLAIN, Routed, fates, world_with
from tests.support.shard_world import DATA, World
from tests.support.shard_worlds import restart
from tests.support.world_checkpoints import checkpoint_all


def appended(world: World) -> list[tuple[int, int]]:
    """Return (type, bytes) of every frame with payload in the log."""
    found = []
    for run in world.runs.values():
        for file_id, path in run.core.log_files.paths.items():
            data = run.read(path, is_cold=False)
            batch = frames.scan(memoryview(data)[: len(data) & ~7], 4096)
            found += [
                (int(kind), int(size))
                for kind, size in zip(frames.types_of(batch.words), batch.total_bytes, strict=True)
                if kind in {layout.FrameType.APPEND, layout.FrameType.ROUTED}
            ]
            assert file_id
    return found


# -- forward requests --------------------------------------------------------------------------------------


def test_copies_of_one_forward_request_are_one_frame_of_the_log():
    """Each destination assigns its own seqs, and the payload is stored once."""
    world = world_with("d", "e", "f")
    world.append("e", [b"direct"])
    rows = [world.row(n, dest, 0, 2, frame=0) for n, dest in enumerate("def", 1)]
    before = len(appended(world))
    assert fates(world.forward(rows, [b"a" * 1_000, b"b"])) == [RouterPassOutcome.DONE] * 3
    assert world.records("d") == world.records("f") == [(1, b"a" * 1_000), (2, b"b")]
    assert world.records("e") == [(1, b"direct"), (2, b"a" * 1_000), (3, b"b")]
    kinds = appended(world)[before:]
    assert [kind for kind, _ in kinds] == [layout.FrameType.ROUTED]
    assert kinds[0][1] < 1_500
    assert world.topic("d").count == 2
    assert world.topic("d").bytes == 1_001


def test_a_forward_request_is_applied_once():
    """It is applied only if the router is at its start (F2)."""
    world = world_with("d")
    row = world.row(1, "d", 0, 2, frame=0)
    assert fates(world.forward([row], [b"a", b"b"])) == [RouterPassOutcome.DONE]
    again = world.forward([row], [b"a", b"b"])
    assert (again[0].fate, again[0].cursor) == (RouterPassOutcome.DONE, 2)
    ahead = world.forward([world.row(1, "d", 3, 4, frame=0)], [b"x"])
    assert (ahead[0].fate, ahead[0].cursor) == (RouterPassOutcome.ELSEWHERE, 2)
    assert world.records("d") == [(1, b"a"), (2, b"b")]
    assert world.router("d").forwarded == 2


def test_a_forward_request_without_copies_moves_the_cursor():
    """The cursor moves with a frame that states that there are no copies (F1)."""
    world = world_with("d")
    assert fates(world.forward([world.row(1, "d", 0, 50)])) == [RouterPassOutcome.DONE]
    assert (world.router("d").cursor, world.router("d").forwarded) == (50, 0)
    assert world.records("d") == []


def test_copies_of_several_frames_in_one_topic_keep_the_order_of_the_frames():
    world = world_with("d", "e")
    world.route_to(3, "d")
    rows = [
        world.row(3, "d", 0, 2, frame=1), world.row(1, "d", 0, 2, frame=0), world.row(2, "e", 0, 2, frame=1),
    ]  # fmt: skip
    assert fates(world.forward(rows, [b"one"], [b"two", b"three"])) == [RouterPassOutcome.DONE] * 3
    assert world.records("d") == [(1, b"one"), (2, b"two"), (3, b"three")]
    assert world.records("e") == [(1, b"two"), (2, b"three")]
    restart(world)
    assert world.records("d") == [(1, b"one"), (2, b"two"), (3, b"three")]


def test_a_deleted_router_receives_nothing_while_others_do():
    """No copy appears behind the deletion of its router (F3)."""
    world = world_with("d", "e")
    rows = [world.row(n, dest, 0, 1, frame=0) for n, dest in enumerate("de", 1)]
    dropped = world.answer("d", m.RouterDrop(world.topic("d").topic_id, 1))
    assert dropped == m.RouterDropped(1, True)
    assert fates(world.forward(rows, [b"a"])) == [RouterPassOutcome.GONE, RouterPassOutcome.DONE]
    assert world.records("d") == []
    assert world.answer("d", m.RouterDrop(world.topic("d").topic_id, 1)) == m.RouterDropped(1, False)
    restart(world)
    assert not world.topic("d").routers


def test_deleting_a_destination_deletes_its_routers():
    """Routers are deleted with their topic (F3)."""
    world = world_with("d", "e")
    world.request(m.TopicDelete("d"))
    listed = world.answer("e", m.ListShardRouters())
    assert [facts.router for facts in listed.routers] == [2]
    world.put_topic("d", durability="disk")
    assert fates(world.forward([world.row(1, "d", 0, 1, frame=0)], [b"a"])) == [RouterPassOutcome.GONE]
    with pytest.raises(TopicNotFound):
        world.answer("d", m.RouterPut(m.RouterFacts(9, "r9", "s", 1, 1, "gone", 12_345, PLAIN, "", 0)))


def test_creating_a_router_twice_creates_one():
    world = world_with("d")
    topic = world.topic("d")
    facts = m.RouterFacts(77, "r1", "source", 1, 1, "d", topic.topic_id, PLAIN, "=tag", 5)
    assert world.answer("d", m.RouterPut(facts)).router == 1
    assert [(each.number, each.filter) for each in topic.routers.values()] == [(1, "=tag")]


@pytest.mark.parametrize(
    ("cap", "room"), [({"cap_records": 3}, (1, 0)), ({"cap_bytes": 12}, (0, 2))], ids=["records", "bytes"]
)
def test_a_full_destination_replies_how_much_it_accepts(cap: dict[str, int], room: tuple[int, int]):
    """The request is refused as a whole for this router. Its cursor stays, and other routers continue."""
    world = world_with("d", "e")
    world.put_topic("d", "merge", discard="reject", **cap)
    world.append("d", [b"12345", b"67890"])
    rows = [world.row(n, dest, 0, 2, frame=0) for n, dest in enumerate("de", 1)]
    full, done = world.forward(rows, [b"abc", b"d"])
    assert (full.fate, full.cursor) == (RouterPassOutcome.FULL, 0)
    assert (full.records if room[0] else full.bytes) == (room[0] or room[1])
    assert done.fate == RouterPassOutcome.DONE
    world.request(m.RecordsDelete("d", before_seq=3))
    assert fates(world.forward(rows[:1], [b"abc", b"d"])) == [RouterPassOutcome.DONE]
    assert world.records("d") == [(3, b"abc"), (4, b"d")]


def test_caps_and_ttl_of_the_destination_apply_to_copies():
    """They are applied in operation and in replay."""
    world = world_with("d", "e")
    world.put_topic("d", "merge", cap_records=3)
    world.put_topic("e", "merge", ttl_ms=1_000)
    rows = [world.row(n, dest, 0, 5, frame=0) for n, dest in enumerate("de", 1)]
    world.forward(rows, [b"%d" % n for n in range(5)])
    assert [seq for seq, _ in world.records("d")] == [3, 4, 5]
    world.tick(2.0)
    assert world.records("e") == []
    restart(world)
    assert [seq for seq, _ in world.records("d")] == [3, 4, 5]


def test_lost_positions_of_the_source_are_reported():
    """Each of them becomes a dead position, which is durable before it is visible."""
    world = world_with("d", durability="fsync")
    world.forward([world.row(1, "d", 0, 2, frame=0)], [b"a", b"b"])
    assert fates(world.forward([world.row(1, "d", 2, 7, lost=5)])) == [RouterPassOutcome.DONE]
    world.forward([world.row(1, "d", 7, 8, frame=0)], [b"c"])
    for _ in range(2):
        located = world.request(m.Locate("d", 0))
        assert (located.lost, located.trimmed) == ([3, 7], [3, 7])
        assert world.records("d") == [(1, b"a"), (2, b"b"), (8, b"c")]
        assert world.topic("d").count == 3
        world.power_loss(1)
        world.start()


@pytest.mark.parametrize(
    "rows",
    [
        [{"frame": 1}], [{"frame": 0, "lost": 1}], [{"frame": -2}], [{"start": 3, "stop": 3}], [{"lost": -1}],
    ],
)  # fmt: skip
def test_an_invalid_forward_request_is_refused_as_a_whole(rows: list[dict[str, int]]):
    world = world_with("d")
    bad = [world.row(1, "d", each.pop("start", 0), each.pop("stop", 1), **each) for each in rows]
    with pytest.raises(InvalidRequest):
        world.forward([world.row(1, "d", 0, 1, frame=0), *bad], [b"a"])
    assert world.records("d") == []


# -- restarts ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("durability", ["fsync", "disk"])
def test_cursor_and_copies_survive_a_kill_and_a_power_loss_together(durability: str):
    """A repeated request finds its copies or creates them: never twice, never none (F1)."""
    for seed in range(8):
        world = world_with("d", "e", durability=durability)
        done = 0
        for stop in range(2, 12, 2):
            rows = [world.row(n, dest, stop - 2, stop, frame=0) for n, dest in enumerate("de", 1)]
            world.forward(rows, [b"%d" % (stop - 2), b"%d" % (stop - 1)])
            done = stop
        if seed % 2:
            world.kill()
        else:
            world.power_loss(seed)
        world.start()
        for number, dest in enumerate("de", 1):
            cursor = world.router(dest).cursor
            assert cursor == done or (durability == "disk" and not seed % 2)
            for start in range(cursor, done, 2):
                world.forward(
                    [world.row(number, dest, start, start + 2, frame=0)],
                    [b"%d" % start, b"%d" % (start + 1)],
                )
            assert [data for _, data in world.records(dest)] == [b"%d" % n for n in range(done)]
            assert world.router(dest).forwarded == done


def test_unsynced_copies_are_recovered_with_their_cursors():
    """Recovery copies them as one routed frame."""
    world = world_with("d", "e")
    rows = [world.row(n, dest, 0, 2, frame=0) for n, dest in enumerate("de", 1)]
    world.forward(rows, [b"a" * 500, b"b"], hops=3)
    for _ in range(3):
        restart(world)
    world.power_loss(3)
    world.start()
    assert world.records("d") == world.records("e") == [(1, b"a" * 500), (2, b"b")]
    assert world.router("d").cursor == world.router("e").cursor == 2
    assert {kind for kind, _ in appended(world)} == {layout.FrameType.ROUTED}


def test_other_shard_counts_assign_the_copies_of_one_frame_to_their_owners():
    world = world_with(*"defgh")
    rows = [world.row(n, dest, 0, 2, frame=0) for n, dest in enumerate("defgh", 1)]
    world.forward(rows, [b"a", b"b"])
    assert len({shard_of(world.topic(dest).topic_id, 3) for dest in "defgh"}) > 1
    for shards in (3, 2, 1):
        world.kill()
        world.start(shards)
        for dest in "defgh":
            assert world.records(dest) == [(1, b"a"), (2, b"b")]
            assert world.router(dest).cursor == 2


@pytest.mark.parametrize("with_more", [False, True], ids=["segments", "segments and log"])
def test_copies_are_sealed_into_segments_and_snapshots_contain_the_cursors(with_more: bool):
    """The cases are segments alone, and segments with a later log."""
    world = world_with("d", "e")
    rows = [world.row(n, dest, 0, 3, frame=0) for n, dest in enumerate("de", 1)]
    world.forward(rows, [b"a", b"b", b"c"])
    world.append("d", [b"direct"])
    checkpoint_all(world)
    expected = [(1, b"a"), (2, b"b"), (3, b"c"), (4, b"direct")]
    if with_more:
        world.forward([world.row(1, "d", 3, 4, frame=0)], [b"d"])
        expected.append((5, b"d"))
    for _ in range(2):
        assert world.records("d") == expected
        assert world.records("e") == expected[:3]
        assert world.router("d").cursor == (4 if with_more else 3)
        assert world.router("d").forwarded == (4 if with_more else 3)
        located = world.request(m.Locate("d", 0))
        assert located.extents[0].segment
        restart(world)


def test_deletes_by_tag_select_copies_in_the_log():
    world = world_with("d", "e")
    columns = encode_records([b"a", b"b", b"c"], tags=["x", "y", "x"])
    rows = [world.row(n, dest, 0, 3, frame=0) for n, dest in enumerate("de", 1)]
    world.answer("d", m.Route(rows, 1), bytearray(frame(columns, topic_id=0)))
    deleted = world.request(m.RecordsDelete("e", match="x"))
    assert deleted.deleted == 2
    assert [data for _, data in world.records("e")] == [b"b"]
    assert len(world.records("d")) == 3
    restart(world)
    assert [data for _, data in world.records("e")] == [b"b"]


def test_ephemeral_copies_end_with_their_shard_and_their_cursor_stays():
    """A copy has the class of its destination."""
    world = world_with("d", "e")
    world.put_topic("v", durability="ephemeral")
    world.route_to(3, "v")
    rows = [world.row(n, dest, 0, 2, frame=0) for n, dest in ((1, "d"), (3, "v"))]
    assert fates(world.forward(rows, [b"a", b"b"])) == [RouterPassOutcome.DONE] * 2
    assert world.records("v") == [(1, b"a"), (2, b"b")]
    restart(world)
    assert world.router("v").cursor == 2
    assert world.router("v").forwarded == 2
    assert world.records("d") == [(1, b"a"), (2, b"b")]
    again = world.forward(rows, [b"a", b"b"])
    assert fates(again) == [RouterPassOutcome.DONE] * 2
    assert world.topic("v").count == 0


# -- histories ---------------------------------------------------------------------------------------------


class Story:
    """A source that exists only in the test, its routers, and all kinds of faults of their shards."""

    DESTS = ("a", "b", "c", "d")

    def __init__(self, seed: int) -> None:
        self.random = random.Random(seed)
        self.world = Routed(SimulatedDisk(DATA), shards=2)
        self.world.start()
        self.head = 0
        self.direct: dict[str, list[bytes]] = {dest: [] for dest in self.DESTS}
        self.sent: list[tuple[m.Route, bytearray, int]] = []
        for number, dest in enumerate(self.DESTS, 1):
            self.world.put_topic(dest, durability="fsync")
            self.world.route_to(number, dest)

    def cursor(self, dest: str) -> int:
        return int(self.world.router(dest).cursor)

    def forward(self) -> None:
        """Send forward requests from the cursor of one router, or repeat an earlier request."""
        if self.sent and self.random.random() < 0.3:
            message, attached, shard = self.random.choice(self.sent)
            if shard in self.world.runs:
                self.world.ask(self.world.runs[shard], message, bytearray(attached))
            return
        start = self.cursor(self.random.choice(self.DESTS))
        stop = start + self.random.randint(1, 5)
        self.head = max(self.head, stop)
        shards = self.world.shards
        for shard in range(shards):
            there = [
                (n, dest) for n, dest in enumerate(self.DESTS, 1)
                if shard_of(self.world.topic(dest).topic_id, shards) == shard
            ]  # fmt: skip
            copied = [self.random.random() < 0.9 for _ in there]
            rows = [
                self.world.row(n, dest, start, stop, frame=0)
                for (n, dest), is_copied in zip(there, copied, strict=True) if is_copied
            ]  # fmt: skip
            if not rows:
                continue
            records = [b"%d" % n for n in range(start + 1, stop + 1)]
            attached = bytearray(frame(encode_records(records), topic_id=0))
            message = m.Route(rows, 1, 1)
            self.sent.append((message, attached, shard))
            self.world.ask(self.world.runs[shard], message, bytearray(attached))

    def write(self) -> None:
        dest = self.random.choice(self.DESTS)
        data = b"direct %d" % len(self.direct[dest])
        self.world.append(dest, [data])
        self.direct[dest].append(data)

    def hurt(self) -> None:
        world, what = self.world, self.random.randrange(5)
        if what == 0:
            restart(world)
        elif what == 1:
            world.power_loss(self.random.randrange(1_000))
            world.start()
        elif what == 2:
            shard = self.random.randrange(world.shards)
            world.kill_shard(shard)
            world.start_shard(shard)
        elif what == 3:
            checkpoint_all(world)
        else:
            world.kill()
            world.start(self.random.randint(1, 3))
            self.sent.clear()  # The shard of a message depends on the number of shards.

    def judge(self) -> None:
        for dest in self.DESTS:
            records = [data for _, data in self.world.records(dest)]
            copies = [data for data in records if not data.startswith(b"direct")]
            cursor = self.cursor(dest)
            assert copies == [b"%d" % n for n in range(1, cursor + 1)]
            assert [data for data in records if data.startswith(b"direct")] == self.direct[dest]
            assert self.world.router(dest).forwarded == cursor
            assert self.world.topic(dest).count == len(records)


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(25))
def test_every_record_is_copied_once_and_in_order_under_any_history(seed: int):
    """The histories contain repeats, crashes, power losses, checkpoints and other shard counts."""
    story = Story(seed)
    for _ in range(60):
        story.random.choices([story.forward, story.write, story.hurt], [6, 2, 1])[0]()
        if story.random.random() < 0.2:
            story.judge()
    story.judge()
