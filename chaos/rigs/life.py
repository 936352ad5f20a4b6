"""A shard's life on a directory of the host: random work over the production core, log writer, recovery and
compactor, which may end at any call to the disk and goes on after it with what the disk holds then."""

from __future__ import annotations

import logging
import random
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from pyroaring import BitMap64

from actors.compactor.checkpoint import Checkpoint, Workplace
from actors.compactor.shards import Shard
from actors.wal_shard import events as ev
from chaos.rigs.hostdisk import HostDisk
from chaos.rigs.promises import TOPICS, Broken, Delete, Promises, seen
from ringlog.config import Storage
from ringlog.envelope import messages as m
from ringlog.errors import refusal
from ringlog.frame.settle import S_FIRST_SEQ, S_PRODUCER_SEQ, S_TOPIC, entry_error
from ringlog.segment.layout import MAKER_COMPACTOR, NumberAllocator, parse_stem
from ringlog.segment.segment import find_segments
from ringlog.storage.disk import Disk
from ringlog.testing.shard_world import DATA, ENGINE_ID, World

FILE_BYTES = 64 << 10
BIG_BYTES = 24 << 10
PRODUCER = 7
IDLE_S = 0.15

# What a shard says of each torn tail is for its operator, not for a thousand of them a minute.
logging.getLogger("ringlog").addHandler(logging.NullHandler())

Wrap = Callable[[HostDisk], Disk]


class Life:
    """One data directory over all its starts."""

    def __init__(self, root: Path, wrap: Wrap = lambda disk: disk) -> None:
        self._root, self._wrap = root, wrap
        root.mkdir(mode=0o700, exist_ok=True)
        self.promises = Promises()
        self._numbers = 0
        self._made = 0
        self._topic_ids: dict[int, str] = {}
        self._host = HostDisk(root)
        self.world = World(self._wrap(self._host), file_bytes=FILE_BYTES, watch=self._watch)

    # -- starts and ends ------------------------------------------------------------------------------

    def start(self, *, is_reboot: bool = False, keeps_board: bool = False) -> None:
        """Start the shard: on another boot, as a successor beside the same board, or anew."""
        world = self.world
        self._host = HostDisk(self._root)
        world.disk = self._wrap(self._host)
        if is_reboot:
            world.reboot()
        if keeps_board:
            world.start_shard(0)
        else:
            world.start()
        for name, durability in TOPICS.items():
            if world.runs[0].core.directory.find(name) is None:
                world.put(name, durability=durability)
            self._topic_ids[world.topic(name).topic_id] = name

    def end(self) -> None:
        """The process is gone; its handles too."""
        self.world.runs.clear()
        self._host.abandon()

    def stop(self) -> None:
        """An orderly stop."""
        for run in self.world.runs.values():
            run.drain()
        self.end()

    def recover(
        self, *, is_reboot: bool = True, keeps_board: bool = False, is_power_loss: bool = True
    ) -> None:
        """Start, judge, start again, which must change nothing; raises Broken or what a start raises."""
        self.start(is_reboot=is_reboot, keeps_board=keeps_board)
        self.promises.check(self.world, is_power_loss=is_power_loss)
        before = seen(self.world)
        self.end()
        self.start()
        after = seen(self.world)
        if after != before:
            raise Broken(f"starting twice changes the state: {before} then {after}")

    # -- work -----------------------------------------------------------------------------------------

    def step(self, rng: random.Random) -> str:
        """Do one piece of work by chance; raises what the shard raises. Returns its name."""
        name = rng.choice(tuple(STEPS))
        STEPS[name](self, rng)
        return name

    def send(self, topic: str, *batches: list[bytes]) -> None:
        """Send frames in one group."""
        frames = []
        for payloads in batches:
            self._numbers += 1
            frames.append(self.world.frame_for(topic, payloads, producer=PRODUCER, seq=self._numbers))
            self.promises.sent(topic, self._numbers, payloads)
        self._refuse(topic, self.world.send(topic, frames))

    def send_again(self, topic: str) -> None:
        """Send the last frame of a topic again, whatever became of it; it must not come in twice."""
        mine = [each for each in self.promises.frames if each.topic == topic]
        if mine:
            frame = self.world.frame_for(topic, mine[-1].payloads, producer=PRODUCER, seq=mine[-1].number)
            self._refuse(topic, self.world.send(topic, [frame]))

    def payload(self, size: int = 24) -> bytes:
        """Another one each time."""
        self._made += 1
        return (f"{self._made}:".encode() * size)[:size]

    def delete(self, seqs: set[int]) -> None:
        """Delete records of `f`."""
        delete = Delete(frozenset(seqs), self.now_ns())
        self.promises.deletes.append(delete)
        self.world.request(m.RecordsDelete("f", seqs=BitMap64(seqs).serialize()))
        delete.acked_ns = self.now_ns()

    def checkpoint(self) -> None:
        """What the compactor does, by its own code."""
        self.world.clock.advance(0.001)
        parsed = [parse_stem(stem) for stem in find_segments(self.world.disk, DATA)]
        known = [each[2] for each in parsed if each is not None]
        place = Workplace(
            disk=self.world.disk, data_dir=DATA, engine_id=ENGINE_ID, clock=self.world.clock,
            storage=Storage(), numbers=NumberAllocator(MAKER_COMPACTOR, known), beat=lambda: None,
        )  # fmt: skip
        shard = Shard(_Asking(self.world), 0)
        Checkpoint(place, shard, shard.plan(roll=True)).run()

    @staticmethod
    def now_ns() -> int:
        """The clock of promises."""
        return time.monotonic_ns()

    def _refuse(self, topic: str, entries: Any) -> None:
        for entry in entries:
            error = entry_error(entry, topic)
            if error is not None:
                raise error

    def _watch(self, shard: int, effect: Any) -> None:
        if isinstance(effect, ev.Settle):
            for entry in effect.entries.tolist():
                topic = self._topic_ids[entry[S_TOPIC]]
                if entry_error(entry, topic) is None:
                    self.promises.settled(topic, entry[S_PRODUCER_SEQ], entry[S_FIRST_SEQ])


