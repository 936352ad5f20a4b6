"""PendingRequest: one request to a process, its reply, and what a refusal means for it."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

from ringlog.envelope.messages import ErrorReply
from ringlog.errors import RinglogError, Status, error_from_status
from ringlog.link.futures import Pending
from ringlog.link.timers import Timer

if TYPE_CHECKING:
    from ringlog.link.peer import Peer

_NOT_READY_STATUSES = frozenset({Status.NOT_READY, Status.SHUTTING_DOWN})
_TRANSIENT_STATUSES = _NOT_READY_STATUSES | {Status.THROTTLED, Status.STORAGE_READ_ONLY}
FINAL_REASONS = frozenset({"cold_unavailable", "shard_failed"})
"""Reasons that are final for the Peer: a retry does not help, or the caller decides whether to wait."""


class PeerReply(NamedTuple):
    """A reply and its attachment."""

    message: Any
    attachment: Any = None


class FastPath(Protocol):
    """A second way to the same process (a call ring), usable while the connection lasts."""

    def send(self, data: bytes) -> bool:
        """Send an encoded request. Return False if it must go through the socket."""
        ...


class PendingRequest(Pending[PeerReply]):
    """A request and, when it is done, its reply."""

    __slots__ = (
        "attachment", "by_fast_path", "corr", "data", "deadline_ns", "is_on_fast_path", "is_patient",
        "is_repeat",
        "kind", "on_refused", "peer", "retry", "timer", "was_sent",
    )  # fmt: skip

    def __init__(
        self, peer: Peer, corr: int, kind: str, data: bytes, attachment: Any, is_patient: bool,
        by_fast_path: bool, deadline_ns: int,
    ) -> None:  # fmt: skip
        self.is_done = False
        self._value = self._error = self._callbacks = None
        self.peer: Peer = peer
        self.corr: int = corr
        self.kind: str = kind
        self.data: bytes = data
        self.attachment: Any = attachment
        self.is_patient: bool = is_patient
        self.by_fast_path: bool = by_fast_path
        self.deadline_ns: int = deadline_ns
        self.on_refused: Callable[[RinglogError], bool] | None = None
        """Called with a refusal. If it returns True, it settles this request later."""
        self.is_on_fast_path: bool = False
        self.was_sent: bool = False
        self.is_repeat: bool = False
        """The request was sent before with an unknown outcome: its connection ended, or its reply said so."""
        self.timer: Timer | None = None
        self.retry: Timer | None = None

    def fail_with(self, error: RinglogError) -> None:
        """Fail the request, unless `on_refused` handles the error."""
        if self.on_refused is None or not self.on_refused(error):
            self.fail(error)

    def start_timer(self) -> None:
        """Start the timeout, if it does not run yet: the caller is about to sleep."""
        if self.timer is None and not self.is_done:
            self.peer.start_request_timer(self)

    def is_patient_with(self, refusal: ErrorReply) -> bool:
        """Return True if the request is sent again after this refusal."""
        is_final = refusal.detail.get("reason") in FINAL_REASONS
        return self.is_patient and refusal.status in _NOT_READY_STATUSES and not is_final

    def refuse(self, refusal: ErrorReply) -> None:
        """Fail the request with a final refusal, unless `on_refused` handles it."""
        # A process that refuses a repeat temporarily does not know the outcome of the first attempt, which
        # may be applied. With the outcome "not applied" the caller would send the write again under new
        # numbers.
        is_in_doubt = self.is_repeat and refusal.status in _TRANSIENT_STATUSES
        outcome = "unknown" if is_in_doubt or refusal.outcome == "unknown" else "not_applied"
        detail = {
            key: value for key, value in refusal.detail.items() if key not in {"status", "message", "outcome"}
        }
        self.fail_with(error_from_status(refusal.status, refusal.message, detail, outcome))  # type: ignore[arg-type]
