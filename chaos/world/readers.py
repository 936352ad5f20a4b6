"""Readers of the simulated engine: by message through the gateway, or from files like a client on the host.

The library's own code decodes each answer, and the model checks it immediately.
"""

from __future__ import annotations

import random
from typing import Any

from chaos.world.clients import Client
from chaos.world.engine import Engine
from chaos.world.model import Model
from ringlog.actors.gateway import events as gateway_events
from ringlog.actors.gateway.reads.frame_reader import read_files
from ringlog.actors.gateway.replies import plan_for_read, read_reply
from ringlog.client.read.fetch_result import FetchResult
from ringlog.client.read.remote_source import decode_received_frames, hidden_numbers
from ringlog.drill.checks import GuaranteeBroken
from ringlog.envelope import messages as m
from ringlog.errors import CorruptData, NotReady, Refused, RinglogError, TopicNotFound
from ringlog.storage.extents import LogHighWatermark
from tests.support.shard_world import DATA

READ_TRIES = 6


class Reader(Client):
    """Reads through the gateway or from files, from a cursor or from the start.

    The model checks each answer.
    """

    def __init__(
        self, engine: Engine, model: Model, name: str, configs: dict[str, dict[str, Any]], rng: random.Random,
        *, is_remote: bool, pause_s: float = 0.1,
    ) -> None:  # fmt: skip
        super().__init__(engine, model, name, configs)
        self.rng, self.is_remote, self.pause_s = rng, is_remote, pause_s
        self.cursors: dict[str, tuple[int, int]] = {}
        self.is_stopping = False
        self.last_seen: list[int] = []
        self.disk = engine.disk_for(self.process)
        self.process.spawn(self.live)

    def live(self) -> None:
        """Read random topics until `is_stopping` is set."""
        while not self.is_stopping:
            topic = self.rng.choice(sorted(self.configs))
            epoch, after = self.cursors.get(topic, (0, 0))
            if self.rng.random() < 0.3:
                epoch = after = 0
            try:
                reply = self.read(topic, epoch, after)
                self.cursors[topic] = reply.epoch, reply.next_after
            except RinglogError as e:
                self.engine.counts["reads failed"] += 1
                if isinstance(e, TopicNotFound):
                    self.cursors.pop(topic, None)
                self.engine.loop.pause(2 * self.pause_s)
            self.engine.loop.pause(self.rng.expovariate(1 / self.pause_s))

    def read(self, topic: str, epoch: int = 0, after: int = 0, limit: int = 200) -> m.ReadReply:
        """Read once and check the answer. Raises the errors of the read."""
        began, losses = self.model.now(), self.model.power_losses
        message = m.Read(topic, after, epoch, limit, 1 << 18)
        if self.is_remote:
            reply, data = self.engine.ask(self.engine.child("gateway"), message)
        else:
            reply, data = self._read_files(message)
        assert isinstance(reply, m.ReadReply), reply
        life = self.life_of(reply, began)
        start = after if epoch in {0, reply.epoch} and after <= reply.next_after else reply.after
        records = _records(data, reply)
        self.last_seen = [seq for seq, _ in records]
        self.model.read(
            life, began, start, reply.next_after, reply.head_seq, reply.earliest_seq, records, losses
        )
        return reply

    def _read_files(self, message: m.Read) -> tuple[m.ReadReply, Any]:
        """Locate the records and read the files, as a client on the host does.

        Locates again if the files were removed in the meantime.
        """
        error: RinglogError | None = None
        for _ in range(READ_TRIES):
            info = self.resolve(message.topic)
            try:
                located, _ = self.engine.ask(
                    self.engine.child("wal_shard", info.shard),
                    m.Locate(message.topic, message.after, message.epoch),
                )
            except Refused:
                self.infos.pop(message.topic, None)
                raise
            assert isinstance(located, m.Located), located
            plan = plan_for_read(message, located)
            self.engine.loop.pause(self.rng.choice((0.0, 0.0, 0.01, 0.3)))
            read = self._look(message, located, plan)
            if read.error is None and (read.frames or read.examined > plan.after or plan.after >= plan.stop):
                return read_reply(located, plan, read), read.data
            error = read.error or NotReady("no frames at the located position")
            self.engine.counts["places gone while they were read"] += 1
            self.engine.tell(message.topic, f"{self.name}: {error} {error.detail}")
            self.process.point()
        assert error is not None
        if isinstance(error, CorruptData) and self.engine.is_calm:
            raise GuaranteeBroken(
                f"{message.topic}: a reader reports damage, but no data was damaged: {error}", message.topic
            )
        raise error

    def _look(self, message: m.Read, located: m.Located, plan: Any) -> gateway_events.FramesRead:
        cold, data = None, None
        marks = self.engine.base.marks.get(located.shard)
        if marks is None:
            raise NotReady("no such shard")
        while True:
            wanted = gateway_events.ReadFiles(
                0, located, plan.after, plan.stop, message.limit, message.max_bytes,
                self.engine.loop.now_us(), cold, data,
            )  # fmt: skip
            read = read_files(
                wanted, data_dir=DATA, shm_dir="/shm", disk=self.disk,
                read_watermark=lambda _: LogHighWatermark(*marks.published),
            )  # fmt: skip
            if read.cold is None:
                return read
            cold = read.cold
            _, data = self.engine.ask(self.engine.child("relocator"), cold)


def _records(data: Any, reply: m.ReadReply) -> list[tuple[int, bytes]]:
    """Return the (seq, payload) pairs of an answer.

    The library decodes it, including overlapping frames and hidden records.
    """
    sent = memoryview(bytes(data or b""))
    runs = decode_received_frames(reply.topic, reply.frames, reply.after, sent) if reply.frames else []
    portion = FetchResult(
        reply.epoch, reply.head_seq, reply.earliest_seq, None, reply.after, runs, reply.next_after,
        hidden_numbers(reply),
    )  # fmt: skip
    found: list[tuple[int, bytes]] = []
    for piece in portion.batches(reply.topic):
        seqs, payloads = piece.seqs.tolist(), piece.payload_views()
        found += [(seq, bytes(payload or b"")) for seq, payload in zip(seqs, payloads, strict=True)]
    return found
