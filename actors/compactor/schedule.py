"""When which shard gets a checkpoint. Pure.

Every shard is looked at every LOOK_NS: how much log is there that no snapshot covers? A checkpoint is due
when a full file waits, when there is much log, when something has waited long, or when an operator asks for
one. Shards take turns: who was served last is looked at last. After a failure a shard is left alone for a
while, which grows; the others are not.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from ringlog.limits import MIB

NS_PER_MS = 1_000_000
NS_PER_S = 1_000_000_000
POLL_INTERVAL_NS = 5 * NS_PER_S
LOG_BYTES = 64 * MIB
WAIT_NS = 60 * NS_PER_S
"""A closed file waits no longer than this, however small (CKP-7)."""
BACKOFF_NS_MIN = NS_PER_S
BACKOFF_NS_MAX = 60 * NS_PER_S
FULL = 0.75
"""A closed file with this part of its size in use was closed because it was full."""


@dataclass(slots=True)
class _ShardSchedule:
    poll_due_ns: int
    """When to look at it next."""
    files_since_ns: int | None = None
    """Since when closed files wait."""
    log_since_ns: int | None = None
    """Since when there is log that no snapshot covers."""
    failures: int = 0
    asked: set[int] = field(default_factory=set)
    """Operators' requests that wait for it, by ticket."""


@dataclass(frozen=True, slots=True)
class CheckpointBacklog:
    """What a shard's plan says: sizes of its closed files, and all log that no snapshot covers."""

    file_bytes: tuple[int, ...]
    log_bytes: int


class CheckpointSchedule:
    """One for all shards. Times are monotonic nanoseconds."""

    def __init__(self, shards: int, *, file_bytes: int, age_ms: int, now_ns: int) -> None:
        """`file_bytes`: size of a log file; `age_ms`: how long records may stay in the log, 0 = for ever."""
        self._shards = [_ShardSchedule(now_ns + NS_PER_S) for _ in range(shards)]
        self._file_bytes = file_bytes
        self._age_ns = age_ms * NS_PER_MS

    def next_poll_ns(self) -> int:
        """When a shard is to be looked at next."""
        return min(shard.poll_due_ns for shard in self._shards)

    def next_shard(self, now_ns: int) -> int | None:
        """The shard whose turn it is; None when it is nobody's."""
        due = min(range(len(self._shards)), key=lambda n: self._shards[n].poll_due_ns)
        return due if self._shards[due].poll_due_ns <= now_ns else None

    def must_roll(self, shard: int, now_ns: int) -> bool:
        """Is the shard to close its current file, so that what is in it can be absorbed?"""
        state = self._shards[shard]
        is_old = self._age_ns > 0 and state.log_since_ns is not None
        return bool(state.asked) or (is_old and now_ns - (state.log_since_ns or 0) >= self._age_ns)

    def is_due(self, shard: int, found: CheckpointBacklog, now_ns: int) -> bool:
        """Take note of what waits; True when a checkpoint is to be made now."""
        state = self._shards[shard]
        was_rolled = self.must_roll(shard, now_ns)
        state.poll_due_ns = now_ns + POLL_INTERVAL_NS
        state.log_since_ns = _since(state.log_since_ns, found.log_bytes, now_ns)
        state.files_since_ns = _since(state.files_since_ns, len(found.file_bytes), now_ns)
        if state.asked:
            return True
        if state.files_since_ns is None:
            return False
        is_full = max(found.file_bytes) >= FULL * self._file_bytes or found.log_bytes >= LOG_BYTES
        return was_rolled or is_full or now_ns - state.files_since_ns >= WAIT_NS

    def checkpoint_done(self, shard: int, now_ns: int) -> list[int]:
        """A checkpoint was made; returns operators' requests that waited for this shard alone."""
        state = self._shards[shard]
        state.failures, state.log_since_ns, state.files_since_ns = 0, None, None
        # What was written meanwhile may be much: look again at once, behind the others.
        state.poll_due_ns = now_ns
        asked, state.asked = state.asked, set()
        return [ticket for ticket in sorted(asked) if not self.is_pending(ticket)]

    def checkpoint_failed(self, shard: int, now_ns: int) -> list[int]:
        """It failed, or the shard could not be asked; returns the operators' requests that fail with it."""
        state = self._shards[shard]
        state.failures += 1
        state.poll_due_ns = now_ns + min(BACKOFF_NS_MIN << min(state.failures - 1, 10), BACKOFF_NS_MAX)
        asked = sorted(state.asked)
        for each in self._shards:
            each.asked.difference_update(asked)
        return asked

    def request_checkpoints(self, ticket: int, now_ns: int) -> None:
        """An operator asks for a checkpoint of every shard now."""
        for state in self._shards:
            state.asked.add(ticket)
            state.poll_due_ns = min(state.poll_due_ns, now_ns)

    def is_pending(self, ticket: int) -> bool:
        """Does this request wait for a shard?"""
        return any(ticket in state.asked for state in self._shards)


def _since(before: int | None, amount: int, now_ns: int) -> int | None:
    if not amount:
        return None
    return now_ns if before is None else before
