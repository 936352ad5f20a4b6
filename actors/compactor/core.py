"""The compactor's decisions: which shard is polled or gets a checkpoint, and replies to operators. Pure.

- An operator's request gets one reply: after each shard had a checkpoint since, or after one of them failed.
- One shard at a time is polled or gets a checkpoint.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from ringlog.actors.compactor.schedule import CheckpointBacklog, CheckpointSchedule
from ringlog.contract import ControlReceived, DrainRequested, Reply, Stop, Tick
from ringlog.envelope import messages as m
from ringlog.errors import ExitCode, InvariantViolation, Refused, RinglogError, ShuttingDown, Status


@dataclass(frozen=True, slots=True)
class PollShard:
    """Effect: request a shard's plan; with `roll` the shard closes its file first.

    `ShardPolled` or `CheckpointFailed` follows.
    """

    shard: int
    roll: bool


@dataclass(frozen=True, slots=True)
class MakeCheckpoint:
    """Effect: make a checkpoint of a shard with `log_bytes` of log that no snapshot covers.

    `CheckpointFinished` or `CheckpointFailed` follows.
    """

    shard: int
    log_bytes: int
    is_requested: bool = False
    """An operator waits for it."""


@dataclass(frozen=True, slots=True)
class ListFiles:
    """Effect: list the files of a consistent copy. `FilesListed` follows."""

    tickets: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class MakeShutdownCheckpoints:
    """Effect: make the checkpoints that shorten the next start, as far as time permits."""


Effect = PollShard | MakeCheckpoint | ListFiles | MakeShutdownCheckpoints | Reply | Stop


@dataclass(frozen=True, slots=True)
class ShardPolled:
    """Event: a shard's plan was received."""

    shard: int
    backlog: CheckpointBacklog


@dataclass(frozen=True, slots=True)
class CheckpointFinished:
    """Event: a shard's checkpoint is finished."""

    shard: int


@dataclass(frozen=True, slots=True)
class CheckpointFailed:
    """Event: a shard did not reply, or its checkpoint failed."""

    shard: int
    error: RinglogError


@dataclass(frozen=True, slots=True)
class FilesListed:
    """Event: the files of a copy, relative to the data directory, or the error."""

    tickets: tuple[int, ...]
    files: list[str] | RinglogError


class Compactor:
    """Decisions of one incarnation. Tick events carry the time."""

    def __init__(self, shards: int, *, file_bytes: int, age_ms: int, now_ns: int) -> None:
        """Create the core. `file_bytes` and `age_ms` are as in CheckpointSchedule."""
        self._schedule = CheckpointSchedule(shards, file_bytes=file_bytes, age_ms=age_ms, now_ns=now_ns)
        self._now_ns = now_ns
        self._clients: dict[int, tuple[bytes, int]] = {}
        """Waiting requests of operators: ticket -> (reply address, correlation id)."""
        self._tickets = 0
        self._busy_with: int | None = None
        """Shard whose poll or checkpoint is in progress."""

    def handle(self, events: Sequence[Any]) -> list[Effect]:
        """Process events in order and return the effects in the order to perform them."""
        effects: list[Effect] = []
        # No poll directly after a result: the shell first receives requests and the stop signal.
        may_poll, is_draining = self._busy_with is None, False
        for event in events:
            may_poll &= not isinstance(
                event, ShardPolled | CheckpointFinished | CheckpointFailed | FilesListed
            )
            match event:
                case Tick():
                    self._now_ns = event.monotonic_ns
                case ControlReceived():
                    self._tickets += 1
                    self._clients[self._tickets] = event.client, event.corr
                    self._schedule.request_checkpoints(self._tickets, self._now_ns)
                case ShardPolled():
                    effects += self._on_polled(event)
                case CheckpointFinished():
                    self._busy_with = None
                    tickets = self._schedule.checkpoint_done(event.shard, self._now_ns)
                    if tickets:
                        effects.append(ListFiles(tuple(tickets)))
                case CheckpointFailed():
                    self._busy_with = None
                    tickets = self._schedule.checkpoint_failed(event.shard, self._now_ns)
                    effects += [self._refused(ticket, event.error) for ticket in tickets]
                case FilesListed():
                    effects += [self._answered(ticket, event.files) for ticket in event.tickets]
                case DrainRequested():
                    is_draining = True
                case _:
                    raise InvariantViolation("not an event of the compactor", event=type(event).__name__)
        if is_draining:
            return [*effects, *self._drain()]
        number = self._schedule.next_shard(self._now_ns) if may_poll else None
        if number is not None:
            self._busy_with = number
            effects.append(PollShard(number, self._schedule.must_roll(number, self._now_ns)))
        return effects

    def next_deadline_ns(self) -> int:
        """Return the time in ns at which the next shard must be polled."""
        return self._schedule.next_poll_ns()

    def check(self) -> None:
        """Check that each waiting request waits for at least one shard."""
        for ticket in self._clients:
            if not self._schedule.is_pending(ticket):
                raise InvariantViolation("a request waits for no shard", ticket=ticket)

    def _on_polled(self, event: ShardPolled) -> list[Effect]:
        if self._schedule.is_due(event.shard, event.backlog, self._now_ns):
            is_requested = self._schedule.is_requested(event.shard)
            return [MakeCheckpoint(event.shard, event.backlog.log_bytes, is_requested)]
        self._busy_with = None
        return []

    def _drain(self) -> list[Effect]:
        stopping = ShuttingDown("the engine is stopping")
        refused = [self._refused(ticket, stopping) for ticket in list(self._clients)]
        return [MakeShutdownCheckpoints(), *refused, Stop(ExitCode.OK, "stop requested")]

    def _answered(self, ticket: int, files: list[str] | RinglogError) -> Reply:
        if isinstance(files, RinglogError):
            return self._refused(ticket, files)
        client, corr = self._clients.pop(ticket)
        return Reply(client, corr, m.CheckpointMade(files))

    def _refused(self, ticket: int, error: RinglogError) -> Reply:
        client, corr = self._clients.pop(ticket)
        status = error.status if isinstance(error, Refused) else Status.INTERNAL
        return Reply(client, corr, m.ErrorReply(int(status), error.message, {"reason": str(error)}))
