"""The supervisor's replies to each request. docs/reference/protocol.md documents them."""

from __future__ import annotations

import os
from collections.abc import Callable

from ringlog.board.board import ProcessField, ProcessSlot, ProcessState
from ringlog.board.layout import SchedulerField
from ringlog.clock import Clock
from ringlog.config import Config
from ringlog.envelope.engine_file import EngineInfo
from ringlog.envelope.messages import (
    EngineStatus,
    EngineStatusReply,
    EngineStop,
    EngineStopping,
    Hello,
    Message,
    Ping,
    Pong,
    ProcessStatus,
    RingClose,
    RingClosed,
    RingOpen,
    Welcome,
)
from ringlog.envelope.refusal import error_reply
from ringlog.errors import InvalidRequest, Refused, ShuttingDown
from ringlog.limits import RING_BYTES_MAX, RING_BYTES_MIN, RINGS_PER_SHARD_MAX
from ringlog.supervision.children import Children, ChildState
from ringlog.supervision.restart import NS_PER_S
from ringlog.supervision.rings import ReplyCallback, RingManager
from ringlog.supervision.status_report import delivery_status, groups_status, pressure_status, queues_status

DRAINING = "draining"
LIMITS = {
    "ring_bytes_min": RING_BYTES_MIN,
    "ring_bytes_max": RING_BYTES_MAX,
    "rings_per_shard": RINGS_PER_SHARD_MAX,
}


class ControlHandler:
    """Handles requests to the supervisor. Messages of other kinds are refused with InvalidRequest."""

    def __init__(
        self,
        info: EngineInfo,
        rings: RingManager,
        children: Children,
        *,
        slot: ProcessSlot,
        state: Callable[[], str],
        stop: Callable[[str], None],
        clock: Clock,
        config: Config,
    ) -> None:
        """`slot` is the supervisor's own, `state` returns the engine's state, `stop` begins the drain."""
        self._info, self._rings, self._children = info, rings, children
        self._slot, self._state, self._stop, self._clock = slot, state, stop, clock
        self._config = config

    def handle_request(self, message: Message, answer: ReplyCallback) -> None:
        """Reply to one request through `answer`. RingOpen is answered after its shard has replied."""
        try:
            self._dispatch(message, answer)
        except Refused as e:
            answer(error_reply(e))

    def _dispatch(self, message: Message, answer: ReplyCallback) -> None:
        match message:
            case RingOpen():
                # A stopping gateway sends what it holds to the shards, which stop after it.
                if self._state() == DRAINING and not self._children.has_process(message.pid):
                    raise ShuttingDown("the engine is stopping")
                self._rings.open(message, answer)
            case RingClose():
                self._rings.close(message.ring)
                answer(RingClosed(message.ring))
            case Hello():
                answer(self._welcome())
            case Ping():
                answer(Pong(self._slot.get(ProcessField.INCARNATION), self._slot.get(ProcessField.TURNS)))
            case EngineStatus():
                answer(self._status())
            case EngineStop():
                answer(EngineStopping())
                self._stop("stop request")
            case _:
                raise InvalidRequest(
                    "the supervisor does not handle this kind of request", kind=type(message).__name__
                )

    def _welcome(self) -> Welcome:
        info = self._info
        return Welcome(
            info.protocol,
            info.version,
            info.engine_id,
            info.shards,
            -1,
            self._slot.get(ProcessField.INCARNATION),
            LIMITS,
        )

    def _status(self) -> EngineStatusReply:
        now = self._clock.monotonic_ns()
        children = self._children.states
        return EngineStatusReply(
            engine_id=self._info.engine_id,
            version=self._info.version,
            state=self._state(),
            uptime_s=(now - self._slot.get(ProcessField.STARTED_NS)) / NS_PER_S,
            data_dir=self._info.data_dir,
            shards=self._info.shards,
            rings=len(self._rings),
            disk_free_bytes=_free_bytes(self._info.data_dir),
            processes=[self._process(child, now) for child in children],
            recovery_s=max((child.slot.get(ProcessField.RECOVERY_NS) for child in children), default=0)
            / NS_PER_S,
            pressure=pressure_status(children, now),
            delivery=delivery_status(children, now),
            routers=sum(child.slot.get(SchedulerField.ROUTERS) for child in children),
            router_lag=sum(child.slot.get(SchedulerField.ROUTER_LAG) for child in children),
            queues=queues_status(children),
            groups=groups_status(children),
            disk_missing_bytes=max((self._missing_on_disk(child) for child in children), default=0),
            findings=sum(child.slot.get(ProcessField.FINDINGS) for child in children),
            quarantined=sum(child.slot.get(ProcessField.QUARANTINED) for child in children),
            live_bytes=sum(child.slot.get(ProcessField.LIVE_BYTES) for child in children),
            max_total_bytes=self._config.limits.max_total_bytes,
        )

    def _missing_on_disk(self, child: ChildState) -> int:
        """Return the bytes that must become free before shards accept records, by the reclaimer's report."""
        is_low = child.process is not None and child.slot.get(ProcessField.DISK_LOW)
        missing = self._config.data.min_free_bytes - child.slot.get(ProcessField.DISK_FREE)
        return max(missing, 1) if is_low else 0

    def _process(self, child: ChildState, now: int) -> ProcessStatus:
        slot, is_alive = child.slot, child.process is not None
        alive_ns = now - child.started_ns if is_alive else 0
        beat_ns = slot.get(ProcessField.HEARTBEAT_NS)
        state = slot.state.name.lower()
        if slot.get(ProcessField.READ_ONLY) and slot.state == ProcessState.READY:
            state = "read_only"
        return ProcessStatus(
            name=child.spec.name,
            kind=child.spec.kind,
            pid=child.process.pid if child.process is not None else 0,
            state="given_up" if child.give_up_reason else state,
            incarnation=child.incarnation,
            restarts=child.restarts,
            uptime_s=alive_ns / NS_PER_S,
            heartbeat_age_s=max(now - beat_ns, 0) / NS_PER_S if is_alive and beat_ns else 0.0,
            busy_ratio=min(slot.get(ProcessField.BUSY_NS) / alive_ns, 1.0) if alive_ns > 0 else 0.0,
            resident_bytes=self._children.resident_bytes(child),
            last_exit=child.give_up_reason or (str(child.last_exit) if child.last_exit else ""),
            progress=slot.get(ProcessField.PROGRESS) / 1_000
            if slot.state == ProcessState.RECOVERING
            else 1.0,
        )


def _free_bytes(path: str) -> int:
    """Return the free bytes of the file system; 0 if the call fails, because a status is still useful."""
    try:
        disk = os.statvfs(path)
    except OSError:
        return 0
    return disk.f_bavail * disk.f_frsize