class _Asking:
    """Asks the World's shard as the compactor asks processes."""

    def __init__(self, world: World) -> None:
        self._world = world

    def ask(self, shard: int, message: m.Message, wanted: type[Any], *, attachment: Any = None) -> Any:
        """See actors.compactor.shards.Asking."""
        run = self._world.runs[shard]
        run.attached = None
        answer = self._world.ask(run, message, bytearray(attachment) if attachment is not None else None)
        if isinstance(answer, m.ErrorReply):
            raise refusal(answer.status, answer.message, answer.detail)
        assert isinstance(answer, wanted), answer
        return SimpleNamespace(message=answer, attachment=run.attached)


def _append(life: Life, rng: random.Random) -> None:
    life.send("f", [life.payload(rng.choice((8, 24, 700, 5_000)))])


def _append_many(life: Life, rng: random.Random) -> None:
    life.send("f", *[[life.payload(300) for _ in range(rng.randint(1, 4))] for _ in range(3)])


def _append_disk(life: Life, rng: random.Random) -> None:
    life.send("d", *[[life.payload(), life.payload(600)] for _ in range(rng.randint(1, 3))])


def _roll(life: Life, rng: random.Random) -> None:
    for _ in range(3):
        life.send("f", [life.payload(BIG_BYTES)])


def _delete(life: Life, rng: random.Random) -> None:
    there = [seq for seq, _ in life.world.records("f")]
    if there:
        life.delete(set(rng.sample(there, min(2, len(there)))))


def _config(life: Life, rng: random.Random) -> None:
    life.world.put("g", durability="fsync", ttl_ms=rng.randrange(1 << 40, 1 << 41))


def _idle(life: Life, rng: random.Random) -> None:
    for _ in range(rng.randint(1, 4)):
        life.world.tick(IDLE_S)


def _checkpoint(life: Life, rng: random.Random) -> None:
    life.checkpoint()


def _restart(life: Life, rng: random.Random) -> None:
    life.stop()
    life.start()


def _replace(life: Life, rng: random.Random) -> None:
    life.end()
    life.start(keeps_board=True)


def _send_again(life: Life, rng: random.Random) -> None:
    life.send_again("f")


STEPS: dict[str, Callable[[Life, random.Random], None]] = {
    "append": _append,
    "append_many": _append_many,
    "append_disk": _append_disk,
    "roll": _roll,
    "delete": _delete,
    "config": _config,
    "idle": _idle,
    "checkpoint": _checkpoint,
    "restart": _restart,
    "replace": _replace,
    "send_again": _send_again,
}
