"""A group's whole state as bytes, for the row of its topic in a snapshot. Pure.

The runs lie in columns, ascending by position. A later version may append fields, never move them.
"""

from __future__ import annotations

import msgspec
import numpy as np

from ringlog.errors import CorruptData, InvariantViolation
from ringlog.leases.group import ConsumerGroup
from ringlog.leases.group_change import U64, Change, Made
from ringlog.leases.runs import BLOCK_SHIFT, DELAYED, EXHAUSTED, LEASED, RETURNED
from ringlog.limits import GROUP_REASONS_SAVED_MAX

_WIDE = ("first", "at", "token", "begun", "given")
_STATES = (LEASED, DELAYED, RETURNED)


class _Saved(msgspec.Struct, array_like=True, frozen=True):
    number: U64
    made: Made
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
    """4 bytes each, as the next two."""
    holders: bytes
    deliveries: bytes
    states: bytes
    calls: list[Change] = []
    reasons: list[tuple[U64, str]] = []
    """(position, why it was rejected), as it was written before `failures`."""
    failures: list[tuple[U64, str, U64, U64]] = []
    """Of positions that failed last, as many as a snapshot keeps: position, and the fields of Failure."""


_encode = msgspec.msgpack.Encoder().encode
_decode = msgspec.msgpack.Decoder(_Saved).decode


def save(group: ConsumerGroup) -> bytes:
    """Encode a group."""
    entries = group.runs
    rows = entries.rows()
    held = [each for each in group.holders if each.runs]
    place = {each.number: at for at, each in enumerate(held)}
    holders = [place[entries.holder[row]] if entries.state[row] == LEASED else 0 for row in rows]
    wide = [np.array([getattr(entries, name)[row] for row in rows], dtype="<u8").tobytes() for name in _WIDE]
    return _encode(
        _Saved(
            group.number, group.made, group.changes, group.cursor, group.committed, group.holder,
            group.holder_token, [(each.name, each.seen_ms) for each in held], b"".join(wide),
            np.array([entries.stop[row] - entries.first[row] for row in rows], dtype="<u4").tobytes(),
            np.array(holders, dtype="<u4").tobytes(),
            np.array([entries.deliveries[row] for row in rows], dtype="<u4").tobytes(),
            bytes([_state_of(entries.state[row]) for row in rows]), list(group.calls.values()),
            failures=[(seq, *each) for seq, each in group.failures][-GROUP_REASONS_SAVED_MAX:],
        )
    )  # fmt: skip


def _state_of(state: int) -> int:
    """Whether anything is exhausted depends on a scheduler that may be there after a restart, or not."""
    return RETURNED if state == EXHAUSTED else state


def load(data: bytes) -> ConsumerGroup:
    """The group that these bytes speak of; raises CorruptData for what no version can have written."""
    try:
        saved = _decode(data)
        group = ConsumerGroup(saved.number, saved.made, saved.cursor)
        group.changes, group.committed = saved.changes, saved.committed
        group.holder, group.holder_token = saved.holder, saved.holder_token
        _fill(group, saved)
        for change in saved.calls:
            group.keep(change)
        for seq, reason, at_ms, nacks in [*((seq, why, 0, 0) for seq, why in saved.reasons), *saved.failures]:
            if group.runs.find(seq) < 0:
                raise ValueError("a reason of nothing that is pending")
            group.failures.note(seq, seq + 1, reason, at_ms, nacks)
        group.check()
    except (msgspec.MsgspecError, ValueError, IndexError, OverflowError, InvariantViolation) as e:
        raise CorruptData("a group's state does not decode", reason=str(e)) from None
    return group


def _fill(group: ConsumerGroup, saved: _Saved) -> None:
    numbers = [group.holders.note(name, seen_ms) for name, seen_ms in saved.members]
    total = len(saved.states)
    first, at, token, begun, given = np.frombuffer(saved.wide, dtype="<u8").reshape(5, total).tolist()
    counts, holders, deliveries = (
        np.frombuffer(column, dtype="<u4").tolist()
        for column in (saved.counts, saved.holders, saved.deliveries)
    )
    before = 0
    for n, state in enumerate(saved.states):
        stop = first[n] + counts[n]
        if (
            state not in _STATES
            or not before <= first[n] < stop
            or first[n] >> BLOCK_SHIFT != stop - 1 >> BLOCK_SHIFT
        ):
            raise ValueError("runs that make no sense")
        before = stop
        holder = numbers[holders[n]] if state == LEASED else 0
        row = group.runs.add(
            first[n], stop, state, at=at[n], token=token[n], holder=holder, deliveries=deliveries[n],
            begun=begun[n], given=given[n],
        )  # fmt: skip
        group.enter(row, state)
