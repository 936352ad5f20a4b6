"""All errors of ringlog, in one tree.

RinglogError                      code, detail, retriable, outcome
├─ UsageError                     an argument or a handle of the caller is wrong
│  ├─ CalledInside                a signal handler used a client that it had interrupted inside its own code
│  └─ WrongLoop                   an asyncio handle was used on another event loop
├─ Interrupted                    an exception from outside hit the client inside its own code
├─ ConfigError                    a setting is unknown, unreadable or impossible
├─ KernelMissing                  the installation has no usable compiled kernel
├─ StartRefused                   the engine must not start here
├─ Backpressure                   the producer's buffer is full
├─ ConnectionTrouble              the engine cannot be reached, or did not reply
│  ├─ NotConnected                no engine answers at the address
│  ├─ RequestTimeout              the engine did not reply in time; the outcome is unknown
│  ├─ ShardsChanged               internal to the client: the number of shards has changed
│  ├─ AuthFailed                  the engine does not accept the client's key
│  └─ VersionMismatch             client and engine have different protocol versions
├─ Refused                        the engine refused the request; one subclass for each code
│  ├─ InvalidRequest  BatchTooLarge  RecordTooLarge  Unauthorized  Forbidden
│  ├─ TopicNotFound  TopicIncompatible  TopicNotEmpty  StaleEpoch
│  ├─ PayloadTooLarge  TopicFull  Throttled  RouterNotFound  RouterCycle  NotAQueue
│  ├─ GroupNotFound  GroupIncompatible  ProducerFenced
│  ├─ Internal  ShuttingDown  CorruptFrame  StorageReadOnly  TopicHalted
│  └─ NotReady                    the shard recovers, restarts, or was given up
│     └─ ColdUnavailable          the cold tier does not answer; no record is lost
├─ LeaseLost                      the lease of a job ended before the job was settled
├─ CorruptData                    stored bytes fail their checksum
├─ FrameInvalid                   bytes are not a valid frame
├─ RingError                      a ring's header is corrupt, or the ring is closed
├─ DiskError                      a call that changes the disk failed
└─ InvariantViolation             a process found its own state inconsistent and exits
"""

from __future__ import annotations

import errno
from enum import IntEnum
from typing import Any, ClassVar, Literal

Outcome = Literal["not_applied", "unknown"]


class RinglogError(Exception):
    """Base class of all errors of ringlog.

    Attributes:
        code: Stable text for programs and logs.
        message: What was wrong, what was expected, and what to do.
        detail: The facts by name: values, limits, names. `str(error)` appends them to the message.
        retriable: Whether the same call may succeed later.
        outcome: `not_applied`: the operation never takes effect. `unknown`: it may have taken effect.
    """

    code: ClassVar[str] = "internal"
    retriable: ClassVar[bool] = False

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
        # Exception's own pickling loses keyword-only arguments, and errors are sent between processes.
        return (_rebuild, (type(self), self.message, self.outcome, self.detail))


def _rebuild(
    kind: type[RinglogError], message: str, outcome: Outcome, detail: dict[str, Any]
) -> RinglogError:
    return kind(message, outcome=outcome, **detail)


class UsageError(RinglogError):
    """An argument or a handle of the caller is wrong. The client sent nothing."""

    code = "usage"


class CalledInside(UsageError):
    """A signal handler used a client that it had interrupted inside the client's own code.

    The same holds for a reader, if the handler interrupted one of its calls. A handler that interrupts only a
    wait of the client may use it.
    """

    code = "called_inside"


class WrongLoop(UsageError):
    """An asyncio handle was used on another event loop than its own, or without a running event loop."""


class Interrupted(RinglogError):
    """An exception from outside, such as KeyboardInterrupt, hit the client inside its own code.

    The client is closed. Operations that were in flight have an unknown outcome. Create a new client.
    """

    code = "interrupted"


class ConfigError(RinglogError):
    """A setting is unknown, unreadable or impossible. The text names the setting and the limit."""

    code = "config"


class KernelMissing(RinglogError, ImportError):
    """The installation has no compiled kernel, or the kernel cannot be loaded on this host."""

    code = "kernel_missing"


class StartRefused(RinglogError):
    """The engine must not start on this directory or host. The text names the reason and the remedy."""

    code = "start_refused"


class Backpressure(RinglogError):
    """The producer's buffer stayed full for longer than the caller allowed."""

    code = "backpressure"
    retriable = True


class ConnectionTrouble(RinglogError):
    """The engine cannot be reached, or did not reply. Base class of connection errors."""

    code = "connection"
    retriable = True


class NotConnected(ConnectionTrouble):
    """No engine answers at the address."""


class RequestTimeout(ConnectionTrouble):
    """The engine did not reply in time. For a write, `outcome` is `unknown`."""


class ShardsChanged(ConnectionTrouble):
    """The engine restarted with another number of shards while this connection was open.

    Internal to the client: it repeats the request at the shard that now owns the topic.
    """


class AuthFailed(ConnectionTrouble):
    """The engine does not accept the client's key."""

    retriable = False


class VersionMismatch(ConnectionTrouble):
    """Client and engine have different protocol versions. Install the same release on both sides."""

    retriable = False


