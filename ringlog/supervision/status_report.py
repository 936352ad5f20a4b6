"""The parts of a status reply on pressure, delivery, queues and groups. They are read from the board only."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from ringlog.board import pressure
from ringlog.board.board import ProcessSlot
from ringlog.board.layout import ConsumerGroupField, GovernorField, QueueField, SchedulerField
from ringlog.board.processes import GATEWAY, SCHEDULER, WAL_SHARD
from ringlog.envelope.messages import DeliveryStatus, GroupsStatus, PressureStatus, QueuesStatus
from ringlog.limits import BANDS
from ringlog.supervision.children import ChildState
from ringlog.supervision.restart import NS_PER_S

INSTANCE = "instance"
_QUEUES = set(QueueField) - {QueueField.EXHAUSTED}


def pressure_status(children: Sequence[ChildState], now_ns: int) -> list[PressureStatus]:
    """Return the pressure of the whole engine, then of each shard. Without schedulers: of the shards only."""
    found = [(child.spec.name, child.slot) for child in children if child.spec.kind == WAL_SHARD]
    schedulers = _schedulers(children)
    of_shards = [_pressure(name, page, now_ns) for name, page in found]
    if not schedulers:
        return of_shards
    throttled = sum(
        child.slot.get(GovernorField.THROTTLED)
        for child in children
        if child.spec.kind in {WAL_SHARD, GATEWAY}
    )
    instance = msgspec.structs.replace(_pressure(INSTANCE, schedulers[0], now_ns), throttled=throttled)
    return [instance, *of_shards]


def delivery_status(children: Sequence[ChildState], now_ns: int) -> DeliveryStatus | None:
    """Return the sums over all schedulers with a fresh heartbeat. None if no scheduler is configured."""
    schedulers = _schedulers(children)
    if not schedulers:
        return None
    alive = [page for page in schedulers if pressure.is_heartbeat_fresh(page, now_ns)]
    return DeliveryStatus(
        ready_by_band=[
            sum(page.get(SchedulerField.BAND_LOWEST + band) for page in alive) for band in range(BANDS)
        ],
        standing=sum(page.get(SchedulerField.STANDING) for page in alive),
        links=sum(page.get(SchedulerField.LINKS) for page in alive),
        subscriptions=sum(page.get(SchedulerField.SUBSCRIPTIONS) for page in alive),
        feeds=sum(page.get(SchedulerField.FEEDS) for page in alive),
        grants_sent=sum(page.get(SchedulerField.GRANTS_SENT) for page in alive),
        latency_s=max((page.get(SchedulerField.LATENCY_NS) for page in alive), default=0) / NS_PER_S,
        lag_s=max((page.get(SchedulerField.LAG_MS) for page in alive), default=0) / 1_000,
    )


def queues_status(children: Sequence[ChildState]) -> QueuesStatus:
    """Return the queue counters, summed over all shards."""
    pages = [child.slot for child in children if child.spec.kind == WAL_SHARD]
    return QueuesStatus(
        **{word.name.lower(): sum(page.get(word) for page in pages) for word in QueueField if word in _QUEUES}
    )


def groups_status(children: Sequence[ChildState]) -> GroupsStatus:
    """Return the consumer group counters, summed over all shards. `floor_age_s` is the maximum."""
    pages = [child.slot for child in children if child.spec.kind == WAL_SHARD]
    return GroupsStatus(
        groups=sum(page.get(ConsumerGroupField.GROUPS) for page in pages),
        lag=sum(page.get(ConsumerGroupField.LAG) for page in pages),
        pending=sum(page.get(ConsumerGroupField.PENDING) for page in pages),
        members=sum(page.get(ConsumerGroupField.MEMBERS) for page in pages),
        floor_age_s=max((page.get(ConsumerGroupField.FLOOR_AGE_MS) for page in pages), default=0) / 1_000,
    )


def _schedulers(children: Sequence[ChildState]) -> list[ProcessSlot]:
    return [child.slot for child in children if child.spec.kind == SCHEDULER]


def _pressure(name: str, page: ProcessSlot, now_ns: int) -> PressureStatus:
    reading = pressure.read(page, now_ns)
    is_instance = name == INSTANCE
    return PressureStatus(
        of=name, pressure=reading.pressure, step=reading.step.name.lower(), busy=reading.busy,
        fill=0.0 if is_instance else reading.fill, delivery=reading.fill if is_instance else 0.0,
        latency_s=reading.latency_ns / NS_PER_S, throttled=reading.refused,
        waited_s=reading.waited_ns / NS_PER_S,
    )  # fmt: skip
