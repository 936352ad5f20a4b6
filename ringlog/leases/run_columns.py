"""Runs as bytes: for a row of a snapshot, and for the log when leases become durable. Pure.

The runs are stored in columns, ascending by seq. A later version may append fields and never moves them.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import msgspec
import numpy as np
from numpy.typing import NDArray

from ringlog.leases.change import U64
from ringlog.leases.failures import Failures
from ringlog.leases.holders import NO_PROCESS, ProcessId
from ringlog.leases.runs import BLOCK_SHIFT, DELAYED, EXHAUSTED, GONE, LEASED, RETURNED
from ringlog.leases.table import LeaseTable
from ringlog.limits import DURABLE_HOLDERS_MAX, DURABLE_REASONS_MAX

Columns = dict[str, NDArray[Any]]
SavedFailure = tuple[U64, str, U64, U64]
"""A seq and the fields of its Failure."""
_STATES = (LEASED, DELAYED, RETURNED, EXHAUSTED)
_WIDE, _NARROW = ("first", "at", "token"), ("count", "holder", "process_number", "deliveries")
_AGE_MS_MAX = (1 << 32) - 1


class _SavedRuns(msgspec.Struct, array_like=True, frozen=True):
    wide: bytes
    """8 bytes each, little-endian, column by column: first, at, token."""
    narrow: bytes
    """4 bytes each, little-endian: count, holder (index in `nodes`), process number (index in `process_ids`,
    from 1 on), deliveries."""
    states: bytes
    nodes: list[bytes]
    process_ids: list[tuple[U64, U64]]
    """The processes that claimed."""
    reasons: dict[U64, str] = {}
    """Reasons of rejections, in the format from before `failures`."""
    failures: list[SavedFailure] = []
    given: bytes = b""
    """8 bytes each, little-endian: time of the last delivery or extension. Empty in the format from
    before."""
    ages: bytes = b""
    """4 bytes each, little-endian: ms from the first delivery to that time, at most 2^32 - 1."""


_encode = msgspec.msgpack.Encoder().encode
_decode = msgspec.msgpack.Decoder(_SavedRuns).decode


def columns_of(table: LeaseTable) -> Columns:
    """Return all columns of all runs, ascending by seq, without deleted runs that their holder may still ack.

    `holder` and `process_number` of runs that are not leased are 0."""
    runs = table.runs
    state = np.frombuffer(bytes(runs.state), dtype=np.uint8)
    rows = np.flatnonzero((state != 0) & (state != GONE))
    rows = rows[np.argsort(np.array(runs.first, dtype=np.uint64)[rows], kind="stable")]
    columns: Columns = {
        name: np.array(getattr(runs, name), dtype=np.uint64)[rows]
        for name in (
            "first", "stop", "at", "token", "begun", "given", "holder", "process_number", "deliveries",
        )
    }  # fmt: skip
    columns["state"] = state[rows]
    columns["count"] = columns["stop"] - columns["first"]
    for name in ("holder", "process_number"):
        columns[name][columns["state"] != LEASED] = 0
    return columns


def packed(columns: Columns, names: tuple[str, ...], dtype: str) -> bytes:
    """Return these columns, concatenated."""
    return b"".join(columns[name].astype(dtype).tobytes() for name in names)


def index_processes(process_numbers: NDArray[Any], table: LeaseTable) -> tuple[NDArray[Any], list[ProcessId]]:
    """Return the index of each process number in the list of processes that claimed, and the list.

    Indexes start at 1; 0 = none.
    """
    numbers = [n for n in np.unique(process_numbers).tolist() if n in table.processes.by_number][
        :DURABLE_HOLDERS_MAX
    ]
    index_of = {n: at for at, n in enumerate(numbers, 1)}
    indexes = np.array([index_of.get(n, 0) for n in process_numbers.tolist()], dtype=np.uint64)
    return indexes, [table.processes.by_number[n] for n in numbers]


def encode_runs(table: LeaseTable, most: int) -> Iterator[bytes]:
    """Encode all runs, at most `most` in one part."""
    columns = columns_of(table)
    for at in range(0, len(columns["first"]), most):
        yield _encode(_part({name: column[at : at + most] for name, column in columns.items()}, table))


def _part(columns: Columns, table: LeaseTable) -> _SavedRuns:
    leased = columns["state"] == LEASED
    held, columns["holder"][leased] = np.unique(columns["holder"][leased], return_inverse=True)
    columns["process_number"], process_ids = index_processes(columns["process_number"], table)
    failures: list[SavedFailure] = []
    if len(table.failures):
        first, last = int(columns["first"][0]), int(columns["stop"][-1])
        failures = [(seq, *each) for seq, each in table.failures if first <= seq < last]
    return _SavedRuns(
        packed(columns, _WIDE, "<u8"), packed(columns, _NARROW, "<u4"), packed(columns, ("state",), "u1"),
        [table.holders.name_of(holder).encode() for holder in held.tolist()], process_ids,
        failures=failures[-DURABLE_REASONS_MAX:], given=packed(columns, ("given",), "<u8"),
        ages=np.minimum(columns["given"] - columns["begun"], _AGE_MS_MAX).astype("<u4").tobytes(),
    )  # fmt: skip


def decode_runs_into(table: LeaseTable, data: bytes, at_ms: int) -> None:
    """Apply encoded runs to a table.

    `at_ms` is the time of their last delivery where the bytes do not state it. Without a time they would look
    idle forever, and a claim with `min_idle_ms` would take live leases over.

    Raises ValueError, IndexError or msgspec's errors for bytes that no version can have written."""
    saved = _decode(data)
    wide, narrow = unpacked(saved.wide, len(_WIDE), "<u8"), unpacked(saved.narrow, len(_NARROW), "<u4")
    first, at, token = wide
    count, holder, process_number, deliveries = narrow
    nodes = [node.decode() for node in saved.nodes]
    given, ages = [at_ms] * len(saved.states), [0] * len(saved.states)
    if saved.given:
        given, ages = unpacked(saved.given, 1, "<u8")[0], unpacked(saved.ages, 1, "<u4")[0]
    begun = [max(when - age, 0) for when, age in zip(given, ages, strict=True)]
    add_runs(
        table, saved.states, first, at, token, count, holder, nodes, deliveries, process_number,
        saved.process_ids, begun, given,
    )  # fmt: skip
    before = [(seq, why, 0, 0) for seq, why in saved.reasons.items() if table.is_exhausted(seq)]
    add_failures(table.failures, before)
    add_failures(table.failures, [each for each in saved.failures if table.runs.find(each[0]) >= 0])


