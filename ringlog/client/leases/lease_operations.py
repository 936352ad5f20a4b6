"""Operations of a worker on a queue, without waiting: shared by both clients.

The reply to a claim contains seqs and leases. The records themselves are read as any record: from the files
on the engine's host, otherwise from frames that the gateway attached. Small jobs may be inside the reply.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, NamedTuple, Protocol

import numpy as np

from ringlog.client.connection.read_connection import Connection
from ringlog.client.leases.claim_result import (
    ClaimResult,
    Leases,
    earliest_expiry_ns,
    encode_settle_entries,
    mark_settled,
    request_parts,
)
from ringlog.client.leases.dead_letters import dead_letter_of, is_dead_letter_of
from ringlog.client.leases.inline_jobs import ClaimedRecords, decode_inline_jobs
from ringlog.client.leases.lease_extender import Lease, encode_u64s, new_call_number, request_chunks
from ringlog.client.read.local_source import LocalSource
from ringlog.client.read.pages import Record, Tombstone
from ringlog.client.read.record_batches import FrameRecordBatch
from ringlog.client.requests.results import PendingJob, QueueStats, Settled
from ringlog.client.requests.validation import check_claim_size
from ringlog.clock import Clock
from ringlog.envelope.messages import (
    Ack,
    AckAndClaim,
    AckReply,
    Claim,
    ClaimReply,
    Extend,
    ExtendReply,
    LeaseStats,
    LeaseStatsReply,
    ListPending,
    Nack,
    NackReply,
    NotCombinable,
    PendingReply,
    Reject,
    RejectReply,
    Steal,
    TopicInfo,
)
from ringlog.errors import NotAQueue, RinglogError, StaleEpoch, UsageError
from ringlog.frame.view import FrameView
from ringlog.limits import (
    CLAIM_SLICE_MS_MAX,
    EXPIRED_CLAIMS_MAX,
    JOBS_PER_REQUEST_MAX,
    NODE_BYTES_MAX,
    PENDING_ROWS_MAX,
)
from ringlog.link.futures import Pending, Steps, delegate
from ringlog.link.peer import MS
from ringlog.link.peer_request import PeerReply
from ringlog.process_id import own_process_id


class QueueConnection(Connection, Protocol):
    """Connection that also sends requests about jobs."""

    def request_jobs(self, message: Any, *, extra_ms: int = 0) -> Pending[PeerReply]:
        """Send a request to the shard of the message's topic."""
        ...

    def dead_letter_targets(self, topic: str) -> Pending[tuple[str, ...]]:
        """Query the dead-letter topics of a topic: the queue's own and those of its groups."""
        ...


STATES = {1: "leased", 2: "delayed", 3: "returned", 5: "exhausted"}
"""States of delivered and unacked jobs, by their number in PendingReply."""
UNCOMBINED_MAX = 256
"""Most claims in a row that are sent without their acks, after requests that could not be combined."""


class NackOptions(NamedTuple):
    """Options of a nack; the fields of the message Nack."""

    delay_ms: int = 0
    reason: str = ""
    has_backoff: bool = False


class ClaimHandle:
    """Handle of a pending claim. After `cancel`, jobs that the engine leased to the claim return to the queue
    at once."""

    __slots__ = ("_is_cancelled", "by_number", "call")

    def __init__(self, *, by_number: bool = False) -> None:
        self._is_cancelled = False
        self.call: int = 0
        """Number of the last request of this claim; 0 = none was sent."""
        self.by_number: bool = by_number
        """Claim the lowest seqs, whatever their priority."""

    def cancel(self) -> None:
        """Cancel the claim."""
        self._is_cancelled = True

    def is_cancelled(self) -> bool:
        """Return True after `cancel`. It may be called during any wait of the claim, so test it after each
        one."""
        return self._is_cancelled


