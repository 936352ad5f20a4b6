"""Clients of the simulated engine: producers that number and resend their frames, and an admin.

A local producer pushes into rings. A remote one sends one batch at a time through the gateway. Both keep
unsettled frames. After a restart of the engine, or after their own death as another process, they resend
these frames in order and under the same numbers.
"""

from __future__ import annotations

import random
from collections import deque
from typing import Any

import numpy as np
from pyroaring import BitMap64

from chaos.world.engine import RING_FRAMES_MAX, Engine, Ring
from chaos.world.model import Deletion, Life, Model, Sent
from chaos.world.tasks import Process, Signal
from ringlog.drill.checks import GuaranteeBroken
from ringlog.envelope import messages as m
from ringlog.errors import RinglogError, StaleEpoch, TopicNotFound
from ringlog.frame import encode_records, frame
from ringlog.frame.settle_entry import (
    FLAG_DEDUPED,
    FLAGS_SHIFT,
    S_COUNT_STATUS,
    S_EPOCH,
    S_FIRST_SEQ,
    S_PRODUCER_SEQ,
    WORDS,
    entry_error,
)
from ringlog.placement import home_shard
from ringlog.types import Durability

OPEN_MAX = 40
"""Maximum number of unsettled frames of one producer."""
BATCH_MAX = 6
IDLE_S, BUSY_S = 0.3, 0.05
TAGS = ("red", "green", "blue")


class Client:
    """A client of the shards. `configs` has the configuration of each topic at its creation."""

    def __init__(self, engine: Engine, model: Model, name: str, configs: dict[str, dict[str, Any]]) -> None:
        self.engine, self.model, self.name, self.configs = engine, model, name, configs
        self.process = self.new_process()
        self.infos: dict[str, m.TopicInfo] = {}
        self.generation = 0

    def new_process(self) -> Process:
        """Replace the process of this client."""
        self.process = Process(self.engine.loop, self.name, "client", 1 << 41)
        self.news = Signal(self.engine.loop)
        return self.process

    def resolve(self, topic: str, *, fresh: bool = False) -> m.TopicInfo:
        """Return the shard and ids of a topic. Raises the errors of the request."""
        if self.generation != self.engine.generation:
            self.infos.clear()
            self.generation = self.engine.generation
        if fresh or topic not in self.infos:
            began = self.model.now()
            self.infos[topic] = self.at_home(topic, m.TopicResolve(topic))
            self.life_of(self.infos[topic], began)
        return self.infos[topic]

    def at_home(self, topic: str, message: m.Message) -> Any:
        """Send a request to the home shard of the name, or to the shard that it refers to."""
        home = home_shard(topic, self.engine.base.shards)
        answer, _ = self.engine.ask(self.engine.child("wal_shard", home), message)
        if isinstance(answer, m.TopicInfo) and not answer.topic_id:
            answer, _ = self.engine.ask(self.engine.child("wal_shard", answer.shard), message)
        return answer

    def life_of(self, info: Any, began: int) -> Life:
        """Return the life of the topic that an answer describes."""
        config = self.configs[info.topic]
        return self.model.met(
            info.topic, info.topic_id, info.epoch, Durability.parse(config["durability"]),
            config.get("cap_records", 0), config.get("ttl_ms", 0) * 1_000, began,
        )  # fmt: skip


