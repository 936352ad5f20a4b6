"""Result of one claim, in columns. Job objects are created only on access to single jobs.

A worker that claims a hundred jobs, passes on their payloads and acks them together needs no object for each
job. The seqs, tokens and payloads of a claim therefore stay in ranges until then.
"""

from __future__ import annotations

import os
import threading
from array import array
from collections.abc import Callable, Iterator, Sequence
from itertools import repeat
from typing import Any, ClassVar, Generic, TypeVar, overload

import numpy as np
from numpy.typing import NDArray

from ringlog.client.leases.inline_jobs import ClaimedRecords, InlineJobs
from ringlog.client.leases.lease_extender import Lease, encode_leases, request_chunks
from ringlog.client.read.pages import Record

J = TypeVar("J")
GrantedRun = tuple[int, int, int, int]
"""(first seq, number of jobs, deliveries, token of the first job), as in the message ClaimReply."""
_NONE: NDArray[np.int64] = np.zeros(0, np.int64)
_materialize_lock = threading.Lock()
"""Guards the creation of a claim's leases, by its holder or by the thread that extends them."""


def _renew_lock() -> None:
    """Make the lock again in a forked child: the thread that may have held it exists only in the parent."""
    global _materialize_lock  # noqa: PLW0603
    _materialize_lock = threading.Lock()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_renew_lock)


