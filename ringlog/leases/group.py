"""One consumer group of one topic: the calls of its members, and the changes that they make. Pure.

A queue uses its topic's own group, which has no name (DEFAULT_GROUP). Both kinds are the same code and differ
in data:

                      own group                     named group
   ack                deletes: `finish_jobs`        settles the position: `ack`; a change
   changes            logged if leases are durable  logged
   delivered          seqs that are not there       below the cursor in each change, or `delivered_ahead`
   all deliveries     tested by the next claim      tested when a record is returned
   members            while they hold a lease       also while they send requests
   mode stream        never                         one fenced reader; `commit` moves the cursor

Each call makes a LeaseChange and applies it with the same `apply` that replays it from the log
(group_state.py). It returns the change, which must be logged, or None if nothing changed. No token is issued
twice. Times are milliseconds and are passed as arguments.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Final

import numpy as np

from ringlog.leases.change import GroupConfig, LeaseChange, Op
from ringlog.leases.fair_shares import fair_shares, split_runs
from ringlog.leases.group_state import GroupState
from ringlog.leases.holders import NO_PROCESS, ProcessId
from ringlog.leases.live_seqs import LiveSeqs
from ringlog.leases.match import tokens_of
from ringlog.leases.run_columns import encode_runs
from ringlog.leases.runs import DELAYED, EXHAUSTED, LEASED, RETURNED
from ringlog.leases.spans import (
    SeqRun,
    Span,
    count_of,
    flatten_spans,
    merge_adjacent,
    spans_of,
    truncate_runs,
)
from ringlog.leases.tokens import LeaseTokens
from ringlog.leases.transitions import ACK, EXHAUST, RESTORE
from ringlog.leases.types import I64, SEQ_ORDER, U64, ClaimRequest, DispatchOrder, LeaseMatch
from ringlog.limits import DURABLE_HOLDERS_MAX, GROUP_PENDING_MAX, RUNS_PER_CHANGE_MAX

_CLAIMED: Final = Op.CLAIMED
_STOLEN: Final = Op.STOLEN
_STEALABLE: Final = (LEASED, DELAYED, RETURNED)
_SNAPSHOT_ROWS = 4_096
"""Runs in one part of the snapshot that is logged when leases become durable."""
_NONE: I64 = np.zeros(0, np.int64)


class ConsumerGroup(GroupState):
    """One group. Its calls return the changes that they made."""

    # -- delivery ------------------------------------------------------------------------------------

    def claim(
        self, live: LiveSeqs, node: str, most: int, lease_ms: int, now_ms: int, *, deliveries_max: int = 0,
        order: DispatchOrder = SEQ_ORDER, new_max: int = 1 << 62, min_idle_ms: int = 0, call: int = 0,
        process_id: ProcessId = NO_PROCESS,
    ) -> LeaseChange | None:  # fmt: skip
        """Lease up to `most` seqs to `node`. The rows of the change ascend.

        Returned seqs come first, lowest first. Then at most `new_max` new seqs follow, lowest first or by
        `order`. With `min_idle_ms`, seqs that another member holds and left idle for that time are last.

        With `deliveries_max`, seqs with that many deliveries are exhausted instead: see `take_returned`.
        """
        if not self.is_default_group:
            most = self._claim_limit(node, most, now_ms)
        found = self.collect(live, most, now_ms, deliveries_max, order, new_max=new_max)
        if min_idle_ms and (left := most - count_of(found)) > 0:
            found += self._idle(node, now_ms - min_idle_ms, left)
            found.sort()
        return self._lease(_CLAIMED, found, node, lease_ms, now_ms, call, process_id)

    def claim_fair_shares(
        self, live: LiveSeqs, requests: Sequence[ClaimRequest], most: int, now_ms: int, *,
        deliveries_max: int = 0, order: DispatchOrder = SEQ_ORDER,
    ) -> list[LeaseChange | None]:  # fmt: skip
        """Claim for requests that arrived together: fair shares of up to `most` jobs, one change for each.

        The first change also contains the seqs that were exhausted."""
        requested = fair_shares([request.most for request in requests], most)
        parts: list[list[SeqRun]] = [[] for _ in requests]
        collected: list[SeqRun] = []
        for by_number in (False, True):
            indexes = [n for n, request in enumerate(requests) if request.by_number is by_number]
            if indexes:
                requested_total = sum(requested[n] for n in indexes)
                chosen = order._replace(by_number=by_number)
                already_collected = count_of(run for run in collected if not run[2])
                found = self.collect(live, requested_total, now_ms, deliveries_max, chosen, already_collected)
                collected += found
                if count_of(found) == requested_total:
                    for n, part in zip(
                        indexes, split_runs(found, [requested[n] for n in indexes]), strict=True
                    ):
                        parts[n] = part
        if count_of(collected) < sum(requested):
            # All ready jobs are taken, so only the shares remain to be decided.
            shares = fair_shares(requested, count_of(collected))
            indexes = sorted(range(len(requests)), key=lambda n: not requests[n].by_number)
            for n, part in zip(
                indexes, split_runs(sorted(collected), [shares[n] for n in indexes]), strict=True
            ):
                parts[n] = part
        return [
            self._lease(_CLAIMED, part, each.node, each.lease_ms, now_ms, each.call, each.process_id)
            for each, part in zip(requests, parts, strict=True)
        ]

    def steal(
        self, seqs: I64, node: str, lease_ms: int, now_ms: int, *, min_idle_ms: int = 0, call: int = 0,
        process_id: ProcessId = NO_PROCESS,
    ) -> LeaseChange | None:  # fmt: skip
        """Lease the pending ones of these ascending positions to `node`, if they were idle for `min_idle_ms`.

        The ack of the previous holder reports them as skipped."""
        self.apply_expirations(now_ms)
        room = len(seqs) if self.is_default_group else self._claim_limit(node, len(seqs), now_ms)
        runs, found = self.runs, list[SeqRun]()
        for first, stop in spans_of(seqs):
            for row in runs.within(first, stop):
                if runs.given[row] <= now_ms - min_idle_ms and runs.state[row] in _STEALABLE:
                    low, high = max(first, runs.first[row]), min(stop, runs.stop[row])
                    found.append((low, high, self.deliveries_of(row)))
        return self._lease(_STOLEN, truncate_runs(found, room), node, lease_ms, now_ms, call, process_id)

    def _claim_limit(self, node: str, most: int, now_ms: int) -> int:
        """Return how many records this member may get. Raises Throttled if there are too many members."""
        self.holders.require_room(node, now_ms)
        self.holders.touch_member(node, now_ms)
        return min(most, (self.config.member_max or GROUP_PENDING_MAX) - self.holders.held_by(node))

    def room_for(self, nodes: Iterable[str]) -> list[bool]:
        """Return for each of these nodes, which claim together, whether it may hold leases.

        A snapshot can name only DURABLE_HOLDERS_MAX holders.
        """
        holders, new = self.holders, set[str]()
        found = []
        for node in nodes:
            if holders.find(node) < 0 and node not in new:
                if len(holders) + len(new) >= DURABLE_HOLDERS_MAX:
                    found.append(False)
                    continue
                new.add(node)
            found.append(True)
        return found

    def _idle(self, node: str, given_by: int, most: int) -> list[SeqRun]:
        runs, own = self.runs, self.holders.find(node)
        rows = runs.select((LEASED,), given_by, 0, -1, own, -1)[:most].tolist()
        return truncate_runs([(runs.first[row], runs.stop[row], runs.deliveries[row]) for row in rows], most)

    def _lease(
        self, op: Op, found: list[SeqRun], node: str, lease_ms: int, now_ms: int, call: int,
        process_id: ProcessId,
    ) -> LeaseChange | None:  # fmt: skip
        exhausted_spans: list[int] = []
        if self.newly_exhausted:
            exhausted_spans = flatten_spans(self.newly_exhausted)
            self.newly_exhausted.clear()
        if not found and not exhausted_spans:
            return None
        rows: list[int] = []
        for first, stop, deliveries in (
            merge_adjacent(found) if self.is_default_group and len(found) > 1 else found
        ):
            rows += (first, stop - first, deliveries + 1, self.tokens.allocate(stop - first))
        until_ms = now_ms + lease_ms if rows else 0
        return self._change(
            op, now_ms, node, until_ms, rows, call, process_id=process_id, exhausted_spans=exhausted_spans
        )

    # -- settlement ----------------------------------------------------------------------------------

    def match(self, seqs: I64, tokens: U64 | None, node: str, now_ms: int) -> LeaseMatch:
        """As in the table. The request shows that a member is alive."""
        if not self.is_default_group and self.holders.find(node) >= 0:
            self.holders.touch_member(node, now_ms)
        return super().match(seqs, tokens, node, now_ms)

    def finish_jobs(self, found: LeaseMatch) -> None:
        """Own group: remove the leases of acked jobs. The caller logs their deletion."""
        for row in (*self.rows_of(found.leased), *self.rows_of(found.gone)):
            self.apply_event(row, ACK)

    def ack_lease(self, first: int, count: int, token: int, node: str, now_ms: int) -> bool:
        """Ack jobs as `finish_jobs` does, if `node` holds all of them under one lease with these tokens.

        The jobs are `count` seqs from `first` on, with tokens from `token` on. Otherwise return False; then
        only expirations changed the table."""
        self.apply_expirations(now_ms)
        runs = self.runs
        row = runs.find(first)
        if row < 0 or runs.state[row] != LEASED or runs.holder[row] != self.holders.find(node):
            return False
        stop = first + count
        if stop > runs.stop[row] or token != runs.token[row] + first - runs.first[row]:
            return False
        if runs.stop[row] > stop:
            self.split(row, stop)
        if runs.first[row] < first:
            row = self.split(row, first)
        self.apply_event(row, ACK)
        return True

    def ack(self, found: LeaseMatch, node: str, now_ms: int, *, call: int = 0) -> LeaseChange | None:
        """Settle these positions."""
        return self._settle(Op.ACKED, found, node, now_ms, 0, call)

    def nack(
        self, found: LeaseMatch, node: str, delay_ms: int, now_ms: int, *, call: int = 0, reason: str = ""
    ) -> LeaseChange | None:
        """Return these seqs, ready now or after the delay. With a reason they failed."""
        until_ms = now_ms + delay_ms if delay_ms else 0
        return self._settle(Op.RELEASED, found, node, now_ms, until_ms, call, reason)

    def nack_with_backoff(
        self, found: LeaseMatch, node: str, now_ms: int, *, call: int = 0, reason: str = ""
    ) -> list[LeaseChange]:
        """Return these seqs, each with the backoff of its number of deliveries.

        The last change answers a repeat of the request."""
        parts: dict[int, list[int]] = {}
        for row in self.rows_of(found.leased):
            delay_ms = self.backoff.delay_after(self.deliveries_of(row))
            parts.setdefault(delay_ms, []).extend(range(self.runs.first[row], self.runs.stop[row]))
        changes = []
        for n, (delay_ms, seqs) in enumerate(sorted(parts.items()), 1):
            is_last = n == len(parts)
            part = found._replace(leased=np.array(sorted(seqs), dtype=np.int64))
            if not is_last:
                part = LeaseMatch(part.leased, _NONE, _NONE)
            change = self.nack(part, node, delay_ms, now_ms, call=call if is_last else 0, reason=reason)
            changes += [change] if change is not None else []
        return changes

    def undo(self, found: LeaseMatch, node: str, now_ms: int, *, call: int = 0) -> LeaseChange | None:
        """Return seqs that were not started: they are ready at once, and the delivery does not count."""
        return self._settle(Op.UNDONE, found, node, now_ms, 0, call)

    def extend(
        self, found: LeaseMatch, node: str, lease_ms: int, now_ms: int, *, call: int = 0
    ) -> LeaseChange | None:
        """Set a new deadline, which may be earlier than the old one."""
        return self._settle(Op.EXTENDED, found, node, now_ms, now_ms + lease_ms, call)

    def reject(
        self, found: LeaseMatch, node: str, reason: str, now_ms: int, *, call: int = 0
    ) -> LeaseChange | None:
        """Exhaust these seqs, whatever their number of deliveries."""
        return self._settle(Op.REJECTED, found, node, now_ms, 0, call, reason)

    def release(self, process_id: ProcessId, now_ms: int) -> list[LeaseChange]:
        """Return all seqs of a process that exited. They are ready at once, and the deliveries count."""
        process_number = self.processes.forget(process_id)
        if not process_number:
            return []
        self.apply_expirations(now_ms)
        runs = self.runs
        spans: list[Span] = sorted(
            (runs.first[row], runs.stop[row]) for row in runs.rows_leased_by(process_number)
        )
        return [
            self._change(Op.RELEASED, now_ms, "", 0, flatten_spans(spans[at : at + RUNS_PER_CHANGE_MAX]), 0)
            for at in range(0, len(spans), RUNS_PER_CHANGE_MAX)
        ]

    def leave(self, node: str, now_ms: int) -> LeaseChange | None:
        """Remove a member. The seqs that it holds are ready at once."""
        self.apply_expirations(now_ms)
        change = None
        if self.holders.held_by(node):
            change = self._change(Op.RELEASED, now_ms, node, 0, [], 0)
        self.holders.leave(node)
        return change

    def _settle(
        self, op: Op, found: LeaseMatch, node: str, now_ms: int, until_ms: int, call: int, reason: str = ""
    ) -> LeaseChange | None:
        if not len(found.leased):
            return None
        # Except for acks: deleted jobs are not held either.
        skipped = [*found.skipped.tolist(), *found.gone.tolist()]
        return self._change(
            op, now_ms, node, until_ms, flatten_spans(spans_of(found.leased)), call, skipped, reason
        )

    def redeliver(self, seq: int, now_ms: int, *, call: int = 0) -> LeaseChange:
        """Deliver this position again, as if for the first time.

        A position that is pending or was not delivered yet stays as it is. The call is remembered in any
        case."""
        is_done = self.was_delivered(seq) and self.runs.find(seq) < 0
        return self._change(Op.REDELIVERED, now_ms, "", 0, [seq, 1] if is_done else [], call)

    # -- position ------------------------------------------------------------------------------------

    def seek(self, cursor: int, now_ms: int) -> LeaseChange:
        """Restart the group at `cursor`: all leases end.

        Every position from there on is delivered, possibly again."""
        self._restart_at(cursor)
        return self._change(Op.SEEK, now_ms, "", 0, [], 0)

    def take_over_stream(self, node: str, token: int, now_ms: int, *, call: int = 0) -> LeaseChange:
        """STREAM: make `node` the reader. It continues after the committed position."""
        return self._change(Op.TAKEN_OVER, now_ms, node, 0, [token], call)

    def commit(self, committed: int, cursor: int, now_ms: int) -> LeaseChange | None:
        """STREAM: commit positions. Return None if nothing changed.

        Every position up to `committed` is processed, and every position before `cursor` was delivered.
        """
        committed, cursor = max(committed, self.committed), max(cursor, self.cursor)
        if (committed, cursor) == (self.committed, self.cursor):
            return None
        self.cursor: int = max(cursor, committed + 1)
        return self._change(Op.COMMITTED, now_ms, self.reader, 0, [committed], 0)

    def remove(self, now_ms: int) -> LeaseChange:
        """Return the change that deletes the group."""
        return self._change(Op.REMOVED, now_ms, "", 0, [], 0)

    # -- log ---------------------------------------------------------------------------------------

    def snapshot_changes(self, now_ms: int) -> list[LeaseChange]:
        """Return the complete state as changes, for the log, when leases become durable."""
        changes = [
            self._change(Op.SNAPSHOT, now_ms, "", 0, [], 0, saved=part)
            for part in encode_runs(self, _SNAPSHOT_ROWS)
        ]
        return [*changes, self.count_dead_lettered(0, now_ms)] if self.dead_lettered else changes

    # -- dead letters ---------------------------------------------------------------------------------

    def set_dead_lettering(self, has_mover: bool) -> None:
        """Named group: set whether a scheduler moves its dead letters."""
        self.has_dead_letters: bool = has_mover and bool(self.config.dead_letter)
        for row in self.runs.rows():
            if self.runs.state[row] == EXHAUSTED or self.becomes_exhausted(row, self.runs.state[row]):
                self.apply_event(row, EXHAUST if self.has_dead_letters else RESTORE)

    def filter_exhausted(self, seqs: I64) -> I64:
        """Return those of these ascending seqs that wait for their move to the dead-letter topic."""
        return np.array([seq for seq in seqs.tolist() if self.is_exhausted(seq)], dtype=np.int64)

    def restore_exhausted(self) -> None:
        """Own group: deliver exhausted jobs again, because there is no dead-letter topic any more."""
        for first, stop, _ in self.exhausted_runs(self.exhausted):
            for row in self.isolate_rows(first, stop):
                self.apply_event(row, RESTORE)

    def count_dead_lettered(self, jobs: int, now_ms: int) -> LeaseChange:
        """Own group: count `jobs` more jobs as moved to the dead-letter topic."""
        return self._change(Op.DEAD_LETTERED, now_ms, "", 0, [self.dead_lettered + jobs], 0)

    def token_of(self, seq: int) -> int:
        """Return the token of the last delivery of this position, which must be pending.

        For a redelivered position without a delivery since it is 0."""
        row = self.runs.find(seq)
        return self.runs.token[row] + seq - self.runs.first[row]

    def confirm_dead_lettered(self, seqs: I64, tokens: U64, now_ms: int) -> LeaseChange | None:
        """Ack positions whose copies in the dead-letter topic are durable, if they are still exhausted.

        `seqs` ascends. `tokens` are those of the leases under which the copied records were last delivered. A
        record that was redelivered and exhausted again has another token. It stays, because its second dead
        letter is not written yet and this call may be a late repeat."""
        runs, done = self.runs, np.zeros(len(seqs), np.bool_)
        for first, stop in spans_of(seqs):
            for row in runs.within(first, stop):
                if runs.state[row] == EXHAUSTED:
                    named = slice(*np.searchsorted(seqs, (runs.first[row], runs.stop[row])).tolist())
                    done[named] = tokens[named] == tokens_of(runs, row, seqs[named])
        if not done.any():
            return None
        return self._change(Op.ACKED, now_ms, "", 0, flatten_spans(spans_of(seqs[done])), 0)


def created(number: int, config: GroupConfig, cursor: int, now_ms: int) -> LeaseChange:
    """Return the change that creates a group."""
    return LeaseChange(number, 1, Op.CREATED, now_ms, cursor, config=config)


def create_group(change: LeaseChange, tokens: LeaseTokens | None = None) -> ConsumerGroup:
    """Return the group that such a change creates."""
    assert change.config is not None
    group = ConsumerGroup(change.config, number=change.group, cursor=change.cursor, tokens=tokens)
    group.last_change_number = change.number
    return group
