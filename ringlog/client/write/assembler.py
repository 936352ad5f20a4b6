"""Assembler: records of one frame that is still open. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

RECORD_OVERHEAD_BYTES = 8
"""Bytes of a record without fields in a frame, beside its payload: an offset and its share of padding."""


class Assembler:
    """Collects payloads, and one value per record for each column that any record has."""

    __slots__ = ("bytes", "columns", "ids", "payloads")

    def __init__(self) -> None:
        self.payloads: list[bytes | None] = []
        self.columns: dict[str, list[Any]] = {}
        self.ids: dict[int, bytes] = {}
        """Digests of dedup ids, by row."""
        self.bytes: int = 0
        """Bytes of the payloads, plus an estimate of the fields."""

    def add(self, payload: bytes | None, values: dict[str, Any] | None = None) -> int:
        """Add a record with `values` by column. Returns its index in the frame."""
        index = len(self.payloads)
        self.payloads.append(payload)
        self.bytes += (len(payload) if payload else 0) + RECORD_OVERHEAD_BYTES
        if values:
            for name in values.keys() - self.columns.keys():
                self.columns[name] = [None] * index
            self.bytes += sum(_size(value) for value in values.values())
        if self.columns:
            given = values or {}
            for name, column in self.columns.items():
                column.append(given.get(name))
        return index

    def set_payloads(self, payloads: Sequence[bytes]) -> None:
        """Set all records, which have no fields. Only on an empty assembler."""
        self.payloads = list(payloads)
        self.bytes = sum(map(len, payloads)) + RECORD_OVERHEAD_BYTES * len(self.payloads)

    def only(self, rows: Sequence[int]) -> Assembler:
        """Return a new assembler with only these rows, in this order."""
        part = Assembler()
        part.payloads = [self.payloads[row] for row in rows]
        part.columns = {name: [column[row] for row in rows] for name, column in self.columns.items()}
        part.ids = {at: self.ids[row] for at, row in enumerate(rows) if row in self.ids}
        return part


def _size(value: Any) -> int:
    if isinstance(value, bytes | str):
        return len(value) + RECORD_OVERHEAD_BYTES
    if isinstance(value, Mapping):
        return sum(len(name) + len(content) + 2 * RECORD_OVERHEAD_BYTES for name, content in value.items())
    return 32
