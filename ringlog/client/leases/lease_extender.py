"""Leases that a client holds, and their extension in the background.

A LeaseExtender extends its leases after each third of their length, from a timer of the session. The timer
runs in the thread that serves the connection, or in the event loop. A lease is lost if the engine refuses its
extension, or if it ends before a reply. The holder is notified at once, and the engine ignores every later
request for the lease.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable, Sequence
from typing import Any, Protocol

import numpy as np

from ringlog.clock import Clock
from ringlog.envelope.messages import Extend, ExtendReply
from ringlog.errors import RinglogError
from ringlog.limits import JOBS_PER_REQUEST_MAX
from ringlog.link.futures import Pending
from ringlog.link.peer import MS
from ringlog.link.peer_request import PeerReply
from ringlog.link.timers import Timer, Timers

EXTEND_FRACTION = 3
"""A lease is extended after this fraction (a third) of its length, which leaves time for two retries."""
RETRY_NS = 50 * MS
"""Pause in nanoseconds after a request that failed at once."""


class Lease:
    """Lease of one job, as its holder knows it."""

    __slots__ = ("deadline_ms", "is_lost", "is_over", "lease_ms", "on_lost", "seq", "token", "until_ns")

    def __init__(self, seq: int, token: int, deadline_ms: int, lease_ms: int, until_ns: int) -> None:
        self.seq: int = seq
        self.token: int = token
        self.deadline_ms: int = deadline_ms
        """End of the lease on the engine's clock, in milliseconds."""
        self.lease_ms: int = lease_ms
        self.until_ns: int = until_ns
        """End of the lease on this process's monotonic clock, as an estimate."""
        self.is_over: bool = False
        """True after the job was acked, returned or lost. The lease is not extended any more."""
        self.is_lost: bool = False
        self.on_lost: Callable[[], None] | None = None

    @property
    def lease_id(self) -> str:
        """Token of the lease in readable form."""
        return f"lease_{self.token:016x}"

    def mark_lost(self) -> None:
        """Mark the lease as lost: another worker may hold the job now."""
        if not (self.is_lost or self.is_over):
            self.is_lost = self.is_over = True
            if self.on_lost is not None:
                self.on_lost()


PRUNE_MIN = 256
"""Number of leases, ended ones included, below which ended leases are not removed."""


class LeaseExtenderSession(Protocol):
    """Interface that a LeaseExtender needs of a session."""

    @property
    def clock(self) -> Clock:
        """Clock of the session."""
        ...

    @property
    def timers(self) -> Timers:
        """Timers of the session."""
        ...

    def request_jobs(self, message: Any, *, extra_ms: int = 0) -> Pending[PeerReply]:
        """Send a request about jobs of a topic."""
        ...


