"""Producer whose frames keep the numbers that the program chose: for a writer whose plan outlives its
process.

An ordinary producer resends a refused frame under a new number. A program that resumes a plan after a crash
must recognise each frame by its number. Here a refused frame stays refused, and the program decides. A shard
knows the last 16,384 frame numbers of each producer and topic. A number that it settled is answered as a
repeat. A lower number that it never received is refused with NotReady and never acked. A program with few
frames in flight can therefore determine the result of each frame.

An id has one owner at a time, the latest claimant. Frames of the previous owner are refused with
ProducerFenced, so two programs with the same numbers are never mistaken for a retry. Ids with the top bit set
(random ids) have no owner, and the shard may forget them.
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
    """One frame with a producer_seq that the program chose."""

    __slots__ = ("number",)

    def __init__(self, batch: Batch, frame: bytearray, deadline_ns: int, number: int) -> None:
        super().__init__(batch, frame, np.array([0, len(frame)], dtype=np.int64), deadline_ns)
        self.number: int = number

    def stamp(
        self, *, topic_id: int, epoch: int, producer_id: int, first_producer_seq: int, follows: bool = False
    ) -> None:
        """Write the identity into the frame's header, with the chosen number instead of the stream's.

        The frame does not follow another frame: the program may skip numbers, and keeps the order itself.
        """
        super().stamp(topic_id=topic_id, epoch=epoch, producer_id=producer_id, first_producer_seq=self.number)


class NumberedStream(Stream):
    """Stream that never renumbers a frame. Frames must be sent in ascending order of their numbers."""

    def settled(self, *, claims: bool) -> Pending[ProducerStateReply]:
        """Query the producer's state at the shard. With `claims`, claim a named producer first."""
        return run_steps(self._settled_steps(claims))

    def _settled_steps(self, claims: bool) -> Steps[ProducerStateReply]:
        self._host.topics.forget(
            self.topic
        )  # The topic may have been created again since it was last resolved.
        info: TopicInfo = yield self._host.topics.resolve(self.topic)
        reply: ProducerStateReply
        if self.producer_id & SESSION_BIT or not claims:
            reply = yield self._host.topics.ask_topic(info, ProducerState(self.topic, self.producer_id))
        else:
            reply = yield from self._claim_steps(info)
        return reply

    def ship_numbered(self, batch: Batch, frame: bytearray, number: int) -> None:
        """Send the only frame of a new batch."""
        deadline = self._count_sent(batch, len(frame), 1)
        self._enqueue(NumberedShipment(batch, frame, deadline, number))

    def handle_refused(
        self, shipment: Shipment, frames: NDArray[Any], error: RinglogError, *, by_shard: bool
    ) -> None:
        """Fail the frame without a retry."""
        self._fail_frames(shipment, frames, error)


class NumberedProducer:
    """Sends whole frames to one topic under numbers of the caller. Thread-safe. See Client.numbered_producer.

    Example:
        producer = client.numbered_producer("orders", producer_id=7)
        last = producer.settled().producer_seq
        producer.send(frame, last + 1).result()
    """

    def __init__(
        self,
        shell: ThreadedShell,
        topic: str,
        producer_id: int,
        durability: Durability | None,
        client: object,
    ) -> None:
        self._client = client
        """Reference that keeps the client alive while this producer is in use."""
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
        """Query the highest frame number that the engine settled for this producer (0 = none), and the
        topic's epoch.

        Args:
            claims: Claim the producer: the engine then accepts its frames only from this process. False if
                the program ensures in another way that it is the only writer.

        Returns:
            The last settled number, and what the engine knows of the producer.

        Raises:
            ProducerFenced: Another process claimed this id later.
            TopicNotFound: The topic does not exist.
            ConnectionTrouble: The engine did not answer.
        """
        reply: ProducerStateReply = self._shell.ask(lambda _: self._our_stream().settled(claims=claims))
        return reply

    def send(self, frame: bytearray, number: int) -> Ticket:
        """Send one frame. The producer owns the buffer from now on.

        The producer writes topic, epoch and producer id into the frame's header.

        Args:
            frame: Encoded frame.
            number: producer_seq of the frame, at least 1.

        Returns:
            Ticket that resolves when the frame reached its durability class (`deduped`: the engine already
                had it), or fails with the reason of the refusal.
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
                "a producer cannot be used in a forked child: open a new one there",
                topic=self.topic, producer_id=self.producer_id,
            )  # fmt: skip
        return self._stream

    def close(self) -> None:
        """Close the producer. Frames in flight are still settled."""
        with self._shell.lock:
            self._shell.session.streams.discard(self._stream)
