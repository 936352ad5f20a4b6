"""Short histories on a recorded disk, built from the steps of chaos/rigs/steps.py.

The record contains the disk calls in order, and when each frame and request was submitted and answered.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from chaos.rigs import storage
from chaos.rigs.harness import CLASSES, Harness
from chaos.rigs.model import Model, Removal, TopicChange
from chaos.rigs.steps import STEPS
from chaos.rigs.storage import COLD
from ringlog.actors.wal_shard import events as ev
from ringlog.envelope import messages as m
from ringlog.testing import disk as d
from tests.support.shard_world import DATA, SimulatedBoardMarks

DIRECTORIES = (DATA, f"{DATA}/meta", COLD)
"""Directories that exist after the engine's first start."""
ALPHABET = (
    "create", "append", "append_many", "delete_seq", "delete_tag", "config", "delete_topic", "rotate", "seal",
    "relocate", "reclaim", "restart",
)  # fmt: skip
"""The twelve operations. All short sequences of them are explored."""


@dataclass(slots=True)
class History:
    """A recorded history. Times in the model are operation numbers."""

    operations: list[d.Operation]
    model: Model


@dataclass
class Facts:
    """The state after the operation `number`."""

    history: History
    number: int
    marks: SimulatedBoardMarks

    @cached_property
    def model(self) -> Model:
        """Model with all requests and answers up to this operation."""
        return self.history.model.until(self.number + 1, knows_places=True)

    @cached_property
    def key(self) -> Hashable:
        """Key that is equal for facts under which the same image gives the same result."""
        return self.model.told()


class Workload(Harness):
    """Runs steps in sequence in one world."""

    def __init__(self, salts: int = 0) -> None:
        self.disk = d.RecordingDisk(d.SimulatedDisk(*DIRECTORIES))
        super().__init__(self.disk, lambda: len(self.disk.operations), _salt=salts)
        self.start()
        for topic, durability in CLASSES.items():
            self.put(topic, durability=durability)

    def run(self, steps: Iterable[str]) -> History:
        """Run the steps; return the recorded history."""
        with storage.counted_salts():
            for step in steps:
                self.disk.add_note("step", step)
                STEPS[step](self)
        for sent in self.model.frames:
            assert sent.first_seq, f"{sent} of {sent.topic} was never settled"
        return History(self.disk.operations, self.model)

    def end(self) -> None:
        super().end()
        self.disk.add_note("marks", SimulatedBoardMarks())

    def send(self, topic: str, *batches: list[bytes]) -> None:
        self.ensure_topic(topic)
        super().send(topic, *batches)

    def delete(self, topic: str, seqs: Iterable[int], request: m.RecordsDelete | None = None) -> Any:
        chosen = frozenset(seqs)
        reply = super().delete(topic, chosen, request)
        assert reply.deleted == len(chosen), (reply, chosen)
        return reply

    def grant(self, asked: Removal | TopicChange) -> None:
        super().grant(asked)
        self.disk.add_note("granted")

    def _settled(self, entry: list[int]) -> None:
        super()._settled(entry)
        self.disk.add_note("acked")

    def _watch(self, shard: int, effect: Any) -> None:
        super()._watch(shard, effect)
        if isinstance(effect, ev.PublishMarks):
            marks = self.world.marks[shard]
            self.disk.add_note("marks", SimulatedBoardMarks(marks.published, marks.durable))
