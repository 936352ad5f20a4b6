"""Lease table: the delivered seqs of a topic, their holders, and the effect of every event on them. Pure.

A queue and a consumer group keep their leases in one table each. A seq without a row is ready and was never
delivered, or is done; the topic and the owner's cursor distinguish the two. Seqs in one state with equal
facts share a row (runs.py). Times are milliseconds and are passed as arguments. Every operation first applies
the expirations of leases and delays, in the order of their times.

The effect of each event on a run is defined in transitions.py.

Invariants, which `check` recounts:
  runs are disjoint, and the counts by state equal those of the rows;
  the counts of a holder equal those of the rows; no seq is in two leases.
"""

from __future__ import annotations

import numpy as np
from pyroaring import BitMap64

from ringlog.errors import InvariantViolation
from ringlog.leases.failures import Failures
from ringlog.leases.holders import Holders, ProcessId
from ringlog.leases.match import match_leases
from ringlog.leases.processes import LeaseProcesses
from ringlog.leases.run_order import RunOrder
from ringlog.leases.runs import (
    BLOCK,
    BLOCK_SHIFT,
    DELAYED,
    EXHAUSTED,
    FREE,
    GONE,
    LEASED,
    RETURNED,
    STATES,
    LeaseRuns,
)
from ringlog.leases.spans import SeqRun, Span, blocks_of, spans_of
from ringlog.leases.transitions import BACK_OFF, DELETE, EXHAUST, EXPIRE, PASSED, REMOVE, next_state
from ringlog.leases.types import I64, NO_BACKOFF, U64, LeaseMatch
from ringlog.limits import DEAD_LETTERS_PER_CLAIM_MAX

REJECTED_BIT = 1 << 31
"""Flag in the deliveries of a rejected run: it is exhausted, whatever its count."""


