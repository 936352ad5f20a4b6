"""Judge a whole run by its journals: one pass over sorted columns per topic.

These faults are detected in a topic that clients wrote, read and deleted from while processes died:

  lost         an acknowledged record that was not deleted is missing from the final read
  doubled      a value or a seq occurs twice, or one value has two acks
  altered      a read record was never submitted, has another digest, or certainly failed
  reordered    an append that returned before another one began has the greater seq, or the records of one
               writer change their order
  stale        a read misses a record that was acknowledged, or read by any client, before the read began
  resurrected  a read returns a record that was deleted before the read began
  gaps         a read skips a seq that was not deleted
  halved       a frame is only partly there, and a delete does not explain it
  backwards    a reader's cursor does not continue where it was
  announced    the engine reports a loss: honest, but still a loss

An operation with an unknown outcome may be applied once or not at all, never twice.
"""

from __future__ import annotations

from dataclasses import dataclass, field, fields
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ringlog.drill.journal import OPS_PER_CLIENT, Outcome, Rows, What

STORIES_MAX = 12
_FAR = np.iinfo(np.int64).max
_READS = (What.READ, What.FINAL)


@dataclass(slots=True)
class HistoryVerdict:
    """The verdict on a run. The first block of fields counts work, the second broken guarantees."""

    ops: int = 0
    """Operations begun: appends, reads, deletes."""
    acked: int = 0
    unknown: int = 0
    """Appends whose outcome is recorded as unknown."""
    failed: int = 0
    read: int = 0
    """Records returned to readers."""
    deletes: int = 0
    """Deletes that returned."""
    survivors: int = 0
    """Records in the final reads."""

    lost: int = 0
    doubled: int = 0
    altered: int = 0
    reordered: int = 0
    stale: int = 0
    resurrected: int = 0
    gaps: int = 0
    halved: int = 0
    backwards: int = 0
    announced: int = 0
    stories: list[str] = field(default_factory=list)
    """The first findings, one line each."""

    @property
    def wrong(self) -> dict[str, int]:
        """Broken guarantees by kind; empty if all held."""
        return {kind: getattr(self, kind) for kind in BROKEN if getattr(self, kind)}

    def add(self, other: HistoryVerdict) -> None:
        """Add the counts and stories of another run."""
        for each in fields(self):
            if each.name == "stories":
                self.stories += other.stories[: STORIES_MAX - len(self.stories)]
            else:
                setattr(self, each.name, getattr(self, each.name) + getattr(other, each.name))

    def add_fault(self, kind: str, topic: str, count: int, story: str) -> None:
        """Count broken guarantees of a kind, with an example."""
        if count:
            setattr(self, kind, getattr(self, kind) + int(count))
            if len(self.stories) < STORIES_MAX:
                self.stories.append(f"{kind}: {topic}: {story}")


BROKEN = (
    "lost", "doubled", "altered", "reordered", "stale", "resurrected", "gaps", "halved", "backwards",
    "announced",
)  # fmt: skip


class NothingToJudge(ValueError):
    """No verdict is possible: a topic has no operation or no final read, or two operations share an id."""


def judge(rows: Rows, topics: list[str]) -> HistoryVerdict:
    """Judge all topics of a run.

    Raises NothingToJudge if a topic has no rows or no completed final read, so that an empty run never
    passes.
    """
    found = HistoryVerdict()
    for number, name in enumerate(topics):
        mine = rows[rows["topic"] == number]
        if not len(mine):
            raise NothingToJudge(f"no operation on topic {name}")
        _Topic(name, mine, found).judge()
    return found


