"""The processes that hold leases: a number for each of them, which the runs store. Pure."""

from __future__ import annotations

from ringlog.leases.holders import ProcessId
from ringlog.leases.runs import LEASED, LeaseRuns
from ringlog.limits import LINKS_MAX


class LeaseProcesses:
    """The processes that claimed, each with its process number; some hold no lease any more."""

    def __init__(self, runs: LeaseRuns) -> None:
        self._runs = runs
        self.by_number: dict[int, ProcessId] = {}
        self._numbers: dict[ProcessId, int] = {}
        self._last_number = 0

    def get_or_add(self, process_id: ProcessId) -> int:
        """Return the number of a process for its runs; 0 = the process is not observed."""
        if not process_id[0]:
            return 0
        number = self._numbers.get(process_id, 0)
        if not number:
            if len(self._numbers) >= LINKS_MAX:
                self.forget_idle()
                if len(self._numbers) >= LINKS_MAX:
                    return 0
            self._last_number += 1
            number = self._numbers[process_id] = self._last_number
            self.by_number[number] = process_id
        return number

    def forget_idle(self) -> None:
        """Forget the processes that hold no lease."""
        runs = self._runs
        held = {runs.process_number[row] for row in runs.rows() if runs.state[row] == LEASED}
        self.by_number = {n: each for n, each in self.by_number.items() if n in held}
        self._numbers = {each: n for n, each in self.by_number.items()}

    def forget(self, process_id: ProcessId) -> int:
        """Forget a process that exited. Return the process number of its runs; 0 = it never had any."""
        number = self._numbers.pop(process_id, 0)
        if number:
            del self.by_number[number]
        return number