class ClaimResult:
    """Leases of one claim with their records.

    Until `materialized` creates single leases, all of them are settled together or not at all.
    """

    __slots__ = (
        "_deliveries",
        "_records",
        "_runs",
        "_skipped",
        "batches",
        "deadline_ms",
        "is_over",
        "lease_ms",
        "leases",
        "ready",
        "until_ns",
    )  # fmt: skip

    def __init__(self, runs: Sequence[GrantedRun], deadline_ms: int, lease_ms: int, until_ns: int) -> None:
        self._runs = runs
        self.deadline_ms: int = deadline_ms
        self.lease_ms: int = lease_ms
        self.until_ns: int = until_ns
        self.ready: int = 0
        """Number of ready jobs that remained in the queue."""
        self.batches: list[ClaimedRecords] = []
        """Source of the records until they are created."""
        self._records: list[Record] = []
        self._deliveries: list[int] = []
        self.is_over: bool = False
        self._skipped: frozenset[int] = frozenset()
        self.leases: list[Lease] | None = None
        """Single leases, once they are created. Each then has its own state."""

    def __len__(self) -> int:
        if self.leases is not None:
            return len(self.leases)
        return len(self.batches[0]) if len(self.batches) == 1 else sum(map(len, self.batches))

    @property
    def seqs(self) -> NDArray[np.int64]:
        """(n,) seqs of the jobs, ascending. A leased job without a record was deleted meanwhile and is
        omitted."""
        if self.leases is not None:
            return np.array([lease.seq for lease in self.leases], dtype=np.int64)
        if len(self.batches) == 1:
            return self.batches[0].seqs
        return np.concatenate([_NONE, *(batch.seqs for batch in self.batches)])

    def payloads(self) -> list[bytes | None]:
        """Return the payloads of the jobs; None for a null."""
        if self.leases is not None:
            return [record.data for record in self._records]
        return [payload for batch in self.batches for payload in batch.payloads()]

    def _columns(self, seqs: NDArray[np.int64]) -> tuple[NDArray[np.uint64], NDArray[np.int64]]:
        """Return (n,) tokens and (n,) deliveries of these jobs."""
        if not self._runs:
            return _NONE.astype(np.uint64), _NONE
        if len(self._runs) == 1:
            first, _, deliveries, token = self._runs[0]
            return (seqs - first).astype(np.uint64) + np.uint64(token), np.full(len(seqs), deliveries)
        firsts, _, delivery_counts, tokens = (np.array(column) for column in zip(*self._runs, strict=True))
        at = np.searchsorted(firsts, seqs, "right") - 1
        return tokens[at].astype(np.uint64) + (seqs - firsts[at]).astype(np.uint64), delivery_counts[at]

    def entries(self) -> tuple[bytes, bytes]:
        """Encode the seqs and tokens for a message."""
        span = self._inline_span()
        if span is not None:
            first, _, _, token = self._runs[0]
            start, stop = span
            return _encode_range(start, stop), _encode_range(token + start - first, token + stop - first)
        seqs = self.seqs
        return seqs.astype("<i8").tobytes(), self._columns(seqs)[0].astype("<u8").tobytes()

    def granted_leases(self) -> list[tuple[int, int]]:
        """Return (seq, token) of every lease, including jobs without a record."""
        return [(first + n, token + n) for first, count, _, token in self._runs for n in range(count)]

    def mark_settled(self, skipped: Sequence[int]) -> None:
        """Mark all leases as settled, and those in `skipped` as lost: they had ended."""
        if self.leases is None:
            self.is_over, self._skipped = True, frozenset(skipped)
            return
        _mark_over(self.leases, frozenset(skipped))

    def mark_lost(self) -> None:
        """Mark all unsettled leases as lost: their outcome is unknown."""
        if self.leases is None:
            if not self.is_over:
                self.is_over, self._skipped = True, frozenset(self.seqs.tolist())
        else:
            for lease in self.leases:
                lease.mark_lost()

    def materialized(self) -> list[tuple[Record, Lease, int]]:
        """Return each record with its lease and delivery number. Every call returns the same leases."""
        with _materialize_lock:
            if self.leases is None:
                self._make()
        return list(zip(self._records, self.leases or (), self._deliveries, strict=True))

    def _make(self) -> None:
        self._records = [record for batch in self.batches for record in batch.records()]
        numbers, tokens, deliveries = self.columns()
        leases = list(
            map(Lease, numbers, tokens, repeat(self.deadline_ms), repeat(self.lease_ms),
                repeat(self.until_ns))
        )  # fmt: skip
        if self.is_over:
            _mark_over(leases, self._skipped)
        # In this order: other threads test `leases` first and then use it.
        self._deliveries, self.leases = deliveries, leases
        self.batches = []  # Frees the source buffers, which are much larger.

    def columns(self) -> tuple[Sequence[int], Sequence[int], list[int]]:
        """Return seq, token and delivery number of each job. Only while `leases` is None."""
        span = self._inline_span()
        if span is not None:
            start, stop = span
            first, _, deliveries, token = self._runs[0]
            token += start - first
            return range(start, stop), range(token, token + stop - start), [deliveries] * (stop - start)
        seqs = self.seqs
        tokens, delivery_counts = self._columns(seqs)
        return seqs.tolist(), tokens.tolist(), delivery_counts.tolist()

    def _inline_span(self) -> tuple[int, int] | None:
        """Return the first seq and one past the last, if the jobs were in the reply as one range; else None.

        Most claims of a single job are like this. Without NumPy they take a tenth of the time.
        """
        inline = self.batches[0] if len(self.batches) == 1 and len(self._runs) == 1 else None
        return inline.span if type(inline) is InlineJobs else None

    def unsettled(self) -> ClaimResult | list[Lease]:
        """Return the unsettled leases: this claim itself, unless single leases were created."""
        if self.leases is None and not self.is_over:
            return self
        return [lease for lease in self.leases or () if not lease.is_over]

    def leases_to_extend(self) -> list[Lease]:
        """Return the unsettled leases. Creates single leases if necessary."""
        if self.leases is None and self.is_over:
            return []
        return [lease for _, lease, _ in self.materialized() if not lease.is_over]

    def parts(self, size: int) -> list[ClaimResult]:
        """Split the claim into batches of up to `size` jobs, each settled on its own. Do not use this object
        afterwards."""
        if self.leases is not None or len(self) <= size:
            return [self]
        parts: list[ClaimResult] = []
        room = 0
        for batch in self.batches:
            start, count = 0, len(batch)
            while start < count:
                if not room:
                    parts.append(ClaimResult(self._runs, self.deadline_ms, self.lease_ms, self.until_ns))
                    room = size
                stop = min(start + room, count)
                parts[-1].batches.append(batch if stop - start == count else batch.slice_rows(start, stop))
                room -= stop - start
                start = stop
        return parts

    def is_lost_at(self, now_ns: int) -> bool:
        """Return True if all leases have ended and none was extended."""
        if self.leases is None:
            return now_ns >= self.until_ns
        return all(lease.is_lost for lease in self.leases)

    def retain_wanted(self, is_wanted: Callable[[Record], bool]) -> list[Lease]:
        """Keep the jobs whose record is wanted. Returns the leases of the others."""
        rows = self.materialized()
        wanted_rows = [each for each in rows if is_wanted(each[0])]
        left = [lease for record, lease, _ in rows if not is_wanted(record)]
        self._records = [record for record, _, _ in wanted_rows]
        self.leases = [lease for _, lease, _ in wanted_rows]
        self._deliveries = [deliveries for _, _, deliveries in wanted_rows]
        return left


class LeaseBundle:
    """Batches of one claim that are settled by one request."""

    __slots__ = ("_parts",)

    def __init__(self, parts: Sequence[ClaimResult]) -> None:
        self._parts = parts

    def __len__(self) -> int:
        return sum(map(len, self._parts))

    @property
    def until_ns(self) -> int:
        """End of the first lease, on the monotonic clock."""
        return min(part.until_ns for part in self._parts)

    def entries(self) -> tuple[bytes, bytes]:
        """Encode the seqs and tokens for a message."""
        seqs, tokens = zip(*(part.entries() for part in self._parts), strict=True)
        return b"".join(seqs), b"".join(tokens)

    def mark_settled(self, skipped: Sequence[int]) -> None:
        """Mark all leases as settled, and those in `skipped` as lost: they had ended."""
        for part in self._parts:
            part.mark_settled(skipped)

    def mark_lost(self) -> None:
        """Mark all unsettled leases as lost: their outcome is unknown."""
        for part in self._parts:
            part.mark_lost()


