"""Leases that a client holds, and how they are kept alive beside the program's code (CL-9).

A Keeper extends the leases it was given every third of their length, from a timer of the session: in
whichever thread serves the connection, or in the loop. A lease whose extension is refused, or whose time ends
without an answer, is lost: its holder is told at once, and the engine skips every later word about it.
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
from ringlog.link.peer import MS, PeerReply
from ringlog.link.timers import Timer, Timers

EXTEND_PART = 3
"""A lease is extended when a third of it has passed: two more tries before it ends."""
RETRY_NS = 50 * MS
"""Pause behind a request that failed at once."""


class Lease:
    """The right to one job, as its holder knows it."""

    __slots__ = ("deadline_ms", "is_lost", "is_over", "lease_ms", "on_lost", "seq", "token", "until_ns")

    def __init__(self, seq: int, token: int, deadline_ms: int, lease_ms: int, until_ns: int) -> None:
        self.seq = seq
        self.token = token
        self.deadline_ms = deadline_ms
        """On the engine's clock."""
        self.lease_ms = lease_ms
        self.until_ns = until_ns
        """The same instant on our monotonic clock, as far as we can know."""
        self.is_over = False
        """It was given back, or its job is done: nothing keeps it any more."""
        self.is_lost = False
        self.on_lost: Callable[[], None] | None = None

    @property
    def lease_id(self) -> str:
        """The token as people see it (QL-7)."""
        return f"lease_{self.token:016x}"

    def mark_lost(self) -> None:
        """Somebody else may hold the job now."""
        if not (self.is_lost or self.is_over):
            self.is_lost = self.is_over = True
            if self.on_lost is not None:
                self.on_lost()


KEPT_MIN = 256
"""So many leases are kept, over or not, before any is looked at."""


class LeaseExtenderSession(Protocol):
    """What a Keeper needs of a session."""

    @property
    def clock(self) -> Clock:
        """Its clock."""
        ...

    @property
    def timers(self) -> Timers:
        """Its timers."""
        ...

    def about_jobs(self, message: Any, *, extra_ms: int = 0) -> Pending[PeerReply]:
        """Send a request about jobs of a topic."""
        ...


class LeaseExtender:
    """Keeps leases of one queue or group and one node. With the client's lock held, or in its loop."""

    def __init__(self, session: LeaseExtenderSession, topic: str, node: str, group: str = "") -> None:
        self._session = session
        self._topic, self._node, self._group = topic, node, group
        self._leases: dict[int, Lease] = {}
        self._timer: Timer | None = None
        self._asking = 0
        """Requests on their way; none follows while there are some."""
        self._not_before_ns = 0
        self._most = KEPT_MIN
        """Of more than these some may be over and are to be forgotten."""

    def extend_until_settled(self, leases: Iterable[Lease]) -> None:
        """Extend these until they are over."""
        timer = self._timer
        is_planned = bool(self._asking) or timer is not None
        for lease in leases:
            self._leases[lease.token] = lease
            if timer is not None and lease.until_ns - self._spare_ns(lease) < timer.when_ns:
                is_planned = False
        # Mostly they are due later than others, and over before that: nothing is to be done for each.
        if not is_planned or len(self._leases) > self._most:
            self._plan()

    def extend_later(self, until_ns: int, lease_ms: int, leases: Callable[[], Iterable[Lease]]) -> Timer:
        """Extend what `leases` says when a part of this time has passed: those that are over by then are
        never asked for. The timer may be cancelled."""
        due_ns = until_ns - lease_ms * MS * (EXTEND_PART - 1) // EXTEND_PART
        return self._session.timers.call_at(due_ns, lambda: self.extend_until_settled(leases()))

    def _plan(self) -> None:
        """Set the timer for the lease that is due first."""
        self._leases = {token: lease for token, lease in self._leases.items() if not lease.is_over}
        self._most = max(2 * len(self._leases), KEPT_MIN)
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        if self._leases and not self._asking:
            due_ns = min(lease.until_ns - self._spare_ns(lease) for lease in self._leases.values())
            self._timer = self._session.timers.call_at(max(due_ns, self._not_before_ns), self._extend)

    @staticmethod
    def _spare_ns(lease: Lease) -> int:
        return lease.lease_ms * MS * (EXTEND_PART - 1) // EXTEND_PART

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
        self._asking += 1
        # An answer that comes when the leases have ended is of no use; that is looked at then.
        timer = self._session.timers.call_at(
            min(lease.until_ns for lease in leases), lambda: self._late(leases)
        )

        def answered(pending: Pending[PeerReply]) -> None:
            timer.cancel()
            self._asking -= 1
            self._extended(pending, leases, now_ns + lease_ms * MS)
            self._plan()

        self._session.about_jobs(message).when_done(answered)

    @staticmethod
    def _late(leases: Sequence[Lease]) -> None:
        for lease in leases:
            lease.mark_lost()

    def _extended(self, pending: Pending[PeerReply], leases: Sequence[Lease], until_ns: int) -> None:
        try:
            reply: ExtendReply = pending.result().message
        except RinglogError:
            # Tried again as long as there is time.
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
    """As many at once as one request names."""
    return [leases[at : at + JOBS_PER_REQUEST_MAX] for at in range(0, len(leases), JOBS_PER_REQUEST_MAX)]


def encode_leases(leases: Sequence[Lease]) -> tuple[bytes, bytes]:
    """Numbers and tokens as they travel."""
    return encode_u64s([lease.seq for lease in leases]), encode_u64s([lease.token for lease in leases])


def encode_u64s(numbers: Sequence[int]) -> bytes:
    """8 bytes each, little-endian."""
    return np.array(numbers, dtype="<u8").tobytes()


def new_call_number() -> int:
    """A number for one request, so that it is known when it is sent again; never 0."""
    return random.getrandbits(63) | 1
