"""What the supervisor answers, message by message. docs/protocol.md says the same for people."""

from __future__ import annotations

import os
from collections.abc import Callable

from ringlog.board.board import P, ProcessSlot, ProcessState
from ringlog.board.layout import D
from ringlog.clock import Clock
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
from ringlog.supervision.children import Children, Ward
from ringlog.supervision.pressure import delivery, groups, pressures, queues
from ringlog.supervision.restart import NS_PER_S
from ringlog.supervision.rings import Answer, RingKeeper

DRAINING = "draining"
LIMITS = {
    "ring_bytes_min": RING_BYTES_MIN,
    "ring_bytes_max": RING_BYTES_MAX,
    "rings_per_shard": RINGS_PER_SHARD_MAX,
}


class Reception:
    """Requests to the supervisor and their answers. Anything else it is sent is refused."""

    def __init__(
        self,
        info: EngineInfo,
        rings: RingKeeper,
        children: Children,
        *,
        slot: ProcessSlot,
        state: Callable[[], str],
        stop: Callable[[str], None],
        clock: Clock,
        min_free_bytes: int,
    ) -> None:
        """`slot` is the supervisor's own; `state` says how the engine is; `stop` begins the drain."""
        self._info, self._rings, self._children = info, rings, children
        self._slot, self._state, self._stop, self._clock = slot, state, stop, clock
        self._min_free_bytes = min_free_bytes

    def take(self, message: Message, answer: Answer) -> None:
        """Answer one request, now or, for RingOpen, when its shard has answered."""
        try:
            self._dispatch(message, answer)
        except Refused as e:
            answer(error_reply(e))

    def _dispatch(self, message: Message, answer: Answer) -> None:
        match message:
            case RingOpen():
                if self._state() == DRAINING:
                    raise ShuttingDown("the engine is stopping")
                self._rings.open(message, answer)
            case RingClose():
                self._rings.close(message.ring)
                answer(RingClosed(message.ring))
            case Hello():
                answer(self._welcome())
            case Ping():
                answer(Pong(self._slot.get(P.INCARNATION), self._slot.get(P.TURNS)))
            case EngineStatus():
                answer(self._status())
            case EngineStop():
                answer(EngineStopping())
                self._stop("asked by message")
            case _:
                raise InvalidRequest("not a message for the supervisor", kind=type(message).__name__)

    def _welcome(self) -> Welcome:
        info = self._info
        return Welcome(
            info.protocol,
            info.version,
            info.engine_id,
            info.shards,
            -1,
            self._slot.get(P.INCARNATION),
            LIMITS,
        )

    def _status(self) -> EngineStatusReply:
        now = self._clock.monotonic_ns()
        wards = self._children.wards
        return EngineStatusReply(
            engine_id=self._info.engine_id,
            version=self._info.version,
            state=self._state(),
            uptime_s=(now - self._slot.get(P.STARTED_NS)) / NS_PER_S,
            data_dir=self._info.data_dir,
            shards=self._info.shards,
            rings=len(self._rings),
            disk_free_bytes=_free_bytes(self._info.data_dir),
            processes=[self._process(ward, now) for ward in wards],
            recovery_s=max((ward.slot.get(P.RECOVERY_NS) for ward in wards), default=0) / NS_PER_S,
            pressure=pressures(wards, now),
            delivery=delivery(wards, now),
            routers=sum(ward.slot.get(D.ROUTERS) for ward in wards),
            router_lag=sum(ward.slot.get(D.ROUTER_LAG) for ward in wards),
            queues=queues(wards),
            groups=groups(wards),
            disk_missing_bytes=max((self._missing_on_disk(ward) for ward in wards), default=0),
            findings=sum(ward.slot.get(P.FINDINGS) for ward in wards),
            quarantined=sum(ward.slot.get(P.QUARANTINED) for ward in wards),
        )

    def _missing_on_disk(self, ward: Ward) -> int:
        """What the reclaimer says that must be free before shards take records again."""
        is_low = ward.child is not None and ward.slot.get(P.DISK_LOW)
        return max(self._min_free_bytes - ward.slot.get(P.DISK_FREE), 1) if is_low else 0

    def _process(self, ward: Ward, now: int) -> ProcessStatus:
        slot, is_alive = ward.slot, ward.child is not None
        alive_ns = now - ward.started_ns if is_alive else 0
        beat_ns = slot.get(P.HEARTBEAT_NS)
        state = slot.state.name.lower()
        if slot.get(P.READ_ONLY) and slot.state == ProcessState.READY:
            state = "read_only"
        return ProcessStatus(
            name=ward.spec.name,
            kind=ward.spec.kind,
            pid=ward.child.pid if ward.child is not None else 0,
            state="given_up" if ward.given_up else state,
            incarnation=ward.incarnation,
            restarts=ward.restarts,
            uptime_s=alive_ns / NS_PER_S,
            heartbeat_age_s=max(now - beat_ns, 0) / NS_PER_S if is_alive and beat_ns else 0.0,
            busy_ratio=min(slot.get(P.BUSY_NS) / alive_ns, 1.0) if alive_ns > 0 else 0.0,
            resident_bytes=self._children.resident_bytes(ward),
            last_exit=ward.given_up or (str(ward.last_exit) if ward.last_exit else ""),
            progress=slot.get(P.PROGRESS) / 1_000 if slot.state == ProcessState.RECOVERING else 1.0,
        )


def _free_bytes(path: str) -> int:
    """Room on the disk; 0 when it cannot be asked, which is no reason to give no status."""
    try:
        disk = os.statvfs(path)
    except OSError:
        return 0
    return disk.f_bavail * disk.f_frsize
