"""What a worker does with a queue, apart from waiting: written once, for both clients.

A claim is answered with numbers and leases. The jobs themselves are read like every record: from the files
on the engine's host, elsewhere from frames that the gateway attached.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import Any, Protocol

import numpy as np

from ringlog.client.connection import Connection
from ringlog.client.leases import Lease, call_number, entries_of, parts_of
from ringlog.client.pages import Record
from ringlog.client.pieces import Piece, visible_pieces
from ringlog.client.results import QueueStats, Settled
from ringlog.client.source import LocalSource, received
from ringlog.clock import Clock
from ringlog.envelope.messages import (
    JobsAck,
    JobsAcked,
    JobsClaim,
    JobsClaimed,
    JobsExtend,
    JobsExtended,
    JobsNack,
    JobsNacked,
    JobsReject,
    JobsRejected,
    QueueStatsReply,
    TopicInfo,
)
from ringlog.envelope.messages import QueueStats as QueueStatsMessage
from ringlog.errors import NotAQueue, RinglogError, UsageError
from ringlog.limits import CLAIM_JOBS_MAX, CLAIM_SLICE_MS_MAX, NODE_BYTES_MAX
from ringlog.link.peer import MS, Reply
from ringlog.link.pending import Pending, Steps
from ringlog.lives import own_life
from ringlog.storage.mask import NOTHING


class QueueConnection(Connection, Protocol):
    """A connection that takes requests about jobs."""

    def about_jobs(self, message: Any, *, extra_ms: int = 0) -> Pending[Reply]:
        """Send one to who looks after its topic."""
        ...


class Wish:
    """Somebody waits for a claim. When it is over, what the claim is given goes back at once."""

    __slots__ = ("_is_over",)

    def __init__(self) -> None:
        self._is_over = False

    def end(self) -> None:
        """Nobody waits any more."""
        self._is_over = True

    def is_over(self) -> bool:
        """It may end whenever a claim waits, so it is asked each time."""
        return self._is_over


class Working:
    """One worker's view of one queue. Its steps run over `connection`; they never run at the same time."""

    def __init__(self, topic: str, node: str, clock: Clock) -> None:
        if not 1 <= len(node.encode()) <= NODE_BYTES_MAX:
            raise UsageError("a node's name has 1 to 128 bytes", found=node[:NODE_BYTES_MAX])
        self.topic = topic
        self.node = node
        self._clock = clock
        self._source: LocalSource | None = None

    def close(self) -> None:
        """Let go of files."""
        if self._source is not None:
            self._source.close()

    # -- claims ---------------------------------------------------------------------------------------

    def call_off(self, wish: Wish) -> None:
        """Nobody waits for this claim any more. It keeps the files that it reads; others get their own."""
        wish.end()
        self._source = None

    def claim(
        self, connection: QueueConnection, most: int, wait_s: float, lease_ms: int | None, wish: Wish
    ) -> Steps[list[tuple[Record, Lease, int]]]:
        """Up to `most` jobs, each with its lease and the number of its delivery; empty when there was none
        within `wait_s`. What cannot be read is given back."""
        if not 1 <= most <= CLAIM_JOBS_MAX:
            raise UsageError("a claim takes between one job and the most there may be", found=most,
                             max=CLAIM_JOBS_MAX)  # fmt: skip
        info: TopicInfo = yield from self.known(connection)
        length_ms = lease_ms or int(info.config["lease_ms"])
        begun_ns = self._clock.monotonic_ns()
        while True:
            left_ms = math.inf
            if wait_s != math.inf:
                left_ms = wait_s * 1_000 - (self._clock.monotonic_ns() - begun_ns) / MS
            wait_ms = int(min(max(left_ms, 0), CLAIM_SLICE_MS_MAX))
            life = own_life() if connection.transport == "ring" else (0, 0)
            claim = JobsClaim(self.topic, self.node, most, lease_ms or 0, wait_ms, call_number(), *life)
            reply = yield connection.about_jobs(claim, extra_ms=wait_ms)
            message: JobsClaimed = reply.message
            if message.runs or wish.is_over() or left_ms <= CLAIM_SLICE_MS_MAX:
                break
        leases = self._leases(message, length_ms)
        if wish.is_over():
            yield from self.nack(connection, leases, 0)
            return []
        pieces: list[Piece] = []
        try:
            yield from self._read(connection, message, reply.attachment, pieces)
        except RinglogError:
            # What comes before the damage is worked on; the rest is given back, and is an error when nothing
            # comes before it (QC-8).
            reached = max((piece.last_seq for piece in pieces), default=0)
            yield from self.nack(connection, [lease for lease in leases if lease.seq > reached], 0)
            if not pieces:
                raise
        if wish.is_over():
            yield from self.nack(connection, [lease for lease in leases if not lease.is_over], 0)
            return []
        found = {record.seq: record for piece in pieces for record in piece.records()}
        times = [times for _, count, times, _ in message.runs for _ in range(count)]
        # A job without a record was deleted in between: it is nobody's any more.
        return [
            (found[lease.seq], lease, number)
            for lease, number in zip(leases, times, strict=True)
            if lease.seq in found
        ]

    def known(self, connection: QueueConnection) -> Steps[TopicInfo]:
        """The topic, which has to be a queue; raises NotAQueue, TopicNotFound."""
        info: TopicInfo = yield connection.resolve(self.topic)
        if info.config.get("type") != "queue":
            raise NotAQueue("not a queue", topic=self.topic)
        return info

    def _leases(self, message: JobsClaimed, length_ms: int) -> list[Lease]:
        until_ns = self._clock.monotonic_ns() + length_ms * MS
        return [
            Lease(first + n, token + n, message.deadline, length_ms, until_ns)
            for first, count, _, token in message.runs
            for n in range(count)
        ]

    def _read(
        self, connection: QueueConnection, message: JobsClaimed, attached: Any, pieces: list[Piece]
    ) -> Steps[None]:
        spans: list[tuple[int, int]] = []
        for first, count, _, _ in message.runs:
            if spans and spans[-1][1] + 1 == first:
                spans[-1] = spans[-1][0], first + count - 1
            else:
                spans.append((first, first + count - 1))
        if connection.transport == "ring":
            source = self._source
            if source is None:
                source = self._source = LocalSource(connection, self.topic)
            try:
                for first, last in spans:
                    yield from source.held(first, last, message.epoch, pieces)
            finally:
                if source is not self._source:
                    source.close()
        elif spans:
            runs = received(self.topic, message.frames, spans[0][0] - 1, memoryview(attached or b""))
            for first, last in spans:
                for run in runs:
                    if run.last_seq >= first:
                        pieces += visible_pieces(run, first - 1, last, NOTHING, self.topic)

    # -- what becomes of jobs -------------------------------------------------------------------------

    def ack(self, connection: QueueConnection, leases: Sequence[Lease]) -> Steps[Settled]:
        """Their jobs are done."""
        skipped: list[int] = []
        for part in parts_of(leases):
            seqs, tokens = entries_of(part)
            in_time = self._clock.monotonic_ns() <= min(lease.until_ns for lease in part)
            ack = JobsAck(self.topic, self.node, seqs, tokens, in_time, call_number())
            reply: JobsAcked = (yield connection.about_jobs(ack)).message
            skipped += _over(part, reply.skipped)
        return Settled(len(leases) - len(skipped), tuple(skipped))

    def nack(self, connection: QueueConnection, leases: Sequence[Lease], delay_ms: int) -> Steps[Settled]:
        """Their jobs are given back."""
        skipped: list[int] = []
        for part in parts_of(leases):
            seqs, tokens = entries_of(part)
            nack = JobsNack(self.topic, self.node, seqs, tokens, delay_ms, call_number())
            reply: JobsNacked = (yield connection.about_jobs(nack)).message
            skipped += _over(part, reply.skipped)
        return Settled(len(leases) - len(skipped), tuple(skipped))

    def reject(self, connection: QueueConnection, leases: Sequence[Lease], reason: str) -> Steps[Settled]:
        """Their jobs go to the dead letters."""
        skipped: list[int] = []
        for part in parts_of(leases):
            seqs, tokens = entries_of(part)
            reject = JobsReject(self.topic, self.node, seqs, tokens, reason, call_number())
            reply: JobsRejected = (yield connection.about_jobs(reject)).message
            skipped += _over(part, reply.skipped)
        return Settled(len(leases) - len(skipped), tuple(skipped))

    def extend(self, connection: QueueConnection, leases: Sequence[Lease], lease_ms: int) -> Steps[Settled]:
        """They are held up to another instant."""
        skipped: list[int] = []
        for part in parts_of(leases):
            seqs, tokens = entries_of(part)
            begun_ns = self._clock.monotonic_ns()
            extend = JobsExtend(self.topic, self.node, seqs, tokens, lease_ms, call_number())
            reply: JobsExtended = (yield connection.about_jobs(extend)).message
            gone = set(np.frombuffer(reply.skipped, dtype="<i8").tolist())
            for lease in part:
                if lease.seq in gone:
                    skipped.append(lease.seq)
                    lease.lose()
                else:
                    lease.deadline_ms, lease.lease_ms = reply.deadline, lease_ms
                    lease.until_ns = begun_ns + lease_ms * MS
        return Settled(len(leases) - len(skipped), tuple(skipped))

    def stats(self, connection: QueueConnection) -> Steps[QueueStats]:
        """How many jobs are in which state."""
        reply: QueueStatsReply = (yield connection.about_jobs(QueueStatsMessage(self.topic))).message
        return QueueStats(
            reply.topic, reply.ready, reply.in_flight, reply.delayed, reply.dead_lettered, reply.waiting,
            None if reply.oldest_ready_ms < 0 else reply.oldest_ready_ms, reply.wait_p99_ms, reply.promoted,
        )  # fmt: skip


def _over(leases: Iterable[Lease], skipped: bytes) -> list[int]:
    """These leases are over, and those skipped are lost."""
    gone: list[int] = np.frombuffer(skipped, dtype="<i8").tolist()
    lost = set(gone)
    for lease in leases:
        if lease.seq in lost:
            lease.lose()
        lease.is_over = True
    return gone
