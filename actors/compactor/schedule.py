"""Schedule of checkpoints. Pure.

Every shard is polled every POLL_INTERVAL_NS for the amount of log that no snapshot covers. A checkpoint is
due if a full file or much log waits, if a file has waited too long, or if an operator requests it. The shard
that was served last is polled last. After a failure a shard is retried with exponential backoff; others are
not delayed.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from ringlog.limits import MIB

NS_PER_MS = 1_000_000
NS_PER_S = 1_000_000_000
POLL_INTERVAL_NS = 5 * NS_PER_S
LOG_BYTES = 64 * MIB
WAIT_NS = 60 * NS_PER_S
"""A closed file of any size waits no longer than this."""
BACKOFF_NS_MIN = NS_PER_S
BACKOFF_NS_MAX = 60 * NS_PER_S
FULL = 0.75
"""A closed file that uses at least this part of its size was closed because it was full."""


@dataclass(slots=True)
class _ShardSchedule:
    poll_due_ns: int
    """When to poll the shard next."""
    files_since_ns: int | None = None
    """Since when closed files have been waiting."""
    log_since_ns: int | None = None
    """Since when there has been log that no snapshot covers."""
    failures: int = 0
    tickets: set[int] = field(default_factory=set)
    """Tickets of the operators' requests that wait for this shard."""


@dataclass(frozen=True, slots=True)
class CheckpointBacklog:
    """Sizes of a shard's closed files in bytes, and of all log that no snapshot covers."""

    file_bytes: tuple[int, ...]
    log_bytes: int


class CheckpointSchedule:
    """Schedule for all shards. Times are monotonic nanoseconds."""

    def __init__(self, shards: int, *, file_bytes: int, age_ms: int, now_ns: int) -> None:
        """Create it. `file_bytes` is the size of a log file, `age_ms` the longest time of records in the log.

        With `age_ms` 0 records may stay in the log forever.
        """
        self._shards = [_ShardSchedule(now_ns + NS_PER_S) for _ in range(shards)]
        self._file_bytes = file_bytes
        self._age_ns = age_ms * NS_PER_MS

    def next_poll_ns(self) -> int:
        """Return when the next shard must be polled."""
        return min(shard.poll_due_ns for shard in self._shards)

    def next_shard(self, now_ns: int) -> int | None:
        """Return the shard that must be polled now, or None."""
        due = min(range(len(self._shards)), key=lambda n: self._shards[n].poll_due_ns)
        return due if self._shards[due].poll_due_ns <= now_ns else None

    def must_roll(self, shard: int, now_ns: int) -> bool:
        """Return whether the shard must close its current file, so that its records can be absorbed."""
        state = self._shards[shard]
        is_old = self._age_ns > 0 and state.log_since_ns is not None
        return bool(state.tickets) or (is_old and now_ns - (state.log_since_ns or 0) >= self._age_ns)

    def is_due(self, shard: int, found: CheckpointBacklog, now_ns: int) -> bool:
        """Record a shard's backlog; return whether its checkpoint is due now."""
        state = self._shards[shard]
        was_rolled = self.must_roll(shard, now_ns)
        state.poll_due_ns = now_ns + POLL_INTERVAL_NS
        state.log_since_ns = _since(state.log_since_ns, found.log_bytes, now_ns)
        state.files_since_ns = _since(state.files_since_ns, len(found.file_bytes), now_ns)
        if state.tickets:
            return True
        if state.files_since_ns is None:
            return False
        is_full = max(found.file_bytes) >= FULL * self._file_bytes or found.log_bytes >= LOG_BYTES
        return was_rolled or is_full or now_ns - state.files_since_ns >= WAIT_NS

    def checkpoint_done(self, shard: int, now_ns: int) -> list[int]:
        """Record a finished checkpoint; return the operators' requests that waited only for this shard."""
        state = self._shards[shard]
        state.failures, state.log_since_ns, state.files_since_ns = 0, None, None
        # Much may have been written meanwhile: poll at once, after the other shards.
        state.poll_due_ns = now_ns
        tickets, state.tickets = state.tickets, set()
        return [ticket for ticket in sorted(tickets) if not self.is_pending(ticket)]

    def checkpoint_failed(self, shard: int, now_ns: int) -> list[int]:
        """Record a failed poll or checkpoint; return the operators' requests that fail with it."""
        state = self._shards[shard]
        state.failures += 1
        state.poll_due_ns = now_ns + min(BACKOFF_NS_MIN << min(state.failures - 1, 10), BACKOFF_NS_MAX)
        tickets = sorted(state.tickets)
        for each in self._shards:
            each.tickets.difference_update(tickets)
        return tickets

    def request_checkpoints(self, ticket: int, now_ns: int) -> None:
        """Request a checkpoint of every shard now."""
        for state in self._shards:
            state.tickets.add(ticket)
            state.poll_due_ns = min(state.poll_due_ns, now_ns)

    def is_requested(self, shard: int) -> bool:
        """Return whether an operator waits for this shard's checkpoint."""
        return bool(self._shards[shard].tickets)

    def is_pending(self, ticket: int) -> bool:
        """Return whether a request waits for a shard."""
        return any(ticket in state.tickets for state in self._shards)


def _since(before: int | None, amount: int, now_ns: int) -> int | None:
    if not amount:
        return None
    return now_ns if before is None else before
