"""What is known of single jobs: who holds them, until when, how often handed out, why they failed. Pure."""

from __future__ import annotations

from typing import NamedTuple

from ringlog.leases.runs import BLOCK_SHIFT, DELAYED, EXHAUSTED, GONE, LEASED, RETURNED
from ringlog.leases.table import LeaseTable

NAMES = {LEASED: "leased", DELAYED: "delayed", RETURNED: "returned", EXHAUSTED: "set aside"}


class Known(NamedTuple):
    """One job that was handed out and is not done."""

    seq: int
    state: str
    node: str
    until_ms: int
    deliveries: int
    nacks: int
    failed_ms: int
    reason: str

    def on_wall(self, ahead_ms: int) -> Known:
        """The same in times of the wall clock, which is so far ahead."""
        until_ms = self.until_ms and self.until_ms + ahead_ms
        return self._replace(until_ms=until_ms, failed_ms=self.failed_ms and self.failed_ms + ahead_ms)


def pending(queue: LeaseTable, after: int, most: int) -> tuple[list[Known], bool]:
    """Such jobs behind `after`, ascending, at most so many; and whether there are more. Costs what it finds,
    and a look at each block of a thousand numbers that has any."""
    runs, found = queue.runs, list[Known]()
    for number in sorted(each for each in runs.blocks if each >= (after + 1) >> BLOCK_SHIFT):
        for row in runs.blocks[number][1]:
            if runs.state[row] == GONE:
                continue
            for seq in range(max(runs.first[row], after + 1), runs.stop[row]):
                if len(found) == most:
                    return found, True
                found.append(_known(queue, row, seq))
    return found, False


def _known(queue: LeaseTable, row: int, seq: int) -> Known:
    runs, failure = queue.runs, queue.failures.find(seq)
    state = runs.state[row]
    node = queue.holders.name_of(runs.holder[row]) if state == LEASED else ""
    reason, failed_ms, nacks = failure or ("", 0, 0)
    until_ms = runs.at[row] if state in {LEASED, DELAYED} else 0
    return Known(seq, NAMES[state], node, until_ms, runs.deliveries[row], nacks, failed_ms, reason)
