"""Plans and the fault matrix: every fault has a class, and a harness that does less work fails."""

from __future__ import annotations

import contextlib
import importlib
import os
import signal
import subprocess
import sys
import threading
from collections import Counter, deque
from datetime import date
from pathlib import Path

import psutil
import pytest

from chaos import plan as plans
from chaos.__main__ import INTERRUPTED
from chaos.order import Account, Order
from chaos.plan import Entry, PlanError, load_faults, load_plan
from chaos.run import ROOT, ROUND_STEP, Verdict, _judge, _next_of, _rows_without_case, run_rounds
from ringlog.testing.real_engine import wait_until

PLANS = sorted(path.stem for path in plans.PLANS.glob("*.toml"))


@pytest.mark.parametrize("name", PLANS)
def test_every_class_of_a_plan_exists_and_has_floors(name: str):
    for entry in load_plan(name).entries:
        module = importlib.import_module(f"chaos.{entry.name}")
        assert callable(module.run), entry.name
        assert callable(module.replay), entry.name
        assert entry.floors, f"{entry.name} may do nothing"
        assert entry.limit_s > entry.seconds
        assert set(entry.distinct) <= set(entry.floors), entry.name


@pytest.mark.parametrize("fault", load_faults(), ids=lambda fault: fault.id)
def test_every_fault_has_a_class_in_each_of_its_plans(fault):
    if fault.later:
        return
    for name in fault.plan:
        if name in PLANS:
            assert set(fault.classes) & set(load_plan(name).by_name), f"{fault.id} has no class in {name}"


def test_the_matrix_has_every_row():
    assert [fault.id for fault in load_faults()] == [f"RF-{n}" for n in range(1, 128)]


def entry(**more: object) -> Entry:
    return Entry(name="states", target="T-1", seconds=1, limit_s=2, **more)  # type: ignore[arg-type]


def test_a_count_below_a_floor_is_a_failure():
    account = Account(counts=Counter(kills=99))
    assert _judge(entry(floors={"kills": 100}), 0, account) == ["kills: 99 is below the floor of 100"]
    assert _judge(entry(floors={"kills": 99}), 0, account) == []


def rounds(entry: Entry, *accounts: Account, lengths: list[float] | None = None) -> tuple[Verdict, list[int]]:
    """Return the verdict of `run_rounds` for these accounts, and the seeds it used. Lengths in seconds go to
    `lengths`."""
    seeds: list[int] = []

    def once(seed: int, seconds: float) -> Verdict:
        account = accounts[len(seeds)]
        seeds.append(seed)
        if lengths is not None:
            lengths.append(seconds)
        return Verdict(entry.name, entry.target, seed, 1.0, account, _judge(entry, 0, account))

    return run_rounds(entry, 5, once), seeds


def test_a_slow_host_gets_more_rounds_and_their_counts_add_up():
    slow = [Account(counts=Counter(kills=40, points=points)) for points in (9, 7, 8)]
    verdict, seeds = rounds(entry(floors={"kills": 100, "points": 9}, distinct=["points"]), *slow)
    assert (verdict.wrong, verdict.rounds, verdict.seconds) == ([], 3, 3.0)
    assert verdict.account.counts == {"kills": 120, "points": 9}
    assert len(set(seeds)) == 3
    verdict, seeds = rounds(entry(floors={"kills": 80}), *slow)
    assert (verdict.rounds, len(seeds)) == (2, 2), "no more than is needed"


@pytest.mark.parametrize(
    ("done", "expected"),
    [
        # The second round takes as long as the missing part took, plus a quarter and 10 s for the start. The
        # third one uses the rates of both.
        ([80, 10, 10], [100.0, 41.25, 29.62]),
        ([99, 1], [100.0, 25.0]),
        ([30, 30, 40], [100.0, 100.0, 100.0]),
        ([0, 100], [100.0, 100.0]),
    ],
)
def test_a_later_round_is_as_long_as_the_missing_work(done: list[int], expected: list[float]):
    lengths: list[float] = []
    asked = Entry(name="states", target="T-1", seconds=100, limit_s=200, floors={"kills": 100})
    verdict, _ = rounds(asked, *[Account(counts=Counter(kills=kills)) for kills in done], lengths=lengths)
    assert (verdict.wrong, [round(each, 2) for each in lengths]) == ([], expected)


