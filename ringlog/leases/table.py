"""One table of leases: which numbers of a topic were handed out, to whom, and what every event does. Pure.

Queue and consumer group keep their leases in one of these each. A number without a row is ready and was
never handed out, or is done: which of both, its topic and the owner's cursor tell. Numbers in one state with
equal facts share a row (runs.py). Times are milliseconds and come as arguments; what has expired is applied
at the beginning of every operation (QL-9), in the order in which it expires.

What an event does to a run is drawn once, in TRANSITIONS, and executed from there.

Invariants, which `check` counts again:
  runs are disjoint, and their counts by state are what the rows say (QS-3);
  a holder's counts are what the rows say; no number is in two leases (QL-4).
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
"""Its holder is done with it; or its copy is durable among the dead letters."""
NACK: Final = 1
"""Its holder gives it back, or is gone: ready at once."""
DELAY: Final = 2
"""Its holder gives it back: ready when a delay is over."""
REJECT: Final = 3
EXTEND: Final = 4
EXPIRE: Final = 5
"""The time of a lease or a delay is over."""
BACK_OFF: Final = 6
"""The time of a lease is over, and the back-off after it is not."""
EXHAUST: Final = 7
"""It came back, and had all its deliveries."""
RESTORE: Final = 8
"""There are no dead letters any more."""
DELETE: Final = 9
"""Its records were deleted on request."""
REMOVE: Final = 10
"""Its records left the topic otherwise."""
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
"""Event x state: the state after it; "done": there is no run any more; "-": the event passes it over. A claim
makes leased runs of returned ones and of numbers without a run, a thief's also of leased and delayed ones.
Requests reach only runs that `match` found held by the node that asks; a replay may be ahead of the time."""
_PASSED: Final = 255


def _parsed(drawing: str) -> bytes:
    """The next state at [event * len(STATES) + state]."""
    head, *lines = (line.split() for line in drawing.strip().splitlines())
    numbers = {name: number for number, name in enumerate(STATES)} | {"done": FREE, "-": _PASSED}
    found = bytearray()
    for _, *after in lines:
        of_state = dict(zip(head, after, strict=True))
        found += bytes(numbers[of_state.get(state, "-")] for state in STATES)
    return bytes(found)


_NEXT = _parsed(TRANSITIONS)
REJECTED_BIT = 1 << 31
"""Beside the deliveries of what was rejected: it is exhausted whatever its count."""
_NONE: I64 = np.zeros(0, np.int64)
_ROW_BITS = 32
_ROW_MASK = (1 << _ROW_BITS) - 1
_STALE_MAX = 1_024
"""Entries of a heap that hold no longer, beside as many as hold; beyond it the heap is made anew."""


class LeaseTable:
    """The leases of one queue or consumer group, and what came back from them."""

    def __init__(self, holders: Holders) -> None:
        self.runs = LeaseRuns()
        self.holders = holders
        self.failures = Failures()
        """Why numbers were given back or rejected, until they are done."""
        self.backoff = NO_BACKOFF
        """How long numbers rest whose leases ended."""
        self.process_by_link: dict[int, ProcessId] = {}
        """The processes that claimed, by their links, which their runs have; some hold nothing any more."""
        self._links: dict[ProcessId, int] = {}
        self._links_made = 0
        self.newly_exhausted: list[Span] = []
        """What claims exhausted since this was emptied."""
        self.has_dead_letters = True
        """Do exhausted numbers wait to be moved? Else they are returned ones."""
        self.deliveries_max = 0
        """How often a number is handed out at most, tested whenever it comes back; 0 = not then."""
        self.version = 0
        """Grows whenever a run does anything: what was found out before holds while it is the same."""
        self.counts_by_state = [0] * len(STATES)
        """Numbers by state."""
        self._runs_of = [0] * len(STATES)
        """Runs by state."""
        self._deadlines: list[int] = []
        """Heap of (instant, row) in one number; one counts only while its row ends at that instant."""
        self._returned: list[int] = []
        """Heap of first numbers of returned runs; one counts only while its run is there and returned."""
        self._exhausted: list[int] = []
        """Of exhausted ones; the same."""

    @property
    def leased(self) -> int:
        """Numbers that are leased, and live."""
        return self.counts_by_state[LEASED]

    @property
    def delayed(self) -> int:
        """Numbers that came back, and are not ready yet."""
        return self.counts_by_state[DELAYED]

    @property
    def returned(self) -> int:
        """Numbers that came back and are ready."""
        return self.counts_by_state[RETURNED]

    @property
    def exhausted(self) -> int:
        """Numbers on their way to the dead letters: none of them is handed out."""
        return self.counts_by_state[EXHAUSTED]

    # -- time -----------------------------------------------------------------------------------------

    def apply_expirations(self, now_ms: int) -> None:
        """What has expired by now is ready again."""
        heap, runs = self._deadlines, self.runs
        while heap and heap[0] >> _ROW_BITS <= now_ms:
            entry = heappop(heap)
            row = entry & _ROW_MASK
            if self._instant(row) != entry >> _ROW_BITS:
                continue
            if self.backoff.base_ms and runs.state[row] == LEASED:
                until_ms = runs.at[row] + self.backoff.delay_after(self.deliveries_of(row))
                if until_ms > now_ms:
                    self.apply_event(row, BACK_OFF, until_ms)
                    continue
            self.apply_event(row, EXPIRE)

    def next_due_ms(self) -> int | None:
        """When the next lease or delay ends; None = none will."""
        heap = self._deadlines
        while heap and self._instant(heap[0] & _ROW_MASK) != heap[0] >> _ROW_BITS:
            heappop(heap)
        return heap[0] >> _ROW_BITS if heap else None

    def _instant(self, row: int) -> int:
        """When this run's state ends; -1 = never. A lease is held at its deadline still (QL-8), a delay is
        over at its end (QN-3)."""
        if row >= len(self.runs.state):
            return -1
        state = self.runs.state[row]
        if state in {LEASED, GONE}:
            return self.runs.at[row] + 1
        return self.runs.at[row] if state == DELAYED else -1

    # -- the drawing, executed ------------------------------------------------------------------------

    def apply_event(self, row: int, event: int, at_ms: int = 0) -> None:
        """Let an event happen to a run; a lease holds up to `at_ms` then, a delay is over at it."""
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
        self, first: int, stop: int, at: int, token: int, holder: int, deliveries: int, *, link: int = 0,
        begun: int = 0, given: int = 0,
    ) -> None:  # fmt: skip
        """Lease numbers without a row."""
        for low, high in blocks_of(first, stop):
            row = self.runs.add(
                low, high, LEASED, at=at, token=token + low - first, holder=holder, deliveries=deliveries,
                link=link, begun=begun, given=given,
            )  # fmt: skip
            self.enter(row, LEASED)

    def add_run(
        self, first: int, stop: int, state: int, *, at: int, token: int, node: str, deliveries: int,
        life: ProcessId, begun: int = 0, given: int = 0,
    ) -> None:  # fmt: skip
        """These numbers are what a log or a snapshot says of them, whatever was known."""
        for row in self.isolate_rows(first, stop):
            self.drop(row)
        if state == LEASED:
            self.lease(
                first, stop, at, token, self.holders.get_or_add(node), deliveries,
                link=self.link_of_process(life),
                begun=begun, given=given,
            )  # fmt: skip
            return
        for low, high in blocks_of(first, stop):
            row = self.runs.add(
                low, high, state, at=at, token=token + low - first, deliveries=deliveries, begun=begun,
                given=given,
            )  # fmt: skip
            self.enter(row, state)

    def link_of_process(self, life: ProcessId) -> int:
        """The number of a process in its runs; 0 = its end would not be noticed."""
        if not life[0]:
            return 0
        link = self._links.get(life, 0)
        if not link:
            if len(self._links) >= LINKS_MAX:
                self.forget_idle_processes()
            self._links_made += 1
            link = self._links[life] = self._links_made
            self.process_by_link[link] = life
        return link

    def forget_idle_processes(self) -> None:
        """Forget the processes that hold nothing."""
        runs = self.runs
        held = {runs.link[row] for row in runs.rows() if runs.state[row] == LEASED}
        self.process_by_link = {link: life for link, life in self.process_by_link.items() if link in held}
        self._links = {life: link for link, life in self.process_by_link.items()}

    def forget_process(self, life: ProcessId) -> int:
        """This process is gone; returns the link of its runs, 0 = it never had any."""
        link = self._links.pop(life, 0)
        if link:
            del self.process_by_link[link]
        return link

    def drop(self, row: int) -> None:
        """A run has no row any more: it is done, or handed out under another one."""
        runs = self.runs
        state, size = runs.state[row], runs.stop[row] - runs.first[row]
        self._count(state, -1, -size)
        if state in {LEASED, GONE}:
            self.holders.drop(runs.holder[row], size)
        runs.drop(row)

    def enter(self, row: int, state: int) -> None:
        """A new row is in this state."""
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
        """Does a run that comes into this state, and is not held, wait for the dead letters?"""
        if not self.has_dead_letters:
            return False
        most, deliveries = self.deliveries_max, self.runs.deliveries[row]
        return state == EXHAUSTED or deliveries >= REJECTED_BIT or 0 < most <= deliveries

    def _index(self, row: int, state: int) -> None:
        """Have a run found by its instant, or by its number where it is ready."""
        if state in {LEASED, DELAYED, GONE}:
            heap, of = self._deadlines, self._runs_of
            heappush(heap, self._instant(row) << _ROW_BITS | row)
            if len(heap) > _STALE_MAX + 2 * (of[LEASED] + of[DELAYED] + of[GONE]):
                heap[:] = {each for each in heap if self._instant(each & _ROW_MASK) == each >> _ROW_BITS}
                heapify(heap)
        elif state == RETURNED:
            heappush(self._returned, self.runs.first[row])
            if len(self._returned) > 2 * self._runs_of[RETURNED] + _STALE_MAX:
                self._returned = sorted({first for first in self._returned if self._begins(first, RETURNED)})
        else:
            heappush(self._exhausted, self.runs.first[row])
            if len(self._exhausted) > 2 * self._runs_of[EXHAUSTED] + _STALE_MAX:
                self._exhausted = sorted(
                    {first for first in self._exhausted if self._begins(first, EXHAUSTED)}
                )

    def _begins(self, first: int, state: int) -> bool:
        """Does a run in this state begin here?"""
        row = self.runs.find(first)
        return row >= 0 and self.runs.state[row] == state and self.runs.first[row] == first

    # -- rows -----------------------------------------------------------------------------------------

    def isolate_rows(self, first: int, stop: int) -> list[int]:
        """Rows that hold exactly what has rows of [first, stop); made by splitting."""
        rows: list[int] = []
        for row in self.runs.within(first, stop):
            if self.runs.stop[row] > stop:
                self.split(row, stop)
            if self.runs.first[row] < first:
                row = self.split(row, first)
            rows.append(row)
        return rows

    def rows_of(self, seqs: I64) -> list[int]:
        """The same of these ascending numbers."""
        rows: list[int] = []
        for first, stop in spans_of(seqs):
            rows += self.isolate_rows(first, stop)
        return rows

    def split(self, row: int, at: int) -> int:
        """Cut a run in two; the second half is known wherever the first one is. Returns it."""
        new = self.runs.split_row(row, at)
        state = self.runs.state[new]
        self._runs_of[state] += 1
        if state in {LEASED, GONE}:
            self.holders.add(self.runs.holder[new], 0)
        self._index(new, state)
        return new

    def deliveries_of(self, row: int) -> int:
        """How often its numbers were handed out."""
        return self.runs.deliveries[row] & ~REJECTED_BIT

    def state_of(self, seq: int) -> int:
        """The state of this number's run; FREE = it has none."""
        row = self.runs.find(seq)
        return self.runs.state[row] if row >= 0 else FREE

    # -- handing out ----------------------------------------------------------------------------------

    def take_returned(self, most: int, deliveries_max: int = 0) -> list[int]:
        """Rows of up to `most` numbers that came back, lowest first; they are to be leased now.

        With `deliveries_max` numbers that had so many are exhausted instead, at most
        DEAD_LETTERS_PER_CLAIM_MAX of them (QD-1, QD-10): see `aside`.
        """
        rows: list[int] = []
        runs, heap, left = self.runs, self._returned, DEAD_LETTERS_PER_CLAIM_MAX
        while most > 0 and heap:
            first = heap[0]
            if not self._begins(first, RETURNED) or (rows and runs.first[rows[-1]] == first):
                heappop(heap)  # It is no more, or is there twice.
                continue
            row = runs.find(first)
            is_spent = 0 < deliveries_max <= self.deliveries_of(row)
            if is_spent and not left:
                break
            heappop(heap)
            room = left if is_spent else most
            if runs.stop[row] - first > room:
                self.split(row, first + room)
            if is_spent:
                self.newly_exhausted.append((first, runs.stop[row]))
                left -= runs.stop[row] - first
                self.apply_event(row, EXHAUST)
            else:
                rows.append(row)
                most -= runs.stop[row] - first
        return rows

    def lowest_returned(self) -> list[int]:
        """The lowest number that came back and is ready; none when there is none."""
        while self._returned and not self._begins(self._returned[0], RETURNED):
            heappop(self._returned)
        return self._returned[:1]

    # -- what becomes of leases -----------------------------------------------------------------------

    def match(self, seqs: I64, tokens: U64 | None, node: str, now_ms: int) -> LeaseMatch:
        """Which of these numbers does `node` hold (QA-3, QA-4, QA-10)? A token of 0 asks for none; a number
        that is named twice counts once. Changes nothing but what has expired."""
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
        """Are these numbers that were claimed together, in order, and are they all held still? Mostly so."""
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
        """The same for one number, which is all latency."""
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
        """Of the lease under which these numbers of a row were handed out last."""
        return (seqs - self.runs.first[row]).astype(np.uint64) + np.uint64(self.runs.token[row])

    def apply_removal(self, floor: int, seqs: BitMap64 | None = None, *, on_request: bool = False) -> None:
        """Numbers below `floor` and those in `seqs` are not alive: their leases and delays end (QL-11)."""
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
        """Those of the numbers whose blocks have runs; a delete may name millions."""
        if len(seqs) <= BLOCK:
            return np.array([seq for seq in seqs if seq >> BLOCK_SHIFT in self.runs.blocks], dtype=np.int64)
        numbers = np.frombuffer(seqs.to_array(), dtype=np.int64)
        blocks = numbers >> BLOCK_SHIFT
        return numbers[np.isin(blocks, np.fromiter(self.runs.blocks, np.int64))]

    # -- dead letters ---------------------------------------------------------------------------------

    def exhausted_runs(self, most: int) -> list[SeqRun]:
        """(first, stop, deliveries) of what waits for the dead letters, lowest first, at most so many
        numbers."""
        found: list[SeqRun] = []
        kept: list[int] = []
        while most and self._exhausted:
            first = heappop(self._exhausted)
            if not self._begins(first, EXHAUSTED) or (kept and kept[-1] == first):
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
        """Does this number wait for the dead letters?"""
        return self.state_of(seq) == EXHAUSTED

    # -- counting -------------------------------------------------------------------------------------

    def check(self) -> None:
        """Assert the invariants by counting again."""
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
                    "runs are out of order", first=first, stop=stop, before=before, state=state
                )
            before = stop
            counts[state] += stop - first
            rows[state] += 1
            if state in {LEASED, GONE}:
                size, number = held.get(runs.holder[row], (0, 0))
                held[runs.holder[row]] = size + stop - first, number + 1
        if (counts, rows, sum(counts)) != (self.counts_by_state, self._runs_of, runs.jobs):
            raise InvariantViolation("leases are counted wrongly", counted=self.counts_by_state, found=counts)
        known = {each.number: (each.held, each.runs) for each in self.holders if each.runs}
        if held != known:
            raise InvariantViolation("holders are counted wrongly", counted=known, found=held)