def unpacked(data: bytes, count: int, dtype: str) -> list[list[int]]:
    """Return `count` columns."""
    columns: list[list[int]] = np.frombuffer(data, dtype=dtype).reshape(count, -1).tolist()
    return columns


def add_failures(failures: Failures, saved: list[SavedFailure]) -> None:
    """Add the last failures of seqs."""
    for seq, reason, at_ms, nacks in saved:
        failures.record_failure(seq, seq + 1, reason, at_ms, nacks)


def add_runs(
    table: LeaseTable, states: bytes, first: list[int], at: list[int], token: list[int], count: list[int],
    holder: list[int], nodes: list[str], deliveries: list[int], process_number: list[int],
    process_ids: list[ProcessId], begun: list[int], given: list[int],
) -> None:  # fmt: skip
    """Add runs from columns. Raises ValueError or IndexError for impossible values."""
    processes, before = [NO_PROCESS, *process_ids], 0
    process_number = process_number or [0] * len(states)
    for n, state in enumerate(states):
        stop = first[n] + count[n]
        is_valid = state in _STATES and before <= first[n] < stop < 1 << 63
        is_valid &= max(at[n], begun[n], given[n]) < 1 << 62
        if not is_valid or first[n] >> BLOCK_SHIFT != stop - 1 >> BLOCK_SHIFT:
            raise ValueError("lease runs have impossible values")
        before, is_leased = stop, state == LEASED
        table.add_run(
            first[n], stop, state, at=at[n], token=token[n], node=nodes[holder[n]] if is_leased else "",
            deliveries=deliveries[n],
            process_id=processes[process_number[n]] if is_leased else NO_PROCESS,
            begun=begun[n], given=given[n],
        )  # fmt: skip
