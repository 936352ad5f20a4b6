"""The whole state of a group as bytes, for the row of its topic in a snapshot (QL-22). Pure.

Named groups and the queue's own one with durable leases have a layout each. A later version may append
fields, never move them.
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
    """(name, when it was last heard of) of those who hold something; `holders` are places in it."""
    wide: bytes
    """8 bytes each, little-endian, column by column: first, at, token, begun, given."""
    counts: bytes
    """4 bytes each, as the next two and `links`."""
    holders: bytes
    deliveries: bytes
    states: bytes
    calls: list[LeaseChange] = []
    reasons: list[tuple[U64, str]] = []
    """(position, why it was rejected), as it was written before `failures`."""
    failures: list[SavedFailure] = []
    """As many as a snapshot keeps."""
    links: bytes = b""
    """Places in `lives`, from 1 on, 0 = none; empty = none of any run."""
    lives: list[tuple[U64, U64]] = []
    """Of the processes that claimed."""
    at_ms: U64 = 0
    delivered_ahead: bytes = b""
    """What was handed out from the cursor on: a 64-bit roaring bitmap; empty = nothing."""


class _SavedQueueLeases(msgspec.Struct, array_like=True, frozen=True):
    changes: U64
    at_ms: U64
    dead_lettered: U64
    runs: bytes
    """As run_columns.py encodes them; empty = none."""
    calls: list[msgspec.Raw] = []


_encode = msgspec.msgpack.Encoder().encode
_decode_group = msgspec.msgpack.Decoder(_SavedGroup).decode
_decode_own = msgspec.msgpack.Decoder(_SavedQueueLeases).decode
_DAMAGE = (msgspec.MsgspecError, ValueError, IndexError, OverflowError, InvariantViolation)
"""What decoding of bytes raises that no version wrote."""


def encode_group(group: ConsumerGroup) -> bytes:
    """Encode a group with a name."""
    columns = columns_of(group)
    # Whether anything is exhausted depends on a scheduler that may be there after a restart, or not.
    columns["state"][columns["state"] == EXHAUSTED] = RETURNED
    leased = columns["state"] == LEASED
    held, columns["holder"][leased] = np.unique(columns["holder"][leased], return_inverse=True)
    columns["link"], lives = index_processes(columns["link"], group)
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
            packed(columns, ("link",), "<u4") if lives else b"", lives, group.at_ms,
            group.delivered_ahead.serialize() if group.delivered_ahead else b"",
        )
    )  # fmt: skip


def decode_group(data: bytes) -> ConsumerGroup:
    """The named group that these bytes speak of; raises CorruptData for what no version can have written."""
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
        links = unpacked(saved.links, 1, "<u4")[0] if saved.links else []
        if EXHAUSTED in saved.states:
            raise ValueError("exhausted runs that nothing exhausts")
        add_runs(
            group, saved.states, first, at, token, count, holder, [name for name, _ in saved.members],
            deliveries, links, saved.lives, begun, given,
        )  # fmt: skip
        group.recent_calls.restore_changes(saved.calls)
        failures = [*((seq, why, 0, 0) for seq, why in saved.reasons), *saved.failures]
        if any(group.runs.find(seq) < 0 for seq, *_ in failures):
            raise ValueError("a reason of nothing that is pending")
        add_failures(group.failures, failures)
        group.check()
    except _DAMAGE as e:
        raise CorruptData("a group's state does not decode", reason=str(e)) from None
    return group


def encode_queue_leases(group: ConsumerGroup) -> bytes:
    """Encode the durable leases of a queue."""
    runs = b"".join(encode_runs(group, 1 << 62))
    calls = [msgspec.Raw(_encode(change)) for change in group.recent_calls]
    return _encode(_SavedQueueLeases(group.last_change_number, group.at_ms, group.dead_lettered, runs, calls))


def decode_queue_leases(data: bytes) -> ConsumerGroup:
    """The durable leases of these bytes; raises CorruptData for what no version can have written."""
    group = new_durable_group()
    try:
        saved = _decode_own(data)
        group.last_change_number, group.at_ms = saved.changes, saved.at_ms
        group.dead_lettered = saved.dead_lettered
        if saved.runs:
            decode_runs_into(group, saved.runs)
        group.recent_calls.restore_changes(map(decode_change, saved.calls))
        group.check()
    except _DAMAGE as e:
        raise CorruptData("a queue's leases do not decode", reason=str(e)) from None
    return group


def new_durable_group() -> ConsumerGroup:
    """The own group of a queue whose leases are in the log, of which nothing is known yet."""
    group = ConsumerGroup()
    group.begin_log()
    return group
