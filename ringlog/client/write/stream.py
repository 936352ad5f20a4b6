"""Stream: one producer's identity on one topic. It numbers frames, keeps their order, tries again.

Frames wait here until it is known which topic they belong to, then they are stamped with topic, epoch and
the next producer numbers and go to the topic's shard in that order. What is refused for the moment
(throttled, not ready), or because the topic was made anew, is copied, stamped with *new* numbers and sent
again until its deadline: the old number was not remembered and would be taken for a repeat once a later
one is settled. Everything else is the batch's error.

Records keep the order in which they were first sent. A frame that is sent while others are on their way says
that it follows the one before (layout.FLAG_FOLLOWS): when that one was refused, by whomever, it is refused as
well. What was refused waits until nothing is on its way any more, then goes first, in the old order, and new
frames wait behind it.
"""

from __future__ import annotations

import random
from bisect import insort
from collections import deque
from collections.abc import Callable, Sequence
from itertools import takewhile
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ringlog.client.write.batch import Batch, Shipment, joined
from ringlog.descriptors import explain_unreachable
from ringlog.envelope.messages import ProducerState, ProducerStateReply, TopicInfo
from ringlog.errors import (
    BatchTooLarge,
    ConnectionTrouble,
    NotConnected,
    NotReady,
    PayloadTooLarge,
    ProducerFenced,
    RecordTooLarge,
    RequestTimeout,
    RinglogError,
    ShuttingDown,
    StaleEpoch,
    Throttled,
    TopicFull,
    TopicNotFound,
)
from ringlog.limits import PRESSURE_RETRY_MS
from ringlog.link.futures import Pending, Steps, run_steps
from ringlog.link.peer import FINAL_REASONS, MS
from ringlog.types import SESSION_BIT, Durability

RETRY_MS = 20
RETRY_MS_MAX = 1_000
_LATER = (Throttled, NotReady, ShuttingDown)
_OF_ONE_RECORD = (RecordTooLarge, BatchTooLarge, PayloadTooLarge, TopicFull)
"""Refusals of a frame that its records, each sent alone, may not all meet."""
_ELSEWHERE = (StaleEpoch, TopicNotFound)


def effective_durability(info: TopicInfo, asked: Durability | None) -> Durability:
    """The class an ack stands for, as the shard decides it.

    A frame may ask for more than its topic's class, but for nothing of an ephemeral topic.
    """
    own = Durability.parse(str(info.config.get("durability", "disk")))
    return own if own is Durability.EPHEMERAL else max(own, asked or own)