class LeaseExtender:
    """Extends the leases of one queue or group and one node. Call with the client's lock held, or in its
    loop."""

    def __init__(self, session: LeaseExtenderSession, topic: str, node: str, group: str = "") -> None:
        self._session = session
        self._topic, self._node, self._group = topic, node, group
        self._leases: dict[int, Lease] = {}
        self._timer: Timer | None = None
        self._in_flight = 0
        """Number of requests in flight. No further request is sent meanwhile."""
        self._not_before_ns = 0
        self._prune_above = PRUNE_MIN
        """Number of leases above which ended ones are removed."""

    def extend_until_settled(self, leases: Iterable[Lease]) -> None:
        """Extend these leases until they are settled or lost."""
        timer = self._timer
        is_planned = bool(self._in_flight) or timer is not None
        for lease in leases:
            self._leases[lease.token] = lease
            if timer is not None and lease.until_ns - self._spare_ns(lease) < timer.when_ns:
                is_planned = False
        # Usually a lease is due after the others and settled before that, so adding it needs no new timer.
        if not is_planned or len(self._leases) > self._prune_above:
            self._plan()

    def extend_later(self, until_ns: int, lease_ms: int, leases: Callable[[], Iterable[Lease]]) -> Timer:
        """Extend the leases that `leases` returns, after a third of their length. Leases that are settled by
        then cost nothing.

        The returned timer may be cancelled.
        """
        due_ns = until_ns - lease_ms * MS * (EXTEND_FRACTION - 1) // EXTEND_FRACTION
        return self._session.timers.call_at(due_ns, lambda: self.extend_until_settled(leases()))

    def _plan(self) -> None:
        """Set the timer for the lease that is due first."""
        self._leases = {token: lease for token, lease in self._leases.items() if not lease.is_over}
        self._prune_above = max(2 * len(self._leases), PRUNE_MIN)
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        if self._leases and not self._in_flight:
            due_ns = min(lease.until_ns - self._spare_ns(lease) for lease in self._leases.values())
            self._timer = self._session.timers.call_at(max(due_ns, self._not_before_ns), self._extend)

    @staticmethod
    def _spare_ns(lease: Lease) -> int:
        return lease.lease_ms * MS * (EXTEND_FRACTION - 1) // EXTEND_FRACTION

    def _extend(self) -> None:
        self._timer = None
        now_ns = self._session.clock.monotonic_ns()
        by_length: dict[int, list[Lease]] = {}
        for lease in self._leases.values():
            if lease.until_ns <= now_ns:
                lease.mark_lost()
            elif not lease.is_over:
                by_length.setdefault(lease.lease_ms, []).append(lease)
        for lease_ms, leases in by_length.items():
            for part in request_chunks(leases):
                self._ask(part, lease_ms, now_ns)
        self._plan()

    def _ask(self, leases: Sequence[Lease], lease_ms: int, now_ns: int) -> None:
        seqs, tokens = encode_leases(leases)
        message = Extend(self._topic, self._node, seqs, tokens, lease_ms, new_call_number(), self._group)
        self._in_flight += 1
        # A reply after the end of the leases is of no use: they are marked as lost at that time.
        timer = self._session.timers.call_at(
            min(lease.until_ns for lease in leases), lambda: self._mark_expired(leases)
        )

        def answered(pending: Pending[PeerReply]) -> None:
            timer.cancel()
            self._in_flight -= 1
            self._extended(pending, leases, now_ns + lease_ms * MS)
            self._plan()

        self._session.request_jobs(message).when_done(answered)

    @staticmethod
    def _mark_expired(leases: Sequence[Lease]) -> None:
        for lease in leases:
            lease.mark_lost()

    def _extended(self, pending: Pending[PeerReply], leases: Sequence[Lease], until_ns: int) -> None:
        try:
            reply: ExtendReply = pending.result().message
        except RinglogError:
            # Retried while the leases last.
            now_ns = self._session.clock.monotonic_ns()
            self._not_before_ns = now_ns + RETRY_NS
            for lease in leases:
                if lease.until_ns <= now_ns:
                    lease.mark_lost()
            return
        skipped = set(np.frombuffer(reply.skipped, dtype="<i8").tolist())
        for lease in leases:
            if lease.seq in skipped:
                lease.mark_lost()
            else:
                lease.deadline_ms, lease.until_ns = reply.deadline, until_ns


def request_chunks(leases: Sequence[Lease]) -> list[Sequence[Lease]]:
    """Split leases into parts of the size that one request may contain."""
    return [leases[at : at + JOBS_PER_REQUEST_MAX] for at in range(0, len(leases), JOBS_PER_REQUEST_MAX)]


def encode_leases(leases: Sequence[Lease]) -> tuple[bytes, bytes]:
    """Encode the seqs and tokens of leases for a message."""
    return encode_u64s([lease.seq for lease in leases]), encode_u64s([lease.token for lease in leases])


def encode_u64s(numbers: Sequence[int]) -> bytes:
    """Encode numbers as 8 bytes each, little-endian."""
    return np.array(numbers, dtype="<u8").tobytes()


def new_call_number() -> int:
    """Return a random number for one request, by which the engine recognises a resend. Never 0."""
    return random.getrandbits(63) | 1