def test_a_later_round_for_distinct_counts_has_full_length():
    lengths: list[float] = []
    asked = Entry(name="states", target="T-1", seconds=100, limit_s=200, floors={"points": 10},
                  distinct=["points"])  # fmt: skip
    rounds(asked, *[Account(counts=Counter(points=points)) for points in (9, 10)], lengths=lengths)
    assert lengths == [100.0, 100.0]


def test_a_class_may_have_other_seeds_each_day_and_each_round():
    """4,768 seeds found faults that 406 seeds never found."""
    days = [date(2026, 11, 22), date(2026, 11, 23), date(2027, 1, 1)]
    assert {entry(seed=3).seed_on(day) for day in days} == {3}
    firsts = [entry(seed=3, daily=True).seed_on(day) for day in days]
    seeds = {first + number * ROUND_STEP for first in firsts for number in range(plans.ROUNDS_MAX)}
    assert len(seeds) == len(days) * plans.ROUNDS_MAX
    assert load_plan("night").by_name["world"].daily
    assert not any(each.daily for each in load_plan("ci").entries), "a commit is judged by what it changes"


def test_a_class_below_its_floor_fails_after_all_rounds():
    verdict, seeds = rounds(entry(floors={"points": 10}, distinct=["points"]), *[Account()] * 3)
    assert (len(seeds), verdict.wrong) == (plans.ROUNDS_MAX, ["points: 0 is below the floor of 10"])


def test_a_finding_ends_the_rounds_and_fails():
    bad = Account(counts=Counter(kills=40))
    bad.report_finding("an acked record is gone", "seed=7", "story")
    verdict, seeds = rounds(entry(floors={"kills": 100}), bad)
    assert (len(seeds), len(verdict.wrong)) == (1, 2)
    verdict, seeds = rounds(entry(floors={"kills": 100}), Account(counts=Counter(kills=60)), bad)
    assert (len(seeds), len(verdict.wrong)) == (2, 1), "enough was done, and something was found"


def test_a_finding_a_bad_exit_status_and_a_missing_account_are_failures(account):
    account.report_finding("an acked record is gone", "seed=7", "story")
    (wrong,) = _judge(entry(), 0, account)
    assert "python -m chaos replay states 'seed=7'" in wrong
    assert _judge(entry(), -9, Account()) == ["exited with status -9"]
    assert _judge(entry(), 0, None) == ["exited with status 0 and wrote no account.json"]


def test_a_class_that_cannot_run_fails_if_it_is_required(account):
    account.skip("ext4", "no loop devices")
    assert _judge(entry(required=False), 3, account) == []
    assert "no loop devices" in _judge(entry(required=True), 3, account)[0]


def test_a_row_of_the_matrix_without_a_case_is_reported():
    faults = load_faults()
    plan = load_plan("ci")
    verdict = Verdict(
        "states", "T-1", 1, 1.0, Account(counts=Counter(images=1), faults=Counter({"RF-57": 1}))
    )
    missing = _rows_without_case(plan, faults, [verdict])
    assert any(line.startswith("RF-58 ") for line in missing)
    assert not any(line.startswith("RF-57 ") for line in missing)


def test_an_account_survives_serialisation(account):
    account.count_work("kills", 3, "RF-1")
    account.skip("kernels", "not installed")
    account.report_finding("what", "case", "story")
    assert Account.from_json(account.to_json()) == account


def test_unknown_settings_of_a_class_are_refused():
    order = Order("states", 1, 1.0, Path(), {"longst": 2})
    with pytest.raises(ValueError, match="longst"):
        order.choose({"longest": 2})


