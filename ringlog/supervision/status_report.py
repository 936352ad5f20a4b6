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


def pressure_status(wards: Sequence[ChildState], now_ns: int) -> list[PressureStatus]:
    """Return the pressure of the whole engine, then of each shard. Without schedulers: of the shards only."""
    found = [(ward.spec.name, ward.slot) for ward in wards if ward.spec.kind == WAL_SHARD]
    schedulers = _schedulers(wards)
    of_shards = [_pressure(name, page, now_ns) for name, page in found]
    if not schedulers:
        return of_shards
    throttled = sum(
        ward.slot.get(GovernorField.THROTTLED) for ward in wards if ward.spec.kind in {WAL_SHARD, GATEWAY}
    )
    instance = msgspec.structs.replace(_pressure(INSTANCE, schedulers[0], now_ns), throttled=throttled)
    return [instance, *of_shards]


def delivery_status(wards: Sequence[ChildState], now_ns: int) -> DeliveryStatus | None:
    """Return the sums over all schedulers with a fresh heartbeat. None if no scheduler is configured."""
    schedulers = _schedulers(wards)
    if not schedulers:
        return None
    living = [page for page in schedulers if pressure.is_heartbeat_fresh(page, now_ns)]
    return DeliveryStatus(
        ready_by_band=[
            sum(page.get(SchedulerField.BAND_LOWEST + band) for page in living) for band in range(BANDS)
        ],
        standing=sum(page.get(SchedulerField.STANDING) for page in living),
        links=sum(page.get(SchedulerField.LINKS) for page in living),
        subscriptions=sum(page.get(SchedulerField.SUBSCRIPTIONS) for page in living),
        feeds=sum(page.get(SchedulerField.FEEDS) for page in living),
        turns_told=sum(page.get(SchedulerField.GRANTS_SENT) for page in living),
        latency_s=max((page.get(SchedulerField.LATENCY_NS) for page in living), default=0) / NS_PER_S,
        lag_s=max((page.get(SchedulerField.LAG_MS) for page in living), default=0) / 1_000,
    )


def queues_status(wards: Sequence[ChildState]) -> QueuesStatus:
    """Return the queue counters, summed over all shards."""
    pages = [ward.slot for ward in wards if ward.spec.kind == WAL_SHARD]
    return QueuesStatus(
        **{word.name.lower(): sum(page.get(word) for page in pages) for word in QueueField if word in _QUEUES}
    )


def groups_status(wards: Sequence[ChildState]) -> GroupsStatus:
    """Return the consumer group counters, summed over all shards. `floor_age_s` is the maximum."""
    pages = [ward.slot for ward in wards if ward.spec.kind == WAL_SHARD]
    return GroupsStatus(
        groups=sum(page.get(ConsumerGroupField.GROUPS) for page in pages),
        lag=sum(page.get(ConsumerGroupField.LAG) for page in pages),
        pending=sum(page.get(ConsumerGroupField.PENDING) for page in pages),
        members=sum(page.get(ConsumerGroupField.MEMBERS) for page in pages),
        floor_age_s=max((page.get(ConsumerGroupField.FLOOR_AGE_MS) for page in pages), default=0) / 1_000,
    )


def _schedulers(wards: Sequence[ChildState]) -> list[ProcessSlot]:
    return [ward.slot for ward in wards if ward.spec.kind == SCHEDULER]


def _pressure(name: str, page: ProcessSlot, now_ns: int) -> PressureStatus:
    said = pressure.read(page, now_ns)
    is_instance = name == INSTANCE
    return PressureStatus(
        of=name, pressure=said.pressure, step=said.step.name.lower(), busy=said.busy,
        fill=0.0 if is_instance else said.fill, delivery=said.fill if is_instance else 0.0,
        latency_s=said.latency_ns / NS_PER_S, throttled=said.refused, waited_s=said.waited_ns / NS_PER_S,
    )  # fmt: skip
