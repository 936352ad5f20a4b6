"""Run a plan: every class in its own process, the lanes in parallel, with one verdict.

A class fails if it has a finding, exits with an error, exceeds its time limit, leaks a resource, or stays
below its floors. It also fails if it cannot run here although the plan requires it. The report states all of
this, and every skip with its reason.
"""

from __future__ import annotations

import os
import platform
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections import Counter, deque
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor, wait
from dataclasses import dataclass, field
from datetime import UTC, datetime
from functools import partial
from pathlib import Path

import msgspec

from chaos import leaks
from chaos.order import Account
from chaos.plan import ROUNDS_MAX, Entry, Fault, Plan
from chaos.processes import private_tmpfs
from ringlog.environment import TEST_PACKAGE

ROOT = Path(__file__).parent.parent
OUTPUT_CHARS_MAX = 20_000
DISK_BYTES_MIN = 4 << 30
"""Free disk space that the harness needs at its peak."""
NEVER_STARTED = 3
"""Exit status of a class that cannot run on this host at all."""
SEED_STEP = 1_000_003
"""Distance between the seeds of two passes. It is far above the seeds of the entries, which are small."""
ROUND_STEP = 7_919
"""Distance between the seeds of two rounds of one pass."""
REST_MARGIN = 1.25
"""Safety factor on the estimated time of a later round."""
REST_SHARE_MIN = 0.15
"""Minimum length of a later round, as a share of the class's time."""
INTERRUPT_S = 1.0
"""Maximum delay (s) until the main thread handles an interrupt. A signal that arrives just before a thread
sleeps does not wake it."""
START_S = 10.0
"""Time (s) added to a later round for work that it does not count, such as its start."""


