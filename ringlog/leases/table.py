"""Lease table: the delivered seqs of a topic, their holders, and the effect of every event on them. Pure.

A queue and a consumer group keep their leases in one table each. A seq without a row is ready and was never
delivered, or is done; the topic and the owner's cursor distinguish the two. Seqs in one state with equal
facts share a row (runs.py). Times are milliseconds and are passed as arguments. Every operation first applies
the expirations of leases and delays, in the order of their times.

The constant TRANSITIONS defines the effect of each event on a run, and the code executes this table.

Invariants, which `check` recounts:
  runs are disjoint, and the counts by state equal those of the rows;
  the counts of a holder equal those of the rows; no seq is in two leases.
"""

from __future__ import annotations

from heapq import heapify, heappop, heappush
from typing import Final

import numpy as np
from numpy.typing import NDArray
from pyroaring import BitMap64

from ringlog.errors import InvariantViolation
from ringlog.leases.failures import Failures
from ringlog.leases.holders import Holders, ProcessId
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
from ringlog.leases.spans import SeqRun, Span, blocks_of, keep_first, spans_of
from ringlog.leases.types import I64, NO_BACKOFF, U64, LeaseMatch
from ringlog.limits import DEAD_LETTERS_PER_CLAIM_MAX, LINKS_MAX

ACK: Final = 0
"""The holder processed it, or its copy in the dead-letter topic is durable."""
NACK: Final = 1
"""The holder returns it, or its process exited: ready at once."""
DELAY: Final = 2
"""The holder returns it: ready after a delay."""
REJECT: Final = 3
EXTEND: Final = 4
EXPIRE: Final = 5
"""The deadline of a lease, or the end of a delay, has passed."""
BACK_OFF: Final = 6
"""The deadline of a lease has passed, and the backoff after it has not ended."""
EXHAUST: Final = 7
"""It was returned after all its deliveries."""
RESTORE: Final = 8
"""The dead-letter topic does not exist any more."""
DELETE: Final = 9
"""Its records were deleted by a request."""
REMOVE: Final = 10
"""Its records left the topic for another reason."""
_STATES: Final = 6

TRANSITIONS = """
          leased     delayed   returned   gone  exhausted
ack       done       done      done       done  done
nack      returned   -         -          -     -
delay     delayed    -         -          -     -
reject    exhausted  -         -          -     -
extend    leased     -         -          -     -
expire    returned   returned  -          done  -
rest      delayed    -         -          -     -
exhaust   -          -         exhausted  -     -
restore   -          -         -          -     returned
delete    gone       done      done       -     done
remove    done       done      done       -     done
"""
"""Event x state: the next state. "done": the run is removed; "-": the event has no effect.

A claim creates leased runs from returned ones and from seqs without a run; a steal also from leased and
delayed ones. Requests reach only runs that `match` found to be held by the requesting node. A replay may be
ahead of the time."""
_PASSED: Final = 255


def _parsed(drawing: str) -> bytes:
    """Return the next states as bytes, indexed by event * len(STATES) + state."""
    head, *lines = (line.split() for line in drawing.strip().splitlines())
    numbers = {name: number for number, name in enumerate(STATES)} | {"done": FREE, "-": _PASSED}
    found = bytearray()
    for _, *after in lines:
        of_state = dict(zip(head, after, strict=True))
        found += bytes(numbers[of_state.get(state, "-")] for state in STATES)
    return bytes(found)


_NEXT = _parsed(TRANSITIONS)
REJECTED_BIT = 1 << 31
"""Flag in the deliveries of a rejected run: it is exhausted, whatever its count."""
_NONE: I64 = np.zeros(0, np.int64)
_ROW_BITS = 32
_ROW_MASK = (1 << _ROW_BITS) - 1
_STALE_MAX = 1_024
"""Number of obsolete heap entries, in addition to the valid ones, after which a heap is rebuilt."""


