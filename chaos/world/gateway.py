"""The gateway as a process of the simulated world: its production core and its reader of files."""

from __future__ import annotations

import itertools
from typing import Any

import numpy as np

from chaos.world.engine import Child, Engine, Ring
from chaos.world.tasks import NS, Process, Signal
from ringlog.access.key_ring import LOCAL_ID, KeyRing
from ringlog.actors.gateway import events as ev
from ringlog.actors.gateway.core import GatewayCore, GatewayIdentity
from ringlog.actors.gateway.reads.frame_reader import read_files
from ringlog.contract import Reply, Tick
from ringlog.errors import NotReady, RequestTimeout, RinglogError
from ringlog.storage.extents import LogHighWatermark
from tests.support.shard_world import DATA, ENGINE_ID

APPEND_NS = 4 * NS
TURN_S = 0.25
RING_FRAME_BYTES_MAX = 16_000
"""Larger frames are sent by message, so that both paths are used."""


class GatewayActor:
    """Replaces actors/gateway/shell.py, without its sockets."""

    def __init__(self, engine: Engine, child: Child, process: Process) -> None:
        self.engine, self.child, self.process = engine, child, process
        self.disk = engine.disk_for(process)
        identity = GatewayIdentity(
            ENGINE_ID.hex(), "0", 1, engine.base.shards, process.incarnation, RING_FRAME_BYTES_MAX
        )
        self.core = GatewayCore(identity, KeyRing(admits_all=True))
        self.events: list[Any] = []
        self.rings: dict[int, Ring] = {}
        self.pushed: dict[int, tuple[int, list[Any], int]] = {}
        """Ticket -> (number of frames, settle entries so far, time limit in ns)."""
        self.watches: dict[int, ev.WatchTopic] = {}
        self.answers: dict[int, Any] = {}
        self.corr = 0
        assert child.bell is not None
        self.bell: Signal = child.bell
        child.actor, child.was_ready = self, True

    def run(self) -> None:
        """Serve requests, forever."""
        while True:
            self.turn()
            if not self.events and not self.child.inbox:
                self.engine.loop.wait(self.bell, TURN_S)

    def turn(self) -> None:
        """Collect events, pass them to the core, and perform its effects."""
        loop = self.engine.loop
        while self.child.inbox:
            request = self.child.inbox.popleft()
            self.corr += 1
            self.answers[self.corr] = request.answer
            self.events.append(
                ev.ClientRequestReceived(
                    b"%d" % self.corr, LOCAL_ID, self.corr, request.message, request.attachment
                )
            )
        self._take_settlements()
        self._compare()
        events, self.events = self.events, []
        for effect in self.core.handle([Tick(loop.now_us(), loop.now_ns), *events]):
            self._perform(effect)
        self.core.check()
        self.process.point()

    def _perform(self, effect: Any) -> None:
        match effect:
            case Reply():
                self.answers.pop(effect.corr)(effect.message, effect.attachment)
            case ev.AskShard():
                self.process.spawn(lambda: self._ask(effect))
            case ev.PushFrames():
                self._push(effect)
            case ev.ReadFiles():
                self.events.append(self._read(effect))
            case ev.ReadCold():
                self.process.spawn(lambda: self._read_cold(effect))
            case ev.WatchTopic():
                self.watches[effect.ticket] = effect
            case ev.UnwatchTopic():
                self.watches.pop(effect.ticket, None)
            case _:
                raise AssertionError(f"an effect that this world does not know: {effect}")

    def _told(self, event: Any) -> None:
        self.events.append(event)
        self.bell.set()

    def _ask(self, effect: ev.AskShard) -> None:
        copied = bytearray(effect.attachment) if effect.attachment is not None else None
        try:
            shard = self.engine.child("wal_shard", effect.shard)
            message, _ = self.engine.ask(shard, effect.message, copied)
        except RinglogError as e:
            self._told(ev.ShardAnswered(effect.ticket, None, e))
        else:
            self._told(ev.ShardAnswered(effect.ticket, message))

    def _push(self, effect: ev.PushFrames) -> None:
        ring = self.rings.get(effect.shard)
        if ring is None:
            ring = self.rings[effect.shard] = Ring(self.process.name, effect.shard, news=self.bell)
            self.engine.rings.append(ring)
        bounds = effect.offsets.tolist()
        for start, stop in itertools.pairwise(bounds):
            ring.frames.append((effect.ticket, bytes(effect.data[start:stop])))
        self.pushed[effect.ticket] = (len(bounds) - 1, [], self.engine.loop.now_ns + APPEND_NS)
        self.engine.ring_bell(effect.shard)

    def _take_settlements(self) -> None:
        for ring in self.rings.values():
            settled, ring.settled = ring.settled, []
            for ticket, entry in settled:
                if ticket not in self.pushed:
                    continue
                count, entries, _ = self.pushed[ticket]
                entries.append(entry)
                if len(entries) == count:
                    del self.pushed[ticket]
                    self.events.append(ev.FramesSettled(ticket, np.stack(entries).tobytes()))
        for ticket, (_, _, until_ns) in list(self.pushed.items()):
            if self.engine.loop.now_ns >= until_ns:
                del self.pushed[ticket]
                late = RequestTimeout("frames are not settled", outcome="unknown")
                self.events.append(ev.FramesSettled(ticket, b"", late))

    def _read(self, effect: ev.ReadFiles) -> ev.FramesRead:
        marks = self.engine.base.marks.get(effect.located.shard)
        if marks is None:  # a position from before a restart with fewer shards
            return ev.FramesRead(effect.ticket, 0, 0, 0, effect.after, None, NotReady("no such shard"))
        return read_files(
            effect, data_dir=DATA, shm_dir="/shm", disk=self.disk,
            read_watermark=lambda is_volatile: LogHighWatermark(0,
            0) if is_volatile else LogHighWatermark(*marks.published),
        )  # fmt: skip

    def _read_cold(self, effect: ev.ReadCold) -> None:
        try:
            _, data = self.engine.ask(self.engine.child("relocator"), effect.wanted)
        except RinglogError as e:
            self._told(ev.ColdReadCompleted(effect.ticket, None, e))
        else:
            self._told(ev.ColdReadCompleted(effect.ticket, data))

    def _compare(self) -> None:
        """Report the watched topics whose head has changed."""
        for ticket, watch in list(self.watches.items()):
            if self.engine.base.published.get(watch.topic_id) != watch.head_seq:
                del self.watches[ticket]
                self.events.append(ev.TopicHeadChanged(ticket))


def gateway(engine: Engine, child: Child, process: Process) -> None:
    """Run the gateway."""
    GatewayActor(engine, child, process).run()