class _Children:
    """Running processes of classes. An interrupted plan kills them."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._running: list[subprocess.Popen[bytes]] = []
        self.are_over = False

    def add(self, child: subprocess.Popen[bytes]) -> None:
        """Register a child that was started in its own session. Kill it if `end` was called before."""
        with self._lock:
            self._running = [each for each in self._running if each.poll() is None] + [child]
        if self.are_over:
            self.end()

    def end(self) -> None:
        """Kill all registered children, and every child that is registered later."""
        with self._lock:
            self.are_over = True
            for child in self._running:
                if child.poll() is None:
                    os.killpg(child.pid, signal.SIGKILL)


_children = _Children()


@dataclass(slots=True)
class Verdict:
    """Result of one class."""

    name: str
    target: str
    seed: int
    seconds: float
    account: Account
    wrong: list[str] = field(default_factory=list)
    """Reasons of the failure; empty if the class passed."""
    output: str = ""
    rounds: int = 1

    def line(self) -> str:
        """Return a one-line summary."""
        counts = ", ".join(f"{number:,} {what}" for what, number in sorted(self.account.counts.items()))
        state = "FAILED" if self.wrong else "passed"
        rounds = f" ({self.rounds} rounds)" if self.rounds > 1 else ""
        return f"{self.target:5} {self.name:12} {state} in {self.seconds:4.0f} s{rounds}  {counts}"


@dataclass(slots=True)
class Report:
    """Result of a plan."""

    plan: str
    begun: str
    commit: str
    host: dict[str, str]
    seconds: float = 0.0
    verdicts: list[Verdict] = field(default_factory=list)
    wrong: list[str] = field(default_factory=list)

    @property
    def is_good(self) -> bool:
        """Whether no class failed and no other check of the plan failed."""
        return not self.wrong and not any(verdict.wrong for verdict in self.verdicts)

    def to_json(self) -> bytes:
        """Encode everything except the output of the classes."""
        raw = msgspec.to_builtins(self)
        for verdict in raw["verdicts"]:
            del verdict["output"]
        return msgspec.json.format(msgspec.json.encode(raw), indent=1)


def run_plan(
    plan: Plan, faults: tuple[Fault, ...], only: list[str], work: Path, *, pass_number: int = 0,
    keep: Callable[[Report], object] | None = None,
) -> Report:  # fmt: skip
    """Run the classes of a plan (those in `only`, or all) and judge them.

    `keep` is called with each class when it is done, so that an interrupted night keeps its results. Raises
    KeyboardInterrupt once all children are killed and the lanes have ended.
    """
    report = Report(plan.name, datetime.now(UTC).isoformat(timespec="seconds"), commit_of(), _host())
    begun = time.monotonic()
    if shutil.disk_usage(work).free < DISK_BYTES_MIN:
        report.wrong.append(f"{work} has less than {DISK_BYTES_MIN >> 30} GiB free")
        return report
    before, today = leaks.host_resources(), datetime.now(UTC).date()
    lock = threading.Lock()

    lanes = [
        deque(entry for entry in entries if not only or entry.name in only)
        for entries in plan.lanes().values()
    ]

    def run_lane(own: deque[Entry]) -> None:
        while (entry := _next_of(own, lanes, lock)) is not None:
            verdict = run_rounds(
                entry, entry.seed_on(today) + pass_number * SEED_STEP, partial(_run_entry_at, entry, work)
            )
            if _children.are_over:
                return
            with lock:
                report.verdicts.append(verdict)
                if keep is not None:
                    keep(Report(report.plan, report.begun, report.commit, report.host, verdicts=[verdict]))
                print(verdict.line(), flush=True)
                for wrong in verdict.wrong:
                    print(f"      {wrong}", flush=True)
                if verdict.wrong and verdict.output:
                    print(verdict.output, flush=True)

    # The exit of the pool waits for all lanes, even after an exception. `Thread.join` must not be used: when
    # interrupted, it takes its thread for ended (CPython 3.11). The directory would then be removed while a
    # lane still writes to it.
    with ThreadPoolExecutor(max(1, len(lanes))) as pool:
        try:
            running = {pool.submit(run_lane, lane) for lane in lanes if lane}
            while wait(running, INTERRUPT_S).not_done:
                continue
        except KeyboardInterrupt:
            _children.end()
            raise
    for each in running:
        each.result()
    report.wrong += [f"leaked: {thing}" for thing in sorted(leaks.host_resources() - before)]
    if not only:
        report.wrong += _rows_without_case(plan, faults, report.verdicts)
    report.seconds = time.monotonic() - begun
    return report


def _next_of(own: deque[Entry], lanes: list[deque[Entry]], lock: threading.Lock) -> Entry | None:
    """Return the next entry of a lane.

    A lane takes its own entries in order. When it has none, it takes the last entry of the lane with the most
    work left.
    """
    with lock:
        if own:
            return own.popleft()
        longest = max(lanes, key=lambda lane: sum(entry.seconds for entry in lane))
        return longest.pop() if longest else None


def run_rounds(entry: Entry, seed: int, once: Callable[[int, float], Verdict]) -> Verdict:
    """Run one class until it reaches its floors, in at most ROUNDS_MAX rounds.

    `once` runs a round with a seed and a number of seconds. Further rounds make up only for missing work: any
    other failure ends the class at once.
    """
    done, spent_s = once(seed, entry.seconds), entry.seconds
    for number in range(1, ROUNDS_MAX):
        if _children.are_over or not done.wrong or done.wrong != _missed_floors(entry, done.account):
            break
        seconds = _remaining_s(entry, done.account, spent_s)
        done = _merge_rounds(entry, done, once(seed + number * ROUND_STEP, seconds))
        spent_s += seconds
    return done


def _remaining_s(entry: Entry, account: Account, spent_s: float) -> float:
    """Estimate the seconds for the missing work from the rate in `spent_s`, at most a whole round.

    A whole round is needed for a count that is still 0, and for a `distinct` count, since a new round may
    repeat the same things.
    """
    wanted_s = REST_SHARE_MIN * entry.seconds
    for what, floor in entry.floors.items():
        done = account.counts[what]
        if done < floor:
            is_whole = not done or what in entry.distinct
            rest_s = entry.seconds if is_whole else REST_MARGIN * spent_s * (floor - done) / done
            wanted_s = max(wanted_s, rest_s)
    return min(START_S + wanted_s, entry.seconds)


def _merge_rounds(entry: Entry, before: Verdict, after: Verdict) -> Verdict:
    """Merge two rounds of one class into one verdict.

    The failures are those of the later round; the floors are compared with the counts of both.
    """
    first, second = before.account, after.account
    counts = first.counts + second.counts
    counts.update({what: -min(first.counts[what], second.counts[what]) for what in entry.distinct})
    account = Account(
        counts, first.faults + second.faults,
        {name: max(each.figures.get(name, 0.0) for each in (first, second))
         for name in first.figures | second.figures},
        [*first.skipped, *(skip for skip in second.skipped if skip not in first.skipped)],
        second.findings, second.findings_more,
    )  # fmt: skip
    other = [each for each in after.wrong if each not in _missed_floors(entry, second)]
    return Verdict(
        entry.name, entry.target, before.seed, round(before.seconds + after.seconds, 1), account,
        other + _missed_floors(entry, account), after.output, before.rounds + 1,
    )  # fmt: skip


def _run_entry_at(entry: Entry, work: Path, seed: int, seconds: float) -> Verdict:
    return run_entry(msgspec.structs.replace(entry, seconds=seconds), work, seed=seed)


def run_entry(
    entry: Entry, work: Path, *, seed: int, root: Path = ROOT, wanted: str | None = None
) -> Verdict:
    """Run one class in its own process, with the program in `root`, and judge it by the plan.

    If `wanted` is given, the class ends at the first finding that contains it.
    """
    mark = f"{os.getpid()}-{entry.name}-{time.monotonic_ns()}"
    scratch = Path(tempfile.mkdtemp(prefix=f"chaos-{entry.name}-", dir=work))
    order = {
        "name": entry.name, "seed": seed, "seconds": entry.seconds, "settings": entry.settings,
        "scratch": str(scratch / "scratch"), "account": str(scratch / "account.json"),
        "wanted": wanted, "parent": os.getpid(), "floors": entry.floors if entry.ends_at_floors else {},
    }  # fmt: skip
    (scratch / "scratch").mkdir()
    (scratch / "order.json").write_bytes(msgspec.json.encode(order))
    command = [sys.executable, "-m", "chaos", "class", str(scratch / "order.json")]
    if entry.in_memory:
        command = [*private_tmpfs(str(scratch / "scratch")), *command]
    if entry.private_mounts:
        command = ["unshare", "--mount", "--propagation", "private", *command]
    environ = {
        **os.environ, leaks.MARK: mark, "TMPDIR": str(scratch / "scratch"), "RINGLOG_ALLOW_ROOT": "1",
        "PYTHONPATH": str(root),
    }  # fmt: skip
    if root != ROOT:
        environ.pop(TEST_PACKAGE, None)  # A compiled build does not contain what a mutant changes.
    begun = time.monotonic()
    wrong = []
    with (scratch / "output").open("wb") as out:
        child = subprocess.Popen(
            command, stdin=subprocess.DEVNULL, stdout=out, stderr=out, env=environ, cwd=root,
            start_new_session=True,
        )  # fmt: skip
        _children.add(child)
        try:
            code = child.wait(entry.limit_s)
        except subprocess.TimeoutExpired:
            os.killpg(child.pid, signal.SIGKILL)
            code = child.wait()
            wrong.append(f"exceeded its limit of {entry.limit_s:.0f} s")
    seconds = time.monotonic() - begun
    wrong += leaks.kill_marked(mark)
    account = _account(scratch / "account.json")
    wrong += _judge(entry, code, account)
    output = (scratch / "output").read_text(errors="replace")[-OUTPUT_CHARS_MAX:]
    shutil.rmtree(scratch, ignore_errors=True)
    return Verdict(entry.name, entry.target, seed, round(seconds, 1), account or Account(), wrong, output)


def _account(path: Path) -> Account | None:
    try:
        return Account.from_json(path.read_bytes())
    except (OSError, msgspec.DecodeError):
        return None


def _judge(entry: Entry, code: int, account: Account | None) -> list[str]:
    if account is None:
        return [f"exited with status {code} and wrote no account.json"]
    wrong = [
        f"{each.what}\n      python -m chaos replay {entry.name} '{each.case}'" for each in account.findings
    ]
    if account.findings_more:
        wrong.append(f"and {account.findings_more} findings more")
    if code == NEVER_STARTED:
        reasons = "; ".join(f"{skip.what}: {skip.why}" for skip in account.skipped)
        missing = f"required by the plan, but this host cannot run it: {reasons}"
        return [*wrong, missing] if entry.required else wrong
    if code != 0:
        wrong.append(f"exited with status {code}")
    return wrong + _missed_floors(entry, account)


def _missed_floors(entry: Entry, account: Account) -> list[str]:
    """Return the floors that were not reached."""
    return [
        f"{what}: {account.counts[what]:,} is below the floor of {floor:,}"
        for what, floor in entry.floors.items()
        if account.counts[what] < floor
    ]


def _rows_without_case(plan: Plan, faults: tuple[Fault, ...], verdicts: list[Verdict]) -> list[str]:
    """Return the rows of the matrix that this plan must test and that had no case.

    Rows whose classes all did nothing here (skipped) are not reported.
    """
    done: Counter[str] = Counter()
    for verdict in verdicts:
        done.update(verdict.account.faults)
    ran = {verdict.name for verdict in verdicts if verdict.account.counts}
    return [
        f"{fault.id} ({fault.what}) had no case"
        for fault in faults
        if plan.name in fault.plan and not done[fault.id] and ran.intersection(fault.classes)
    ]


def commit_of() -> str:
    """Return the checked-out commit, or an empty string if there is none."""
    try:
        found = subprocess.run(
            ["git", "rev-parse", "--short=12", "HEAD"], cwd=ROOT, capture_output=True, text=True, check=False
        )
    except OSError:
        return ""
    return found.stdout.strip()


def _host() -> dict[str, str]:
    return {
        "kernel": platform.release(), "python": platform.python_version(), "cpus": str(os.cpu_count()),
        "machine": platform.machine(),
    }  # fmt: skip