Leases = Sequence[Lease] | ClaimResult | LeaseBundle
"""Leases that are settled together."""


def unsettled_requests(parts: Sequence[ClaimResult]) -> list[Leases]:
    """Return the unsettled leases of these batches, in as few requests as possible."""
    unsplit: list[ClaimResult] = []
    single: list[Lease] = []
    for part in parts:
        left = part.unsettled()
        if isinstance(left, ClaimResult):
            unsplit.append(left)
        else:
            single += left
    requests: list[Leases] = []
    if unsplit:
        requests.append(unsplit[0] if len(unsplit) == 1 else LeaseBundle(unsplit))
    if single:
        requests.append(single)
    return requests


def request_parts(leases: Leases) -> Sequence[Leases]:
    """Split leases into parts of the size that one request may contain. A claim always fits into one."""
    if isinstance(leases, ClaimResult | LeaseBundle):
        return [leases] if len(leases) else []
    return request_chunks(leases)


def earliest_expiry_ns(leases: Leases) -> int:
    """Return when the first of the leases ends, on the monotonic clock."""
    if isinstance(leases, ClaimResult | LeaseBundle):
        return leases.until_ns
    return min(lease.until_ns for lease in leases)


def encode_settle_entries(leases: Leases) -> tuple[bytes, bytes]:
    """Encode the seqs and tokens of leases for a message, single ones or those of a claim."""
    if isinstance(leases, ClaimResult | LeaseBundle):
        return leases.entries()
    return encode_leases(leases)


def mark_settled(leases: Leases, skipped: bytes) -> list[int]:
    """Mark leases as settled, and the skipped ones as lost. Returns the skipped seqs."""
    skipped_seqs: list[int] = np.frombuffer(skipped, dtype="<i8").tolist() if skipped else []
    if isinstance(leases, ClaimResult | LeaseBundle):
        leases.mark_settled(skipped_seqs)
        return skipped_seqs
    _mark_over(leases, frozenset(skipped_seqs))
    return skipped_seqs


def mark_lost(leases: Leases) -> None:
    """Mark leases as lost after an unknown outcome. If they were still extended, unprocessed jobs would never
    be delivered again."""
    if isinstance(leases, ClaimResult | LeaseBundle):
        leases.mark_lost()
    else:
        for lease in leases:
            lease.mark_lost()


def _encode_range(first: int, stop: int) -> bytes:
    if stop - first == 1:
        return first.to_bytes(8, "little")
    return array("Q", range(first, stop)).tobytes()


def _mark_over(leases: Sequence[Lease], skipped: frozenset[int]) -> None:
    for lease in leases:
        if lease.seq in skipped:
            lease.mark_lost()
        lease.is_over = True


class Jobs(Sequence[J], Generic[J]):
    """Jobs of one claim, ascending: a sequence that creates Job objects on first access to single jobs.

    `payloads()` and `seqs` cover all jobs and create no Job. `queue.ack(jobs)` settles all of them at once.
    """

    __slots__ = ("_jobs", "_make", "claimed")

    def __init__(self, claimed: ClaimResult, make: Callable[[Record, Lease, int], J]) -> None:
        self.claimed: ClaimResult = claimed
        self._make = make
        self._jobs: list[J] | None = None

    @property
    def seqs(self) -> NDArray[np.int64]:
        """(n,) seqs of the jobs."""
        return self.claimed.seqs

    def payloads(self) -> list[bytes | None]:
        """Return the payloads of the jobs; None for a null."""
        return self.claimed.payloads()

    def _all(self) -> list[J]:
        if self._jobs is None:
            make = self._make
            self._jobs = [make(*each) for each in self.claimed.materialized()]
        return self._jobs

    def __len__(self) -> int:
        return len(self.claimed)

    def __iter__(self) -> Iterator[J]:
        return iter(self._all())

    @overload
    def __getitem__(self, index: int) -> J: ...

    @overload
    def __getitem__(self, index: slice) -> list[J]: ...

    def __getitem__(self, index: int | slice) -> J | list[J]:
        return self._all()[index]

    def __eq__(self, other: object) -> bool:
        return self is other or (isinstance(other, list | Jobs) and self._all() == list(other))

    __hash__: ClassVar[None]  # type: ignore[assignment]  # Python sets None, because of __eq__.

    def __repr__(self) -> str:
        return repr(self._all())


def unsplit_claim_of(jobs: Any) -> ClaimResult | None:
    """Return the claim if these are all its jobs and no single job was created; else None."""
    if not isinstance(jobs, Jobs) or jobs.claimed.leases is not None or jobs.claimed.is_over:
        return None
    return jobs.claimed