class Status(IntEnum):
    """Status codes in settlements and replies. The number is the value on the wire."""

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
    """The engine refused the request. Nothing of it was applied, unless `outcome` is `unknown`.

    `status` is the number on the wire, `http` the corresponding HTTP status.
    """

    status: ClassVar[Status] = Status.INTERNAL
    http: ClassVar[int] = 500


class InvalidRequest(Refused):
    """An argument is malformed, out of range or not allowed here. `detail` names the field and the limit."""

    code: ClassVar[str] = "invalid_request"
    status: ClassVar[Status] = Status.INVALID_REQUEST
    http: ClassVar[int] = 400


class BatchTooLarge(Refused):
    """One write has more records than the limit."""

    code: ClassVar[str] = "batch_too_large"
    status: ClassVar[Status] = Status.BATCH_TOO_LARGE
    http: ClassVar[int] = 400


class RecordTooLarge(Refused):
    """One record exceeds the limit on records, or can never fit the topic's cap."""

    code: ClassVar[str] = "record_too_large"
    status: ClassVar[Status] = Status.RECORD_TOO_LARGE
    http: ClassVar[int] = 400


class Unauthorized(Refused):
    """The connection has no known key."""

    code: ClassVar[str] = "unauthorized"
    status: ClassVar[Status] = Status.UNAUTHORIZED
    http: ClassVar[int] = 401


class Forbidden(Refused):
    """The key does not permit this operation, or not on this topic."""

    code: ClassVar[str] = "forbidden"
    status: ClassVar[Status] = Status.FORBIDDEN
    http: ClassVar[int] = 403


class TopicNotFound(Refused):
    """The topic does not exist."""

    code: ClassVar[str] = "topic_not_found"
    status: ClassVar[Status] = Status.TOPIC_NOT_FOUND
    http: ClassVar[int] = 404


class RouterNotFound(Refused):
    """The router does not exist."""

    code: ClassVar[str] = "router_not_found"
    status: ClassVar[Status] = Status.ROUTER_NOT_FOUND
    http: ClassVar[int] = 404


class RouterCycle(Refused):
    """The router would close a cycle. `detail["cycle"]` lists its topics."""

    code: ClassVar[str] = "router_cycle"
    status: ClassVar[Status] = Status.ROUTER_CYCLE
    http: ClassVar[int] = 409


class NotAQueue(Refused):
    """A queue operation names a topic of type `log`."""

    code: ClassVar[str] = "not_a_queue"
    status: ClassVar[Status] = Status.NOT_A_QUEUE
    http: ClassVar[int] = 409


class GroupNotFound(Refused):
    """The topic has no such consumer group."""

    code: ClassVar[str] = "group_not_found"
    status: ClassVar[Status] = Status.GROUP_NOT_FOUND
    http: ClassVar[int] = 404


class GroupIncompatible(Refused):
    """The consumer group has another mode or other settings, or the request needs the other mode.

    `detail["differences"]` maps each differing setting to (existing, requested).
    """

    code: ClassVar[str] = "group_incompatible"
    status: ClassVar[Status] = Status.GROUP_INCOMPATIBLE
    http: ClassVar[int] = 409


class ProducerFenced(Refused):
    """A newer producer with the same name took over. This producer can no longer write.

    `outcome` is `unknown` for a frame that may have been stored before the takeover.
    """

    code: ClassVar[str] = "producer_fenced"
    status: ClassVar[Status] = Status.PRODUCER_FENCED
    http: ClassVar[int] = 409


class TopicIncompatible(Refused):
    """The topic exists with another type or other settings than requested.

    `detail["differences"]` maps each differing setting to (existing, requested).
    """

    code: ClassVar[str] = "topic_exists_incompatible"
    status: ClassVar[Status] = Status.TOPIC_EXISTS_INCOMPATIBLE
    http: ClassVar[int] = 409


class TopicNotEmpty(Refused):
    """A delete with `if_empty` found records."""

    code: ClassVar[str] = "topic_not_empty"
    status: ClassVar[Status] = Status.TOPIC_NOT_EMPTY
    http: ClassVar[int] = 409


class StaleEpoch(Refused):
    """The frame or cursor belongs to an earlier epoch: the topic was deleted and created again."""

    code: ClassVar[str] = "stale_epoch"
    status: ClassVar[Status] = Status.STALE_EPOCH
    http: ClassVar[int] = 409


class PayloadTooLarge(Refused):
    """The whole request exceeds the size limit."""

    code: ClassVar[str] = "payload_too_large"
    status: ClassVar[Status] = Status.PAYLOAD_TOO_LARGE
    http: ClassVar[int] = 413


class TopicFull(Refused):
    """The topic is at its cap and has `discard = "reject"`."""

    code: ClassVar[str] = "topic_full"
    status: ClassVar[Status] = Status.TOPIC_FULL
    http: ClassVar[int] = 422


class Throttled(Refused):
    """A limit is reached, or the engine is under pressure. Retry after `detail["retry_after_ms"]`."""

    code: ClassVar[str] = "throttled"
    status: ClassVar[Status] = Status.THROTTLED
    http: ClassVar[int] = 429
    retriable = True


