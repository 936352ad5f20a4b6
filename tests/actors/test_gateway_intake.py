"""The bound on appends that a gateway holds for a shard, and half of it under pressure."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from ringlog.actors.gateway.requests.append_admission import AppendAdmission, Flow
from ringlog.envelope import messages as m
from ringlog.errors import Throttled
from ringlog.limits import INTAKE_BYTES_MAX, INTAKE_REQUESTS_MAX, PRESSURE_RETRY_MS

DONE: Any = m.Pong(1, 2), None


class Door:
    """Admitted appends that wait for their shard's answer."""

    def __init__(self) -> None:
        self.intake = AppendAdmission()
        self.waiting: list[Flow] = []

    def append(self, shard: int = 0, nbytes: int = 10, **options: Any) -> Flow:
        """Admit one append. Raises `Throttled`."""
        flow = self.intake.run_admitted(shard, m.Append("t", 1, **options), nbytes, self._asks())
        assert next(flow) == "asked"
        self.waiting.append(flow)
        return flow

    def answer(self, flow: Flow) -> None:
        self.waiting.remove(flow)
        with pytest.raises(StopIteration) as ended:
            flow.send("answer")
        assert ended.value.value == DONE

    @staticmethod
    def _asks() -> Flow:
        yield "asked"
        return DONE


@pytest.fixture
def door() -> Iterator[Door]:
    door = Door()
    yield door
    for flow in list(door.waiting):
        door.answer(flow)
    assert [door.intake.in_flight(shard) for shard in range(2)] == [(0, 0), (0, 0)], "space was not released"


def test_appends_are_admitted_up_to_the_bound_of_their_shard(door: Door) -> None:
    """Each shard has its own bound. `disable_backpressure` does not lift it."""
    flows = [door.append() for _ in range(INTAKE_REQUESTS_MAX)]
    for options in ({}, {"disable_backpressure": True}):
        with pytest.raises(Throttled) as refused:
            door.append(**options)
        assert refused.value.detail == {
            "reason": "ingest_full", "topic": "t", "retry_after_ms": PRESSURE_RETRY_MS,
        }  # fmt: skip
    door.append(shard=1)
    door.answer(flows[0])
    door.append()


def test_bytes_are_bounded_too(door: Door) -> None:
    door.append(nbytes=INTAKE_BYTES_MAX - 5)
    with pytest.raises(Throttled, match="ingest_full"):
        door.append(nbytes=6)
    door.append(nbytes=5)


def test_under_pressure_the_bound_is_halved(door: Door) -> None:
    """This affects only the shard under pressure, and no append with `disable_backpressure`."""
    for _ in range(INTAKE_REQUESTS_MAX // 2):
        door.append()
        door.append(shard=1)
    door.intake.refusing_shards = frozenset({0})
    with pytest.raises(Throttled) as refused:
        door.append()
    assert refused.value.detail == {"reason": "pressure", "topic": "t", "retry_after_ms": PRESSURE_RETRY_MS}
    door.append(shard=1)
    door.append(disable_backpressure=True)
    door.intake.refusing_shards = frozenset()
    door.append()
    assert door.intake.refused_appends == 1, "only refusals for pressure are counted"


def test_pressure_without_a_half_full_intake_refuses_nothing(door: Door) -> None:
    """An append is refused only if half of the bound is in use as well."""
    door.intake.refusing_shards = frozenset({0})
    for _ in range(INTAKE_REQUESTS_MAX // 2):
        door.append()
    with pytest.raises(Throttled, match="pressure"):
        door.append()


def test_a_failed_append_releases_its_space(door: Door) -> None:
    """The gateway releases the space on every path (L6)."""
    flow = door.append()
    door.waiting.remove(flow)
    with pytest.raises(Throttled, match="elsewhere"):
        flow.throw(Throttled("elsewhere"))
    assert door.intake.in_flight(0) == (0, 0)
