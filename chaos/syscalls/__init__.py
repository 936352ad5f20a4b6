"""Fails single system calls of the real program with strace (RF-38).

strace attaches to one process of a running engine and fails the n-th call of one kind, once or from then on.
The engine is under load all the time. It may end the process, refuse requests, or continue. After strace
detaches, the engine must serve every topic again. All acknowledged records must be readable, also after a
kill of all processes.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import shutil
import signal
import subprocess
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from chaos.order import Account, CannotRun, Order
from chaos.rigs.program import BATCH, TOPICS, Traffic, checkpoint, data_of, program, until
from ringlog.drill.checks import GuaranteeBroken, verify
from ringlog.drill.load import ACKED
from ringlog.drill.nursery import Nursery
from ringlog.errors import RinglogError
from ringlog.testing.real_engine import TestEngine

SETTINGS: dict[str, Any] = {"judge_every": 24}
"""`judge_every` is the number of cases on one engine before all records are read, the engine is killed, and
all records are read again."""
CALLS = {
    "wal_shard": ("pwritev", "fdatasync", "fsync", "fallocate", "ftruncate", "openat", "rename", "unlink"),
    "compactor": ("pwritev", "fdatasync", "fsync", "openat", "rename", "unlink", "fallocate"),
    "reclaimer": ("unlink", "openat", "pwritev", "fsync"),
}
ERRORS = ("EIO", "ENOSPC", "EINTR", "EAGAIN", "ESTALE")
PASSES = ("1", "2", "1+")
"""Which calls fail: the first, the second, or all until strace detaches."""
ATTACH_S = 5.0
INJECT_S = 1.5
"""Time (s) to wait for the call, which the process may not make at all."""
SERVE_S = 40.0
END_S = 10.0
DELETE_KEEPS, DELETE_MS = 200, 1_500
LIMITS: dict[str, Any] = {"supervisor": {"restart_max": 1_000, "restart_window_s": 1.0}}
"""High limits of restarts, because these cases cause many deaths. Class `kills` tests the limits."""


@dataclass(frozen=True, slots=True)
class Case:
    """One call of one process."""

    role: str
    call: str
    error: str
    when: str

    def __str__(self) -> str:
        return f"{self.role}/{self.call}/{self.error}/{self.when}"


def cases(order: Order) -> Iterator[Case]:
    """Yield all cases in an order that depends on the seed, repeatedly."""
    every = [
        Case(role, call, error, when)
        for role, calls in CALLS.items()
        for call, error, when in itertools.product(calls, ERRORS, PASSES)
    ]
    order.random("cases").shuffle(every)
    return itertools.cycle(every)


def run(order: Order, account: Account) -> None:
    """Run cases until the time is over."""
    settings = order.choose(SETTINGS)
    if shutil.which("strace") is None:
        raise CannotRun("strace is not installed (package strace)")
    until_s = time.monotonic() + order.seconds
    todo = cases(order)
    for number in itertools.count():
        if time.monotonic() > until_s or order.is_enough(account.counts):
            break
        root = order.scratch / f"engine-{number}"
        batch = list(itertools.islice(todo, settings["judge_every"]))
        try:
            _run_batch(root, batch, account, until_s)
        except (GuaranteeBroken, RinglogError) as e:
            account.report_finding(f"system calls: {str(e)[:300]}", ",".join(map(str, batch)), str(e))
        shutil.rmtree(root, ignore_errors=True)


def replay(order: Order, case: str) -> None:
    """Run cases on one engine, given as in a finding: joined by commas."""
    account = Account()
    _run_batch(order.scratch / "engine", [Case(*one.split("/")) for one in case.split(",")], account, 1e18)
    account.print_report()


def _run_batch(root: Path, batch: list[Case], account: Account, until_s: float) -> None:
    root.mkdir()
    done: list[str] = []
    with Nursery("chaos.rigs.work") as nursery, program(root, **LIMITS) as host:
        traffic = Traffic.begin(nursery, root / "journals", host.url)
        try:
            for case in batch:
                if time.monotonic() > until_s:
                    break
                hits = _inject(host, traffic, case, root)
                done.append(f"{case} ({hits} times)")
                if hits:
                    account.count_work("failed calls", hits)
                    account.count_work("call_runs", 1, "RF-38")
                _need_service(host, traffic, f"after {case}", done)
        finally:
            traffic.end()
        account.count_work("records read", traffic.judge().survivors)
        host.power_off()
        verify(data_of(root))
        host.start()
        account.count_work("acked batches held to", traffic.judge().acked // BATCH)


def _inject(host: TestEngine, traffic: Traffic, case: Case, root: Path) -> int:
    """Fail the calls; return the number of failed calls."""
    out = root / "strace.out"
    out.unlink(missing_ok=True)
    pid = host.pid_of(case.role)
    inject = f"inject={case.call}:error={case.error}:when={case.when}"
    tracer = subprocess.Popen(
        ["strace", "-f", "-p", str(pid), "-o", str(out), "-e", f"trace={case.call}", "-e", inject],
        stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
    )  # fmt: skip
    try:
        until(lambda: _is_traced(pid) or tracer.poll() is not None, ATTACH_S)
        deadline = time.monotonic() + INJECT_S
        while time.monotonic() < deadline and tracer.poll() is None and not _hits(out):
            _provoke(host, traffic, case)
    finally:
        with contextlib.suppress(ProcessLookupError):
            tracer.send_signal(signal.SIGTERM)  # strace detaches from the process when it exits
        try:
            tracer.wait(END_S)
        except subprocess.TimeoutExpired:
            tracer.kill()
            tracer.wait()
    return _hits(out)


def _provoke(host: TestEngine, traffic: Traffic, case: Case) -> None:
    """Cause activity of the process. A shard has its load, and creates files for checkpoints."""
    with contextlib.suppress(RinglogError, OSError):
        if case.role == "reclaimer":
            topic = TOPICS[traffic.acked % len(TOPICS)]
            traffic.delete_below(topic, max(traffic.count(ACKED, topic=topic) - DELETE_KEEPS, 2), DELETE_MS)
        checkpoint(host, INJECT_S / 3)


def _hits(out: Path) -> int:
    try:
        return out.read_text(errors="replace").count("(INJECTED)")
    except OSError:
        return 0


def _is_traced(pid: int) -> bool:
    try:
        status = Path(f"/proc/{pid}/status").read_text()
    except OSError:
        return True
    tracer = next((line for line in status.splitlines() if line.startswith("TracerPid:")), "TracerPid:\t0")
    return tracer.split()[1] != "0"


def _need_service(host: TestEngine, traffic: Traffic, when: str, done: list[str]) -> None:
    """Check that every topic accepts writes again. Raises GuaranteeBroken with the cases done so far."""
    try:
        traffic.need_acks(when, 1, SERVE_S)
    except GuaranteeBroken as e:
        log = host.log_path.read_text(errors="replace").splitlines()
        raise GuaranteeBroken(
            f"{e}\n{done}\n" + "\n".join(log[-20:])[-3_000:] + f"\nload {os.getloadavg()}"
        ) from None
