"""What clients of queues and consumer groups did and saw, written down outside the engine while it happens.

As chaos/check/journal.py: an operation is noted before it begins and again when it returned, in one write of
whole rows to a file of the client's own. Times are of the monotonic clock.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from enum import IntEnum
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from chaos.check import journal
from chaos.check.journal import RowFile

ROW = np.dtype(
    [
        ("at_ns", "<i8"), ("begun_ns", "<i8"), ("client", "<u4"), ("queue", "u1"), ("what", "u1"),
        ("outcome", "u1"), ("group", "u1"), ("value", "<u8"), ("seq", "<u8"), ("deliveries", "<u4"),
    ]
)  # fmt: skip
"""One row. `value` is a job's own number, which its payload carries, `queue` an index into the topics, and
`group` one into the consumer groups of a topic; `deliveries` is what a claim of a group said of it."""
Rows = NDArray[Any]


class Did(IntEnum):
    """What a row says."""

    PUT = 1
    """Begun."""
    PUT_END = 2
    """With `outcome` and the job's `seq`."""
    CLAIMED = 3
    """A claim that began at `begun_ns` gave it."""
    ACK = 4
    """Begun; so are the next two."""
    NACK = 5
    REJECT = 6
    END = 7
    """Of an ack or a reject, with `outcome`."""

    # Of consumer groups alone; verdict.py says what they mean for its judgement.
    TAKEN_OVER = 8
    """As CLAIMED, by a member that also takes over what another one did nothing about."""
    STOLEN = 9
    """As CLAIMED, from whoever held it."""
    EXTENDED = 10
    """Held for a lease from `begun_ns` on, as its answer says."""
    TAKEN = 11
    """A stream is read by this client, which began to ask for it at `begun_ns`."""
    READ = 12
    """It was given by the stream that began at `begun_ns`; that names it in the next two as well."""
    COMMIT = 13
    """Begun: everything up to `seq` is done."""
    COMMIT_END = 14
    """With `outcome`."""
    FLOOR = 15
    """A look that began at `begun_ns` found the floor at `seq`."""
    SEEK = 16
    """Begun."""
    SEEK_END = 17
    """The group goes on at `seq`; it had begun at `begun_ns`."""
    REDRIVE = 18
    """Begun, at `begun_ns`: the dead letter `seq` is to come back."""
    REDRIVE_END = 19
    """It returned."""


class Outcome(IntEnum):
    """How an operation ended for its client."""

    UNKNOWN = 0
    OK = 1
    REFUSED = 2
    """Certainly not done: its lease had ended."""


class Journal(RowFile):
    """One client's journal."""

    def note(
        self, did: Did, queue: int, values: Sequence[int], *, seqs: Any = 0,
        outcome: Outcome = Outcome.UNKNOWN, begun_ns: int = 0, group: int = 0, deliveries: Any = 0,
    ) -> None:  # fmt: skip
        """Note something of some jobs, now."""
        rows = np.zeros(len(values), dtype=ROW)
        rows["at_ns"], rows["begun_ns"], rows["client"] = time.monotonic_ns(), begun_ns, self.client
        rows["queue"], rows["what"], rows["outcome"] = queue, did, outcome
        rows["value"], rows["seq"] = values, seqs
        rows["group"], rows["deliveries"] = group, deliveries
        self.write(rows)


def load(folder: Path) -> Rows:
    """All journals of a run, by time."""
    rows = journal.load(folder, ROW)
    return rows[np.argsort(rows["at_ns"], kind="stable")]
