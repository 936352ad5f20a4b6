"""Frames that keep the numbers they were given: for a writer whose plan outlives it.

An ordinary producer gives a refused frame a new number and sends it again. Whoever resumes a plan after a
crash has to recognise every frame by its number, so here a refused frame stays refused and its owner
decides. The shard knows each number among the last 16,384 frames of a producer on a topic: one that it has
settled is answered as a repeat, and one below the highest that it never saw is refused with NotReady, never
acknowledged (I-13, I-14). So an owner that has few frames in flight learns the fate of each for certain.

An id has one owner at a time, the last one that came: its predecessor's frames are refused with
ProducerFenced, so that two that number alike are never taken for one that sends again. Ids with the top bit
set (drawn by chance) have no owner, and may be forgotten.
"""

from __future__ import annotations

import os
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ringlog.client.connection.shell import ThreadedShell
from ringlog.client.ticket import Ticket
from ringlog.client.write.batch import Batch, Shipment
from ringlog.client.write.stream import Stream
from ringlog.envelope.messages import ProducerState, ProducerStateReply, TopicInfo
from ringlog.errors import RinglogError, UsageError
from ringlog.frame import layout
from ringlog.link.futures import Pending, Steps, run_steps
from ringlog.types import SESSION_BIT, Durability


class NumberedShipment(Shipment):
    """One frame of a producer_seq that its owner chose."""

    __slots__ = ("number",)

    def __init__(self, batch: Batch, frame: bytearray, deadline_ns: int, number: int) -> None:
        super().__init__(batch, frame, np.array([0, len(frame)], dtype=np.int64), deadline_ns)
        self.number = number

    def stamp(
        self, *, topic_id: int, epoch: int, producer_id: int, first_producer_seq: int, follows: bool = False
    ) -> None:
        """Write identity into the header, with our own number whatever the stream counts.

        It follows no other frame: the owner of the numbers leaves gaps, and keeps the order himself.
        """
        super().stamp(topic_id=topic_id, epoch=epoch, producer_id=producer_id, first_producer_seq=self.number)


class NumberedStream(Stream):
    """A Stream that never numbers a frame anew. Frames are to be sent in the order of their numbers."""

    def settled(self, *, claims: bool) -> Pending[ProducerStateReply]:
        """What the shard settled of this producer; with `claims` it is claimed first, if it has a name."""
        return run_steps(self._settled_steps(claims))

    def _settled_steps(self, claims: bool) -> Steps[ProducerStateReply]:
        self._host.forget(self.topic)  # The topic may have been made anew since it was last asked about.
        info: TopicInfo = yield self._host.resolve(self.topic)
        reply: ProducerStateReply
        if self.producer_id & SESSION_BIT or not claims:
            reply = yield self._host.ask_topic(info, ProducerState(self.topic, self.producer_id))
        else:
            reply = yield from self._claim_steps(info)
        return reply

    def ship_numbered(self, batch: Batch, frame: bytearray, number: int) -> None:
        """Send the only frame of a new batch."""
        batch.bytes = len(frame)
        self.pending_records += batch.records
        self.pending_bytes += batch.bytes
        self.frames_sent += 1
        self.bytes_sent += batch.bytes
        deadline = self._host.clock.monotonic_ns() + self._timeout_ns
        self._enqueue(NumberedShipment(batch, frame, deadline, number))

    def handle_refused(
        self, shipment: Shipment, frames: NDArray[Any], error: RinglogError, *, by_shard: bool
    ) -> None:
        """The frame's owner learns it, and nothing is tried again."""
        self._lose(shipment, frames, error)


class NumberedProducer:
    """Whole frames to one topic, under numbers of the caller's (Client.numbered_producer). Thread-safe."""

    def __init__(
        self,
        shell: ThreadedShell,
        topic: str,
        producer_id: int,
        durability: Durability | None,
        client: object,
    ) -> None:
        self._client = client
        """Lasts as long as it is of use."""
        self.topic = topic
        self.producer_id = producer_id
        self._shell = shell
        self._pid = os.getpid()
        with shell.checked_lock, shell.guarded_session as session:
            self._stream = NumberedStream(
                session, topic, producer_id=producer_id, create=False, durability=durability
            )
            session.streams.add(self._stream)

    def settled(self, *, claims: bool = True) -> ProducerStateReply:
        """Ask the engine for the highest number it settled of this producer here (0: none), and the epoch.

        From then on it takes frames of this producer from us alone, unless `claims` is false, for who has
        other means to know that nobody else writes. Raises ProducerFenced when another one of this id came
        later, TopicNotFound, and ConnectionTrouble when the engine does not answer.
        """
        reply: ProducerStateReply = self._shell.ask(lambda _: self._our_stream().settled(claims=claims))
        return reply

    def send(self, frame: bytearray, number: int) -> Ticket:
        """Send one frame, which is the sender's to keep no longer; `number` is its producer_seq, at least 1.

        Topic, epoch and producer are written into its header here. The ticket resolves when it met its
        class (`deduped`: the engine had it already) and fails with what it was refused for.
        """
        stream = self._our_stream()
        batch = Batch(stream)
        with memoryview(frame) as view, view.cast("Q") as words:
            batch.records = words[layout.W_COUNT_EPOCH] & 0xFFFFFFFF
        with self._shell.checked_lock, self._shell.guarded_session as session:
            stream.ship_numbered(batch, frame, number)
            session.links.pump()
        return Ticket(self._shell, batch)

    def _our_stream(self) -> NumberedStream:
        if self._pid != os.getpid():
            raise UsageError(
                "a producer of one process is not used in a child of it: open one there",
                topic=self.topic, producer_id=self.producer_id,
            )  # fmt: skip
        return self._stream

    def close(self) -> None:
        """Nothing more will be sent; what is in flight still gets its fate."""
        with self._shell.lock:
            self._shell.session.streams.discard(self._stream)
