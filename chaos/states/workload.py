"""Short histories over a few topics, run on a recorded disk, with what was asked and what was answered.

`f` is of class `fsync`, `d` of class `disk`; both are made before the history begins, as is the stream. An
operation brings about what it needs: one that deletes appends first when there is nothing to delete, one
that moves segments seals first. The record says, in the order of the disk calls, when each frame and
request was submitted and when it was acknowledged.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from pyroaring import BitMap64

from actors.wal_shard import events as ev
from chaos.rigs import storage
from chaos.rigs.model import Model, Removal, SentFrame, TopicChange
from chaos.rigs.storage import COLD
from ringlog.contract import Reply
from ringlog.envelope import messages as m
from ringlog.frame import encode_records, frame
from ringlog.frame.settle import S_FIRST_SEQ, S_PRODUCER_SEQ
from ringlog.limits import KIB
from ringlog.testing import disk as d
from ringlog.testing.shard_world import DATA, Marks, World
from ringlog.types import Durability

FILE_BYTES = 80 * KIB
"""Of a log file: hardly more than the room that a shard keeps free in one, so that images are small."""
BIG = 39 * KIB
"""A payload that leaves no room for a second one in a file of FILE_BYTES."""
DIRECTORIES = (DATA, f"{DATA}/meta", COLD)
"""There from the beginning, as the engine's first start leaves them."""
CLASSES = {"f": "fsync", "d": "disk"}
PRODUCERS = {"f": 7, "d": 8}
TAG = "a"
"""Of every second record."""
_GRANTS = m.TopicInfo | m.TopicDeleted | m.RecordsDeleted


@dataclass(slots=True)
class History:
    """What happened. Moments of the model are numbers of operations."""

    operations: list[d.Operation]
    model: Model
    incarnation: int = 0


@dataclass
class Facts:
    """What was true when the operation `number` had been done."""

    history: History
    number: int
    marks: Marks

    @cached_property
    def model(self) -> Model:
        """What had been asked and answered by then."""
        return self.history.model.until(self.number + 1, knows_places=True)

    @cached_property
    def key(self) -> Hashable:
        """Equal when judging the same image under the facts would be the same."""
        return self.model.told()


