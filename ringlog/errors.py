"""The one error tree.

RinglogError                      code, detail, retriable, outcome
├─ UsageError                     the caller's argument or handle is wrong
│  ├─ CalledInside                a reader used by a signal handler that interrupted the reader
│  └─ WrongLoop                   an asyncio handle used from another loop
├─ Interrupted                    an exception from outside hit the client in the middle of its work
├─ ConfigError                    a setting is unknown, unreadable or impossible
├─ KernelMissing                  this installation lacks its compiled kernel
├─ StartRefused                   the engine must not start; says why
├─ Backpressure                   the client's own buffer is full
├─ ConnectionTrouble
│  ├─ NotConnected                no engine answers there
│  ├─ RequestTimeout              the engine did not answer in time; outcome unknown
│  ├─ ShardsChanged               within the client: what was asked has to be asked elsewhere
│  ├─ AuthFailed                  the engine does not know this key
│  └─ VersionMismatch             the engine is of a release with another protocol
├─ Refused                        the engine said no; one subclass for each code
│  ├─ InvalidRequest  BatchTooLarge  RecordTooLarge  Unauthorized  Forbidden
│  ├─ TopicNotFound  TopicIncompatible  TopicNotEmpty  StaleEpoch
│  ├─ PayloadTooLarge  TopicFull  Throttled  RouterNotFound  RouterCycle  NotAQueue
│  ├─ GroupNotFound  GroupIncompatible  ProducerFenced
│  ├─ Internal  ShuttingDown  StorageReadOnly  TopicHalted
│  └─ NotReady
│     └─ ColdUnavailable          the cold tier does not answer; nothing is lost
├─ LeaseLost                      a job is held by somebody else now, or by nobody
├─ CorruptData                    stored bytes fail their checksum; says which
├─ FrameInvalid                   bytes are not a frame; says why and where
├─ RingError                      a ring's shared words make no sense, or it was closed
├─ DiskError                      a call that changes the disk failed
└─ InvariantViolation             we are wrong; the incarnation ends
"""

from __future__ import annotations

import errno
from enum import IntEnum
from typing import Any, ClassVar, Literal

Outcome = Literal["not_applied", "unknown"]


class RinglogError(Exception):
    """Root of the tree. `detail` holds the facts, the text prints them."""

    code: ClassVar[str] = "internal"
    retriable: bool = False

    def __init__(self, message: str, *, outcome: Outcome = "not_applied", **detail: Any) -> None:
        super().__init__(message)
        self.message = message
        self.outcome: Outcome = outcome
        self.detail = detail

    def __str__(self) -> str:
        if not self.detail:
            return self.message
        facts = ", ".join(f"{name}={value!r}" for name, value in self.detail.items())
        return f"{self.message} ({facts})"

    def __reduce__(self) -> tuple[Any, ...]:
        # Keyword-only facts do not survive Exception's own pickling, and errors cross processes.
        return (_rebuild, (type(self), self.message, self.outcome, self.detail))


def _rebuild(
    kind: type[RinglogError], message: str, outcome: Outcome, detail: dict[str, Any]
) -> RinglogError:
    return kind(message, outcome=outcome, **detail)


class UsageError(RinglogError):
    """The caller's argument or handle is wrong; nothing was sent."""

    code = "usage"


class CalledInside(UsageError):
    """A signal handler used a client that it had interrupted in the middle of its work, not while it waited,
    or a reader of which it had interrupted a call."""

    code = "called_inside"


class WrongLoop(UsageError):
    """An asyncio handle was used from a loop it does not belong to."""


class Interrupted(RinglogError):
    """An exception from outside (KeyboardInterrupt) hit the client in the middle of its work and ended it.

    What it had in hand may be half done: what was open has an unknown outcome. Make a new client.
    """

    code = "interrupted"


class ConfigError(RinglogError):
    """A setting is unknown, unreadable or impossible; names it and the limit."""

    code = "config"


class KernelMissing(RinglogError, ImportError):
    """This installation of ringlog has no compiled kernel, or one that cannot be loaded here."""

    code = "kernel_missing"


class StartRefused(RinglogError):
    """The engine must not start on this directory or host; says why."""

    code = "start_refused"


class Backpressure(RinglogError):
    """The client's own buffer stayed full for as long as the caller was willing to wait."""

    code = "backpressure"
    retriable = True


class ConnectionTrouble(RinglogError):
    """The engine could not be asked, or did not answer."""

    code = "connection"
    retriable = True


class NotConnected(ConnectionTrouble):
    """No engine answers at this address."""


class RequestTimeout(ConnectionTrouble):
    """The engine did not answer in time; whether it acted is unknown."""


class ShardsChanged(ConnectionTrouble):
    """The engine was started with another number of shards while this was open: whoever has its topic now is
    asked again. Within the client alone."""


class AuthFailed(ConnectionTrouble):
    """The engine does not admit this key."""

    retriable = False


class VersionMismatch(ConnectionTrouble):
    """Client and engine speak different versions of the protocol; install the same release for both."""

    retriable = False


