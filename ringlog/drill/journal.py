"""Journals: what clients did and observed, written outside the engine as it happens.

A client records an operation *before* it begins and again after it returned. If the client is killed, the
operation has no return and its outcome is unknown. Times are of the monotonic clock, which all processes of a
host share. Each client has one file. Each row is appended by one write call, so that a kill leaves no partial
row.
"""

from __future__ import annotations

import os
import time
from bisect import bisect_left
from collections.abc import Sequence
from enum import IntEnum
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

ROW = np.dtype(
    [
        ("at_ns", "<i8"), ("client", "<u4"), ("topic", "<u2"), ("what", "u1"), ("outcome", "u1"),
        ("op", "<u8"), ("value", "<u8"), ("seq", "<u8"), ("digest", "<u8"),
    ]
)  # fmt: skip
"""One row. `op` is unique in the run; `topic` is an index into the run's list of topics. The meaning of the
other fields depends on `what`."""
Rows = NDArray[Any]
OPS_PER_CLIENT = 1 << 32


class What(IntEnum):
    """Kind of a row, and the meaning of its fields."""

    APPEND = 1
    """Begun: append a record with this `value` and `digest`. Operations with the same value are one record,
    resent under one key. `seq`: number of records that begin together and form one frame; 0: the frame is not
    checked."""
    READ = 2
    """Begun: a read of the records after `seq`."""
    DELETE = 3
    """Begun: a delete of everything below `seq`."""
    RETURN = 4
    """The operation returned with `outcome`. Append: `seq` is the record's seq, 0 if no longer known. Read:
    `seq` is the observed head, `value` the returned cursor."""
    RECORD = 5
    """The read `op` returned record `seq` with `value` and `digest`."""
    GAP = 6
    """The read `op` reported that `seq`..`value` are lost."""
    FINAL = 7
    """Begun: a read of everything after all other operations have ended. Otherwise like READ."""


class Outcome(IntEnum):
    """How an operation ended for its client."""

    UNKNOWN = 0
    """It may have been applied, may be applied later, or never. An operation without RETURN is unknown
    too."""
    OK = 1
    FAIL = 2
    """Certainly not applied."""


class RowFile:
    """The rows of one client. Each call appends with one write call. Not thread-safe."""

    def __init__(self, path: Path, client: int) -> None:
        """Create the file. Raises FileExistsError, because two clients must not share one number."""
        self.client = client
        self._fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_APPEND | os.O_CLOEXEC, 0o600)

    def write(self, rows: Rows) -> None:
        """Append whole rows."""
        data = rows.tobytes()
        if data and os.write(self._fd, data) != len(data):
            raise OSError("short write to a journal")

    def close(self) -> None:
        """Close the file."""
        os.close(self._fd)


class Journal(RowFile):
    """The journal of one client."""

    def __init__(self, path: Path, client: int) -> None:
        """Create the journal; see RowFile."""
        super().__init__(path, client)
        self._next_op = client * OPS_PER_CLIENT

    def begin(
        self, what: What, topic: int, *, seq: int = 0, values: Sequence[int] = (0,),
        digests: Sequence[int] = (0,),
    ) -> NDArray[np.uint64]:  # fmt: skip
        """Record that operations begin now, one for each value. Returns their ids."""
        count = len(values)
        rows = self._rows(count, what, topic)
        ops = np.arange(self._next_op, self._next_op + count, dtype=np.uint64)
        self._next_op += count
        rows["op"], rows["seq"], rows["value"], rows["digest"] = ops, seq, values, digests
        self.write(rows)
        return ops

    def end(
        self, topic: int, ops: NDArray[np.uint64], outcome: Outcome, seqs: Any = 0, values: Any = 0
    ) -> None:
        """Record that operations returned now."""
        rows = self._rows(len(ops), What.RETURN, topic)
        rows["op"], rows["outcome"], rows["seq"], rows["value"] = ops, outcome, seqs, values
        self.write(rows)

    def records(self, topic: int, op: int, seqs: Any, values: Any, digests: Any) -> None:
        """Record the records that a read returned. Call it before `end`."""
        rows = self._rows(len(seqs), What.RECORD, topic)
        rows["op"], rows["seq"], rows["value"], rows["digest"] = op, seqs, values, digests
        self.write(rows)

    def gap(self, topic: int, op: int, first: int, last: int) -> None:
        """Record a reported loss."""
        rows = self._rows(1, What.GAP, topic)
        rows["op"], rows["seq"], rows["value"] = op, first, last
        self.write(rows)

    def _rows(self, count: int, what: What, topic: int) -> Rows:
        rows = np.zeros(count, dtype=ROW)
        rows["at_ns"], rows["client"], rows["topic"], rows["what"] = (
            time.monotonic_ns(), self.client, topic, what,
        )  # fmt: skip
        return rows


def load(folder: Path, dtype: np.dtype[Any] = ROW, since_ns: int = 0) -> Rows:
    """Return the rows of all journals of a directory, from time `since_ns` on.

    The rows of a client stay in order.
    """
    parts = [np.zeros(0, dtype=dtype)]
    for path in sorted(folder.glob("*.journal")):
        if count := path.stat().st_size // dtype.itemsize:
            rows = np.memmap(path, dtype, "r", shape=(count,))
            first = bisect_left(rows, since_ns, key=lambda row: row["at_ns"]) if since_ns else 0
            parts.append(np.array(rows[first:]))
    return np.concatenate(parts)


def rows_in(folder: Path) -> int:
    """Return the number of rows so far."""
    return sum(path.stat().st_size for path in folder.glob("*.journal")) // ROW.itemsize