class Workload:
    """Runs steps one after the other in one world."""

    def __init__(self, salts: int = 0) -> None:
        self.disk = d.RecordingDisk(d.SimulatedDisk(*DIRECTORIES))
        self.world = World(
            self.disk, watch=self._watch, file_bytes=FILE_BYTES, cold=COLD, has_cold=True, _salt=salts
        )  # fmt: skip
        self.model = Model(lambda: len(self.disk.operations))
        self.history = History(self.disk.operations, self.model)
        self._open: Removal | TopicChange | None = None
        self._topics_made = 0
        self.world.start()
        for topic, durability in CLASSES.items():
            self.put(topic, durability=durability)

    def run(self, steps: Iterable[str]) -> History:
        """Do the steps; returns everything that happened."""
        with storage.counted_salts():
            for step in steps:
                self.disk.note("step", step)
                STEPS[step](self)
        self.history.incarnation = self.world.incarnation
        for sent in self.model.frames:
            assert sent.first_seq, f"{sent} of {sent.topic} was never settled"
        return self.history

    # -- what steps are made of -----------------------------------------------------------------------

    def put(self, topic: str, *, ttl_ms: int = 0, **config: Any) -> None:
        """Create or configure."""
        self._change(m.TopicPut(topic, {"ttl_ms": ttl_ms, **config}), exists=True, ttl_ms=ttl_ms)

    def drop(self, topic: str) -> None:
        """Delete."""
        self._change(m.TopicDelete(topic), exists=False)

    def _change(self, request: m.TopicPut | m.TopicDelete, *, exists: bool, ttl_ms: int = 0) -> None:
        run = self.world.run_of(request.topic)
        self._open = self.model.change(request.topic, exists=exists, ttl_ms=ttl_ms)
        answer = self.world.ask(run, request)
        assert not isinstance(answer, m.ErrorReply), answer
        self._open = None

    def configure(self, topic: str, **config: Any) -> None:
        """Another configuration, told apart by a time to live that ends after the test."""
        ttl_ms = 10**12 + self.world.clock.now_us() % 10**12
        self.put(topic, ttl_ms=ttl_ms, durability=CLASSES[topic], **config)
        self.world.clock.advance(0.001)

    def need(self, topic: str) -> None:
        """Make the topic anew if it was deleted."""
        if self.world.run_of(topic).core.directory.find(topic) is None:
            self.put(topic, durability=CLASSES[topic])

    def send(self, topic: str, *batches: list[bytes]) -> None:
        """Send frames in one group; every second record of each has a tag."""
        self.need(topic)
        live = self.world.topic(topic)
        frames = []
        for payloads in batches:
            producer, number = PRODUCERS[topic], len(self.model.frames) + 1
            tags = [TAG if i % 2 else None for i in range(len(payloads))]
            made = frame(
                encode_records(payloads, tags=tags if len(tags) > 1 else None), topic_id=live.topic_id,
                producer_id=producer, producer_seq=number, durability=Durability.EPHEMERAL,
            )  # fmt: skip
            is_fsync = live.config.durability is Durability.FSYNC
            self.model.send(SentFrame(topic, tuple(payloads), live.topic_id, number, is_fsync, bytes(made)))
            frames.append(made)
        self.world.send(topic, frames)

    def visible(self, topic: str) -> list[int]:
        """Numbers that a reader gets to see."""
        self.need(topic)
        return [seq for seq, _ in self.world.records(topic)]

    def tagged(self, topic: str) -> set[int]:
        """Numbers of all records of this life of the topic that were sent with the tag."""
        topic_id = self.world.topic(topic).topic_id
        mine = [sent for sent in self.model.frames if sent.topic_id == topic_id]
        return {seq for sent in mine for seq in sent.seqs[1::2]}

    @property
    def segments(self) -> dict[int, m.SegmentRef]:
        """What the shard knows of segments, by number."""
        return self.world.runs[0].core.checkpoint.sealed.refs

    def submit_removal(self, topic: str, seqs: Iterable[int], *, is_eviction: bool = False) -> Removal:
        """Note that these records are to leave. Evictions are synced whatever the class (X2)."""
        live = self.world.topic(topic)
        is_durable = is_eviction or live.config.durability is Durability.FSYNC
        return self.model.remove(live.topic_id, seqs, is_durable=is_durable)

    def delete(self, topic: str, seqs: Iterable[int], request: m.RecordsDelete) -> None:
        """Delete records on request; `seqs` are those that the request has to find."""
        chosen = frozenset(seqs)
        self._open = self.submit_removal(topic, chosen)
        reply = self.world.request(request)
        assert reply.deleted == len(chosen), (reply, chosen)
        self._open = None

    def grant(self, asked: Removal | TopicChange) -> None:
        """Note that it was answered: an end after this is judged by it."""
        self.model.grant(asked)
        self.disk.note("granted")

    def payload(self, size: int = 20) -> bytes:
        """Another payload each time."""
        return self.model.payload(size)

    def new_topic(self) -> str:
        """A name that was not used yet."""
        self._topics_made += 1
        return f"n{self._topics_made}"

    def _watch(self, shard: int, effect: Any) -> None:
        if isinstance(effect, ev.Settle):
            for entry in effect.entries.tolist():
                sent = self.model.frames[entry[S_PRODUCER_SEQ] - 1]
                self.model.settle(sent, entry[S_FIRST_SEQ])
                self.disk.note("acked")
        elif isinstance(effect, Reply) and isinstance(effect.message, _GRANTS):
            is_of_records = isinstance(effect.message, m.RecordsDeleted)
            if self._open is not None and is_of_records == isinstance(self._open, Removal):
                self.grant(self._open)
        elif isinstance(effect, ev.PublishMarks):
            marks = self.world.marks[shard]
            self.disk.note("marks", Marks(marks.published, marks.durable))

    def restart(self) -> None:
        """An orderly stop and a start, as another start of the engine on the same boot."""
        self.world.stop()
        self.disk.note("marks", Marks())
        self.world.start()


# -- steps ------------------------------------------------------------------------------------------------


def _create(work: Workload) -> None:
    work.put(work.new_topic(), durability="fsync")


def _append(work: Workload) -> None:
    work.send("f", [work.payload()])


def _append_many(work: Workload) -> None:
    """Both classes; what is of class `disk` is synced once in between, and once not."""
    work.send("d", *[[work.payload(), work.payload()] for _ in range(3)])
    work.send("f", [work.payload(300), work.payload(300)], [work.payload()], [work.payload(700)])
    work.send("d", [work.payload()])


def _delete_seq(work: Workload) -> None:
    if len(work.visible("f")) < 3:
        work.send("f", [work.payload(), work.payload(), work.payload()])
    chosen = work.visible("f")[1::2]
    work.delete("f", chosen, m.RecordsDelete("f", 0, None, BitMap64(chosen).serialize()))


