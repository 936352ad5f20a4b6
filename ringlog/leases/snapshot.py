"""The complete state of a group as bytes, for the row of its topic in a snapshot. Pure.

Named groups, and the queue's own group with durable leases, have a format each. A later version may append
fields and never moves them.
"""

from __future__ import annotations

import msgspec
import numpy as np
from pyroaring import BitMap64

from ringlog.errors import CorruptData, InvariantViolation
from ringlog.leases.change import U64, GroupConfig, LeaseChange, decode_change
from ringlog.leases.group import ConsumerGroup
from ringlog.leases.run_columns import (
    SavedFailure,
    add_failures,
    add_runs,
    columns_of,
    decode_runs_into,
    encode_runs,
    index_processes,
    packed,
    unpacked,
)
from ringlog.leases.runs import EXHAUSTED, LEASED, RETURNED
from ringlog.limits import GROUP_REASONS_SAVED_MAX

_WIDE = ("first", "at", "token", "begun", "given")


class _SavedGroup(msgspec.Struct, array_like=True, frozen=True):
    number: U64
    config: GroupConfig
    changes: U64
    cursor: U64
    committed: U64
    holder: str
    holder_token: U64
    members: list[tuple[str, U64]]
    """(name, time of the last request) of the members with leases; `holders` are indexes into it."""
    wide: bytes
    """8 bytes each, little-endian, column by column: first, at, token, begun, given."""
    counts: bytes
    """4 bytes each, little-endian, like `holders`, `deliveries` and `process_numbers`."""
    holders: bytes
    deliveries: bytes
    states: bytes
    calls: list[LeaseChange] = []
    reasons: list[tuple[U64, str]] = []
    """(position, reason of its rejection), in the format from before `failures`."""
    failures: list[SavedFailure] = []
    """At most GROUP_REASONS_SAVED_MAX."""
    process_numbers: bytes = b""
    """Indexes into `process_ids`, from 1 on, 0 = none; empty = 0 for all runs."""
    process_ids: list[tuple[U64, U64]] = []
    """The processes that claimed."""
    at_ms: U64 = 0
    delivered_ahead: bytes = b""
    """Positions that were delivered at or above the cursor: a 64-bit roaring bitmap; empty = none."""


class _SavedQueueLeases(msgspec.Struct, array_like=True, frozen=True):
    changes: U64
    at_ms: U64
    dead_lettered: U64
    runs: bytes
    """Encoded by run_columns.py; empty = none."""
    calls: list[msgspec.Raw] = []


_encode = msgspec.msgpack.Encoder().encode
_decode_group = msgspec.msgpack.Decoder(_SavedGroup).decode
_decode_queue = msgspec.msgpack.Decoder(_SavedQueueLeases).decode
_DECODE_ERRORS = (msgspec.MsgspecError, ValueError, IndexError, OverflowError, InvariantViolation)
"""Exceptions for bytes that no version wrote."""


def encode_group(group: ConsumerGroup) -> bytes:
    """Encode a named group."""
    columns = columns_of(group)
    # Whether a record is exhausted depends on a scheduler, which may be missing after a restart.
    columns["state"][columns["state"] == EXHAUSTED] = RETURNED
    leased = columns["state"] == LEASED
    held, columns["holder"][leased] = np.unique(columns["holder"][leased], return_inverse=True)
    columns["process_number"], process_ids = index_processes(columns["process_number"], group)
    of_number = {each.number: each for each in group.holders}
    return _encode(
        _SavedGroup(
            group.number, group.config, group.last_change_number, group.lowest_undelivered, group.committed,
            group.reader,
            group.reader_token, [(of_number[n].name, of_number[n].seen_ms) for n in held.tolist()],
            packed(columns, _WIDE, "<u8"), packed(columns, ("count",), "<u4"),
            packed(columns, ("holder",), "<u4"), packed(columns, ("deliveries",), "<u4"),
            packed(columns, ("state",), "u1"), list(group.recent_calls), [],
            [(seq, *each) for seq, each in group.failures][-GROUP_REASONS_SAVED_MAX:],
            packed(columns, ("process_number",), "<u4") if process_ids else b"", process_ids, group.at_ms,
            group.delivered_ahead.serialize() if group.delivered_ahead else b"",
        )
    )  # fmt: skip


def decode_group(data: bytes) -> ConsumerGroup:
    """Decode a named group. Raises CorruptData for bytes that no version can have written."""
    try:
        saved = _decode_group(data)
        group = ConsumerGroup(saved.config, number=saved.number, cursor=saved.cursor)
        group.last_change_number, group.committed, group.at_ms = saved.changes, saved.committed, saved.at_ms
        group.reader, group.reader_token = saved.holder, saved.holder_token
        if saved.delivered_ahead:
            group.delivered_ahead = BitMap64.deserialize(saved.delivered_ahead)
            group.create_ready_index(group.delivered_ahead)
        for name, seen_ms in saved.members:
            group.holders.touch_member(name, seen_ms)
        first, at, token, begun, given = unpacked(saved.wide, len(_WIDE), "<u8")
        narrow = saved.counts + saved.holders + saved.deliveries
        count, holder, deliveries = unpacked(narrow, 3, "<u4")
        process_numbers = unpacked(saved.process_numbers, 1, "<u4")[0] if saved.process_numbers else []
        if EXHAUSTED in saved.states:
            raise ValueError("snapshot of a group must not contain exhausted runs")
        add_runs(
            group, saved.states, first, at, token, count, holder, [name for name, _ in saved.members],
            deliveries, process_numbers, saved.process_ids, begun, given,
        )  # fmt: skip
        group.recent_calls.restore_changes(saved.calls)
        failures = [*((seq, why, 0, 0) for seq, why in saved.reasons), *saved.failures]
        if any(group.runs.find(seq) < 0 for seq, *_ in failures):
            raise ValueError("failure reason of a position that is not pending")
        add_failures(group.failures, failures)
        group.check()
    except _DECODE_ERRORS as e:
        raise CorruptData("state of a consumer group cannot be decoded", reason=str(e)) from None
    return group


def encode_queue_leases(group: ConsumerGroup) -> bytes:
    """Encode the durable leases of a queue."""
    runs = b"".join(encode_runs(group, 1 << 62))
    calls = [msgspec.Raw(_encode(change)) for change in group.recent_calls]
    return _encode(_SavedQueueLeases(group.last_change_number, group.at_ms, group.dead_lettered, runs, calls))


def decode_queue_leases(data: bytes) -> ConsumerGroup:
    """Decode the durable leases of a queue. Raises CorruptData for bytes that no version can have written."""
    group = new_durable_group()
    try:
        saved = _decode_queue(data)
        group.last_change_number, group.at_ms = saved.changes, saved.at_ms
        group.dead_lettered = saved.dead_lettered
        if saved.runs:
            decode_runs_into(group, saved.runs, saved.at_ms)
        group.recent_calls.restore_changes(map(decode_change, saved.calls))
        group.check()
    except _DECODE_ERRORS as e:
        raise CorruptData("leases of a queue cannot be decoded", reason=str(e)) from None
    return group


def new_durable_group() -> ConsumerGroup:
    """Return an empty own group of a queue with durable leases."""
    group = ConsumerGroup()
    group.begin_log()
    return group
