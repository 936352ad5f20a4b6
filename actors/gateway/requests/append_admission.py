"""Admission of appends: limits of the data in flight to each shard, halved under pressure. Pure."""

from __future__ import annotations

from collections.abc import Generator
from typing import Any

from ringlog.envelope import messages as m
from ringlog.errors import Throttled
from ringlog.limits import INTAKE_BYTES_MAX, INTAKE_REQUESTS_MAX, PRESSURE_RETRY_MS

Flow = Generator[Any, Any, tuple[m.Message, Any]]


class AppendAdmission:
    """Number and bytes of the appends in flight to each shard."""

    def __init__(self) -> None:
        self.refusing_shards: frozenset[int] = frozenset()
        """Shards whose governor refuses new writes."""
        self.refused_appends: int = 0
        """Number of appends that were refused for pressure."""
        self._in_flight: dict[int, tuple[int, int]] = {}

    def in_flight(self, shard: int) -> tuple[int, int]:
        """Return (appends, bytes) in flight to a shard."""
        return self._in_flight.get(shard, (0, 0))

    def run_admitted(self, shard: int, message: m.Append, nbytes: int, flow: Flow) -> Flow:
        """Run an append flow and count it while it runs.

        Raises Throttled if the limit of the shard is reached.
        """
        self._require_room(shard, message, nbytes)
        self._add(shard, 1, nbytes)
        try:
            return (yield from flow)
        finally:
            self._add(shard, -1, -nbytes)

    def _require_room(self, shard: int, message: m.Append, nbytes: int) -> None:
        appends, total_bytes = self.in_flight(shard)
        appends, total_bytes = appends + 1, total_bytes + nbytes
        if appends > INTAKE_REQUESTS_MAX or total_bytes > INTAKE_BYTES_MAX:
            raise Throttled(
                "too many appends in flight to this shard, retry later", reason="ingest_full",
                topic=message.topic, retry_after_ms=PRESSURE_RETRY_MS,
            )  # fmt: skip
        is_half_full = appends * 2 > INTAKE_REQUESTS_MAX or total_bytes * 2 > INTAKE_BYTES_MAX
        if is_half_full and shard in self.refusing_shards and not message.disable_backpressure:
            self.refused_appends += 1
            raise Throttled(
                "the shard is under pressure and refuses new writes, retry later", reason="pressure",
                topic=message.topic, retry_after_ms=PRESSURE_RETRY_MS,
            )  # fmt: skip

    def _add(self, shard: int, appends: int, nbytes: int) -> None:
        before = self.in_flight(shard)
        after = before[0] + appends, before[1] + nbytes
        if any(after):
            self._in_flight[shard] = after
        else:
            self._in_flight.pop(shard, None)