class Producer(Client):
    """Sends frames. `todo` has entries (topic, number of frames, maximum payload bytes, random generator)."""

    def __init__(
        self, engine: Engine, model: Model, name: str, configs: dict[str, dict[str, Any]], number: int,
        *, is_remote: bool,
    ) -> None:  # fmt: skip
        super().__init__(engine, model, name, configs)
        self.producer_id, self.is_remote = number, is_remote
        self.todo: deque[tuple[str, int, int, random.Random]] = deque()
        self.open: list[Sent] = []
        self.unsent: deque[Sent] = deque()
        self.rings: dict[int, Ring] = {}
        self.numbers: dict[tuple[int, int], int] = {}
        self.joined = 0
        self.process.spawn(self.live)

    @property
    def is_idle(self) -> bool:
        """Whether all work is done and settled."""
        return not self.todo and not self.open

    def restart(self) -> None:
        """Kill the client's process; another process continues with the unsettled frames."""
        self.engine.loop.kill(self.process)
        for ring in self.rings.values():
            ring.is_abandoned, ring.news = True, None
        self.rings = {}
        self.joined = 0
        self.new_process().spawn(self.live, 0.05)

    def live(self) -> None:
        """Send the frames of `todo`, forever."""
        while True:
            try:
                self._turn()
            except (StaleEpoch, TopicNotFound):
                self.infos.clear()
            except RinglogError:
                self.engine.loop.pause(0.05)
            is_waiting = self.engine.is_up and not self.unsent and not (self.is_remote and self.open)
            self.engine.loop.wait(self.news, IDLE_S if is_waiting else BUSY_S)

    def _turn(self) -> None:
        if not self.engine.is_up:
            return
        if self.joined != self.engine.generation:
            self.joined = self.engine.generation
            self.rings = {}
            self.unsent = deque(self.open)
        self._take_settlements()
        while self.todo and len(self.open) < OPEN_MAX:
            topic, count, size, rng = self.todo[0]
            info = self._resolved(topic)
            if self.todo:
                self.todo.popleft()
            if info is not None:
                self._make(self.model.lives[info.topic_id, info.epoch], count, size, rng)
        if self.is_remote:
            self._send_batch()
        else:
            while self.unsent and self._push(self.unsent[0]):
                self.unsent.popleft()

    def _resolved(self, topic: str) -> m.TopicInfo | None:
        try:
            return self.resolve(topic)
        except TopicNotFound:
            return None

    def _make(self, life: Life, count: int, size: int, rng: random.Random) -> None:
        for _ in range(count):
            key = life.topic_id, life.epoch
            number = self.numbers[key] = self.numbers.get(key, 0) + rng.choice((1, 1, 1, 3))
            payloads = [
                len(self.model.by_token).to_bytes(6, "little") + i.to_bytes(2, "little")
                + rng.randbytes(rng.randrange(1, size)) for i in range(rng.choice((1, 1, 2, 5)))
            ]  # fmt: skip
            tag = rng.choice(TAGS)
            made = frame(
                encode_records(payloads, tags=[tag] * len(payloads)), topic_id=life.topic_id,
                producer_id=self.producer_id, producer_seq=number, epoch=life.epoch,
                durability=Durability.EPHEMERAL,
            )  # fmt: skip
            sent = self.model.submit(life, self.producer_id, number, payloads, tag, bytes(made))
            self.open.append(sent)
            self.unsent.append(sent)

    def _gone(self, sent: Sent) -> None:
        """Record that a frame was refused because its topic was deleted."""
        sent.times += 1
        self.model.refused(sent)
        if sent in self.open:
            self.open.remove(sent)

    def _push(self, sent: Sent) -> bool:
        info = self._resolved(sent.life.name)
        if info is None or (info.topic_id, info.epoch) != (sent.life.topic_id, sent.life.epoch):
            self._gone(sent)
            return True
        if self.joined != self.engine.generation or not self.engine.is_up:
            return False
        ring = self.rings.get(info.shard)
        if ring is None:
            ring = self.rings[info.shard] = Ring(self.name, info.shard, news=self.news)
            self.engine.rings.append(ring)
        if len(ring.frames) >= RING_FRAMES_MAX:
            return False
        self.model.sending(sent)
        ring.frames.append((sent, sent.frame))
        self.engine.ring_bell(info.shard)
        return True

    def _take_settlements(self) -> None:
        for ring in self.rings.values():
            settled, ring.settled = ring.settled, []
            for sent, entry in settled:
                self._settled(sent, entry)

    def _settled(self, sent: Sent, entry: Any) -> None:
        error = entry_error(entry, sent.life.name)
        if int(entry[S_PRODUCER_SEQ]) != sent.number:
            raise GuaranteeBroken(f"{sent} is settled as number {int(entry[S_PRODUCER_SEQ])}", sent.life.name)
        if error is None:
            if int(entry[S_EPOCH]) != sent.life.epoch:
                raise GuaranteeBroken(f"{sent} is settled in epoch {int(entry[S_EPOCH])}", sent.life.name)
            is_repeat = bool(int(entry[S_COUNT_STATUS]) >> FLAGS_SHIFT & FLAG_DEDUPED)
            self.model.acked(sent, int(entry[S_FIRST_SEQ]), is_repeat=is_repeat)
        else:
            self.model.refused(sent, error.outcome)
            if isinstance(error, TopicNotFound | StaleEpoch):
                self.infos.pop(sent.life.name, None)
        self.engine.tell(sent.life.name, f"{self.name}: {sent} {error or ''}")
        if sent in self.open:
            self.open.remove(sent)

    def _send_batch(self) -> None:
        """Send a batch as one message. The next pass repeats it until it is settled."""
        if not self.open:
            return
        life = self.open[0].life
        batch = [sent for sent in self.open[:BATCH_MAX] if sent.life is life]
        for sent in batch:
            self.model.sending(sent)
        joined = bytearray().join(bytearray(sent.frame) for sent in batch)
        message = m.Append(life.name, len(batch))
        try:
            reply, _ = self.engine.ask(self.engine.child("gateway"), message, joined)
        except (TopicNotFound, StaleEpoch):
            self.infos.pop(life.name, None)
            for sent in batch:
                sent.times += 1
                self._gone(sent)
            return
        assert isinstance(reply, m.Appended), reply
        entries = np.frombuffer(reply.entries, dtype="<u8").reshape(-1, WORDS)
        if len(entries) != len(batch):
            raise GuaranteeBroken(f"{len(batch)} frames were sent, {len(entries)} are settled", life.name)
        for sent, entry in zip(batch, entries, strict=True):
            self._settled(sent, entry)