class Stream:
    """Frames of one producer id to one topic. `host` is the Session it belongs to."""

    def __init__(
        self,
        host: Any,
        topic: str,
        *,
        producer_id: int | None = None,
        create: bool = True,
        durability: Durability | None = None,
        timeout_ms: int = 0,
        disable_backpressure: bool = False,
    ) -> None:
        self.topic = topic
        self.create = create
        self.durability = durability
        self.disable_backpressure = disable_backpressure
        self.producer_id = producer_id if producer_id is not None else random.getrandbits(63) | SESSION_BIT
        self.next_seq = 1
        self._owner = random.getrandbits(63) | 1
        """Who we are when we claim the name."""
        self._claim = 0
        self._fenced: ProducerFenced | None = None
        """Another one of our name was opened later: nothing is sent any more, so that its owner keeps it."""
        self.resumed: ProducerStateReply | None = None
        """What the shard had of this producer when it was claimed; named producers only."""
        self.pending_records = self.pending_bytes = 0
        self.records_acked = self.records_failed = self.records_deduped = 0
        self.frames_sent = self.bytes_sent = self.retries = 0
        self.on_batch_done: Callable[[Batch, RinglogError | None], None] | None = None
        self.on_split: Callable[[Any], tuple[bytearray, NDArray[np.int64]]] | None = None
        """Makes a frame for each record of one frame: (frames, their offsets)."""
        self._host = host
        self._timeout_ns = (timeout_ms or host.timeout_ms) * MS
        self.effective_durability = durability or Durability.DISK
        """The class that an ack of this stream's frames stands for."""
        self._info: TopicInfo | None = None
        self._generation = -1
        self._queue: deque[Shipment] = deque()
        """Frames that were never sent."""
        self._refused: list[Shipment] = []
        """Frames to be sent again, by their place: under new numbers, but those that are stamped."""
        self._displaced: deque[Shipment] = deque()
        """Frames to be sent again under their old numbers: they may have been applied."""
        self._in_flight: set[Shipment] = set()
        """With the links, and not settled."""
        self._shipped = 0
        self._again_ns = 0
        """When refused frames may go again at the earliest."""
        self._is_flushing = False
        self._locating: Pending[TopicInfo] | None = None
        self._live: set[Shipment] = set()

    # -- sending ------------------------------------------------------------------------------------

    def send_frames(self, batch: Batch, buffer: bytearray, offsets: NDArray[np.int64]) -> None:
        """Send the only frame, or all frames, of a new batch."""
        self.send_parts(batch, [(buffer, offsets)])

    def send_parts(self, batch: Batch, parts: Sequence[tuple[bytearray, NDArray[np.int64]]]) -> None:
        """Send the frames of a new batch, given as buffers with offsets, in this order."""
        batch.bytes = sum(len(buffer) for buffer, _ in parts)
        self.pending_records += batch.records
        self.pending_bytes += batch.bytes
        self.frames_sent += batch.frames
        self.bytes_sent += batch.bytes
        deadline = self._host.clock.monotonic_ns() + self._timeout_ns
        start_row = 0
        for buffer, offsets in parts:
            count = len(offsets) - 1
            rows = None if len(parts) == 1 else np.arange(start_row, start_row + count)
            self._enqueue(Shipment(batch, buffer, offsets, deadline, rows))
            start_row += count

    def send_rows(self, batch: Batch, frames: Sequence[bytearray], rows: Sequence[int]) -> None:
        """Send some frames of a batch that was split, those of these records."""
        batch.bytes = sum(map(len, frames))
        self.pending_records += batch.records
        self.pending_bytes += batch.bytes
        self.frames_sent += len(rows)
        self.bytes_sent += batch.bytes
        deadline = self._host.clock.monotonic_ns() + self._timeout_ns
        if rows:
            self._enqueue(Shipment(batch, *joined(frames), deadline, np.array(rows)))

    def fail_batch(self, batch: Batch, error: RinglogError) -> None:
        """A new batch could not be made into frames."""
        self.pending_records += batch.records
        batch.fail_frames(np.arange(batch.missing), error)

    def resend_displaced(self, shipment: Shipment) -> None:
        """The engine was restarted before this was settled: send it again under the same numbers."""
        self._in_flight.discard(shipment)
        self._displaced.append(shipment)
        self._flush()

    def query_producer_state(self) -> Pending[ProducerStateReply | None]:
        """Find the topic, and for a named producer what the engine had of it; resolved with that."""
        return run_steps(self._meet_steps())

    def _meet_steps(self) -> Steps[ProducerStateReply | None]:
        if not self._is_located():
            self._locate()
            if self._locating is not None:
                yield self._locating
        return self.resumed

    def take_seq(self) -> int:
        """The next producer number, for a frame that does not go through this stream's queue."""
        self.next_seq += 1
        return self.next_seq - 1

    def unfinished(self) -> tuple[int, int]:
        """(records that never left, records whose fate is unknown) of what is pending now."""
        unsent = sum(s.batch.records for s in self._live if not s.was_sent)
        return unsent, self.pending_records - unsent

    def _enqueue(self, shipment: Shipment) -> None:
        self._shipped += 1
        shipment.order = self._shipped
        self._await(shipment)
        if self._fenced is not None:
            self._give_up(shipment, self._fenced)
        elif self._queue or self._refused or self._displaced or not self._is_located():
            self._queue.append(shipment)
            self._flush()
        else:
            self._send(shipment)

    def _await(self, shipment: Shipment) -> None:
        self._live.add(shipment)
        shipment.timer = self._host.timers.call_at(shipment.deadline_ns, lambda: self._expire(shipment))

    def _flush(self) -> None:
        """Send what waits and may go now. What that brings about at once is seen by the loop that runs."""
        if self._is_flushing:
            return
        self._is_flushing = True
        try:
            while (shipment := self._next()) is not None:
                if not shipment.is_abandoned:
                    self._send(shipment)
        finally:
            self._is_flushing = False

    def _next(self) -> Shipment | None:
        """The next to be sent, taken out of where it waits; None when there is none or it may not go yet."""
        if not (self._displaced or self._refused or self._queue):
            return None
        if not self._is_located():
            self._locate()  # Perhaps at once: what is known of the topic need not be asked for.
        if not self._is_located():
            return None
        if self._displaced:
            return self._displaced.popleft()
        if self._refused:
            # With new numbers, so nothing with an old one may still be on its way.
            if self._in_flight or self._host.clock.monotonic_ns() < self._again_ns:
                return None
            self._queue_refused()
            if self._displaced:
                return self._displaced.popleft()
        return self._queue.popleft() if self._queue else None

    def _queue_refused(self) -> None:
        """Let go what was refused: first what keeps its numbers, alone, then everything else."""
        # Those whose time is over have no bytes any more.
        refused, self._refused = [each for each in self._refused if not each.is_abandoned], []
        may_be_there = list(takewhile(lambda each: each.is_stamped, refused))
        if may_be_there:
            # The first one need not follow what has its fate; what does not follow it after all comes back.
            for place, shipment in enumerate(may_be_there):
                shipment.set_follows_flags(first=place > 0)
            self._displaced.extend(may_be_there)
            self._refused = refused[len(may_be_there) :]
            return
        for shipment in refused:
            # Behind something that the shard refused for certain: so it cannot have been appended either.
            shipment.is_stamped = shipment.was_rewound = False
        self._queue.extendleft(reversed(refused))

    def _send(self, shipment: Shipment) -> None:
        info = self._info
        assert info is not None
        if not shipment.is_stamped:
            shipment.stamp(
                topic_id=info.topic_id, epoch=info.epoch, producer_id=self.producer_id,
                first_producer_seq=self.next_seq, follows=bool(self._in_flight),
            )  # fmt: skip
            if self._claim:
                shipment.put_claim(self._claim)
            shipment.is_stamped = True
            self.next_seq += shipment.count
        self._in_flight.add(shipment)
        self._host.links.submit(info.shard, shipment)

    # -- where is the topic? --------------------------------------------------------------------------

    def _is_located(self) -> bool:
        return self._info is not None and self._generation == self._host.links.generation

    def _locate(self) -> None:
        if self._locating is None:
            self._locating = locating = run_steps(self._locate_steps())
            locating.when_done(self._located)

    def _locate_steps(self) -> Steps[TopicInfo]:
        info: TopicInfo = yield self._host.resolve(self.topic, create=self.create)
        if not self.producer_id & SESSION_BIT and (self.resumed is None or self.resumed.epoch != info.epoch):
            reply = yield from self._claim_steps(info)
            self.next_seq = max(self.next_seq, reply.producer_seq + 1)
        return info

    def _claim_steps(self, info: TopicInfo) -> Steps[ProducerStateReply]:
        """Claim the name on this life of the topic, or make sure that it is ours; raises ProducerFenced.

        It is kept through restarts of the engine and of connections. A topic that was made anew knows no
        claims: the last one to come has the name there.
        """
        if self._fenced is not None:
            raise self._fenced
        held = self._claim if self.resumed is not None and self.resumed.epoch == info.epoch else 0
        question = ProducerState(self.topic, self.producer_id, self._owner, held)
        try:
            reply: ProducerStateReply = yield self._host.ask_topic(info, question)
        except ProducerFenced as e:
            self._fenced = e
            raise
        self.resumed, self._claim = reply, reply.claim
        return reply

    def _located(self, found: Pending[TopicInfo]) -> None:
        self._locating = None
        if found.error is not None:
            self._not_located(found.error)
            return
        self._info = info = found.result()
        self.effective_durability = effective_durability(info, self.durability)
        self._generation = self._host.links.generation
        self._flush()

    def _not_located(self, error: BaseException) -> None:
        if isinstance(error, ConnectionTrouble) and error.retriable:
            # The engine is away: what still has time waits for it, what has not has failed by its timer.
            if self._drop_abandoned():
                self._host.timers.call_at(self._host.clock.monotonic_ns() + RETRY_MS * MS, self._flush)
            return
        reason = error if isinstance(error, RinglogError) else NotConnected(str(error))
        waiting = [*self._displaced, *self._refused, *self._queue]
        self._forget_waiting()
        for shipment in waiting:
            if not shipment.is_abandoned:
                self._give_up(shipment, reason)

    def _drop_abandoned(self) -> bool:
        """Is anything left that waits to be sent?"""
        self._displaced = deque(each for each in self._displaced if not each.is_abandoned)
        self._refused = [each for each in self._refused if not each.is_abandoned]
        self._queue = deque(each for each in self._queue if not each.is_abandoned)
        return bool(self._displaced or self._refused or self._queue)

    def _forget_waiting(self) -> None:
        self._displaced.clear()
        self._refused.clear()
        self._queue.clear()

    # -- fate -----------------------------------------------------------------------------------------

    def handle_refused(
        self, shipment: Shipment, frames: NDArray[Any], error: RinglogError, *, by_shard: bool
    ) -> None:
        """These frames of the shipment were not appended: try again what may be, else fail the batch.

        Refused by the shard, which looks for a repeat first, they never were; else not this time.
        """
        # A repeat that is turned away says nothing of the first way (outcome unknown).
        may_be_there = not by_shard and (shipment.was_rewound or error.outcome == "unknown")
        now = self._host.clock.monotonic_ns()
        delay_ns = self._pause_ns(error, shipment.attempts)
        if isinstance(error, ProducerFenced):
            self._fenced = ProducerFenced(error.message, **error.detail)
        may_retry = isinstance(error, _LATER) or (
            isinstance(error, _ELSEWHERE)
            # Without `create` it is looked for once more: perhaps it was deleted and made anew.
            and (self.create or isinstance(error, StaleEpoch) or not shipment.attempts)
        )
        may_retry &= may_be_there or error.outcome == "not_applied"
        may_retry &= error.detail.get("reason") not in FINAL_REASONS
        if isinstance(error, _ELSEWHERE):
            # Also where this shipment is lost: the next one asks where the topic is.
            self._info = None
            self._host.forget(self.topic)
        if not may_retry or now + delay_ns >= shipment.deadline_ns:
            if may_be_there:
                error = type(error)(error.message, outcome="unknown", **error.detail)
            if by_shard and isinstance(error, _OF_ONE_RECORD) and shipment.batch.is_gathered:
                self._split(shipment)
                return
            self._lose(shipment, frames, error)
            return
        self.retries += len(frames)
        self._host.retries += len(frames)
        buffer, offsets = shipment.copy_frames(frames)
        again = Shipment(
            shipment.batch, buffer, offsets, shipment.deadline_ns, shipment.rows_in_batch(frames),
            shipment.attempts + 1, shipment.order,
        )  # fmt: skip
        again.refusal = error
        again.is_stamped = again.was_rewound = may_be_there
        self._await(again)
        self._drop_if_finished(shipment)
        insort(self._refused, again, key=lambda each: each.place)
        self._again_ns = max(self._again_ns, now + delay_ns)
        self._host.timers.call_at(now + delay_ns, self._flush)

    def handle_batch_done(self, batch: Batch, *, acked: int, error: RinglogError | None = None) -> None:
        """All frames of a batch have their fate."""
        self.pending_records -= batch.records
        self.pending_bytes -= batch.bytes
        self.records_acked += acked
        self.records_failed += batch.records - acked
        if batch.deduped:
            self.records_deduped += acked
        if self.on_batch_done is not None:
            self.on_batch_done(batch, error)

    def handle_settled(self, shipment: Shipment) -> None:
        """Every frame of the shipment has its entry."""
        self._live.discard(shipment)

    def handle_landed(self, shipment: Shipment) -> None:
        """All that came of the shipment has been told."""
        self._in_flight.discard(shipment)
        if self._refused and not self._in_flight:
            self._flush()

    def fail_all(self, error_of: Callable[[bool], RinglogError]) -> None:
        """Give up everything; `error_of(was_sent)` makes the reason."""
        self._forget_waiting()
        for shipment in list(self._live):
            self._give_up(shipment, error_of(shipment.was_sent))

    @staticmethod
    def _pause_ns(error: RinglogError, attempts: int) -> int:
        """How long to wait before it is tried again: no less than was asked for, and not all at once."""
        asked_ms = min(int(error.detail.get("retry_after_ms", 0) or 0), RETRY_MS_MAX)
        own_ms = min(RETRY_MS << min(attempts, 5), RETRY_MS_MAX) * random.uniform(0.5, 1.0)
        return int(max(asked_ms * random.uniform(1.0, 1.25), own_ms) * MS)

    def _drop_if_finished(self, shipment: Shipment) -> None:
        if shipment.settled >= shipment.count:
            self._live.discard(shipment)

    def _lose(self, shipment: Shipment, frames: NDArray[Any], error: RinglogError) -> None:
        self._drop_if_finished(shipment)
        shipment.batch.fail_frames(shipment.rows_in_batch(frames), error)

    def _split(self, shipment: Shipment) -> None:
        """A gathered frame was refused for what may be one record's fault: send a frame for each."""
        batch = shipment.batch
        batch.is_gathered = False
        batch.split()
        self._drop_if_finished(shipment)
        assert self.on_split is not None, "gathered frames are made by a producer"
        buffer, offsets = self.on_split(shipment.buffer)
        again = Shipment(
            batch, buffer, offsets, shipment.deadline_ns, np.arange(batch.frames), shipment.attempts + 1,
            shipment.order,
        )  # fmt: skip
        self._await(again)
        insort(self._refused, again, key=lambda each: each.place)
        self._host.timers.call_at(self._host.clock.monotonic_ns(), self._flush)

    def _expire(self, shipment: Shipment) -> None:
        was_sent = shipment.was_sent
        waited_s = self._timeout_ns / 1e9
        if shipment.refusal is not None and not was_sent:
            error = shipment.refusal
        elif was_sent:
            error = RequestTimeout(
                "the engine did not settle in time", outcome="unknown", topic=self.topic, timeout_s=waited_s
            )
        elif self._is_shard_full():
            error = Throttled(
                "the shard's intake stayed full", reason="ingest_full", topic=self.topic,
                retry_after_ms=PRESSURE_RETRY_MS, waited_s=waited_s,
            )  # fmt: skip
        elif self._host.links.generation:
            text = explain_unreachable(
                "the engine was not there in time", self._host.links.unreachable_reason
            )
            error = RequestTimeout(text, topic=self.topic, timeout_s=waited_s)
        else:
            reason = self._host.links.unreachable_reason
            text = explain_unreachable("no engine was found in time", reason)
            error = NotConnected(text, topic=self.topic, timeout_s=waited_s)
        self._give_up(shipment, error)

    def _is_shard_full(self) -> bool:
        """Did it wait for room alone (BP-4)?"""
        return self._is_located() and self._info is not None and self._host.links.is_full(self._info.shard)

    def _give_up(self, shipment: Shipment, error: RinglogError) -> None:
        left = shipment.count - shipment.settled
        shipment.abandon()
        self._live.discard(shipment)
        if left:
            frames = np.arange(shipment.count - left, shipment.count)
            shipment.batch.fail_frames(shipment.rows_in_batch(frames), error)
        # What of it is on its way has a lower number than all that comes: it is appended before, or never.
        self.handle_landed(shipment)