class Internal(Refused):
    """The engine failed. `detail["reason"]` names the operation."""

    code: ClassVar[str] = "internal"
    status: ClassVar[Status] = Status.INTERNAL
    http: ClassVar[int] = 500
    retriable = True


class NotReady(Refused):
    """The shard recovers or restarts. With `reason` `shard_failed` the supervisor has given it up."""

    code: ClassVar[str] = "not_ready"
    status: ClassVar[Status] = Status.NOT_READY
    http: ClassVar[int] = 503
    retriable = True


SHARD_FAILED = "shard_failed"
"""`reason` of NotReady if the supervisor has given the shard up. Only a restart of the engine helps."""


def is_shard_failed(error: BaseException) -> bool:
    """Return whether the error is NotReady because the supervisor has given the shard up."""
    return isinstance(error, NotReady) and error.detail.get("reason") == SHARD_FAILED


class ColdUnavailable(NotReady):
    """The cold tier's store did not reply, or could not perform the operation. No record is known to be lost.

    On the wire it is `not_ready` with `reason: "cold_unavailable"`.
    """

    def __init__(self, message: str, *, outcome: Outcome = "not_applied", **detail: Any) -> None:
        super().__init__(message, outcome=outcome, **{"reason": "cold_unavailable", **detail})


class ShuttingDown(Refused):
    """The engine stops and accepts no new work."""

    code: ClassVar[str] = "shutting_down"
    status: ClassVar[Status] = Status.SHUTTING_DOWN
    http: ClassVar[int] = 503
    retriable = True


class CorruptFrame(Refused):
    """A frame failed its checksum or has an invalid structure on arrival."""

    code: ClassVar[str] = "corrupt_frame"
    status: ClassVar[Status] = Status.CORRUPT_FRAME
    http: ClassVar[int] = 400


class StorageReadOnly(Refused):
    """The data directory is not writable at present. Reads work. Retry later.

    `outcome` is `unknown` for a frame that an earlier incarnation of the shard may have written.
    """

    code: ClassVar[str] = "storage_read_only"
    status: ClassVar[Status] = Status.STORAGE_READ_ONLY
    http: ClassVar[int] = 503
    retriable = True


class TopicHalted(Refused):
    """A file with records of the topic is missing or unreadable, so the shard serves nothing of the topic.

    No record is lost: if the file is back at a later start of the engine, all records are available.
    `detail["part"]` names the file. `outcome` is `unknown` for a write that may have been stored before the
    current start.
    """

    code: ClassVar[str] = "topic_halted"
    status: ClassVar[Status] = Status.TOPIC_HALTED
    http: ClassVar[int] = 503
    TEXT: ClassVar[str] = (
        "the topic is halted because a file with its records is missing or unreadable: put the file back and"
        " restart the engine, or give up its records with `ringlog repair --write` or with one start under"
        " wal.corruption=truncate"
    )


class LeaseLost(RinglogError):
    """The lease of a job ended before the job was settled. Another worker may have the job."""

    code = "lease_lost"


class CorruptData(RinglogError):
    """Stored bytes fail their checksum. `detail` has topic, seq, file and offset as far as known."""

    code = "corrupt_data"


class FrameInvalid(RinglogError):
    """Bytes are not a valid frame. `reason` is a short constant phrase, `offset` is in bytes."""

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
    """A ring's header is corrupt or belongs to another engine or life, or the ring is closed."""

    code = "ring"


_UNWRITABLE = frozenset({errno.EROFS, errno.EACCES, errno.ENOSPC, errno.EDQUOT})


class DiskError(RinglogError):
    """A write, sync or other call that changes the disk failed. `detail` has call, path and errno."""

    code = "disk"

    @property
    def errno(self) -> int:
        """Error number of the operating system; 0 if there is none."""
        return int(self.detail.get("errno", 0))

    @property
    def is_unwritable(self) -> bool:
        """Whether the directory is not writable (read-only, no permission, full), and the device works."""
        return self.errno in _UNWRITABLE and not self.detail.get("holder")


class InvariantViolation(RinglogError):
    """A process found its own state inconsistent. It logs its last events and exits.

    The supervisor restarts it from durable data.
    """

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
    """Return the error for a status on the wire.

    An unknown status becomes Internal, with the number as `detail["unknown_status"]`.
    """
    kind = ERRORS_BY_STATUS.get(status)
    if kind is None:
        return Internal(message, outcome=outcome, unknown_status=status, **detail)
    if kind is NotReady and detail.get("reason") == "cold_unavailable":
        kind = ColdUnavailable
    return kind(message, outcome=outcome, **detail)


class ExitCode(IntEnum):
    """Exit code of an actor's process. The supervisor decides by it whether to restart the actor."""

    OK = 0
    CRASH = 1
    CANNOT_BOOT = 70
    FENCED = 71
    INVARIANT = 72
    DISK_FAILED = 73
    CORRUPT = 74
    ORPHANED = 75
    READ_ONLY = 76
    """The data directory is not writable. A shard is restarted to serve reads until it is writable again."""