class Admin(Client):
    """Creates, configures and deletes topics in sequence.

    `todo` has entries (operation, topic, random generator).
    """

    def __init__(self, engine: Engine, model: Model, name: str, configs: dict[str, dict[str, Any]]) -> None:
        super().__init__(engine, model, name, configs)
        self.todo: deque[tuple[str, str, random.Random]] = deque()
        self.is_busy = False
        self.process.spawn(self.live)

    @property
    def is_idle(self) -> bool:
        """Whether all work is done."""
        return not self.todo and not self.is_busy

    def live(self) -> None:
        """Run the operations of `todo`, forever. A failed delete is not retried; it may have taken effect."""
        while True:
            while self.todo:
                what, topic, rng = self.todo.popleft()
                self.is_busy = True
                try:
                    getattr(self, f"_{what}")(topic, rng)
                    self.engine.counts[what] += 1
                except RinglogError as e:
                    self.engine.tell(topic, f"{what}: {type(e).__name__}: {e}")
                    if what == "put":  # may be repeated, and without topics there is no work
                        self.todo.append((what, topic, rng))
                        self.engine.loop.pause(0.1)
                self.is_busy = False
            self.engine.loop.wait(self.news, 0.1)

    def _put(self, topic: str, rng: random.Random) -> None:
        began = self.model.now()
        info = self.at_home(topic, m.TopicPut(topic, self.configs[topic]))
        self.life_of(info, began)
        self.engine.tell(topic, f"put: epoch {info.epoch} in shard {info.shard}")

    def _configure(self, topic: str, rng: random.Random) -> None:
        self.at_home(topic, m.TopicPut(topic, {"idempotency_window_ms": rng.randrange(1, 1 << 20)}, "merge"))

    def _drop(self, topic: str, rng: random.Random) -> None:
        info = self.resolve(topic, fresh=True)
        key = info.topic_id, info.epoch
        self.model.doomed.add(key)
        self.engine.tell(topic, f"drop epoch {info.epoch}")
        shard = self.engine.child("wal_shard", info.shard)
        reply, _ = self.engine.ask(shard, m.TopicDelete(topic))
        assert isinstance(reply, m.TopicDeleted), reply
        self.model.gone_at.setdefault(key, self.model.now())
        self.model.lives[key].had.add("drop")
        self.engine.tell(topic, f"dropped epoch {info.epoch}")

    def _delete(self, topic: str, rng: random.Random) -> None:
        """Delete records: below a seq, by tag, by both, or by a list of seqs."""
        info = self.resolve(topic, fresh=True)
        life = self.model.lives[info.topic_id, info.epoch]
        highest = max(life.highest_acked, life.highest_shown)
        deletion = Deletion(self.model.now())
        how = rng.choice(("before", "tag", "tag", "both", "seqs"))
        if how in {"before", "both"}:
            deletion.before = max(1, highest - rng.randrange(0, 30))
        if how in {"tag", "both"}:
            deletion.tag = rng.choice(TAGS)
            life.had.add("delete by tag")
        if how == "seqs":
            some = [rng.randrange(1, highest + 2) for _ in range(8)]
            deletion.seqs = frozenset(some)
        life.deletions.append(deletion)
        self.engine.tell(topic, f"delete {deletion}")
        message = m.RecordsDelete(
            topic, deletion.before, deletion.tag or None, BitMap64(deletion.seqs).serialize()
            if deletion.seqs else b"", info.epoch,
        )  # fmt: skip
        # The answer may arrive after a power loss that undoes the deletion, so take the count before the
        # request.
        losses = self.model.power_losses
        reply, _ = self.engine.ask(self.engine.child("wal_shard", info.shard), message)
        assert isinstance(reply, m.RecordsDeleted), reply
        deletion.done_at, deletion.losses = self.model.now(), losses
        self.engine.tell(topic, f"deleted {reply.deleted} records, asked at {deletion.asked_at}")
