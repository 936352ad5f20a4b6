"""Jobs that came along with the answer to their claim: payloads and stamps, and nothing to be read."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from ringlog.client.pages import Record

I64 = NDArray[np.int64]


class Stretch(Protocol):
    """Jobs of a claim, wherever they came from; a Piece is one."""

    @property
    def last_seq(self) -> int:
        """The last number."""
        ...

    @property
    def seqs(self) -> I64:
        """(n,) numbers, ascending."""
        ...

    def __len__(self) -> int: ...

    def part(self, start: int, stop: int) -> Stretch:
        """Only jobs `start` to `stop`, counted from 0, the latter excluded."""
        ...

    def payloads(self) -> list[bytes]:
        """Their payloads."""
        ...

    def records(self) -> list[Record]:
        """Them as records."""
        ...


class Inline:
    """Jobs of one claim. `runs` as in the message JobsClaimed; both others have an entry a job."""

    __slots__ = ("_payloads", "_seqs", "_stamps")

    def __init__(self, seqs: Sequence[int], payloads: list[bytes], stamps: bytes) -> None:
        self._seqs, self._payloads, self._stamps = seqs, payloads, stamps

    def __len__(self) -> int:
        return len(self._payloads)

    @property
    def last_seq(self) -> int:
        return self._seqs[-1]

    @property
    def span(self) -> tuple[int, int] | None:
        """First number and one past the last, where they follow each other in one run."""
        seqs = self._seqs
        return (seqs.start, seqs.stop) if type(seqs) is range and seqs else None

    @property
    def seqs(self) -> I64:
        return np.array(self._seqs, np.int64)

    def part(self, start: int, stop: int) -> Inline:
        return Inline(self._seqs[start:stop], self._payloads[start:stop], self._stamps[8 * start : 8 * stop])

    def payloads(self) -> list[bytes]:
        return list(self._payloads)

    def records(self) -> list[Record]:
        stamps = np.frombuffer(self._stamps, "<i8").tolist()
        return list(map(Record, self._seqs, stamps, self._payloads))


def inline_of(
    runs: Sequence[tuple[int, int, int, int]], payloads: list[bytes], stamps: bytes
) -> Inline | None:
    """What came along with these leases; None when that is not all of them."""
    count = sum(run[1] for run in runs)
    if not count or len(payloads) != count or len(stamps) != 8 * count:
        return None
    if len(runs) == 1:
        return Inline(range(runs[0][0], runs[0][0] + count), payloads, stamps)
    return Inline([first + n for first, many, _, _ in runs for n in range(many)], payloads, stamps)
