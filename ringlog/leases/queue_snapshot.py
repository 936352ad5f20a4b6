"""What is known of a queue's jobs as bytes: for a snapshot, and for the log when leases become durable. Pure.

The runs lie in columns, ascending by number. A later version may append fields, never move them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any

import msgspec
import numpy as np
from numpy.typing import NDArray

from ringlog.leases.queue import Queue
from ringlog.leases.queue_change import U64
from ringlog.leases.runs import BLOCK_SHIFT, DELAYED, EXHAUSTED, LEASED, RETURNED
from ringlog.limits import DURABLE_HOLDERS_MAX, DURABLE_REASONS_MAX

_STATES = (LEASED, DELAYED, RETURNED, EXHAUSTED)
_WIDE, _NARROW = ("first", "at", "token"), ("count", "holder", "link", "deliveries")


class _Runs(msgspec.Struct, array_like=True, frozen=True):
    wide: bytes
    """8 bytes each, little-endian, column by column: first, at, token."""
    narrow: bytes
    """4 bytes each, as the others: count, holder and link as places in the next two, deliveries."""
    states: bytes
    nodes: list[bytes]
    lives: list[tuple[U64, U64]]
    """Of the processes that claimed."""
    reasons: dict[U64, str] = {}
    """Why jobs were rejected, as it was written before `failures`."""
    failures: list[tuple[U64, str, U64, U64]] = []
    """Of jobs that failed: number, and the fields of Failure."""


_encode = msgspec.msgpack.Encoder().encode
_decode = msgspec.msgpack.Decoder(_Runs).decode


def save_runs(queue: Queue, lives: Mapping[int, tuple[int, int]], most: int) -> Iterator[bytes]:
    """Encode what is known, at most so many runs a part. Deleted jobs whose holder may still ack them are
    left out."""
    runs = queue.runs
    state = np.frombuffer(bytes(runs.state), dtype=np.uint8)
    rows = np.flatnonzero(np.isin(state, _STATES))
    columns: dict[str, NDArray[Any]] = {
        name: np.array(getattr(runs, name), dtype=np.uint64)[rows] for name in (*_WIDE, "stop")
    }
    order = np.argsort(columns["first"], kind="stable")
    rows = rows[order]
    columns = {name: column[order] for name, column in columns.items()}
    columns["count"] = columns["stop"] - columns["first"]
    columns |= {name: np.array(getattr(runs, name), dtype=np.uint64)[rows] for name in _NARROW[1:]}
    columns["state"] = state[rows]
    for at in range(0, len(rows), most):
        yield _encode(_part({name: column[at : at + most] for name, column in columns.items()}, queue, lives))


def _part(columns: dict[str, NDArray[Any]], queue: Queue, lives: Mapping[int, tuple[int, int]]) -> _Runs:
    leased = columns["state"] == LEASED
    holders = np.where(leased, columns["holder"], 0)
    links = np.where(leased, columns["link"], 0)
    held, places = np.unique(holders[leased], return_inverse=True)
    holders[leased] = places
    linked = np.array([link if link in lives else 0 for link in np.unique(links).tolist()], dtype=np.uint64)
    known = linked[linked > 0][:DURABLE_HOLDERS_MAX]
    links = np.where(np.isin(links, known), np.searchsorted(known, links) + 1, 0)
    narrow = (columns["count"], holders, links, columns["deliveries"])
    failures: list[tuple[int, str, int, int]] = []
    if len(queue.failures) and len(columns["first"]):
        first, last = int(columns["first"][0]), int(columns["stop"][-1])
        failures = [(seq, *each) for seq, each in queue.failures if first <= seq < last]
        failures = failures[-DURABLE_REASONS_MAX:]
    return _Runs(
        b"".join(columns[name].astype("<u8").tobytes() for name in _WIDE),
        b"".join(column.astype("<u4").tobytes() for column in narrow),
        columns["state"].astype(np.uint8).tobytes(),
        [queue.holders.name_of(holder).encode() for holder in held.tolist()],
        [lives[link] for link in known.tolist()],
        failures=failures,
    )  # fmt: skip


def add_saved(queue: Queue, data: bytes, link_of: Callable[[tuple[int, int]], int]) -> None:
    """Put what these bytes say into force; raises ValueError, IndexError or msgspec's errors for what no
    version can have written."""
    saved = _decode(data)
    total = len(saved.states)
    first, at, token = np.frombuffer(saved.wide, dtype="<u8").reshape(len(_WIDE), total).tolist()
    count, holder, link, deliveries = (
        np.frombuffer(saved.narrow, dtype="<u4").reshape(len(_NARROW), total).tolist()
    )
    links = [0, *map(link_of, saved.lives)]
    before = 0
    for n, state in enumerate(saved.states):
        stop = first[n] + count[n]
        is_sound = state in _STATES and before <= first[n] < stop < 1 << 63 and at[n] < 1 << 62
        if not is_sound or first[n] >> BLOCK_SHIFT != stop - 1 >> BLOCK_SHIFT:
            raise ValueError("runs that make no sense")
        before = stop
        is_leased = state == LEASED
        queue.put(
            first[n], stop, state, at=at[n], token=token[n], deliveries=deliveries[n],
            node=saved.nodes[holder[n]].decode() if is_leased else "",
            link=links[link[n]] if is_leased else 0,
        )  # fmt: skip
    for seq, reason in saved.reasons.items():
        if queue.is_exhausted(seq):
            queue.failures.note(seq, seq + 1, reason, 0, 0)
    for seq, reason, at_ms, nacks in saved.failures:
        if queue.runs.find(seq) >= 0:
            queue.failures.note(seq, seq + 1, reason, at_ms, nacks)