class Status(IntEnum):
    """Codes as they travel in settlements and replies; the number is the wire value."""

    OK = 0
    INVALID_REQUEST = 1
    BATCH_TOO_LARGE = 2
    RECORD_TOO_LARGE = 3
    UNAUTHORIZED = 4
    FORBIDDEN = 5
    TOPIC_NOT_FOUND = 6
    TOPIC_EXISTS_INCOMPATIBLE = 7
    TOPIC_NOT_EMPTY = 8
    STALE_EPOCH = 9
    PAYLOAD_TOO_LARGE = 10
    TOPIC_FULL = 11
    THROTTLED = 12
    INTERNAL = 13
    NOT_READY = 14
    SHUTTING_DOWN = 15
    CORRUPT_FRAME = 16
    STORAGE_READ_ONLY = 17
    ROUTER_NOT_FOUND = 18
    ROUTER_CYCLE = 19
    NOT_A_QUEUE = 20
    TOPIC_HALTED = 21
    PRODUCER_FENCED = 33
    GROUP_NOT_FOUND = 81
    GROUP_INCOMPATIBLE = 82


class Refused(RinglogError):
    """The engine understood and said no; nothing of the request was applied."""

    status: ClassVar[Status] = Status.INTERNAL
    http: ClassVar[int] = 500


class InvalidRequest(Refused):
    """Malformed or out-of-range request."""

    code, status, http = "invalid_request", Status.INVALID_REQUEST, 400


class BatchTooLarge(Refused):
    """More records in one write than the limit."""

    code, status, http = "batch_too_large", Status.BATCH_TOO_LARGE, 400


class RecordTooLarge(Refused):
    """One record exceeds the record limit, or could never fit the topic's cap."""

    code, status, http = "record_too_large", Status.RECORD_TOO_LARGE, 400


class Unauthorized(Refused):
    """No or unknown credential."""

    code, status, http = "unauthorized", Status.UNAUTHORIZED, 401


class Forbidden(Refused):
    """The credential does not reach this operation or this topic."""

    code, status, http = "forbidden", Status.FORBIDDEN, 403


class TopicNotFound(Refused):
    """No such topic."""

    code, status, http = "topic_not_found", Status.TOPIC_NOT_FOUND, 404


class RouterNotFound(Refused):
    """No such router."""

    code, status, http = "router_not_found", Status.ROUTER_NOT_FOUND, 404


class RouterCycle(Refused):
    """The router would close a cycle; `cycle` names the topics along it."""

    code, status, http = "router_cycle", Status.ROUTER_CYCLE, 409


class NotAQueue(Refused):
    """The topic is a log: nothing is claimed there."""

    code, status, http = "not_a_queue", Status.NOT_A_QUEUE, 409


class GroupNotFound(Refused):
    """The topic has no such consumer group."""

    code, status, http = "group_not_found", Status.GROUP_NOT_FOUND, 404


class GroupIncompatible(Refused):
    """The consumer group is there in another mode or with other settings (`differences`), or the request is
    one for the other mode."""

    code, status, http = "group_incompatible", Status.GROUP_INCOMPATIBLE, 409


class ProducerFenced(Refused):
    """The producer's name belongs to one that was opened later, here or in another process: this one is over.

    `outcome` is `unknown` for a frame that may have been stored before that.
    """

    code, status, http = "producer_fenced", Status.PRODUCER_FENCED, 409


class TopicIncompatible(Refused):
    """The topic exists with another type, or with other settings than were asked for; `differences` maps each
    to (existing, asked for)."""

    code, status, http = "topic_exists_incompatible", Status.TOPIC_EXISTS_INCOMPATIBLE, 409


class TopicNotEmpty(Refused):
    """Delete with if_empty met records."""

    code, status, http = "topic_not_empty", Status.TOPIC_NOT_EMPTY, 409


class StaleEpoch(Refused):
    """The frame or cursor belongs to an earlier life of the topic."""

    code, status, http = "stale_epoch", Status.STALE_EPOCH, 409


class PayloadTooLarge(Refused):
    """The whole request is larger than the limit."""

    code, status, http = "payload_too_large", Status.PAYLOAD_TOO_LARGE, 413


class TopicFull(Refused):
    """A `discard: reject` topic is at its cap."""

    code, status, http = "topic_full", Status.TOPIC_FULL, 422


class Throttled(Refused):
    """A limit or a full intake; retry after `retry_after_ms`."""

    code, status, http = "throttled", Status.THROTTLED, 429
    retriable = True


class Internal(Refused):
    """The engine failed; `reason` says at what."""

    code, status, http = "internal", Status.INTERNAL, 500
    retriable = True


class NotReady(Refused):
    """Recovering or restarting."""

    code, status, http = "not_ready", Status.NOT_READY, 503
    retriable = True


SHARD_FAILED = "shard_failed"
"""Reason of NotReady about a shard that was given up: not waiting helps, but the engine's next start."""


