"""What a gateway holds for each shard: bounded, and under pressure by half of it (BP-3, G-3). Pure."""

from __future__ import annotations

from collections.abc import Generator
from typing import Any

from ringlog.envelope import messages as m
from ringlog.errors import Throttled
from ringlog.limits import INTAKE_BYTES_MAX, INTAKE_REQUESTS_MAX, PRESSURE_RETRY_MS

Flow = Generator[Any, Any, tuple[m.Message, Any]]


class AppendAdmission:
    """Appends on their way to the shards: how many, and how many bytes they are."""

    def __init__(self) -> None:
        self.refusing_shards: frozenset[int] = frozenset()
        """Shards whose governor is at the top of its ladder."""
        self.refused_appends = 0
        """Appends that were refused for pressure."""
        self._held: dict[int, tuple[int, int]] = {}

    def in_flight(self, shard: int) -> tuple[int, int]:
        """(appends, bytes) on their way to a shard."""
        return self._held.get(shard, (0, 0))

    def run_admitted(self, shard: int, message: m.Append, nbytes: int, flow: Flow) -> Flow:
        """Run a flow that appends, counted as long as it takes; raises Throttled where there is no room."""
        self._require_room(shard, message, nbytes)
        self._add(shard, 1, nbytes)
        try:
            return (yield from flow)
        finally:
            self._add(shard, -1, -nbytes)

    def _require_room(self, shard: int, message: m.Append, nbytes: int) -> None:
        appends, held = self.in_flight(shard)
        appends, held = appends + 1, held + nbytes
        if appends > INTAKE_REQUESTS_MAX or held > INTAKE_BYTES_MAX:
            raise Throttled(
                "too much waits for this shard", reason="ingest_full", topic=message.topic,
                retry_after_ms=PRESSURE_RETRY_MS,
            )  # fmt: skip
        is_half_full = appends * 2 > INTAKE_REQUESTS_MAX or held * 2 > INTAKE_BYTES_MAX
        if is_half_full and shard in self.refusing_shards and not message.disable_backpressure:
            self.refused_appends += 1
            raise Throttled(
                "the shard is under pressure", reason="pressure", topic=message.topic,
                retry_after_ms=PRESSURE_RETRY_MS,
            )  # fmt: skip

    def _add(self, shard: int, appends: int, nbytes: int) -> None:
        before = self.in_flight(shard)
        after = before[0] + appends, before[1] + nbytes
        if any(after):
            self._held[shard] = after
        else:
            self._held.pop(shard, None)