def _delete_tag(work: Workload) -> None:
    work.need("d")
    if not work.tagged("d").intersection(work.visible("d")):
        work.send("d", [work.payload(), work.payload()], [work.payload()])
    chosen = work.tagged("d").intersection(work.visible("d"))
    work.delete("d", chosen, m.RecordsDelete("d", 0, TAG, b""))


def _config(work: Workload) -> None:
    """A cap that evicts, and then none."""
    if len(work.visible("f")) < 2:
        work.send("f", [work.payload(), work.payload()])
    visible = work.visible("f")
    cap = len(visible) - 1
    evicted = work.submit_removal("f", visible[:1])
    work.configure("f", cap_records=cap)
    work.grant(evicted)
    work.configure("f")


def _delete_topic(work: Workload) -> None:
    work.need("d")
    work.drop("d")


def _rotate(work: Workload) -> None:
    work.send("f", [work.payload(BIG)])
    work.send("f", [work.payload(BIG)])


def _seal(work: Workload) -> None:
    if not work.visible("f"):
        work.send("f", [work.payload()])
    storage.seal(work.world)


def _relocate(work: Workload) -> None:
    if all(ref.tier == m.TIER_COLD for ref in work.segments.values()):
        work.send("f", [work.payload(), work.payload()])
        storage.seal(work.world)
    moved = storage.relocate(work.world)
    assert moved.moved, "the relocator has something to do"
    assert not moved.failed, moved


def _reclaim(work: Workload) -> None:
    """All but the last record of `f` goes, and then the segments that held it."""
    if len(work.visible("f")) < 2:
        work.send("f", [work.payload(), work.payload(), work.payload()])
    if not work.segments:
        storage.seal(work.world)
    visible = work.visible("f")
    work.delete("f", visible[:-1], m.RecordsDelete("f", visible[-1], None, b""))
    storage.reclaim(work.world)


def _restart(work: Workload) -> None:
    work.restart()


def _append_disk(work: Workload) -> None:
    work.send("d", [work.payload()])


def _append_disk_many(work: Workload) -> None:
    work.send("d", *[[work.payload(), work.payload()] for _ in range(3)])


def _idle(work: Workload) -> None:
    """Long enough for what is of class `disk` to be synced."""
    for _ in range(4):
        work.world.tick(0.15)


def _seal_amid(work: Workload) -> None:
    """Records come between the plan and the rows of a checkpoint, and between the rows and the end."""

    def before(message: m.Message) -> None:
        if isinstance(message, m.CheckpointRows | m.CheckpointDone):
            work.send("d", [work.payload()])
            work.send("f", [work.payload()])
            work.send("d", [work.payload()])

    storage.seal(work.world, before)


def _delete_amid(work: Workload) -> None:
    """Records are deleted when the compactor is about to ask which live, and nothing is synced since."""
    work.send("d", [work.payload(), work.payload()], [work.payload(), work.payload()])

    def before(message: m.Message) -> None:
        if isinstance(message, m.LiveAsk) and work.tagged("d").intersection(work.visible("d")):
            _delete_tag(work)

    storage.seal(work.world, before)


def _evict(work: Workload) -> None:
    """A topic of class `disk` is full, and one more record comes."""
    if len(work.visible("d")) < 2:
        work.send("d", [work.payload()], [work.payload()])
    visible = work.visible("d")
    work.configure("d", cap_records=len(visible))
    evicted = work.submit_removal("d", visible[:1], is_eviction=True)
    work.send("d", [work.payload()])
    work.grant(evicted)


ALPHABET = (
    "create", "append", "append_many", "delete_seq", "delete_tag", "config", "delete_topic", "rotate", "seal",
    "relocate", "reclaim", "restart",
)  # fmt: skip
"""Twelve operations, of which all short sequences are explored."""
STEPS: dict[str, Callable[[Workload], None]] = {
    "create": _create,
    "append": _append,
    "append_many": _append_many,
    "delete_seq": _delete_seq,
    "delete_tag": _delete_tag,
    "config": _config,
    "delete_topic": _delete_topic,
    "rotate": _rotate,
    "seal": _seal,
    "relocate": _relocate,
    "reclaim": _reclaim,
    "restart": _restart,
    "append_disk": _append_disk,
    "append_disk_many": _append_disk_many,
    "idle": _idle,
    "seal_amid": _seal_amid,
    "delete_amid": _delete_amid,
    "evict": _evict,
}
