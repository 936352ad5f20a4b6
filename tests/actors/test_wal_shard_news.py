"""News of a shard: exactly the published records and their positions, after they are on the board."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

import ringlog
from ringlog import spin_wait
from ringlog.actors.wal_shard import events as ev
from ringlog.actors.wal_shard.commit.commit_batch import News
from ringlog.actors.wal_shard.commit.scheduler_notifier import SchedulerNotifier
from ringlog.board.board import Board
from ringlog.board.layout import SLOT_MASK, VOLATILE_BIT, ProcessField, ProcessState, news_name
from ringlog.board.news import NewsReader, NewsRow
from ringlog.board.processes import scheduler_bell, scheduler_slot, shard_slot
from ringlog.board.row_ring import RowsRead
from ringlog.board.topics import TOPIC_EMPTY, TopicTable, decode_priority
from ringlog.client import Tombstone
from ringlog.envelope import messages as m
from ringlog.envelope.boot import ActorBoot
from ringlog.frame import encode_records, frame, open_frame
from ringlog.frame.view import FrameView
from ringlog.limits import EARLY_WAKEUP_BYTES_MAX
from ringlog.link.shard_requests import Requester
from ringlog.ring.doorbell import BellListener, make_bell
from ringlog.testing import engine
from ringlog.testing.real_engine import wait_until
from ringlog.topic.config import TopicConfig
from ringlog.topic.state import ShardTopic
from tests.support.engines import engine_fixture
from tests.support.shard_world import World
from tests.support.shard_worlds import started

pytestmark = pytest.mark.timeout(120)

# -- the core ---------------------------------------------------------------------------------------------


@pytest.fixture
def world() -> World:
    return started({"f": "fsync", "d": "disk", "e": "ephemeral"})


def news_of(world: World) -> list[News]:
    """Return a list that receives all later news."""
    told: list[News] = []

    def watch(shard: int, effect: Any) -> None:
        if isinstance(effect, ev.PublishTopics):
            told.extend(effect.news)

    world.effect_observer = watch
    return told


def frames_at(world: World, piece: News) -> list[FrameView]:
    """Return the frames at the position of a piece of news, with every checksum verified."""
    topic, first_seq, last_seq, file_id, offset, stop, is_volatile = piece
    run = world.runs[0]
    path = run.core.log_files.paths[file_id]
    assert path.startswith("@") == is_volatile
    data = run.read(path)
    return frames_in(data, topic, (first_seq, last_seq), offset, stop, run.core.log_files.salts[file_id])


def frames_in(
    data: bytes, topic: Any, seqs: tuple[int, int], offset: int, stop: int, salt: int
) -> list[FrameView]:
    found, expected = [], seqs[0]
    while offset < stop:
        view = open_frame(data, offset, seed=salt)
        assert (view.topic_id, view.epoch, view.base_seq) == (topic.topic_id, topic.epoch, expected)
        found.append(view)
        expected, offset = view.last_seq + 1, offset + view.header.total_bytes
    assert (offset, expected - 1) == (stop, seqs[1])
    return found


def test_each_seq_range_of_a_commit_batch_is_announced_with_its_position(world):
    """Topics and classes are mixed in one buffer, next to frames of other rings (N1)."""
    told, run = news_of(world), world.runs[0]
    sent = [
        world.frame_for(name, [b"%d" % i] * (i + 1)) for i, name in enumerate(["e", "f", "f", "e", "d", "f"])
    ]
    run.step(
        run.frames(1, *sent),
        run.frames(2, world.frame_for("d", [b"x", b"y"], producer=2)),
        run.frames(3, world.frame_for("e", [b"z"], producer=3)),
    )
    assert sorted((piece[0].name, piece[1], piece[2]) for piece in told) == [
        ("d", 1, 5), ("d", 6, 7), ("e", 1, 6), ("f", 1, 5), ("f", 6, 11),
    ]  # fmt: skip
    assert {piece[0].name for piece in told if piece[6]} == {"e"}
    payloads = {name: [] for name in "def"}
    for piece in told:
        for view in frames_at(world, piece):
            payloads[piece[0].name] += view.to_list()
    for name, found in payloads.items():
        assert found == [payload for _, payload in world.records(name)]


def test_the_frames_of_all_producers_of_a_topic_are_one_piece_of_news(world):
    """The work of a scheduler does not grow with the number of producers or frames (N1)."""
    told, run = news_of(world), world.runs[0]
    for name in "fe":
        frames = [world.frame_for(name, [b"%d" % n], producer=n) for n in range(1, 10)]
        run.step(*(run.frames(n, one) for n, one in enumerate(frames, 1)))
    assert [(piece[0].name, piece[1], piece[2]) for piece in told] == [("f", 1, 9), ("e", 1, 9)]
    assert [len(frames_at(world, piece)) for piece in told] == [9, 9]


def test_appends_by_message_are_announced_as_well(world):
    told = news_of(world)
    sent = frame(encode_records([b"a", b"b"]), topic_id=0, producer_id=7, producer_seq=1)
    world.request(m.Append("f", 1), sent)
    [piece] = told
    assert piece[:3] == (world.topic("f"), 1, 2)
    frames_at(world, piece)


def test_requests_that_publish_nothing_announce_nothing(world):
    """Repeats, refusals, configurations, deletions, and chain marks of an idle shard."""
    world.append("f", [b"a"], seq=1)
    told = news_of(world)
    world.append("f", [b"a"], seq=1)
    world.send("f", [world.frame_for("f", [b"b"], epoch=99)])
    world.put_topic("f", durability="fsync", priority=3)
    world.request(m.RecordsDelete("f", before_seq=2))
    world.tick(1.0)
    assert told == []


def test_recovery_announces_nothing_and_later_appends_are_announced(world):
    """After a restart of the shard, readers rescan every topic (N4)."""
    world.append("f", [b"a"])
    world.append("d", [b"b"])
    told = news_of(world)
    world.kill_shard(0)
    world.start_shard(0)
    assert told == []
    assert world.append("f", [b"c"]) == 2
    [piece] = told
    assert piece[:3] == (world.topic("f"), 2, 2)
    frames_at(world, piece)


def test_news_follows_heads_and_marks_and_precedes_acks(world):
    """A row is written after marks and heads are on the board, and before the ack (N2, W3)."""
    seen: list[Any] = []
    world.effect_observer = lambda shard, effect: seen.append(effect)
    world.append("f", [b"a"])
    kinds = [type(effect) for effect in seen]
    assert kinds.index(ev.PublishMarks) < kinds.index(ev.PublishTopics) < kinds.index(ev.Settle)
    [published] = [effect for effect in seen if isinstance(effect, ev.PublishTopics)]
    assert [piece[0] for piece in published.news] == published.topics


def test_news_continues_in_the_next_file(world):
    world.append("f", [b"a"])
    told = news_of(world)
    world.append("f", [b"b"])
    first = world.runs[0].core.log.file_id
    for _ in range(200):
        world.append("f", [bytes(100_000)])
        if world.runs[0].core.log.file_id != first:
            break
    assert {piece[3] for piece in told} == {first, world.runs[0].core.log.file_id}
    assert [piece[1] for piece in told] == list(range(2, len(told) + 2))
    for piece in told:
        frames_at(world, piece)


# -- the notifier -----------------------------------------------------------------------------------------


SHARDS = 2


@pytest.fixture
def board(shm_dir: Path) -> Iterator[Board]:
    board = Board.create(shm_dir)
    yield board
    board.close()


@pytest.fixture
def announcer(shm_dir: Path, board: Board) -> Iterator[Callable[..., SchedulerNotifier]]:
    made: list[SchedulerNotifier] = []

    def make(schedulers: int) -> SchedulerNotifier:
        boot = ActorBoot(
            kind="wal_shard", name="wal_shard-01", engine_id="e", incarnation=1, boot_incarnation=1,
            boot_id="b", slot=2, data_dir="/nowhere", shm_dir=str(shm_dir), supervisor_pid=1, shard=1,
            shards=SHARDS,
        )  # fmt: skip
        made.append(SchedulerNotifier(boot, board, schedulers))
        return made[-1]

    yield make
    for one in made:
        one.close()


def topic_at(slot: int) -> ShardTopic:
    return ShardTopic(77, 3, "t", TopicConfig(), slot=slot, head_seq=12)


def rows_of(taken: RowsRead) -> list[NewsRow]:
    return [NewsRow(*row) for row in taken.rows.tolist()]


def test_news_becomes_rows_with_the_slot_of_the_topic(announcer, shm_dir):
    one = announcer(1)
    one.begin()
    reader = NewsReader(shm_dir, 1)
    reader.take_rows()
    one.publish_news(
        [(topic_at(5), 8, 9, 1 << 24, 4096, 5000, False), (topic_at(6), 1, 1, 1 << 23, 64, 128, True)]
    )
    one.publish_news([(topic_at(-1), 1, 1, 1 << 24, 5000, 6000, False)])
    taken = reader.take_rows()
    assert taken.is_complete
    assert rows_of(taken) == [
        NewsRow(5, 77, 3, 8, 9, 1 << 24, 4096, 5000),
        NewsRow(6 | VOLATILE_BIT, 77, 3, 1, 1, 1 << 23, 64, 128),
    ], "a topic without a slot must not be announced"
    one.announce_deletion(topic_at(5))
    assert rows_of(reader.take_rows()) == [NewsRow(5, 77, 3, 12, 12, 0, 0, 0)]
    reader.close()


def test_nothing_is_announced_before_recovery_is_on_the_board_or_without_schedulers(announcer, shm_dir):
    """The notifier starts after recovery (N4)."""
    for schedulers in (1, 0):
        one = announcer(schedulers)
        if not schedulers:
            one.begin()
        one.publish_news([(topic_at(5), 8, 9, 1 << 24, 4096, 5000, False)])
        one.announce_deletion(topic_at(5))
        one.wake_early(128, 1)
        one.ring_bells(1)
        assert not (shm_dir / news_name(1)).exists()


def test_the_bells_of_sleeping_schedulers_are_rung_once(announcer, shm_dir, board):
    """Schedulers that are awake, dead or missing cause no work (N5)."""
    bells = []
    for n in range(2):
        make_bell(scheduler_bell(str(shm_dir), n))
        bells.append(BellListener(scheduler_bell(str(shm_dir), n)))
    pages = [board.process(scheduler_slot(SHARDS, n)) for n in range(3)]
    one = announcer(3)
    one.begin()

    def rings() -> list[int]:
        one.publish_news([(topic_at(5), 8, 9, 1 << 24, 4096, 5000, False)])
        one.announce_deletion(topic_at(5))
        one.ring_bells(1)
        one.ring_bells(2)
        return [bell.drain() for bell in bells]

    assert rings() == [0, 0], "no scheduler sleeps"
    for page in pages:
        page.set(ProcessField.ASLEEP, 1)
    assert rings() == [0, 0], "no scheduler is ready"
    for page in pages:
        page.set(ProcessField.STATE, ProcessState.READY)
    assert rings() == [1, 1], "a missing bell must not prevent the others"
    pages[0].set(ProcessField.ASLEEP, 0)
    assert rings() == [0, 1]
    for bell in bells:
        bell.close()


LOOK_NS = spin_wait.SPIN_REPLY_NS


@pytest.fixture
def sleeper(shm_dir: Path, board: Board) -> Iterator[BellListener]:
    """Yield the bell of a sleeping scheduler."""
    make_bell(scheduler_bell(str(shm_dir), 0))
    page = board.process(scheduler_slot(SHARDS, 0))
    page.set(ProcessField.ASLEEP, 1)
    page.set(ProcessField.STATE, ProcessState.READY)
    bell = BellListener(scheduler_bell(str(shm_dir), 0))
    yield bell
    bell.close()


def commit(one: SchedulerNotifier, at_ns: int, took_ns: int) -> None:
    """Take frames, announce them, and ring the bells."""
    one.wake_early(128, at_ns)
    one.publish_news([(topic_at(5), 8, 9, 1 << 24, 4096, 5000, False)])
    one.ring_bells(at_ns + took_ns)


def test_a_sleeping_scheduler_is_woken_early_while_commits_are_fast(announcer, sleeper):
    one = announcer(1)
    one.begin()
    one.wake_early(EARLY_WAKEUP_BYTES_MAX + 1, 1)
    assert sleeper.drain() == 0, "large batches must not wake schedulers early"
    one.wake_early(EARLY_WAKEUP_BYTES_MAX, 1)
    assert sleeper.drain() == 1, "the wake-up must precede the news"
    now = LOOK_NS
    for _ in range(40):
        commit(one, now, 2 * LOOK_NS)
        now += 10 * LOOK_NS
    sleeper.drain()
    one.wake_early(128, now)
    assert sleeper.drain() == 0, "with slow commits there must be no early wake-up"
    one.ring_bells(now + 1)
    assert sleeper.drain() == 0
    for _ in range(40):
        now += 10 * LOOK_NS
        commit(one, now, LOOK_NS // 4)
    sleeper.drain()
    one.wake_early(128, now + LOOK_NS)
    assert sleeper.drain() == 1, "with fast commits there must be an early wake-up"


def test_no_scheduler_is_woken_early_for_frames_without_news(announcer, sleeper):
    """All frames of the producer are refused."""
    one = announcer(1)
    one.begin()
    for turn in range(1, 40):
        one.wake_early(128, turn * 10 * LOOK_NS)
    sleeper.drain()
    one.wake_early(128, 500 * LOOK_NS)
    assert sleeper.drain() == 0


def test_a_news_reader_returns_the_word_to_spin_on(announcer, shm_dir):
    one = announcer(1)
    one.begin()
    reader = NewsReader(shm_dir, 1)
    reader.take_rows()
    word, seen = reader.spin_word()
    assert not spin_wait.spin_wait([word], [seen], 0)
    one.publish_news([(topic_at(5), 8, 9, 1 << 24, 4096, 5000, False)])
    assert spin_wait.spin_wait([word], [seen], 0)
    reader.take_rows()
    word, seen = reader.spin_word()
    assert not spin_wait.spin_wait([word], [seen], 0)
    word.release()
    reader.close()


# -- a real engine ----------------------------------------------------------------------------------------


class Watched:
    """One shard of an engine, from the view of a scheduler."""

    def __init__(self, host: Any) -> None:
        self.info = host.info
        self.data_dir = Path(host.info.data_dir)
        self.shm_dir = Path(host.info.shm_dir)
        self.news = NewsReader(self.shm_dir, 0)
        self.table = TopicTable.open(self.shm_dir, 0)
        self.board = Board.open(self.shm_dir, writable=False)
        self.shard = Requester("wal_shard-00", f"ipc://{self.shm_dir}/wal_shard-00.sock")

    def close(self) -> None:
        self.news.close()
        self.table.close()
        self.board.close()
        self.shard.close()

    def id_of(self, name: str) -> int:
        return self.shard.ask(m.TopicResolve(name), m.TopicInfo).message.topic_id

    def changes(self) -> int:
        return self.board.process(shard_slot(0)).get(ProcessField.TOPICS_CHANGED)

    def verified(self, row: NewsRow, name: str) -> list[Any]:
        """Return the payloads that a reader finds at the position of a row."""
        facts = self.table.read(row.slot & SLOT_MASK)
        assert (facts.topic_id, facts.epoch) == (row.topic_id, row.epoch)
        assert facts.head_seq >= row.last_seq, "news must follow the head on the board"
        located = self.shard.ask(m.Locate(name, row.first_seq - 1), m.Located).message
        [extent] = [extent for extent in located.extents if extent.file_id == row.file_id]
        assert extent.path.startswith("@") == bool(row.slot & VOLATILE_BIT)
        root = self.shm_dir if extent.path.startswith("@") else self.data_dir
        data = (root / extent.path.removeprefix("@")).read_bytes()
        views = frames_in(data, row, (row.first_seq, row.last_seq), row.offset, row.stop, extent.salt)
        return [payload for view in views for payload in view.to_list()]


host = engine_fixture(wal={"shards": 1}, delivery={"schedulers": 1})


@pytest.fixture
def watched(host: Any) -> Iterator[Watched]:
    watched = Watched(host)
    yield watched
    watched.close()


def until_told(watched: Watched, last_seqs: dict[int, int]) -> list[NewsRow]:
    """Return all rows until each topic was announced up to its seq."""
    found: list[NewsRow] = []

    def is_told() -> bool:
        found.extend(rows_of(watched.news.take_rows()))
        told = {row.topic_id: row.last_seq for row in found}
        return all(told.get(topic_id, -1) >= seq for topic_id, seq in last_seqs.items())

    wait_until(is_told, 20, "news", lambda: str(found))
    return found


def test_rows_give_the_exact_position_of_every_acked_record(host, watched):
    """Every acked record is in exactly one row, which gives the exact bytes of its frames (N1, N2)."""
    with ringlog.connect(host.url, wait=10) as client:
        before = watched.changes()
        orders = {
            "fsync": (-1000, True),
            "disk": (None, True),
            "memory": (7, False),
            "ephemeral": (None, False),
        }
        for kind, (priority, is_auto) in orders.items():
            client.topics.create(kind, durability=kind, priority=priority, auto_priority=is_auto)
        assert watched.changes() >= before + 4
        assert not watched.news.take_rows().is_complete
        for n in range(30):
            for kind in orders:
                client.append(kind, b"%d" % n * (n + 1))
        ids = {watched.id_of(kind): kind for kind in orders}
        rows = until_told(watched, dict.fromkeys(ids, 30))
        for topic_id, kind in ids.items():
            mine = [row for row in rows if row.topic_id == topic_id]
            payloads = [payload for row in mine for payload in watched.verified(row, kind)]
            items = [item for item in client.reader(kind, 0) if not isinstance(item, Tombstone)]
            assert payloads == [bytes(item.data) for item in items]
            assert [item.seq for item in items] == list(range(1, 31))
        words = {ids[row.topic_id]: watched.table.read(row.slot & SLOT_MASK).priority_word for row in rows}
        assert {kind: decode_priority(word) for kind, word in words.items()} == {
            "fsync": (-1000, False), "disk": (0, True), "memory": (7, False), "ephemeral": (0, False),
        }  # fmt: skip


def test_a_deleted_topic_is_announced_and_a_restart_makes_readers_rescan(host, watched):
    """The deletion is announced without a position (N3). After a restart readers rescan every topic (N4)."""
    with ringlog.connect(host.url, wait=10) as client:
        client.topics.create("t", durability="fsync")
        client.topics.create("u", durability="fsync")
        client.append("t", b"a")
        topic_id = watched.id_of("t")
        watched.news.take_rows()
        before = watched.changes()
        client.topics.delete("t")
        [row] = until_told(watched, {topic_id: 1})
        assert (row.first_seq, row.last_seq, row.file_id, row.offset, row.stop) == (1, 1, 0, 0, 0)
        assert watched.table.read(row.slot & SLOT_MASK).state == TOPIC_EMPTY
        assert watched.changes() == before + 1
        client.append("u", b"b")
        host.kill("wal_shard")
        host.wait_ready()
        wait_until(lambda: not watched.news.take_rows().is_complete, 20, "a complete rescan")
        client.append("u", b"c")
        other = watched.id_of("u")
        rows = [row for row in until_told(watched, {other: 2}) if row.topic_id == other]
        assert [payload for row in rows[-1:] for payload in watched.verified(row, "u")] == [b"c"]


@pytest.mark.slow
def test_without_schedulers_there_is_no_news():
    with engine(wal={"shards": 1}, delivery={"schedulers": 0}) as host:
        with ringlog.connect(host.url, wait=10) as client:
            client.append("t", b"a")
        assert not (Path(host.info.shm_dir) / news_name(0)).exists()
