"""A shard's life on a directory of the host: random work over the production core, log writer, recovery and
compactor, which may end at any call to the disk and goes on after it with what the disk holds then."""

from __future__ import annotations

import logging
import random
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from pyroaring import BitMap64

from actors.wal_shard import events as ev
from chaos.rigs.hostdisk import HostDisk
from chaos.rigs.judge import POWER_LOSS, How, Seen, check, note_seen, observe, require_same
from chaos.rigs.model import Model, SentFrame
from ringlog.envelope import messages as m
from ringlog.frame.settle import S_FIRST_SEQ, S_PRODUCER_SEQ, S_TOPIC, entry_error
from ringlog.storage.disk import Disk
from ringlog.testing.checkpoints import checkpoint
from ringlog.testing.shard_world import World

FILE_BYTES = 64 << 10
BIG_BYTES = 24 << 10
PRODUCER = 7
IDLE_S = 0.15

# What a shard says of each torn tail is for its operator, not for a thousand of them a minute.
logging.getLogger("ringlog").addHandler(logging.NullHandler())

TOPICS = {"f": "fsync", "d": "disk"}
Wrap = Callable[[HostDisk], Disk]


class Life:
    """One data directory over all its starts."""

    def __init__(self, root: Path, wrap: Wrap = lambda disk: disk) -> None:
        self._root, self._wrap = root, wrap
        root.mkdir(mode=0o700, exist_ok=True)
        self.model = Model(time.monotonic_ns)
        self._numbers = 0
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
                self.put(name, durability=durability)

    def end(self) -> None:
        """The process is gone; its handles too."""
        self.world.runs.clear()
        self._host.abandon()

    def stop(self) -> None:
        """An orderly stop."""
        for run in self.world.runs.values():
            run.drain()
        self.end()

    def recover(self) -> None:
        """Start after a loss of power, judge, start again, which must change nothing; raises Broken or what a
        start raises."""
        self.start(is_reboot=True)
        before = self.judge()
        self.end()
        self.start()
        require_same(before, observe(self.world), "starting twice changes the state")

    def judge(self, how: How = POWER_LOSS) -> dict[str, Seen]:
        """Look at everything a reader can see now, and keep in mind that he saw it; raises Broken."""
        seen = observe(self.world)
        check(self.model, seen, how)
        note_seen(self.model, seen)
        return seen

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
            topic_id = self.world.topic(topic).topic_id
            frames.append(self.world.frame_for(topic, payloads, producer=PRODUCER, seq=self._numbers))
            is_fsync = TOPICS[topic] == "fsync"
            self.model.send(SentFrame(topic, tuple(payloads), topic_id, self._numbers, is_fsync))
        self._refuse(topic, self.world.send(topic, frames))

    def send_again(self, topic: str) -> None:
        """Send the last frame of a topic again, whatever became of it; it must not come in twice."""
        mine = [each for each in self.model.frames if each.topic == topic]
        if mine:
            frame = self.world.frame_for(topic, mine[-1].payloads, producer=PRODUCER, seq=mine[-1].number)
            self._refuse(topic, self.world.send(topic, [frame]))

    def payload(self, size: int = 24) -> bytes:
        """Another one each time."""
        return self.model.payload(size)

    def put(self, topic: str, ttl_ms: int = 0, **config: Any) -> None:
        """Create or configure a topic."""
        asked = self.model.change(topic, exists=True, ttl_ms=ttl_ms)
        self.world.put(topic, ttl_ms=ttl_ms, **config)
        self.model.grant(asked)

    def delete(self, seqs: set[int]) -> None:
        """Delete records of `f`."""
        asked = self.model.remove(self.world.topic("f").topic_id, seqs)
        self.world.request(m.RecordsDelete("f", seqs=BitMap64(seqs).serialize()))
        self.model.grant(asked)

    def checkpoint(self) -> None:
        """What the compactor does, by its own code."""
        self.world.clock.advance(0.001)
        checkpoint(self.world)

    def _refuse(self, topic: str, entries: Any) -> None:
        for entry in entries:
            error = entry_error(entry, topic)
            if error is not None:
                raise error

    def _watch(self, shard: int, effect: Any) -> None:
        if isinstance(effect, ev.Settle):
            for entry in effect.entries.tolist():
                if entry_error(entry, "") is None:
                    sent = next(
                        each for each in reversed(self.model.frames)
                        if (each.topic_id, each.number) == (entry[S_TOPIC], entry[S_PRODUCER_SEQ])
                    )  # fmt: skip
                    self.model.settle(sent, entry[S_FIRST_SEQ])


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
    life.put("g", ttl_ms=rng.randrange(1 << 40, 1 << 41), durability="fsync")


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
