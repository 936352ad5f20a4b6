"""A governor's numbers on a process page, written by its process and read by all others (L7)."""

from __future__ import annotations

from dataclasses import dataclass

from ringlog.board.board import ProcessSlot
from ringlog.board.layout import GovernorField, ProcessField
from ringlog.governor import Governor, PressureStep
from ringlog.limits import GOVERNOR_STALE_MS

MILLION = 1_000_000
_STALE_NS = GOVERNOR_STALE_MS * 1_000_000


@dataclass(frozen=True, slots=True)
class Pressure:
    """Latest values of a governor. Shares are in [0, 1]."""

    pressure: float = 0.0
    step: PressureStep = PressureStep.FREE
    busy: float = 0.0
    fill: float = 0.0
    """Fill of the fullest ring. For the engine: its pressure without that of the shards."""
    latency_ns: int = 0
    refused: int = 0
    waited_ns: int = 0


def publish(page: ProcessSlot, governor: Governor, fill: float, now_ns: int) -> None:
    """Publish a governor's values on the page of its process. `fill` is in [0, 1]."""
    page.set(GovernorField.PRESSURE, round(governor.pressure * MILLION))
    page.set(GovernorField.STEP, governor.step)
    page.set(GovernorField.BUSY, round(governor.busy * MILLION))
    page.set(GovernorField.FILL, round(fill * MILLION))
    page.set(GovernorField.DELAY_NS, round(governor.latency_ns))
    page.set(GovernorField.SAMPLED_NS, now_ns)


def reset_gauges(page: ProcessSlot) -> None:
    """Reset the predecessor's values for a new incarnation. Counters stay."""
    for word in (
        GovernorField.PRESSURE,
        GovernorField.STEP,
        GovernorField.BUSY,
        GovernorField.FILL,
        GovernorField.DELAY_NS,
        GovernorField.SAMPLED_NS,
    ):
        page.set(word, 0)


def read(page: ProcessSlot, now_ns: int) -> Pressure:
    """Return the governor's latest values. Without a fresh heartbeat, all except the counters are 0 (L7)."""
    refused, waited_ns = page.get(GovernorField.THROTTLED), page.get(GovernorField.WAITED_NS)
    if not is_heartbeat_fresh(page, now_ns):
        return Pressure(refused=refused, waited_ns=waited_ns)
    step = page.get(GovernorField.STEP)
    return Pressure(
        page.get(GovernorField.PRESSURE) / MILLION, PressureStep(min(step, PressureStep.REFUSE)),
        page.get(GovernorField.BUSY) / MILLION,
        page.get(GovernorField.FILL) / MILLION, page.get(GovernorField.DELAY_NS), refused, waited_ns,
    )  # fmt: skip


def is_heartbeat_fresh(page: ProcessSlot, now_ns: int) -> bool:
    """Return whether the process is alive according to its heartbeat."""
    return now_ns - page.get(ProcessField.HEARTBEAT_NS) < _STALE_NS
