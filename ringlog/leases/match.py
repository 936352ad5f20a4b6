"""Match: which seqs of a request are leased to its sender, under the tokens that it names. Pure."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from ringlog.leases.runs import FREE, GONE, LEASED, LeaseRuns
from ringlog.leases.spans import keep_first
from ringlog.leases.types import I64, U64, LeaseMatch

_NONE: I64 = np.zeros(0, np.int64)


def match_leases(runs: LeaseRuns, seqs: I64, tokens: U64 | None, holder: int) -> LeaseMatch:
    """Return which of these seqs the holder with this number holds.

    A token of 0 matches any lease. A seq that occurs twice counts once."""
    if len(seqs) == 1:
        return _match_one(runs, seqs, 0 if tokens is None else int(tokens[0]), holder)
    if _is_one_lease(runs, seqs, tokens, holder):
        return LeaseMatch(seqs, _NONE, _NONE)
    order = np.argsort(seqs, kind="stable")
    ascending = seqs[order]
    given = None if tokens is None else tokens[order]
    leased = np.zeros(len(seqs), np.bool_)
    gone = np.zeros(len(seqs), np.bool_)
    place = 0
    while place < len(ascending) and holder >= 0:
        row = runs.find(int(ascending[place]))
        if row < 0:
            place += 1
            continue
        end = int(np.searchsorted(ascending, runs.stop[row]))
        state = runs.state[row]
        if state in {LEASED, GONE} and runs.holder[row] == holder:
            into = leased if state == LEASED else gone
            into[place:end] = _fits(runs, row, ascending[place:end], given, place, end)
        place = end
    keep_first(leased, ascending)
    keep_first(gone, ascending)
    passed = np.ones(len(seqs), np.bool_)
    passed[order[leased | gone]] = False
    return LeaseMatch(ascending[leased], ascending[gone], seqs[passed])


def _is_one_lease(runs: LeaseRuns, seqs: I64, tokens: U64 | None, holder: int) -> bool:
    """Return True if these seqs were claimed together, are in order, and are all still held.

    The common case.
    """
    count, first = len(seqs), int(seqs[0]) if len(seqs) else 0
    if not count or int(seqs[-1]) - first != count - 1:
        return False
    row = runs.find(first)
    if row < 0 or first + count > runs.stop[row]:
        return False
    if runs.state[row] != LEASED or runs.holder[row] != holder:
        return False
    if not np.array_equal(seqs, first + np.arange(count)):
        return False
    return tokens is None or np.array_equal(tokens, tokens_of(runs, row, seqs))


def _match_one(runs: LeaseRuns, seqs: I64, token: int, holder: int) -> LeaseMatch:
    """Match a single seq; optimized for latency."""
    seq = int(seqs[0])
    row = runs.find(seq)
    state = runs.state[row] if row >= 0 else FREE
    is_held = state in {LEASED, GONE} and runs.holder[row] == holder
    if not is_held or token not in {0, runs.token[row] + seq - runs.first[row]}:
        return LeaseMatch(_NONE, _NONE, seqs)
    return LeaseMatch(seqs, _NONE, _NONE) if state == LEASED else LeaseMatch(_NONE, seqs, _NONE)


def _fits(
    runs: LeaseRuns, row: int, seqs: I64, tokens: U64 | None, place: int, end: int
) -> NDArray[np.bool_] | bool:
    if tokens is None:
        return True
    given = tokens[place:end]
    fits: NDArray[np.bool_] = (given == tokens_of(runs, row, seqs)) | (given == 0)
    return fits


def tokens_of(runs: LeaseRuns, row: int, seqs: I64) -> U64:
    """Return the tokens of the leases under which these seqs of a row were last delivered."""
    return (seqs - runs.first[row]).astype(np.uint64) + np.uint64(runs.token[row])