class _Topic:
    """The rows of one topic, split by kind."""

    def __init__(self, name: str, rows: Rows, found: HistoryVerdict) -> None:
        self.name, self.found = name, found
        what = rows["what"]
        begun = rows[np.isin(what, (What.APPEND, What.READ, What.DELETE, What.FINAL))]
        returns = rows[what == What.RETURN]
        self.begun = begun[np.argsort(begun["op"], kind="stable")]
        self.records = rows[what == What.RECORD]
        self.gaps = rows[what == What.GAP]
        self._join(returns)
        finals = self.begun[(self.begun["what"] == What.FINAL) & (self.returned < _FAR)]
        if not len(finals):
            raise NothingToJudge(f"topic {name} has no completed final read")
        self.final_op = int(finals["op"][np.argmax(finals["at_ns"])])
        found.ops += len(begun)
        found.read += len(self.records)

    def _join(self, returns: Rows) -> None:
        """Join every operation with its return. `returned` is _FAR for an operation without one."""
        begun = self.begun
        if len(np.unique(begun["op"])) != len(begun):
            raise NothingToJudge(f"topic {self.name}: two operations share one id")
        index = np.searchsorted(begun["op"], returns["op"])
        count = len(begun)
        self.returned = np.full(count, _FAR, dtype=np.int64)
        self.outcome = np.zeros(count, dtype=np.uint8)
        self.seq = np.zeros(count, dtype=np.uint64)
        self.cursor = np.zeros(count, dtype=np.uint64)
        self.returned[index] = returns["at_ns"]
        self.outcome[index] = returns["outcome"]
        self.seq[index] = returns["seq"]
        self.cursor[index] = returns["value"]

    def judge(self) -> None:
        """Run all checks."""
        begun, found = self.begun, self.found
        is_append = begun["what"] == What.APPEND
        found.acked += int((is_append & (self.outcome == Outcome.OK)).sum())
        found.failed += int((is_append & (self.outcome == Outcome.FAIL)).sum())
        found.unknown += int((is_append & (self.outcome == Outcome.UNKNOWN)).sum())
        self.final = np.sort(self.records[self.records["op"] == self.final_op], order="seq")
        found.survivors += len(self.final)
        self._deletes()
        self._appends(is_append)
        self._identity()
        self._survival()
        self._frames(self.begun[is_append & (self.begun["seq"] > 0)])
        self._order()
        self._reads()
        for gap in self.gaps:
            found.add_fault("announced", self.name, 1, f"seqs {gap['seq']}..{gap['value']} reported as lost")

    # -- pieces -----------------------------------------------------------------------------------------

    def _deletes(self) -> None:
        """Build the delete floor over time.

        `certain_floor` rises when a delete returns, `possible_floor` when one begins.
        """
        is_delete = self.begun["what"] == What.DELETE
        done = is_delete & (self.outcome == Outcome.OK)
        tried = is_delete & (self.outcome != Outcome.FAIL)
        self.found.deletes += int(done.sum())
        self.certain_floor = _Steps(self.returned[done], self.begun["seq"][done])
        self.possible_floor = _Steps(self.begun["at_ns"][tried], self.begun["seq"][tried])

    def _appends(self, is_append: NDArray[np.bool_]) -> None:
        """Build one row per value: earliest begin, earliest successful return, seq, digest."""
        rows, outcome = self.begun[is_append], self.outcome[is_append]
        returned, seq = self.returned[is_append], self.seq[is_append]
        self.values, group = np.unique(rows["value"], return_inverse=True)
        count = len(self.values)
        self.began = np.full(count, _FAR, dtype=np.int64)
        np.minimum.at(self.began, group, rows["at_ns"])
        is_ok = outcome == Outcome.OK
        self.acked_at = np.full(count, _FAR, dtype=np.int64)
        np.minimum.at(self.acked_at, group[is_ok], returned[is_ok])
        self.number = np.zeros(count, dtype=np.uint64)
        np.maximum.at(self.number, group[is_ok], seq[is_ok])
        known = is_ok & (seq > 0)
        differs = known & (seq != self.number[group])
        self.found.add_fault(
            "doubled", self.name, differs.sum(), f"value {rows['value'][differs][:1]} was acknowledged twice"
        )
        self.digest = np.zeros(count, dtype=np.uint64)
        self.digest[group] = rows["digest"]
        self.is_failed = np.ones(count, dtype=bool)
        np.logical_and.at(self.is_failed, group, outcome == Outcome.FAIL)
        self.first_op = np.full(count, np.iinfo(np.uint64).max, dtype=np.uint64)
        np.minimum.at(self.first_op, group, rows["op"])
        self.tries = np.bincount(group, minlength=count)

    def _row_of(self, values: NDArray[np.uint64]) -> tuple[NDArray[np.int64], NDArray[np.bool_]]:
        """Return the rows of `values` in the table of values, and which of them were submitted at all."""
        if not len(self.values):
            return np.zeros(len(values), dtype=np.int64), np.zeros(len(values), dtype=bool)
        index = np.minimum(np.searchsorted(self.values, values), len(self.values) - 1)
        return index, self.values[index] == values

    def _identity(self) -> None:
        """Check that every seq has one value, every value one seq, and that both were submitted."""
        found, records = self.found, self.records
        index, is_known = self._row_of(records["value"])
        forged = ~is_known
        found.add_fault("altered", self.name, forged.sum(), f"never submitted: {_shown(records[forged])}")
        changed = is_known & (self.digest[index] != records["digest"]) if len(self.values) else forged
        found.add_fault(
            "altered", self.name, (changed & is_known).sum(), f"changed: {_shown(records[changed])}"
        )
        failed = is_known & self.is_failed[index] if len(self.values) else forged
        found.add_fault(
            "altered", self.name, (failed & is_known).sum(), f"refused: {_shown(records[failed])}"
        )
        is_numbered = self.number > 0
        seqs = np.concatenate([records["seq"], self.number[is_numbered]])
        values = np.concatenate([records["value"], self.values[is_numbered]])
        pairs = np.unique(np.stack([seqs, values], axis=1), axis=0)
        one_seq = np.diff(pairs[:, 0]) == 0
        found.add_fault(
            "doubled", self.name, one_seq.sum(), f"seqs {pairs[1:][one_seq][:3, 0]} have two values"
        )
        by_value = pairs[np.lexsort((pairs[:, 0], pairs[:, 1]))]
        one_value = np.diff(by_value[:, 1]) == 0
        story = f"values with two seqs, as (seq, value): {by_value[1:][one_value][:3]}"
        found.add_fault("doubled", self.name, one_value.sum(), story)

    def _survival(self) -> None:
        """Check that the final read has no resurrected record, and every record that was acked or read."""
        found, final = self.found, self.final
        certain_floor, possible_floor = self.certain_floor.last, self.possible_floor.last
        numbers = final["seq"]
        self.head = int(numbers[-1]) if len(numbers) else 0
        raised = numbers < certain_floor
        found.add_fault(
            "resurrected", self.name, raised.sum(), f"{_shown(final[raised])} below {certain_floor}"
        )
        is_due = (self.acked_at < _FAR) & ((self.number >= possible_floor) | (self.number == 0))
        is_there = np.isin(self.values, final["value"])
        # An ack without a seq may belong to a deleted record.
        is_due &= (self.number > 0) | (possible_floor <= 1)
        missing = is_due & ~is_there
        found.add_fault(
            "lost", self.name, missing.sum(),
            f"acknowledged as {self.number[missing][:3]}, final read {numbers[:1]}..{numbers[-1:]}",
        )  # fmt: skip
        seen = self.records[(self.records["seq"] >= possible_floor) & (self.records["op"] != self.final_op)]
        gone = ~np.isin(seen["seq"], numbers)
        found.add_fault("lost", self.name, gone.sum(), f"read earlier, missing now: {_shown(seen[gone])}")

    def _frames(self, rows: Rows) -> None:
        """Check that of each frame all records exist or none. A delete may remove the first ones."""
        _, frame = np.unique(rows[["client", "at_ns"]], return_inverse=True)
        index = np.searchsorted(
            self.final["value"], rows["value"], sorter=(order := np.argsort(self.final["value"]))
        )
        is_there = np.isin(rows["value"], self.final["value"])
        size, left = np.bincount(frame), np.bincount(frame, is_there)
        seqs = self.final["seq"][order[index[is_there]]].astype(np.int64)
        low, high = np.full(len(size), _FAR), np.zeros(len(size), dtype=np.int64)
        np.minimum.at(low, frame[is_there], seqs)
        np.maximum.at(high, frame[is_there], seqs)
        is_rest = (low <= self.possible_floor.last) & (high - low + 1 == left)
        torn_frames = (left > 0) & (left < size) & ~is_rest
        self.found.add_fault(
            "halved", self.name, torn_frames.sum(),
            f"{left[torn_frames][:1]} of {size[torn_frames][:1]} records",
        )  # fmt: skip

    def _order(self) -> None:
        """Check that seqs follow real time, and the order of each writer."""
        number = self.number.copy()
        index, is_known = self._row_of(self.final["value"])
        number[index[is_known]] = self.final["seq"][is_known]
        is_acked = (self.acked_at < _FAR) & (number > 0)
        read_at, read_seq = self._learned()
        self.known = _Steps(
            np.concatenate([self.acked_at[is_acked], read_at]),
            np.concatenate([number[is_acked], read_seq]),
        )
        known = self.known.at(self.began)
        late = (number > 0) & (number <= known)
        self.found.add_fault(
            "reordered", self.name, late.sum(),
            f"numbers {number[late][:3]} were given after {known[late][:3]} was known",
        )  # fmt: skip
        # A record that was resent by another client, or is not acked, may follow later records of its first
        # writer.
        order = np.argsort(self.first_op, kind="stable")
        order = order[(is_acked & (self.tries == 1))[order]]
        writer = self.first_op[order] // OPS_PER_CLIENT
        back = (np.diff(writer) == 0) & (number[order][1:] < number[order][:-1])
        story = f"seqs {number[order][1:][back][:3]} of one writer are out of order"
        self.found.add_fault("reordered", self.name, back.sum(), story)

    def _learned(self) -> tuple[NDArray[np.int64], NDArray[np.uint64]]:
        """Return (time of return, observed head) of every successful read."""
        is_read = np.isin(self.begun["what"], _READS) & (self.outcome == Outcome.OK)
        return self.returned[is_read], self.seq[is_read]

    def _reads(self) -> None:
        """Check each read: it starts at its position, skips only deleted records, and is not stale."""
        found, begun = self.found, self.begun
        is_read = np.isin(begun["what"], _READS) & (self.outcome == Outcome.OK)
        ops, after = begun["op"][is_read], begun["seq"][is_read]
        began, returned = begun["at_ns"][is_read], self.returned[is_read]
        head, cursor = self.seq[is_read], self.cursor[is_read]
        known = self.known.at(began)
        stale = head < known
        found.add_fault(
            "stale", self.name, stale.sum(), f"saw head {head[stale][:3]}, known {known[stale][:3]}"
        )
        records = self.records[np.argsort(self.records["op"], kind="stable")]
        first, last = np.searchsorted(records["op"], ops), np.searchsorted(records["op"], ops, side="right")
        certain_at_start, possible_at_return = self.certain_floor.at(began), self.possible_floor.at(returned)
        counts = last - first
        # Join each record with the read that returned it. Other checks cover records of reads that never
        # returned.
        owner = np.repeat(np.arange(len(ops)), counts)
        rows = np.repeat(first - np.concatenate([[0], np.cumsum(counts)[:-1]]), counts) + np.arange(
            len(owner)
        )
        seqs = records["seq"][rows]
        raised = seqs < certain_at_start[owner]
        found.add_fault(
            "resurrected", self.name, raised.sum(), f"numbers {seqs[raised][:3]} were deleted before"
        )
        is_first = np.ones(len(seqs), dtype=bool)
        is_first[1:] = owner[1:] != owner[:-1]
        before = np.empty(len(seqs), dtype=np.int64)
        before[1:] = seqs[:-1]
        before[is_first] = after[owner][is_first]
        step = seqs.astype(np.int64) - before
        found.add_fault(
            "reordered",
            self.name,
            (step <= 0).sum(),
            f"read {seqs[step <= 0][:3]} after {before[step <= 0][:3]}",
        )
        skipped = (step > 1) & (seqs > possible_at_return[owner])
        found.add_fault("gaps", self.name, skipped.sum(), f"skipped records before seqs {seqs[skipped][:3]}")
        end = after.astype(np.int64)
        end[counts > 0] = records["seq"][last[counts > 0] - 1]
        unread = (cursor.astype(np.int64) > end) & (cursor >= possible_at_return)
        found.add_fault(
            "gaps", self.name, unread.sum(), f"read to {end[unread][:3]}, cursor {cursor[unread][:3]}"
        )
        behind = cursor.astype(np.int64) < end
        found.add_fault(
            "backwards", self.name, behind.sum(), f"cursor {cursor[behind][:3]} after {end[behind][:3]}"
        )
        client = ops // OPS_PER_CLIENT
        may_merge = (np.diff(client) == 0) & (begun["what"][is_read][1:] == What.READ)
        jumped = may_merge & (after[1:] != cursor[:-1]) & (after[1:] != 0)
        story = f"continued after {after[1:][jumped][:3]} instead of its cursor"
        found.add_fault("backwards", self.name, jumped.sum(), story)


class _Steps:
    """The greatest number known at a time, from (time, number) events."""

    def __init__(self, times: NDArray[np.int64], numbers: NDArray[np.uint64]) -> None:
        order = np.argsort(times, kind="stable")
        self._times = times[order]
        self._numbers = np.maximum.accumulate(numbers[order]) if len(numbers) else numbers

    @property
    def last(self) -> int:
        """The number after the last event."""
        return int(self._numbers[-1]) if len(self._numbers) else 0

    def at(self, times: NDArray[np.int64]) -> NDArray[np.uint64]:
        """Return the number known strictly before each of these times."""
        place = np.searchsorted(self._times, times, side="left")
        padded = np.concatenate([np.zeros(1, dtype=np.uint64), self._numbers])
        return padded[place]


def _shown(rows: Any) -> str:
    return ", ".join(f"number {row['seq']} value {row['value']:#x}" for row in rows[:3])