def test_an_invalid_plan_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(plans, "PLANS", tmp_path)
    with pytest.raises(PlanError, match="no plan ci"):
        load_plan("ci")
    (tmp_path / "ci.toml").write_text('[[entry]]\nname = "states"\ntarget = "T-1"\nseconds = 1\nlimt_s = 2\n')
    with pytest.raises(PlanError, match="limt_s"):
        load_plan("ci")


def classes_of(runner: psutil.Process) -> list[psutil.Process]:
    """Return the children of the runner that are classes. Another child is git, which returns the commit."""
    found = []
    for child in runner.children():
        with contextlib.suppress(psutil.NoSuchProcess):
            if "class" in child.cmdline():
                found.append(child)
    return found


def test_a_run_that_is_killed_leaves_no_class_behind(tmp_path: Path) -> None:
    """The class would run for the time of its plan and disturb later measurements."""
    command = [sys.executable, "-m", "chaos", "run", "world", "--plan", "night", "--work", str(tmp_path)]
    environ = {**os.environ, "RINGLOG_ALLOW_ROOT": "1"}
    running = subprocess.Popen(
        [*command, "--out", str(tmp_path / "out.json")], cwd=ROOT, env=environ, stdout=subprocess.DEVNULL
    )
    try:
        runner = psutil.Process(running.pid)
        wait_until(lambda: bool(classes_of(runner)), 30, "the class to begin")
        (child,) = classes_of(runner)
        running.kill()
        running.wait(20)
        wait_until(lambda: not child.is_running() or child.status() == "zombie", 20, "the class to end")
    finally:
        running.kill()
        running.wait(20)


def test_is_enough_is_true_when_all_floors_are_reached():
    order = Order("world", 1, 60.0, Path("/"), floors={"seeds": 2, "deaths": 10})
    assert not order.is_enough({"seeds": 2})
    assert not order.is_enough({"seeds": 2, "deaths": 9})
    assert order.is_enough({"seeds": 2, "deaths": 10})
    assert order.is_enough({"seeds": 2}, "seeds")
    assert order.is_enough({}, "of which there is no floor")
    assert not Order("world", 1, 60.0, Path("/")).is_enough({"seeds": 2}), "it uses its time"


def test_an_idle_lane_takes_the_last_entry_of_the_other_lane():
    def named(name: str, seconds: float) -> Entry:
        return Entry(name=name, target="T-1", seconds=seconds, limit_s=2 * seconds)

    short, long = deque([named("a", 1)]), deque([named("b", 1), named("c", 1), named("d", 1)])
    lanes, lock = [short, long], threading.Lock()
    taken = [_next_of(own, lanes, lock) for own in (short, long, short, long, short)]
    assert [entry.name if entry else None for entry in taken] == ["a", "b", "d", "c", None]


HEEDING = """
import runpy, signal
signal.signal(signal.SIGINT, signal.default_int_handler)
runpy.run_module("chaos", run_name="__main__")
"""
"""Runs chaos as from a terminal. A background job of a shell would ignore interrupts."""


@pytest.mark.timeout(120)
def test_an_interrupted_run_ends_its_classes_with_one_line(tmp_path):
    """The run prints one line and no traceback, and no class continues in the background."""
    command = [sys.executable, "-c", HEEDING, "run", "schedules", "states", "--work", str(tmp_path)]
    out = tmp_path / "report.json"
    running = subprocess.Popen(
        [*command, "--out", str(out)], cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
        start_new_session=True,
    )  # fmt: skip
    try:
        lanes = psutil.Process(running.pid)
        wait_until(lambda: len(list(tmp_path.glob("*/chaos-*/output"))) == 2, 60.0, "both lanes to run")
        wait_until(lambda: len(lanes.children()) == 2, 60.0, "the class of each to be started")
        classes = lanes.children(recursive=True)
        running.send_signal(signal.SIGINT)
        _, told = running.communicate(timeout=60)
    finally:
        running.kill()
        running.wait()
    assert running.returncode == INTERRUPTED
    assert "Traceback" not in told
    assert told.startswith("interrupted")
    assert not [each for each in classes if each.is_running() and each.status() != psutil.STATUS_ZOMBIE]
    assert not out.exists()
