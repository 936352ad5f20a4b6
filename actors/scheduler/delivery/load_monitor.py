"""Load measurement of each scheduler, and the engine's governor in the first one. Part of the shell.

Every scheduler measures itself and publishes the result on its page of the board. The first one combines
these measurements with those of the shards and publishes the pressure of the engine. Each scheduler reads
from the pages how to react:

- It coalesces wake-ups of a shard's topics if delivery or that shard is under pressure.
- It sheds bands if the engine is under pressure.

The measurements include neither delays that the scheduler causes itself nor feeds that wait for a slow
consumer.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence

import numpy as np

from ringlog.actors.scheduler import events as ev
from ringlog.actors.scheduler.core import Scheduler
from ringlog.actors.scheduler.delivery.lag import Lag
from ringlog.board import pressure
from ringlog.board.board import Board, ProcessSlot
from ringlog.board.histogram import HistogramSnapshot
from ringlog.board.layout import GovernorField, HistogramKind, ProcessField, SchedulerField
from ringlog.board.processes import scheduler_slot, shard_slot
from ringlog.governor import Governor, PressureSample, PressureStep, coalesce_ns, pressure_of_averages
from ringlog.limits import BANDS, GOVERNOR_SAMPLE_MS, LAG_ANNOUNCED_MS
from ringlog.logs import log_event

log: logging.Logger = logging.getLogger("ringlog.scheduler")

_SAMPLE_NS = GOVERNOR_SAMPLE_MS * 1_000_000
_LAG_SAMPLE_NS = 1_000_000_000


class SchedulerLoadMonitor:
    """The load monitor of one scheduler. `schedulers` and `shards` are the pages of all of them, in order."""

    def __init__(
        self, number: int, page: ProcessSlot, shards: Sequence[ProcessSlot],
        schedulers: Sequence[ProcessSlot], now_ns: int, *, is_reacting: bool = True,
    ) -> None:  # fmt: skip
        self._page, self._shards, self._schedulers = page, shards, schedulers
        self._is_first, self._is_reacting = number == 0, is_reacting
        self._own = Governor()
        self._engine_governor = Governor()
        self.idle_ns: int = 0
        """Idle time in ns since the last sample. The shell adds to it when it sleeps."""
        self._sampled_ns, self._due_ns = now_ns, now_ns + _SAMPLE_NS
        self._lag_ns = 0
        self._is_lag_announced = False
        self._backlog_min: int | None = None
        self._latency_seen: HistogramSnapshot = page.histogram(HistogramKind.COMMIT).snapshot()
        self._groups = 0
        self._is_quiet = True
        self._waited_before_ns = page.get(GovernorField.WAITED_NS)
        self._last = ev.DeliveryPressureChanged((0,) * len(shards), False)
        pressure.reset_gauges(page)

    @classmethod
    def from_board(cls, board: Board, number: int, shards: int, schedulers: int, now_ns: int, *,
           is_reacting: bool) -> SchedulerLoadMonitor:  # fmt: skip
        """Create the monitor with the pages that it needs."""
        pages = [board.process(scheduler_slot(shards, n)) for n in range(schedulers)]
        of_shards = [board.process(shard_slot(shard)) for shard in range(shards)]
        return cls(number, pages[number], of_shards, pages, now_ns, is_reacting=is_reacting)

    def observe_turn(
        self, now_ns: int, events: Sequence[object], core: Scheduler
    ) -> ev.DeliveryPressureChanged | None:
        """Measure the start of a pass.

        Return the new instructions for delivery, or None if they did not change.
        """
        waiting = 0
        for event in events:
            if type(event) is ev.NewsRows:
                rows = event.rows
                waiting += len(rows) if len(rows) < 2 else len(np.unique(rows[:, 0]))
        self._backlog_min = waiting if self._backlog_min is None else min(self._backlog_min, waiting)
        if now_ns < self._due_ns:
            return None
        self._sample(now_ns, core)
        pressed = self._read_pressure(now_ns)
        if pressed == self._last:
            return None
        self._last = pressed
        return pressed

    def wait_ms(self, most: int) -> int:
        """Return the longest time to sleep in ms, at most `most`.

        Under load the next sample ends the sleep.
        """
        return most if self._is_quiet else min(most, GOVERNOR_SAMPLE_MS)

    def _sample(self, now_ns: int, core: Scheduler) -> None:
        page, took_ns = self._page, max(now_ns - self._sampled_ns, 1)
        worked_ns = max(took_ns - self.idle_ns, 0)
        self.idle_ns, self._sampled_ns, self._due_ns = 0, now_ns, now_ns + _SAMPLE_NS
        # Only a backlog that was present in every pass of a full interval counts.
        backlog = (self._backlog_min or 0) if took_ns < 2 * _SAMPLE_NS else 0
        self._backlog_min = None
        latencies = page.histogram(HistogramKind.COMMIT).snapshot()
        latency_ns, self._latency_seen = latencies.since(self._latency_seen).mean, latencies
        self._own.observe(PressureSample(busy=worked_ns / took_ns, latency_ns=latency_ns))
        page.add(ProcessField.BUSY_NS, worked_ns)
        page.set(SchedulerField.STANDING, backlog)
        for band in range(BANDS):
            page.set(SchedulerField.BAND_LOWEST + band, core.grants.ready_by_band[band])
        if now_ns - self._lag_ns >= _LAG_SAMPLE_NS:
            self._lag_ns = now_ns
            furthest = core.furthest_behind()
            page.set(SchedulerField.LAG_MS, furthest.lag_ms if furthest is not None else 0)
            self._log_lag_change(furthest)
        if self._is_first:
            self._sample_engine(now_ns)
            pressure.publish(page, self._engine_governor, self._engine_governor.own, now_ns)
        page.set(GovernorField.BUSY, round(self._own.busy * pressure.MILLION))
        page.set(GovernorField.DELAY_NS, round(self._own.latency_ns))
        page.set(GovernorField.WAITED_NS, self._waited_before_ns + core.grants.coalesced_ns)
        page.set(GovernorField.SAMPLED_NS, now_ns)

    def _log_lag_change(self, furthest: Lag | None) -> None:
        """Log once when a consumer lags, and once when no consumer lags any more."""
        is_late = furthest is not None and furthest.lag_ms >= LAG_ANNOUNCED_MS
        if is_late == self._is_lag_announced:
            return
        self._is_lag_announced = is_late
        if furthest is not None and is_late:
            log_event(
                log, logging.WARNING, "consumer lags", lag_s=round(furthest.lag_ms / 1_000, 1),
                consumer=f"{furthest.link.hex()}/{furthest.number}", turns_out=furthest.granted,
                waiting=furthest.waiting,
            )  # fmt: skip
        else:
            log_event(log, logging.INFO, "no consumer lags any more")

    def _sample_engine(self, now_ns: int) -> None:
        others = [page for page in self._schedulers[1:] if pressure.is_heartbeat_fresh(page, now_ns)]
        busy = max((page.get(GovernorField.BUSY) / pressure.MILLION for page in others), default=0.0)
        delay_ns = max((page.get(GovernorField.DELAY_NS) for page in others), default=0)
        ready = self._page.get(SchedulerField.STANDING) + sum(
            page.get(SchedulerField.STANDING) for page in others
        )
        averages = pressure_of_averages(max(self._own.busy, busy), max(self._own.latency_ns, delay_ns))
        self._engine_governor.observe(
            PressureSample(
                ready=ready, workers=len(self._schedulers), fill=averages,
                shards_pressure=max(pressure.read(page, now_ns).pressure for page in self._shards),
            )
        )  # fmt: skip

    def _read_pressure(self, now_ns: int) -> ev.DeliveryPressureChanged:
        """Read the pressure from the pages, so that all schedulers use the same values."""
        engine = pressure.read(self._schedulers[0], now_ns)
        shards = [pressure.read(page, now_ns).pressure for page in self._shards]
        groups = sum(page.get(ProcessField.GROUPS) for page in self._shards)
        self._is_quiet = groups == self._groups and not (engine.pressure or any(shards) or self._own.busy)
        self._groups = groups
        if not self._is_reacting:
            return self._last
        gaps_ns = tuple(coalesce_ns(max(engine.fill, each)) for each in shards)
        return ev.DeliveryPressureChanged(gaps_ns, engine.step >= PressureStep.SHED)