def is_shard_failed(error: BaseException) -> bool:
    """The shard this is about was given up (PR-12)."""
    return isinstance(error, NotReady) and error.detail.get("reason") == SHARD_FAILED


class ColdUnavailable(NotReady):
    """The cold tier's store did not answer or could not do it (TI-10); nothing is known to be lost.

    On the wire it is `not_ready` with `reason: "cold_unavailable"`.
    """

    def __init__(self, message: str, *, outcome: Outcome = "not_applied", **detail: Any) -> None:
        super().__init__(message, outcome=outcome, **{"reason": "cold_unavailable", **detail})


class ShuttingDown(Refused):
    """Draining."""

    code, status, http = "shutting_down", Status.SHUTTING_DOWN, 503
    retriable = True


class CorruptFrame(Refused):
    """A frame failed its checksum or its structure on arrival."""

    code, status, http = "corrupt_frame", Status.CORRUPT_FRAME, 400


class StorageReadOnly(Refused):
    """The engine's directory takes no writes at present; what is stored can be read. Try again later.

    `outcome` is `unknown` for a frame that an earlier life of the shard may have written.
    """

    code, status, http = "storage_read_only", Status.STORAGE_READ_ONLY, 503
    retriable = True


class TopicHalted(Refused):
    """A file that holds records of the topic is missing or unreadable, so its shard serves nothing of it.

    Nothing is lost: when the file is back at a later start of the engine, everything is there. `part` names
    the file. `outcome` is `unknown` for a write that may have been stored before that start.
    """

    code, status, http = "topic_halted", Status.TOPIC_HALTED, 503
    TEXT: ClassVar[str] = (
        "the topic is halted because a file with its records is missing or unreadable: put the file back and"
        " restart the engine, or give up its records with `ringlog repair --write` or with one start under"
        " wal.corruption=truncate"
    )


class LeaseLost(RinglogError):
    """The lease of a job ended before it was acknowledged; the job is handed out again, or was."""

    code = "lease_lost"


class CorruptData(RinglogError):
    """Stored bytes fail their checksum; detail names topic, seq, file and offset as far as known."""

    code = "corrupt_data"


class FrameInvalid(RinglogError):
    """Bytes are not a frame; `reason` is a short stable phrase, `offset` is in bytes."""

    code = "frame_invalid"

    def __init__(
        self, reason: str, *, offset: int = 0, outcome: Outcome = "not_applied", **detail: Any
    ) -> None:
        super().__init__(reason, outcome=outcome, offset=offset, **detail)
        self.reason = reason
        self.offset = offset

    def __reduce__(self) -> tuple[Any, ...]:
        return (_rebuild, (type(self), self.message, self.outcome, self.detail))


class RingError(RinglogError):
    """A ring's shared words make no sense, belong to another life, or the ring was closed."""

    code = "ring"


_UNWRITABLE = frozenset({errno.EROFS, errno.EACCES, errno.ENOSPC, errno.EDQUOT})


class DiskError(RinglogError):
    """A call that changes the disk failed; detail names call, path and errno."""

    code = "disk"

    @property
    def errno(self) -> int:
        """The operating system's error number, or 0 when it gave none."""
        return int(self.detail.get("errno", 0))

    @property
    def is_unwritable(self) -> bool:
        """Does the directory refuse new bytes, rather than the device fail?"""
        return self.errno in _UNWRITABLE and not self.detail.get("holder")


class InvariantViolation(RinglogError):
    """Something that must be true is not. The process tells its story and dies."""

    code = "invariant"


ERRORS_BY_STATUS: dict[int, type[Refused]] = {
    kind.status: kind
    for kind in (
        InvalidRequest, BatchTooLarge, RecordTooLarge, Unauthorized, Forbidden, TopicNotFound,
        TopicIncompatible, TopicNotEmpty, StaleEpoch, PayloadTooLarge, TopicFull, Throttled,
        Internal, NotReady, ShuttingDown, CorruptFrame, StorageReadOnly, RouterNotFound, RouterCycle,
        NotAQueue, GroupNotFound, GroupIncompatible, ProducerFenced, TopicHalted,
    )
}  # fmt: skip


def error_from_status(
    status: int, message: str, detail: dict[str, Any], outcome: Outcome = "not_applied"
) -> Refused:
    """Build the error for a wire status; an unknown status becomes Internal and keeps its number."""
    kind = ERRORS_BY_STATUS.get(status)
    if kind is None:
        return Internal(message, outcome=outcome, unknown_status=status, **detail)
    if kind is NotReady and detail.get("reason") == "cold_unavailable":
        kind = ColdUnavailable
    return kind(message, outcome=outcome, **detail)


class ExitCode(IntEnum):
    """How an actor's process says why it ended; the supervisor decides by it."""

    OK = 0
    CRASH = 1
    CANNOT_BOOT = 70
    FENCED = 71
    INVARIANT = 72
    DISK_FAILED = 73
    CORRUPT = 74
    ORPHANED = 75
    READ_ONLY = 76
    """Its directory takes no writes: a successor may serve reads until it does."""
