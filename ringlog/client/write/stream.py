"""Stream: identity of one producer on one topic. It numbers frames, keeps their order, and retries.

Frames wait here until the topic is resolved. The stream then stamps them with topic, epoch and the next
producer numbers, and sends them to the topic's shard in that order. Some refusals are retried until the
frame's deadline: temporary ones (throttled, not ready), and those because the topic was created again. A copy
of the frame gets *new* numbers. The shard does not remember the old number, and after a later number was
settled it would treat the old one as a repeat. Every other refusal is the batch's error.

Records keep the order in which they were first sent. A frame that is sent while others are in flight has a
flag (layout.FLAG_FOLLOWS): it is refused if the frame before it was refused, by any process. Refused frames
wait until no frame is in flight. They are then sent first, in the old order, and new frames wait until after
them.
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
from ringlog.link.peer import MS
from ringlog.link.peer_request import FINAL_REASONS
from ringlog.types import SESSION_BIT, Durability

RETRY_MS = 20
RETRY_MS_MAX = 1_000
_TEMPORARY = (Throttled, NotReady, ShuttingDown)
_OF_ONE_RECORD = (RecordTooLarge, BatchTooLarge, PayloadTooLarge, TopicFull)
"""Refusals of a frame that may not apply to each of its records if sent separately."""
_TOPIC_MOVED = (StaleEpoch, TopicNotFound)


def effective_durability(info: TopicInfo, requested: Durability | None) -> Durability:
    """Return the durability class of an ack, as the shard determines it.

    A frame may require a stronger class than its topic's, but not on an ephemeral topic.
    """
    own = Durability.parse(str(info.config.get("durability", "disk")))
    return own if own is Durability.EPHEMERAL else max(own, requested or own)


class Stream:
    """Frames of one producer id to one topic. `host` is the Session."""

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
        self.producer_id: int = (
            producer_id if producer_id is not None else random.getrandbits(63) | SESSION_BIT
        )
        self.next_seq: int = 1
        self._owner = random.getrandbits(63) | 1
        """Identity of this process in claims of the producer's name."""
        self._claim = 0
        self._fenced: ProducerFenced | None = None
        """Set after a later claim of the name by another process. The stream sends no further frame."""
        self.resumed: ProducerStateReply | None = None
        """State that the shard had of this producer at its claim; named producers only."""
        self.pending_records: int = 0
        self.pending_bytes: int = 0
        self.records_acked: int = 0
        self.records_failed: int = 0
        self.records_deduped: int = 0
        self.frames_sent: int = 0
        self.bytes_sent: int = 0
        self.retries: int = 0
        self.on_batch_done: Callable[[Batch, RinglogError | None], None] | None = None
        self.on_split: Callable[[Any], tuple[bytearray, NDArray[np.int64]]] | None = None
        """Makes a frame for each record of one frame: (frames, their offsets)."""
        self._host = host
        self._timeout_ns = (timeout_ms or host.timeout_ms) * MS
        self.effective_durability: Durability = durability or Durability.DISK
        """Durability class of an ack of this stream's frames."""
        self._info: TopicInfo | None = None
        self._generation = -1
        self._queue: deque[Shipment] = deque()
        """Frames that were never sent."""
        self._refused: list[Shipment] = []
        """Frames to resend, in sending order. They get new numbers, except frames that are already
        stamped."""
        self._displaced: deque[Shipment] = deque()
        """Frames to resend under their old numbers, since they may have been appended."""
        self._in_flight: set[Shipment] = set()
        """Frames that were passed to the links and are not settled."""
        self._shipped = 0
        self._retry_at_ns = 0
        """Earliest time at which refused frames are resent."""
        self._is_flushing = False
        self._locating: Pending[TopicInfo] | None = None
        self._live: set[Shipment] = set()

    # -- sending ------------------------------------------------------------------------------------

    def send_frames(self, batch: Batch, buffer: bytearray, offsets: NDArray[np.int64]) -> None:
        """Send the frames of a new batch."""
        self.send_parts(batch, [(buffer, offsets)])

    def send_parts(self, batch: Batch, parts: Sequence[tuple[bytearray, NDArray[np.int64]]]) -> None:
        """Send the frames of a new batch, given as buffers with offsets, in this order."""
        deadline = self._count_sent(batch, sum(len(buffer) for buffer, _ in parts), batch.frames)
        start_row = 0
        for buffer, offsets in parts:
            count = len(offsets) - 1
            rows = None if len(parts) == 1 else np.arange(start_row, start_row + count)
            self._enqueue(Shipment(batch, buffer, offsets, deadline, rows))
            start_row += count

    def send_rows(self, batch: Batch, frames: Sequence[bytearray], rows: Sequence[int]) -> None:
        """Send those frames of a split batch that belong to these records."""
        deadline = self._count_sent(batch, sum(map(len, frames)), len(rows))
        if rows:
            self._enqueue(Shipment(batch, *joined(frames), deadline, np.array(rows)))

    def _count_sent(self, batch: Batch, size: int, frames: int) -> int:
        """Count a new batch of `size` bytes, and return its deadline in ns."""
        batch.bytes = size
        self.pending_records += batch.records
        self.pending_bytes += size
        self.frames_sent += frames
        self.bytes_sent += size
        deadline: int = self._host.clock.monotonic_ns() + self._timeout_ns
        return deadline

    def fail_batch(self, batch: Batch, error: RinglogError) -> None:
        """Fail a new batch that could not be encoded."""
        self.pending_records += batch.records
        batch.fail_frames(np.arange(batch.missing), error)

    def resend_displaced(self, shipment: Shipment) -> None:
        """Resend frames under their old numbers: the engine restarted before they were settled."""
        self._in_flight.discard(shipment)
        self._displaced.append(shipment)
        self._flush()

    def query_producer_state(self) -> Pending[ProducerStateReply | None]:
        """Resolve the topic, and claim a named producer. Resolves with the state that the engine had of
        it."""
        return run_steps(self._resolve_steps())

    def _resolve_steps(self) -> Steps[ProducerStateReply | None]:
        if not self._is_located():
            self._locate()
            if self._locating is not None:
                yield self._locating
        return self.resumed

    def take_seq(self) -> int:
        """Return the next producer number, for a frame that is sent outside of this stream's queue."""
        self.next_seq += 1
        return self.next_seq - 1

    def unfinished(self) -> tuple[int, int]:
        """Return the number of pending records that were never sent, and of those with an unknown outcome."""
        unsent = unknown = 0
        for shipment in self._live:
            if shipment.was_sent:
                unknown += shipment.unsettled_records
            else:
                unsent += shipment.unsettled_records
        return unsent, unknown

    def open_batches(self) -> set[Batch]:
        """Return the batches that are not done."""
        return {shipment.batch for shipment in self._live}

    def _enqueue(self, shipment: Shipment) -> None:
        self._shipped += 1
        shipment.order = self._shipped
        self._start_timeout(shipment)
        if self._fenced is not None:
            self._give_up(shipment, self._fenced)
        elif self._queue or self._refused or self._displaced or not self._is_located():
            self._queue.append(shipment)
            self._flush()
        else:
            self._send(shipment)

    def _start_timeout(self, shipment: Shipment) -> None:
        self._live.add(shipment)
        shipment.timer = self._host.timers.call_at(shipment.deadline_ns, lambda: self._expire(shipment))

    def _flush(self) -> None:
        """Send the frames that may be sent now. A nested call returns, since the running loop sees its
        frames."""
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
        """Take the next frame to send. None if there is none, or it must not be sent yet."""
        if not (self._displaced or self._refused or self._queue):
            return None
        if not self._is_located():
            self._locate()  # This may complete at once, if the topic is cached.
        if not self._is_located():
            return None
        if self._displaced:
            return self._displaced.popleft()
        if self._refused:
            # They get new numbers, so no frame with an old number may be in flight.
            if self._in_flight or self._host.clock.monotonic_ns() < self._retry_at_ns:
                return None
            self._queue_refused()
            if self._displaced:
                return self._displaced.popleft()
        return self._queue.popleft() if self._queue else None

    def _queue_refused(self) -> None:
        """Queue the refused frames: first only the frames that keep their numbers; after these are settled,
        all others."""
        # Abandoned frames have no bytes any more.
        refused, self._refused = [each for each in self._refused if not each.is_abandoned], []
        may_be_appended = list(takewhile(lambda each: each.is_stamped, refused))
        if may_be_appended:
            # The first frame need not follow a frame that is settled. A frame that is refused for its order
            # is resent.
            for index, shipment in enumerate(may_be_appended):
                shipment.set_follows_flags(first=index > 0)
            self._displaced.extend(may_be_appended)
            self._refused = refused[len(may_be_appended) :]
            return
        for shipment in refused:
            # These frames follow one that the shard refused for certain, so they were not appended either.
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

    # -- resolving the topic --------------------------------------------------------------------------

    def _is_located(self) -> bool:
        return self._info is not None and self._generation == self._host.links.generation

    def _locate(self) -> None:
        if self._locating is None:
            self._locating = locating = run_steps(self._locate_steps())
            locating.when_done(self._located)

    def _locate_steps(self) -> Steps[TopicInfo]:
        info: TopicInfo = yield self._host.topics.resolve(self.topic, create=self.create)
        if not self.producer_id & SESSION_BIT and (self.resumed is None or self.resumed.epoch != info.epoch):
            reply = yield from self._claim_steps(info)
            self.next_seq = max(self.next_seq, reply.producer_seq + 1)
        return info

    def _claim_steps(self, info: TopicInfo) -> Steps[ProducerStateReply]:
        """Claim the name on this life of the topic, or confirm the claim. Raises ProducerFenced.

        A claim survives restarts of the engine and of connections. A topic that was created again has no
        claims; its latest claimant owns the name.
        """
        if self._fenced is not None:
            raise self._fenced
        known_claim = self._claim if self.resumed is not None and self.resumed.epoch == info.epoch else 0
        request = ProducerState(self.topic, self.producer_id, self._owner, known_claim)
        try:
            reply: ProducerStateReply = yield self._host.topics.ask_topic(info, request)
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
            # The engine is down. Frames wait for it until their timers expire.
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
        """Drop abandoned frames. Returns True if frames to send are left."""
        self._displaced = deque(each for each in self._displaced if not each.is_abandoned)
        self._refused = [each for each in self._refused if not each.is_abandoned]
        self._queue = deque(each for each in self._queue if not each.is_abandoned)
        return bool(self._displaced or self._refused or self._queue)

    def _forget_waiting(self) -> None:
        self._displaced.clear()
        self._refused.clear()
        self._queue.clear()

    # -- results --------------------------------------------------------------------------------------

    def handle_refused(
        self, shipment: Shipment, frames: NDArray[Any], error: RinglogError, *, by_shard: bool
    ) -> None:
        """Retry frames of a shipment that were not appended, or fail the batch.

        `by_shard` means that the shard refused them. It checks for a repeat first, so they were never
        appended. Otherwise they were not appended by this attempt.
        """
        # A refused resend does not tell the outcome of the first attempt.
        may_be_appended = not by_shard and (shipment.was_rewound or error.outcome == "unknown")
        now = self._host.clock.monotonic_ns()
        delay_ns = self._pause_ns(error, shipment.attempts)
        if isinstance(error, ProducerFenced):
            self._fenced = ProducerFenced(error.message, **error.detail)
        may_retry = isinstance(error, _TEMPORARY) or (
            isinstance(error, _TOPIC_MOVED)
            # Without `create` retry once: it may have been deleted and created again.
            and (self.create or isinstance(error, StaleEpoch) or not shipment.attempts)
        )
        may_retry &= may_be_appended or error.outcome == "not_applied"
        # A limit that an operator has set does not end by itself, unlike pressure.
        may_retry &= error.detail.get("reason") not in FINAL_REASONS and "limit" not in error.detail
        if isinstance(error, _TOPIC_MOVED):
            # Also if this shipment fails: the next one must resolve the topic again.
            self._info = None
            self._host.topics.forget(self.topic)
        if not may_retry or now + delay_ns >= shipment.deadline_ns:
            if may_be_appended:
                error = type(error)(error.message, outcome="unknown", **error.detail)
            if by_shard and isinstance(error, _OF_ONE_RECORD) and shipment.batch.is_gathered:
                self._split(shipment)
                return
            self._fail_frames(shipment, frames, error)
            return
        self.retries += len(frames)
        self._host.retries += len(frames)
        buffer, offsets = shipment.copy_frames(frames)
        resend = Shipment(
            shipment.batch, buffer, offsets, shipment.deadline_ns, shipment.rows_in_batch(frames),
            shipment.attempts + 1, shipment.order,
        )  # fmt: skip
        resend.refusal = error
        resend.is_stamped = resend.was_rewound = may_be_appended
        self._start_timeout(resend)
        self._drop_if_finished(shipment)
        insort(self._refused, resend, key=lambda each: each.sort_key)
        self._retry_at_ns = max(self._retry_at_ns, now + delay_ns)
        self._host.timers.call_at(now + delay_ns, self._flush)

    def handle_batch_done(self, batch: Batch, *, acked: int, error: RinglogError | None = None) -> None:
        """Count a batch whose frames are all settled."""
        self.pending_records -= batch.records
        self.pending_bytes -= batch.bytes
        self.records_acked += acked
        self.records_failed += batch.records - acked
        if batch.deduped:
            self.records_deduped += acked
        if self.on_batch_done is not None:
            self.on_batch_done(batch, error)

    def handle_settled(self, shipment: Shipment) -> None:
        """Remove a shipment whose frames are all settled."""
        self._live.discard(shipment)

    def handle_processed(self, shipment: Shipment) -> None:
        """Remove a shipment whose results are all processed. Refused frames may be resent then."""
        self._in_flight.discard(shipment)
        if self._refused and not self._in_flight:
            self._flush()

    def fail_all(self, error_of: Callable[[bool], RinglogError]) -> None:
        """Give up all frames with the error `error_of(was_sent)`."""
        self._forget_waiting()
        for shipment in list(self._live):
            self._give_up(shipment, error_of(shipment.was_sent))

    @staticmethod
    def _pause_ns(error: RinglogError, attempts: int) -> int:
        """Return the pause before a retry: at least `retry_after_ms`, with jitter."""
        asked_ms = min(int(error.detail.get("retry_after_ms", 0) or 0), RETRY_MS_MAX)
        own_ms = min(RETRY_MS << min(attempts, 5), RETRY_MS_MAX) * random.uniform(0.5, 1.0)
        return int(max(asked_ms * random.uniform(1.0, 1.25), own_ms) * MS)

    def _drop_if_finished(self, shipment: Shipment) -> None:
        if shipment.settled >= shipment.count:
            self._live.discard(shipment)

    def _fail_frames(self, shipment: Shipment, frames: NDArray[Any], error: RinglogError) -> None:
        self._drop_if_finished(shipment)
        shipment.batch.fail_frames(shipment.rows_in_batch(frames), error)

    def _split(self, shipment: Shipment) -> None:
        """Resend each record of a refused frame as its own frame, since only one of them may cause the
        refusal."""
        batch = shipment.batch
        batch.is_gathered = False
        batch.split()
        self._drop_if_finished(shipment)
        assert self.on_split is not None, "gathered frames are made by a producer"
        buffer, offsets = self.on_split(shipment.buffer)
        resend = Shipment(
            batch, buffer, offsets, shipment.deadline_ns, np.arange(batch.frames), shipment.attempts + 1,
            shipment.order,
        )  # fmt: skip
        self._start_timeout(resend)
        insort(self._refused, resend, key=lambda each: each.sort_key)
        self._host.timers.call_at(self._host.clock.monotonic_ns(), self._flush)

    def _expire(self, shipment: Shipment) -> None:
        was_sent = shipment.was_sent
        waited_s = self._timeout_ns / 1e9
        if shipment.refusal is not None and not was_sent:
            error = shipment.refusal
        elif was_sent:
            error = RequestTimeout(
                "the engine did not settle the records in time", outcome="unknown", topic=self.topic,
                timeout_s=waited_s,
            )  # fmt: skip
        elif self._is_shard_full():
            error = Throttled(
                "the shard's intake stayed full", reason="ingest_full", topic=self.topic,
                retry_after_ms=PRESSURE_RETRY_MS, waited_s=waited_s,
            )  # fmt: skip
        elif self._host.links.generation:
            text = explain_unreachable(
                "the engine was not reachable in time", self._host.links.unreachable_reason
            )
            error = RequestTimeout(text, topic=self.topic, timeout_s=waited_s)
        else:
            reason = self._host.links.unreachable_reason
            text = explain_unreachable("no engine was found in time", reason)
            error = NotConnected(text, topic=self.topic, timeout_s=waited_s)
        self._give_up(shipment, error)

    def _is_shard_full(self) -> bool:
        """Return True if the frame waited only for room at the shard."""
        return self._is_located() and self._info is not None and self._host.links.is_full(self._info.shard)

    def _give_up(self, shipment: Shipment, error: RinglogError) -> None:
        left = shipment.count - shipment.settled
        shipment.abandon()
        self._live.discard(shipment)
        if left:
            frames = np.arange(shipment.count - left, shipment.count)
            shipment.batch.fail_frames(shipment.rows_in_batch(frames), error)
        # Frames of it in flight have lower numbers than all later frames: they are appended before those, or
        # never.
        self.handle_processed(shipment)