class LeaseTable:
    """The leases of one queue or consumer group, and the records that were returned."""

    def __init__(self, holders: Holders) -> None:
        self.runs: LeaseRuns = LeaseRuns()
        self.holders = holders
        self.failures: Failures = Failures()
        """Reasons of nacks and rejections, until the records are done."""
        self.backoff = NO_BACKOFF
        """Delay of records whose lease expired."""
        self.processes: LeaseProcesses = LeaseProcesses(self.runs)
        self.newly_exhausted: list[Span] = []
        """Spans that claims exhausted since the list was last emptied."""
        self.has_dead_letters = True
        """Exhausted records wait for their move. If false, they count as returned."""
        self.deliveries_max = 0
        """Highest number of deliveries, tested whenever a record is returned; 0 = not tested then."""
        self.version: int = 0
        """Grows with every change of a run. Derived data is valid while it stays the same."""
        self.counts_by_state: list[int] = [0] * len(STATES)
        """Number of seqs by state."""
        self._runs_of = [0] * len(STATES)
        """Number of runs by state."""
        self.run_order: RunOrder = RunOrder(self.runs, self._runs_of)

    @property
    def leased(self) -> int:
        """Number of leased seqs that are alive."""
        return self.counts_by_state[LEASED]

    @property
    def delayed(self) -> int:
        """Number of seqs that were returned and are not ready yet."""
        return self.counts_by_state[DELAYED]

    @property
    def returned(self) -> int:
        """Number of seqs that were returned and are ready."""
        return self.counts_by_state[RETURNED]

    @property
    def exhausted(self) -> int:
        """Number of seqs that wait for their move to the dead-letter topic. They are not delivered."""
        return self.counts_by_state[EXHAUSTED]

    # -- time -----------------------------------------------------------------------------------------

    def apply_expirations(self, now_ms: int) -> None:
        """Make records ready whose lease or delay ended by now."""
        runs, run_order = self.runs, self.run_order
        while (row := run_order.pop_due(now_ms)) >= 0:
            if self.backoff.base_ms and runs.state[row] == LEASED:
                until_ms = runs.at[row] + self.backoff.delay_after(self.deliveries_of(row))
                if until_ms > now_ms:
                    self.apply_event(row, BACK_OFF, until_ms)
                    continue
            self.apply_event(row, EXPIRE)

    def next_due_ms(self) -> int | None:
        """Return the time at which the next lease or delay ends; None if there is none."""
        return self.run_order.next_due_ms()

    # -- transitions ---------------------------------------------------------------------------------

    def apply_event(self, row: int, event: int, at_ms: int = 0) -> None:
        """Apply an event to a run. `at_ms` is the new deadline of a lease or the end of a delay."""
        runs = self.runs
        state = runs.state[row]
        to = next_state(event, state)
        if to == PASSED:
            return
        if to in {FREE, GONE} and self.failures:
            self.failures.forget(runs.first[row], runs.stop[row])
        if to == FREE:
            self.drop(row)
            return
        if to in {RETURNED, EXHAUSTED}:
            to = EXHAUSTED if self.becomes_exhausted(row, to) else RETURNED
        size = runs.stop[row] - runs.first[row]
        self._count(state, -1, -size)
        self._count(to, 1, size)
        runs.state[row] = to
        if to in {LEASED, DELAYED}:
            runs.at[row] = at_ms
        if state == LEASED and to not in {LEASED, GONE}:
            self.holders.drop(runs.holder[row], size)
        self.run_order.add(row, to)

    def lease(
        self, first: int, stop: int, at: int, token: int, holder: int, deliveries: int, *,
        process_number: int = 0, begun: int = 0, given: int = 0,
    ) -> None:  # fmt: skip
        """Lease seqs without a row."""
        for low, high in blocks_of(first, stop):
            row = self.runs.add(
                low, high, LEASED, at=at, token=token + low - first, holder=holder, deliveries=deliveries,
                process_number=process_number, begun=begun, given=given,
            )  # fmt: skip
            self.add_row(row, LEASED)

    def add_run(
        self, first: int, stop: int, state: int, *, at: int, token: int, node: str, deliveries: int,
        process_id: ProcessId, begun: int = 0, given: int = 0,
    ) -> None:  # fmt: skip
        """Set the state of these seqs to that of a log or a snapshot, and replace what was known."""
        for row in self.isolate_rows(first, stop):
            self.drop(row)
        if state == LEASED:
            self.lease(
                first, stop, at, token, self.holders.get_or_add(node), deliveries,
                process_number=self.processes.get_or_add(process_id),
                begun=begun, given=given,
            )  # fmt: skip
            return
        for low, high in blocks_of(first, stop):
            row = self.runs.add(
                low, high, state, at=at, token=token + low - first, deliveries=deliveries, begun=begun,
                given=given,
            )  # fmt: skip
            self.add_row(row, state)

    def drop(self, row: int) -> None:
        """Remove the row of a run that is done, or that is delivered under another row."""
        runs = self.runs
        state, size = runs.state[row], runs.stop[row] - runs.first[row]
        self._count(state, -1, -size)
        if state in {LEASED, GONE}:
            self.holders.drop(runs.holder[row], size)
        runs.drop(row)

    def add_row(self, row: int, state: int) -> None:
        """Count and index a new row in this state."""
        runs = self.runs
        if state in {RETURNED, EXHAUSTED}:
            state = EXHAUSTED if self.becomes_exhausted(row, state) else RETURNED
        size = runs.stop[row] - runs.first[row]
        runs.state[row] = state
        self._count(state, 1, size)
        if state == LEASED:
            self.holders.add(runs.holder[row], size)
        self.run_order.add(row, state)

    def count_change(self) -> None:
        """Tell holders of `version` that the table changed."""
        self.version += 1

    def _count(self, state: int, runs: int, size: int) -> None:
        self.version += 1
        self.counts_by_state[state] += size
        self._runs_of[state] += runs

    def becomes_exhausted(self, row: int, state: int) -> bool:
        """Return True if a run that enters this state waits for its move to the dead-letter topic."""
        if not self.has_dead_letters:
            return False
        most, deliveries = self.deliveries_max, self.runs.deliveries[row]
        return state == EXHAUSTED or deliveries >= REJECTED_BIT or 0 < most <= deliveries

    # -- rows -----------------------------------------------------------------------------------------

    def isolate_rows(self, first: int, stop: int) -> list[int]:
        """Return the rows within [first, stop), and split runs that cross its ends."""
        rows: list[int] = []
        for row in self.runs.within(first, stop):
            if self.runs.stop[row] > stop:
                self.split(row, stop)
            if self.runs.first[row] < first:
                row = self.split(row, first)
            rows.append(row)
        return rows

    def rows_of(self, seqs: I64) -> list[int]:
        """Return the rows of these ascending seqs, with splits as in `isolate_rows`."""
        rows: list[int] = []
        for first, stop in spans_of(seqs):
            rows += self.isolate_rows(first, stop)
        return rows

    def split(self, row: int, at: int) -> int:
        """Split a run. The second half is counted and indexed like the first. Return its row."""
        new = self.runs.split_row(row, at)
        state = self.runs.state[new]
        self._runs_of[state] += 1
        if state in {LEASED, GONE}:
            self.holders.add(self.runs.holder[new], 0)
        self.run_order.add(new, state)
        return new

    def deliveries_of(self, row: int) -> int:
        """Return the number of deliveries of a row."""
        return self.runs.deliveries[row] & ~REJECTED_BIT

    def state_of(self, seq: int) -> int:
        """Return the state of this seq's run; FREE if it has none."""
        row = self.runs.find(seq)
        return self.runs.state[row] if row >= 0 else FREE

    # -- delivery ------------------------------------------------------------------------------------

    def take_returned(self, most: int, deliveries_max: int = 0) -> list[int]:
        """Return rows of up to `most` returned seqs, lowest first, which the caller must lease now.

        With `deliveries_max`, seqs with that many deliveries are exhausted instead, at most
        DEAD_LETTERS_PER_CLAIM_MAX of them: see `newly_exhausted`.
        """
        rows: list[int] = []
        runs, run_order, left = self.runs, self.run_order, DEAD_LETTERS_PER_CLAIM_MAX
        first = -1
        while most > 0 and (row := run_order.lowest_returned(first)) >= 0:
            is_exhausted = 0 < deliveries_max <= self.deliveries_of(row)
            if is_exhausted and not left:
                break
            run_order.pop_returned()
            first = runs.first[row]
            room = left if is_exhausted else most
            if runs.stop[row] - first > room:
                self.split(row, first + room)
            if is_exhausted:
                self.newly_exhausted.append((first, runs.stop[row]))
                left -= runs.stop[row] - first
                self.apply_event(row, EXHAUST)
            else:
                rows.append(row)
                most -= runs.stop[row] - first
        return rows

    # -- settlement ----------------------------------------------------------------------------------

    def match(self, seqs: I64, tokens: U64 | None, node: str, now_ms: int) -> LeaseMatch:
        """Return which of these seqs `node` holds.

        A token of 0 matches any lease. A seq that occurs twice counts once. Only expirations change the
        table."""
        self.apply_expirations(now_ms)
        holder = self.holders.find(node)
        return match_leases(self.runs, seqs, tokens, holder)

    def apply_removal(self, floor: int, seqs: BitMap64 | None = None, *, on_request: bool = False) -> None:
        """End the leases and delays of seqs below `floor` and in `seqs`, because they are not alive any
        more."""
        if not len(self.runs):
            return
        event = DELETE if on_request else REMOVE
        for row in self.runs.below(floor) if floor else ():
            if self.runs.stop[row] > floor:
                self.split(row, floor)
            self.apply_event(row, event)
        if seqs:
            for row in self.rows_of(self._known(seqs)):
                self.apply_event(row, event)

    def _known(self, seqs: BitMap64) -> I64:
        """Return the seqs whose blocks have runs. A delete may name millions of seqs."""
        if len(seqs) <= BLOCK:
            return np.array([seq for seq in seqs if seq >> BLOCK_SHIFT in self.runs.blocks], dtype=np.int64)
        numbers = np.frombuffer(seqs.to_array(), dtype=np.int64)
        blocks = numbers >> BLOCK_SHIFT
        return numbers[np.isin(blocks, np.fromiter(self.runs.blocks, np.int64))]

    # -- dead letters ---------------------------------------------------------------------------------

    def exhausted_runs(self, most: int) -> list[SeqRun]:
        """Return (first, stop, deliveries) of exhausted runs, lowest first, at most `most` seqs."""
        found: list[SeqRun] = []
        for row in self.run_order.lowest_exhausted(most):
            first = self.runs.first[row]
            stop = min(self.runs.stop[row], first + most)
            found.append((first, stop, self.deliveries_of(row)))
            most -= stop - first
        return found

    def is_exhausted(self, seq: int) -> bool:
        """Return True if this seq waits for its move to the dead-letter topic."""
        return self.state_of(seq) == EXHAUSTED

    # -- counting -------------------------------------------------------------------------------------

    def check(self) -> None:
        """Verify the invariants by a recount."""
        runs, before = self.runs, 0
        counts, rows = [0] * len(STATES), [0] * len(STATES)
        held: dict[int, tuple[int, int]] = {}
        for row in runs.rows():
            first, stop, state = runs.first[row], runs.stop[row], runs.state[row]
            if (
                not before <= first < stop
                or first >> BLOCK_SHIFT != (stop - 1) >> BLOCK_SHIFT
                or state == FREE
            ):
                raise InvariantViolation(
                    "lease runs overlap or are out of order", first=first, stop=stop, before=before,
                    state=state,
                )  # fmt: skip
            before = stop
            counts[state] += stop - first
            rows[state] += 1
            if state in {LEASED, GONE}:
                size, number = held.get(runs.holder[row], (0, 0))
                held[runs.holder[row]] = size + stop - first, number + 1
        if (counts, rows, sum(counts)) != (self.counts_by_state, self._runs_of, runs.jobs):
            raise InvariantViolation(
                "lease counts differ from a recount", counted=self.counts_by_state, found=counts
            )
        known = {each.number: (each.held, each.runs) for each in self.holders if each.runs}
        if held != known:
            raise InvariantViolation("counts of holders differ from a recount", counted=known, found=held)
