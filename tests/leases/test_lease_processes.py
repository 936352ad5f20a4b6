"""The processes that hold leases: numbers up to a limit, and what happens there."""

from __future__ import annotations

from ringlog.leases.processes import LeaseProcesses
from ringlog.leases.runs import LEASED, LeaseRuns
from ringlog.limits import LINKS_MAX


def test_a_process_keeps_its_number_until_it_exits():
    processes = LeaseProcesses(LeaseRuns())
    assert [processes.get_or_add((pid, 1)) for pid in (7, 8, 7)] == [1, 2, 1]
    assert processes.get_or_add((0, 0)) == 0, "not observed"
    assert (processes.forget((7, 1)), processes.forget((7, 1))) == (1, 0)
    assert processes.get_or_add((7, 1)) == 3, "numbers are not used again"


def test_at_the_limit_processes_without_a_lease_are_forgotten():
    runs = LeaseRuns()
    processes = LeaseProcesses(runs)
    for pid in range(1, LINKS_MAX + 1):
        processes.get_or_add((pid, 1))
    runs.add(10, 20, LEASED, process_number=processes.get_or_add((5, 1)))
    assert processes.get_or_add((LINKS_MAX + 1, 1)) == LINKS_MAX + 1
    assert processes.by_number == {5: (5, 1), LINKS_MAX + 1: (LINKS_MAX + 1, 1)}


def test_beyond_the_limit_a_process_with_leases_is_not_observed():
    runs = LeaseRuns()
    processes = LeaseProcesses(runs)
    for pid in range(1, LINKS_MAX + 1):
        runs.add(4 * pid, 4 * pid + 2, LEASED, process_number=processes.get_or_add((pid, 1)))
    assert [processes.get_or_add((LINKS_MAX + n, 1)) for n in (1, 2)] == [0, 0]
    assert len(processes.by_number) == LINKS_MAX
    assert processes.forget((9, 1)) == 9
    assert processes.get_or_add((LINKS_MAX + 1, 1)) == LINKS_MAX + 1
