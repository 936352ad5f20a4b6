"""The compactor's decisions: which shard is looked at or gets a checkpoint, which operator is answered. Pure.

K1  a request for a checkpoint is answered once: when each shard had one since, or when one of them failed.
K2  one shard is looked at, or gets a checkpoint, at a time.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from actors.compactor.schedule import CheckpointBacklog, CheckpointSchedule
from ringlog.contract import ControlReceived, DrainRequested, Reply, Stop, Tick
from ringlog.envelope import messages as m
from ringlog.errors import ExitCode, InvariantViolation, Refused, RinglogError, ShuttingDown, Status


@dataclass(frozen=True, slots=True)
class PollShard:
    """Effect: ask a shard for its plan; with `roll` it closes its file first. Then `Looked` or `Failed`."""

    shard: int
    roll: bool


@dataclass(frozen=True, slots=True)
class MakeCheckpoint:
    """Effect: make one of a shard with so much log that no snapshot covers. `Made` or `Failed` follows."""

    shard: int
    log_bytes: int


@dataclass(frozen=True, slots=True)
class ListFiles:
    """Effect: find the files of a consistent copy. `FilesListed` follows."""

    tickets: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class MakeShutdownCheckpoints:
    """Effect: make the checkpoints that shorten the next start, as far as there is time."""


Effect = PollShard | MakeCheckpoint | ListFiles | MakeShutdownCheckpoints | Reply | Stop


@dataclass(frozen=True, slots=True)
class ShardPolled:
    """Event: what a shard's plan says."""

    shard: int
    backlog: CheckpointBacklog


@dataclass(frozen=True, slots=True)
class CheckpointFinished:
    """Event: a shard's checkpoint is made."""

    shard: int


@dataclass(frozen=True, slots=True)
class CheckpointFailed:
    """Event: a shard could not be asked, or its checkpoint was not made."""

    shard: int
    error: RinglogError


@dataclass(frozen=True, slots=True)
class FilesListed:
    """Event: the files of a copy, below the data directory, or why they are not known."""

    tickets: tuple[int, ...]
    files: list[str] | RinglogError


class Compactor:
    """One incarnation's decisions. Times come in Tick."""

    def __init__(self, shards: int, *, file_bytes: int, age_ms: int, now_ns: int) -> None:
        """`file_bytes` and `age_ms` as in Schedule."""
        self._schedule = CheckpointSchedule(shards, file_bytes=file_bytes, age_ms=age_ms, now_ns=now_ns)
        self._now_ns = now_ns
        self._clients: dict[int, tuple[bytes, int]] = {}
        """Operators' requests that wait: ticket -> (reply address, correlation id)."""
        self._tickets = 0
        self._busy_with: int | None = None
        """Shard of which word is awaited."""

    def handle(self, events: Sequence[Any]) -> list[Effect]:
        """Take events in order; returns effects in the order to perform them."""
        effects: list[Effect] = []
        # Not behind what came of the last look: requests and the stop are taken in between.
        may_look, is_draining = self._busy_with is None, False
        for event in events:
            may_look &= not isinstance(
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
                    effects += self._looked(event)
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
        number = self._schedule.next_shard(self._now_ns) if may_look else None
        if number is not None:
            self._busy_with = number
            effects.append(PollShard(number, self._schedule.must_roll(number, self._now_ns)))
        return effects

    def next_deadline_ns(self) -> int:
        """When a shard is to be looked at next."""
        return self._schedule.next_poll_ns()

    def check(self) -> None:
        """Assert K1: each request that waits, waits for a shard."""
        for ticket in self._clients:
            if not self._schedule.is_pending(ticket):
                raise InvariantViolation("a request waits for no shard", ticket=ticket)

    def _looked(self, event: ShardPolled) -> list[Effect]:
        if self._schedule.is_due(event.shard, event.backlog, self._now_ns):
            return [MakeCheckpoint(event.shard, event.backlog.log_bytes)]
        self._busy_with = None
        return []

    def _drain(self) -> list[Effect]:
        stopping = ShuttingDown("the engine is stopping")
        refused = [self._refused(ticket, stopping) for ticket in list(self._clients)]
        return [MakeShutdownCheckpoints(), *refused, Stop(ExitCode.OK, "asked to stop")]

    def _answered(self, ticket: int, files: list[str] | RinglogError) -> Reply:
        if isinstance(files, RinglogError):
            return self._refused(ticket, files)
        client, corr = self._clients.pop(ticket)
        return Reply(client, corr, m.CheckpointMade(files))

    def _refused(self, ticket: int, error: RinglogError) -> Reply:
        client, corr = self._clients.pop(ticket)
        status = error.status if isinstance(error, Refused) else Status.INTERNAL
        return Reply(client, corr, m.ErrorReply(int(status), error.message, {"reason": str(error)}))