class LeaseTable:
    """The leases of one queue or consumer group, and the records that were returned."""

    def __init__(self, holders: Holders) -> None:
        self.runs = LeaseRuns()
        self.holders = holders
        self.failures = Failures()
        """Reasons of nacks and rejections, until the records are done."""
        self.backoff = NO_BACKOFF
        """Delay of records whose lease expired."""
        self.process_by_number: dict[int, ProcessId] = {}
        """The processes that claimed, by the process number in their runs; some hold no lease any more."""
        self._number_by_process: dict[ProcessId, int] = {}
        self._last_process_number = 0
        self.newly_exhausted: list[Span] = []
        """Spans that claims exhausted since the list was last emptied."""
        self.has_dead_letters = True
        """Exhausted records wait for their move. If false, they count as returned."""
        self.deliveries_max = 0
        """Highest number of deliveries, tested whenever a record is returned; 0 = not tested then."""
        self.version = 0
        """Grows with every change of a run. Derived data is valid while it stays the same."""
        self.counts_by_state = [0] * len(STATES)
        """Number of seqs by state."""
        self._runs_of = [0] * len(STATES)
        """Number of runs by state."""
        self._deadlines: list[int] = []
        """Heap of (time, row), packed into one integer. An entry is valid only while its row ends at that
        time."""
        self._returned: list[int] = []
        """Heap of first seqs of returned runs. An entry is valid only while such a run starts there."""
        self._exhausted: list[int] = []
        """The same for exhausted runs."""

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
        heap, runs = self._deadlines, self.runs
        while heap and heap[0] >> _ROW_BITS <= now_ms:
            entry = heappop(heap)
            row = entry & _ROW_MASK
            if self._due_ms(row) != entry >> _ROW_BITS:
                continue
            if self.backoff.base_ms and runs.state[row] == LEASED:
                until_ms = runs.at[row] + self.backoff.delay_after(self.deliveries_of(row))
                if until_ms > now_ms:
                    self.apply_event(row, BACK_OFF, until_ms)
                    continue
            self.apply_event(row, EXPIRE)

    def next_due_ms(self) -> int | None:
        """Return the time at which the next lease or delay ends; None if there is none."""
        heap = self._deadlines
        while heap and self._due_ms(heap[0] & _ROW_MASK) != heap[0] >> _ROW_BITS:
            heappop(heap)
        return heap[0] >> _ROW_BITS if heap else None

    def _due_ms(self, row: int) -> int:
        """Return the time at which the state of this run ends; -1 = never.

        A lease is still held in the millisecond of its deadline. A delay has ended in the millisecond of its
        end."""
        if row >= len(self.runs.state):
            return -1
        state = self.runs.state[row]
        if state in {LEASED, GONE}:
            return self.runs.at[row] + 1
        return self.runs.at[row] if state == DELAYED else -1

    # -- transitions ---------------------------------------------------------------------------------

    def apply_event(self, row: int, event: int, at_ms: int = 0) -> None:
        """Apply an event to a run. `at_ms` is the new deadline of a lease or the end of a delay."""
        runs = self.runs
        state = runs.state[row]
        to = _NEXT[event * _STATES + state]
        if to == _PASSED:
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
        self._index(row, to)

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
                process_number=self.number_of_process(process_id),
                begun=begun, given=given,
            )  # fmt: skip
            return
        for low, high in blocks_of(first, stop):
            row = self.runs.add(
                low, high, state, at=at, token=token + low - first, deliveries=deliveries, begun=begun,
                given=given,
            )  # fmt: skip
            self.add_row(row, state)

    def number_of_process(self, process_id: ProcessId) -> int:
        """Return the number of a process for its runs; 0 = the process is not observed."""
        if not process_id[0]:
            return 0
        process_number = self._number_by_process.get(process_id, 0)
        if not process_number:
            if len(self._number_by_process) >= LINKS_MAX:
                self.forget_idle_processes()
            self._last_process_number += 1
            process_number = self._number_by_process[process_id] = self._last_process_number
            self.process_by_number[process_number] = process_id
        return process_number

    def forget_idle_processes(self) -> None:
        """Forget the processes that hold no lease."""
        runs = self.runs
        held = {runs.process_number[row] for row in runs.rows() if runs.state[row] == LEASED}
        self.process_by_number = {n: each for n, each in self.process_by_number.items() if n in held}
        self._number_by_process = {each: n for n, each in self.process_by_number.items()}

    def forget_process(self, process_id: ProcessId) -> int:
        """Forget a process that exited. Return the process number of its runs; 0 = it never had any."""
        process_number = self._number_by_process.pop(process_id, 0)
        if process_number:
            del self.process_by_number[process_number]
        return process_number

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
        self._index(row, state)

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

    def _index(self, row: int, state: int) -> None:
        """Add a run to the heap by time, or to the heap of its state."""
        if state in {LEASED, DELAYED, GONE}:
            heap, of = self._deadlines, self._runs_of
            heappush(heap, self._due_ms(row) << _ROW_BITS | row)
            if len(heap) > _STALE_MAX + 2 * (of[LEASED] + of[DELAYED] + of[GONE]):
                heap[:] = {each for each in heap if self._due_ms(each & _ROW_MASK) == each >> _ROW_BITS}
                heapify(heap)
        elif state == RETURNED:
            heappush(self._returned, self.runs.first[row])
            if len(self._returned) > 2 * self._runs_of[RETURNED] + _STALE_MAX:
                self._returned = sorted(
                    {first for first in self._returned if self._run_starts(first, RETURNED)}
                )
        else:
            heappush(self._exhausted, self.runs.first[row])
            if len(self._exhausted) > 2 * self._runs_of[EXHAUSTED] + _STALE_MAX:
                self._exhausted = sorted(
                    {first for first in self._exhausted if self._run_starts(first, EXHAUSTED)}
                )

    def _run_starts(self, first: int, state: int) -> bool:
        """Return True if a run in this state starts at `first`."""
        row = self.runs.find(first)
        return row >= 0 and self.runs.state[row] == state and self.runs.first[row] == first

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
        self._index(new, state)
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
        runs, heap, left = self.runs, self._returned, DEAD_LETTERS_PER_CLAIM_MAX
        while most > 0 and heap:
            first = heap[0]
            if not self._run_starts(first, RETURNED) or (rows and runs.first[rows[-1]] == first):
                heappop(heap)  # The run does not exist any more, or the entry is a duplicate.
                continue
            row = runs.find(first)
            is_exhausted = 0 < deliveries_max <= self.deliveries_of(row)
            if is_exhausted and not left:
                break
            heappop(heap)
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

    def lowest_returned(self) -> list[int]:
        """Return a list with the lowest returned and ready seq; empty if there is none."""
        while self._returned and not self._run_starts(self._returned[0], RETURNED):
            heappop(self._returned)
        return self._returned[:1]

    # -- settlement ----------------------------------------------------------------------------------

    def match(self, seqs: I64, tokens: U64 | None, node: str, now_ms: int) -> LeaseMatch:
        """Return which of these seqs `node` holds.

        A token of 0 matches any lease. A seq that occurs twice counts once. Only expirations change the
        table."""
        self.apply_expirations(now_ms)
        holder = self.holders.find(node)
        if len(seqs) == 1:
            return self._match_one(seqs, 0 if tokens is None else int(tokens[0]), holder)
        if self._is_one_lease(seqs, tokens, holder):
            return LeaseMatch(seqs, _NONE, _NONE)
        order = np.argsort(seqs, kind="stable")
        ascending = seqs[order]
        given = None if tokens is None else tokens[order]
        leased = np.zeros(len(seqs), np.bool_)
        gone = np.zeros(len(seqs), np.bool_)
        runs, place = self.runs, 0
        while place < len(ascending) and holder >= 0:
            row = runs.find(int(ascending[place]))
            if row < 0:
                place += 1
                continue
            end = int(np.searchsorted(ascending, runs.stop[row]))
            state = runs.state[row]
            if state in {LEASED, GONE} and runs.holder[row] == holder:
                into = leased if state == LEASED else gone
                into[place:end] = self._fits(row, ascending[place:end], given, place, end)
            place = end
        keep_first(leased, ascending)
        keep_first(gone, ascending)
        passed = np.ones(len(seqs), np.bool_)
        passed[order[leased | gone]] = False
        return LeaseMatch(ascending[leased], ascending[gone], seqs[passed])

    def _is_one_lease(self, seqs: I64, tokens: U64 | None, holder: int) -> bool:
        """Return True if these seqs were claimed together, are in order, and are all still held.

        The common case.
        """
        count, first = len(seqs), int(seqs[0]) if len(seqs) else 0
        if not count or int(seqs[-1]) - first != count - 1:
            return False
        runs = self.runs
        row = runs.find(first)
        if row < 0 or first + count > runs.stop[row]:
            return False
        if runs.state[row] != LEASED or runs.holder[row] != holder:
            return False
        if not np.array_equal(seqs, first + np.arange(count)):
            return False
        return tokens is None or np.array_equal(tokens, self.tokens_of(row, seqs))

    def _match_one(self, seqs: I64, token: int, holder: int) -> LeaseMatch:
        """Match a single seq; optimized for latency."""
        seq, runs = int(seqs[0]), self.runs
        row = runs.find(seq)
        state = runs.state[row] if row >= 0 else FREE
        is_held = state in {LEASED, GONE} and runs.holder[row] == holder
        if not is_held or token not in {0, runs.token[row] + seq - runs.first[row]}:
            return LeaseMatch(_NONE, _NONE, seqs)
        return LeaseMatch(seqs, _NONE, _NONE) if state == LEASED else LeaseMatch(_NONE, seqs, _NONE)

    def _fits(
        self, row: int, seqs: I64, tokens: U64 | None, place: int, end: int
    ) -> NDArray[np.bool_] | bool:
        if tokens is None:
            return True
        given = tokens[place:end]
        fits: NDArray[np.bool_] = (given == self.tokens_of(row, seqs)) | (given == 0)
        return fits

    def tokens_of(self, row: int, seqs: I64) -> U64:
        """Return the tokens of the leases under which these seqs of a row were last delivered."""
        return (seqs - self.runs.first[row]).astype(np.uint64) + np.uint64(self.runs.token[row])

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
        kept: list[int] = []
        while most and self._exhausted:
            first = heappop(self._exhausted)
            if not self._run_starts(first, EXHAUSTED) or (kept and kept[-1] == first):
                continue
            kept.append(first)
            row = self.runs.find(first)
            stop = min(self.runs.stop[row], first + most)
            found.append((first, stop, self.deliveries_of(row)))
            most -= stop - first
        for first in kept:
            heappush(self._exhausted, first)
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