class LeaseOperations:
    """View of one worker on one queue. The steps run over `connection`; several may run at the same time."""

    def __init__(
        self, topic: str, node: str, clock: Clock, *, release_on_exit: bool = True, min_idle_ms: int = 0
    ) -> None:
        if not 1 <= len(node.encode()) <= NODE_BYTES_MAX:
            raise UsageError(
                f"node must have 1 to {NODE_BYTES_MAX} bytes, got {len(node.encode())}",
                found=node[:NODE_BYTES_MAX],
            )
        self.topic = topic
        self.group = ""
        """Key of the consumer group whose records are the jobs; "" = a queue."""
        self._min_idle_ms = min_idle_ms
        """Claims take over jobs whose last delivery or lease extension is at least this old, in milliseconds;
        0 = never."""
        self.node = node
        self._clock = clock
        self._release_on_exit = release_on_exit
        """The engine ends the leases of this process when it exits, if the engine can observe that."""
        self._idle_sources: list[LocalSource] = []
        """Open files that no claim is reading. At most one source stays for the next claim."""
        self._is_closed = False
        self._frame: FrameView | None = None
        """Frame that was read last. Jobs that were put together are often claimed one after the other."""
        self._uncombined_left = self._not_combinable_count = 0
        """Number of acks and claims to send as two requests, and number of refusals in a row to combine
        them."""

    def close_files(self) -> None:
        """Close idle files. Claims that are reading keep their own."""
        self._frame = None
        while (source := self._take_source()) is not None:
            source.close()

    def close(self) -> None:
        """Close files, and keep none open from now on: each claim opens and closes its own."""
        self._is_closed = True
        self.close_files()

    def _take_source(self) -> LocalSource | None:
        try:
            return self._idle_sources.pop()
        except IndexError:
            return None  # Another claim, perhaps of another thread, took it.

    def _return_source(self, source: LocalSource) -> None:
        self._idle_sources.append(source)
        # In this order: another thread may call `close` at any moment.
        if self._is_closed or len(self._idle_sources) > 1:
            extra = self._take_source()
            if extra is not None:
                extra.close()

    # -- claims ---------------------------------------------------------------------------------------

    def cancel_claim(self, connection: QueueConnection, handle: ClaimHandle) -> Pending[PeerReply] | None:
        """Cancel a claim: jobs leased to it return to the queue, and no delivery is counted. None if no
        request was sent."""
        handle.cancel()
        if not handle.call:
            return None
        undo = Nack(self.topic, self.node, b"", b"", 0, handle.call, undo=True, group=self.group)
        return connection.request_jobs(undo)

    def claim(
        self, connection: QueueConnection, most: int, wait_s: float, lease_ms: int | None, handle: ClaimHandle
    ) -> Steps[ClaimResult]:
        """Claim up to `most` jobs. The result is empty if no job was ready within `wait_s` seconds.

        Unreadable jobs return to the queue. If all claimed jobs expire before they are read, others are
        claimed.
        """
        check_claim_size(most)
        return (yield from self._lease(connection, most, b"", wait_s, lease_ms, self._min_idle_ms, handle))

    def steal(
        self, connection: QueueConnection, seqs: Sequence[int], min_idle_ms: int, lease_ms: int | None,
        handle: ClaimHandle,
    ) -> Steps[ClaimResult]:  # fmt: skip
        """Lease the pending jobs among `seqs`, whichever worker holds them."""
        yield from self.resolve_topic(connection)
        if len(seqs) > JOBS_PER_REQUEST_MAX:
            raise UsageError(
                f"seqs must have at most {JOBS_PER_REQUEST_MAX} entries, got {len(seqs)}", seqs=len(seqs),
                max=JOBS_PER_REQUEST_MAX,
            )  # fmt: skip
        if not seqs:
            return ClaimResult((), 0, 0, 0)
        return (
            yield from self._lease(
                connection, len(seqs), encode_u64s(seqs), 0.0, lease_ms, min_idle_ms, handle
            )
        )

    def _lease(
        self, connection: QueueConnection, most: int, seqs: bytes, wait_s: float, lease_ms: int | None,
        min_idle_ms: int, handle: ClaimHandle,
    ) -> Steps[ClaimResult]:  # fmt: skip
        """Claim up to `most` jobs or, with `seqs`, steal these."""
        begun_ns = self._clock.monotonic_ns()
        may_settle = wait_s <= 0  # A claim that waits receives copies when routers make them.
        expired_claims = 0
        while not handle.is_cancelled():
            left_ms = math.inf
            if wait_s != math.inf:
                left_ms = wait_s * 1_000 - (self._clock.monotonic_ns() - begun_ns) / MS
            wait_ms = int(min(max(left_ms, 0), CLAIM_SLICE_MS_MAX))
            life = own_process_id() if self._release_on_exit and connection.transport == "ring" else (0, 0)
            handle.call = new_call_number()
            claim: Claim | Steal
            if seqs:
                claim = Steal(
                    self.topic, self.node, seqs, lease_ms or 0, min_idle_ms, handle.call, *life, self.group
                )
            else:
                claim = Claim(
                    self.topic, self.node, most, lease_ms or 0, wait_ms, handle.call, *life, handle.by_number,
                    self.group, min_idle_ms,
                )  # fmt: skip
            reply = yield connection.request_jobs(claim, extra_ms=wait_ms)
            message: ClaimReply = reply.message
            if may_settle and message.is_fed and not message.runs and not handle.is_cancelled():
                may_settle = False
                yield connection.catch_up(self.topic, message.topic_id)
                continue
            is_over = handle.is_cancelled() or left_ms <= CLAIM_SLICE_MS_MAX
            if not message.runs and not is_over:
                continue
            claimed = yield from self._claimed(connection, reply, handle)
            expired_claims += 1
            if len(claimed) or not message.runs or expired_claims >= EXPIRED_CLAIMS_MAX:
                return claimed
        return ClaimResult((), 0, 0, 0)

    def ack_and_claim(
        self, connection: QueueConnection, done: Leases, most: int, lease_ms: int | None, handle: ClaimHandle
    ) -> Steps[ClaimResult | None]:
        """Ack the jobs in `done` and claim up to `most` others in one request, without waiting for ready
        jobs.

        The reply arrives after the acks are complete. Returns None, without any effect, if two requests are
        necessary. This includes the case that a lease had ended.
        """
        is_usual = len(done) <= JOBS_PER_REQUEST_MAX and not (handle.by_number or self._min_idle_ms)
        if not is_usual or connection.transport != "ring":
            return None
        if self._uncombined_left:
            self._uncombined_left -= 1
            return None
        seqs, tokens = encode_settle_entries(done)
        life = own_process_id() if self._release_on_exit else (0, 0)
        handle.call = new_call_number()
        message = AckAndClaim(
            self.topic, self.node, seqs, tokens, most, lease_ms or 0, handle.call, *life, self.group
        )
        reply = yield connection.request_jobs(message)
        if isinstance(reply.message, NotCombinable):
            # A single refusal has no effect. After several, combining is tried only at intervals, since it
            # depends on the size of the jobs.
            self._uncombined_left = min((1 << self._not_combinable_count) - 1, UNCOMBINED_MAX)
            self._not_combinable_count += self._uncombined_left < UNCOMBINED_MAX
            return None
        self._not_combinable_count = 0
        mark_settled(done, b"")
        return (yield from self._claimed(connection, reply, handle))

    def _claimed(
        self, connection: QueueConnection, reply: PeerReply, handle: ClaimHandle
    ) -> Steps[ClaimResult]:
        """Read the jobs of a reply. Unreadable jobs return to the queue."""
        message: ClaimReply = reply.message
        until_ns = self._clock.monotonic_ns() + message.lease_ms * MS
        claimed = ClaimResult(message.runs, message.deadline, message.lease_ms, until_ns)
        claimed.ready = message.ready
        if handle.is_cancelled():
            # The shard may have received the cancellation before the claim.
            yield from self._return_jobs(connection, claimed, undo=True)
            return claimed
        try:
            yield from self._read(connection, message, reply.attachment, claimed.batches)
        except StaleEpoch:
            # The queue was created again: these jobs are deleted, so others are claimed.
            claimed.batches.clear()
        except RinglogError:
            # Deliver the jobs before the damage and return the others. Raise the error only if no job comes
            # before it.
            reached = max((batch.last_seq for batch in claimed.batches), default=0)
            yield from self._return_jobs(connection, claimed, reached)
            if not claimed.batches:
                raise
        if handle.is_cancelled():
            yield from self._return_jobs(connection, claimed, undo=True)
            claimed.batches.clear()
        return claimed

    def _return_jobs(
        self, connection: QueueConnection, claimed: ClaimResult, after: int = 0, *, undo: bool = False
    ) -> Steps[None]:
        """Return the jobs with a seq above `after` to the queue. The engine skips jobs that were returned
        already."""
        entries = [each for each in claimed.granted_leases() if each[0] > after]
        for at in range(0, len(entries), JOBS_PER_REQUEST_MAX):
            seqs, tokens = zip(*entries[at : at + JOBS_PER_REQUEST_MAX], strict=True)
            nack = Nack(
                self.topic, self.node, encode_u64s(seqs), encode_u64s(tokens), 0, new_call_number(),
                undo=undo,
                group=self.group,
            )  # fmt: skip
            yield connection.request_jobs(nack)

    def resolve_topic(self, connection: QueueConnection) -> Steps[TopicInfo]:
        """Return the topic. Raises NotAQueue if it is not a queue, TopicNotFound."""
        info: TopicInfo = yield connection.resolve(self.topic)
        if info.config.get("type") != "queue":
            raise NotAQueue(
                "the topic is not a queue: use a queue, or name a consumer group", topic=self.topic
            )
        return info

    def dead_letter(self, connection: QueueConnection) -> Steps[str]:
        """Return the name of the dead-letter topic. Raises InvalidRequest if the queue has none."""
        return dead_letter_of((yield from self.resolve_topic(connection)))

    def is_own_dead_letter(self, letter: Record | Tombstone) -> bool:
        """Return True if this record of the dead-letter topic came from this queue or group."""
        return is_dead_letter_of(self.topic, letter, self.group)

    def _read(
        self,
        connection: QueueConnection,
        message: ClaimReply,
        attached: Any,
        record_batches: list[ClaimedRecords],
    ) -> Steps[None]:
        if message.payloads or message.frames:
            record_batches += decode_inline_jobs(self.topic, message, attached)
        elif connection.transport == "ring":
            yield from self._read_files(connection, message, record_batches)

    def _read_files(
        self, connection: QueueConnection, message: ClaimReply, record_batches: list[ClaimedRecords]
    ) -> Steps[None]:
        spans: list[tuple[int, int]] = []  # first and last seq, both included
        for first, count, _, _ in message.runs:
            if spans and spans[-1][1] + 1 == first:
                spans[-1] = spans[-1][0], first + count - 1
            else:
                spans.append((first, first + count - 1))
        source = self._take_source() or LocalSource(connection, self.topic)
        try:
            for first, last in spans:
                known = self._known_frame(message, first, last)
                if known is not None:
                    record_batches.append(FrameRecordBatch(known))
                    continue
                yield from delegate(source.read_leased(first, last, message.epoch, record_batches))
                if record_batches and isinstance(record_batches[-1], FrameRecordBatch):
                    self._frame = record_batches[-1].view.whole_frame_view
        finally:
            self._return_source(source)

    def _known_frame(self, message: ClaimReply, first: int, last: int) -> FrameView | None:
        """Return the jobs as part of the frame that was read last, or None. Within one life of a topic, the
        record of a seq never changes."""
        frame = self._frame
        if frame is None or (frame.topic_id, frame.epoch) != (message.topic_id, message.epoch):
            return None
        if not frame.first_seq <= first <= last <= frame.last_seq:
            return None
        return frame.slice(first - frame.first_seq, last + 1 - frame.first_seq)

    # -- settling -------------------------------------------------------------------------------------

    def ack(self, connection: QueueConnection, leases: Leases) -> Steps[Settled]:
        """Ack the jobs of these leases."""
        skipped: list[int] = []
        for part in request_parts(leases):
            seqs, tokens = encode_settle_entries(part)
            in_time = self._clock.monotonic_ns() <= earliest_expiry_ns(part)
            ack = Ack(self.topic, self.node, seqs, tokens, in_time, new_call_number(), self.group)
            reply: AckReply = (yield connection.request_jobs(ack)).message
            skipped += mark_settled(part, reply.skipped)
        return Settled(len(leases) - len(skipped), tuple(skipped))

    def nack(
        self, connection: QueueConnection, leases: Leases, delay_ms: int, reason: str = "",
        has_backoff: bool = False,
    ) -> Steps[Settled]:  # fmt: skip
        """Return the jobs of these leases to the queue. A reason marks them as failed. See the message
        Nack."""
        return self._return_leases(connection, leases, delay_ms, reason, has_backoff, undo=False)

    def release(self, connection: QueueConnection, leases: Leases) -> Steps[Settled]:
        """Return the jobs of these leases to the queue as unstarted: the delivery does not count."""
        return self._return_leases(connection, leases, 0, "", has_backoff=False, undo=True)

    def _return_leases(
        self, connection: QueueConnection, leases: Leases, delay_ms: int, reason: str, has_backoff: bool,
        undo: bool,
    ) -> Steps[Settled]:  # fmt: skip
        skipped: list[int] = []
        for part in request_parts(leases):
            seqs, tokens = encode_settle_entries(part)
            nack = Nack(
                self.topic, self.node, seqs, tokens, delay_ms, new_call_number(), reason, has_backoff, undo,
                self.group,
            )  # fmt: skip
            reply: NackReply = (yield connection.request_jobs(nack)).message
            skipped += mark_settled(part, reply.skipped)
        return Settled(len(leases) - len(skipped), tuple(skipped))

    def reject(self, connection: QueueConnection, leases: Sequence[Lease], reason: str) -> Steps[Settled]:
        """Move the jobs of these leases to the dead-letter topic."""
        skipped: list[int] = []
        for part in request_chunks(leases):
            seqs, tokens = encode_settle_entries(part)
            reject = Reject(self.topic, self.node, seqs, tokens, reason, new_call_number(), self.group)
            reply: RejectReply = (yield connection.request_jobs(reject)).message
            skipped += mark_settled(part, reply.skipped)
        return Settled(len(leases) - len(skipped), tuple(skipped))

    def extend(self, connection: QueueConnection, leases: Sequence[Lease], lease_ms: int) -> Steps[Settled]:
        """Set the leases to end `lease_ms` milliseconds from now."""
        skipped: list[int] = []
        for part in request_chunks(leases):
            seqs, tokens = encode_settle_entries(part)
            begun_ns = self._clock.monotonic_ns()
            extend = Extend(self.topic, self.node, seqs, tokens, lease_ms, new_call_number(), self.group)
            reply: ExtendReply = (yield connection.request_jobs(extend)).message
            lost = set(np.frombuffer(reply.skipped, dtype="<i8").tolist())
            for lease in part:
                if lease.seq in lost:
                    skipped.append(lease.seq)
                    lease.mark_lost()
                else:
                    lease.deadline_ms, lease.lease_ms = reply.deadline, lease_ms
                    lease.until_ns = begun_ns + lease_ms * MS
        return Settled(len(leases) - len(skipped), tuple(skipped))

    def _pending(
        self,
        connection: QueueConnection,
        node: str,
        idle_ms: int,
        min_deliveries: int,
        after: int,
        limit: int,
    ) -> Steps[tuple[PendingReply, bool]]:
        """Return a page of delivered and unacked jobs, and whether another page follows."""
        request = ListPending(
            self.topic, after, min(limit, PENDING_ROWS_MAX), node, idle_ms, min_deliveries, self.group
        )
        reply: PendingReply = (yield connection.request_jobs(request)).message
        return reply, reply.more and bool(reply.rows)

    def pending_jobs(self, connection: QueueConnection, after: int, limit: int) -> Steps[list[PendingJob]]:
        """Return delivered and unacked jobs."""
        found: list[PendingJob] = []
        has_more = True
        while has_more and len(found) < limit:
            reply, has_more = yield from self._pending(connection, "", 0, 0, after, limit - len(found))
            for first, count, state, deliveries, _, _, until, node_index, _ in reply.rows:
                for seq in range(first, first + count):
                    reason, failed_ms, nacks = reply.failures.get(seq, ("", 0, 0))
                    found.append(
                        PendingJob(
                            seq, STATES.get(state, ""), reply.nodes[node_index], until / 1_000, deliveries,
                            nacks, failed_ms / 1_000, reason,
                        )
                    )  # fmt: skip
                after = first + count - 1
        return found[:limit]

    def stats(self, connection: QueueConnection) -> Steps[QueueStats]:
        """Return the number of jobs in each state."""
        reply: LeaseStatsReply = (yield connection.request_jobs(LeaseStats(self.topic))).message
        return QueueStats(
            self.topic, reply.ready, reply.in_flight, reply.delayed, reply.dead_lettered, reply.waiting,
            None if reply.oldest_ready_ms < 0 else reply.oldest_ready_ms, reply.wait_p99_ms, reply.promoted,
        )  # fmt: skip
