"""Short histories over two topics, run on a recorded disk, with what was asked and what was answered.

`f` is of class `fsync`, `d` of class `disk`; both are made before the history begins, as is the stream.
A step may submit frames or requests; the record says, in the order of the disk calls, when each was
submitted and when it was acknowledged.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from actors.wal_shard import events as ev
from ringlog.contract import Reply
from ringlog.envelope import messages as m
from ringlog.frame.settle import S_FIRST_SEQ, S_PRODUCER_SEQ, S_TOPIC
from ringlog.testing import disk as d
from ringlog.testing.shard_world import Marks, World
from ringlog.types import Durability

BIG = 48 << 10
"""A payload that leaves no room for a second one in a file of World.file_bytes."""


@dataclass(slots=True)
class Sent:
    """One frame: what it held, and what it was told."""

    topic: str
    topic_id: int
    seq: int
    """The producer's number."""
    payloads: list[bytes]
    frame: bytes
    durability: Durability
    first_seq: int = 0
    """As it came out in the end, whether or not the ack was seen before the cut."""


@dataclass(frozen=True, slots=True)
class Wish:
    """One request about a topic's existence or configuration."""

    topic: str
    exists: bool
    ttl_ms: int = 0


@dataclass(slots=True)
class History:
    """What happened. Notes among the operations point into `sent` and `wishes`."""

    operations: list[d.Operation]
    sent: list[Sent] = field(default_factory=list)
    wishes: list[Wish] = field(default_factory=list)
    incarnation: int = 0


class Workload:
    """Runs steps one after the other in one world."""

    def __init__(self) -> None:
        self.disk = d.RecordingDisk(d.SimulatedDisk("/data"))
        self.world = World(self.disk, watch=self._watch)
        self.history = History(self.disk.operations)
        self._by_number: dict[tuple[int, int], int] = {}
        self._open_wish = -1
        self._made = 0
        self.world.start()
        self.wish(Wish("f", True), durability="fsync")
        self.wish(Wish("d", True), durability="disk")

    def run(self, steps: tuple[str, ...]) -> History:
        """Do the steps; returns everything that happened."""
        for step in steps:
            STEPS[step](self)
        self.history.incarnation = self.world.incarnation
        for sent in self.history.sent:
            assert sent.first_seq, f"{sent.topic} {sent.seq} was never settled"
        return self.history

    # -- what steps are made of -----------------------------------------------------------------------

    def wish(self, wish: Wish, **config: Any) -> None:
        """Create, configure or delete."""
        run = self.world.run_of(wish.topic)
        self.history.wishes.append(wish)
        self._open_wish = len(self.history.wishes) - 1
        self.disk.note("wish", self._open_wish)
        put = m.TopicPut(wish.topic, {"ttl_ms": wish.ttl_ms, **config})
        answer = self.world.ask(run, put if wish.exists else m.TopicDelete(wish.topic))
        assert not isinstance(answer, m.ErrorReply), answer
        self._open_wish = -1

    def send(self, topic: str, *batches: list[bytes]) -> None:
        """Send frames in one group; a topic that was deleted is made again first."""
        if self.world.run_of(topic).core.directory.find(topic) is None:
            self.wish(Wish(topic, True), durability={"f": "fsync", "d": "disk"}[topic])
        live = self.world.topic(topic)
        frames = []
        for payloads in batches:
            producer = 7 if topic == "f" else 8
            number = len(self.history.sent) + 1
            frame = self.world.frame_for(topic, payloads, producer=producer, seq=number)
            self._by_number[live.topic_id, number] = len(self.history.sent)
            durability = live.config.durability
            sent = Sent(topic, live.topic_id, number, payloads, bytes(frame), durability)
            self.disk.note("sent", len(self.history.sent))
            self.history.sent.append(sent)
            frames.append(frame)
        self.world.send(topic, frames)

    def payload(self, size: int = 20) -> bytes:
        """Another payload each time."""
        self._made += 1
        return (f"{self._made}:".encode() * size)[:size]

    def _watch(self, shard: int, effect: Any) -> None:
        if isinstance(effect, ev.Settle):
            for entry in effect.entries.tolist():
                index = self._by_number[entry[S_TOPIC], entry[S_PRODUCER_SEQ]]
                self.history.sent[index].first_seq = entry[S_FIRST_SEQ]
                self.disk.note("acked", index)
        elif isinstance(effect, Reply) and isinstance(effect.message, m.TopicInfo | m.TopicDeleted):
            if self._open_wish >= 0:
                self.disk.note("granted", self._open_wish)
        elif isinstance(effect, ev.PublishMarks):
            marks = self.world.marks[shard]
            self.disk.note("marks", Marks(marks.published, marks.durable))

    def restart(self) -> None:
        """An orderly stop and a start, as another start of the engine on the same boot."""
        self.disk.note("stopping")
        self.world.stop()
        self.disk.note("marks", Marks())
        self.world.start()


def _append_one(work: Workload) -> None:
    work.send("f", [work.payload()])


def _append_many(work: Workload) -> None:
    work.send("f", [work.payload(300), work.payload(300)], [work.payload()], [work.payload(700)])


def _append_disk(work: Workload) -> None:
    work.send("d", [work.payload()])


def _append_disk_many(work: Workload) -> None:
    work.send("d", *[[work.payload(), work.payload()] for _ in range(3)])


def _config(work: Workload) -> None:
    work.wish(Wish("f", True, ttl_ms=work.world.clock.now_us()), durability="fsync")
    work.world.clock.advance(0.001)


def _delete(work: Workload) -> None:
    work.wish(Wish("d", False))


def _roll(work: Workload) -> None:
    work.send("f", [work.payload(BIG)])
    work.send("f", [work.payload(BIG)])


def _idle(work: Workload) -> None:
    for _ in range(4):
        work.world.tick(0.15)


def _restart(work: Workload) -> None:
    work.restart()


STEPS: dict[str, Callable[[Workload], None]] = {
    "append": _append_one,
    "append_many": _append_many,
    "append_disk": _append_disk,
    "append_disk_many": _append_disk_many,
    "config": _config,
    "delete": _delete,
    "roll": _roll,
    "idle": _idle,
    "restart": _restart,
}
