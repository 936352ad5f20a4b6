"""Journals of clients of queues and consumer groups, written outside the engine as it happens.

As in ringlog/drill/journal.py, an operation is recorded before it begins and again after it returned. Each
call is one write of whole rows to the client's own file. Times are of the monotonic clock.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from enum import IntEnum
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ringlog.drill import journal
from ringlog.drill.journal import RowFile

ROW = np.dtype(
    [
        ("at_ns", "<i8"), ("begun_ns", "<i8"), ("client", "<u4"), ("queue", "u1"), ("what", "u1"),
        ("outcome", "u1"), ("group", "u1"), ("value", "<u8"), ("seq", "<u8"), ("deliveries", "<u4"),
    ]
)  # fmt: skip
"""One row. `value`: the job's own number, which its payload contains. `queue`: index into the topics.
`group`: index into the consumer groups of the topic. `deliveries`: delivery count that a claim of a group
returned."""
Rows = NDArray[Any]


class Did(IntEnum):
    """Kind of a row."""

    PUT = 1
    """A put begins."""
    PUT_END = 2
    """A put returned, with `outcome` and the job's `seq`."""
    CLAIMED = 3
    """A claim that began at `begun_ns` returned the job."""
    ACK = 4
    """An ack begins. NACK and REJECT are begins as well."""
    NACK = 5
    REJECT = 6
    END = 7
    """An ack or a reject returned, with `outcome`."""

    # The kinds below are only for consumer groups; verdict.py defines how they are judged.
    TAKEN_OVER = 8
    """Like CLAIMED, by a member that also takes over idle leases of others."""
    STOLEN = 9
    """Like CLAIMED, but the lease was stolen from its holder."""
    EXTENDED = 10
    """The lease was extended, counted from `begun_ns`."""
    TAKEN = 11
    """This client became the reader of a stream; its request began at `begun_ns`."""
    READ = 12
    """The stream that began at `begun_ns` returned the record. COMMIT and COMMIT_END use `begun_ns` in the
    same way."""
    COMMIT = 13
    """A commit of everything up to `seq` begins."""
    COMMIT_END = 14
    """The commit returned, with `outcome`."""
    FLOOR = 15
    """A look that began at `begun_ns` found the floor at `seq`."""
    SEEK = 16
    """A seek begins."""
    SEEK_END = 17
    """The seek that began at `begun_ns` returned; the group continues at `seq`."""
    REDRIVE = 18
    """A redrive of dead letter `seq` begins at `begun_ns`."""
    REDRIVE_END = 19
    """The redrive returned."""


class Outcome(IntEnum):
    """How an operation ended for its client."""

    UNKNOWN = 0
    OK = 1
    REFUSED = 2
    """Certainly not done: the lease had ended."""


class Journal(RowFile):
    """The journal of one client."""

    def note(
        self, did: Did, queue: int, values: Sequence[int], *, seqs: Any = 0,
        outcome: Outcome = Outcome.UNKNOWN, begun_ns: int = 0, group: int = 0, deliveries: Any = 0,
    ) -> None:  # fmt: skip
        """Record one row of this kind for each value, now."""
        rows = np.zeros(len(values), dtype=ROW)
        rows["at_ns"], rows["begun_ns"], rows["client"] = time.monotonic_ns(), begun_ns, self.client
        rows["queue"], rows["what"], rows["outcome"] = queue, did, outcome
        rows["value"], rows["seq"] = values, seqs
        rows["group"], rows["deliveries"] = group, deliveries
        self.write(rows)


def load(folder: Path) -> Rows:
    """Return the rows of all journals of a run, sorted by time."""
    rows = journal.load(folder, ROW)
    return rows[np.argsort(rows["at_ns"], kind="stable")]
