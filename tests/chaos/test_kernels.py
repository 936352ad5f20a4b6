"""The class `kernels`: guest kernels die and recover; syncs without effect, and wrong reports, are
detected."""

from __future__ import annotations

import base64
import json
import os
import signal
import subprocess
import sys
import zlib
from pathlib import Path
from typing import Any

import pytest

from chaos.kernels import DRIVER, KNOWN, Slot, load
from chaos.kernels.guest import build_shim, need_kernel
from chaos.kernels.judge import Story
from chaos.order import Account, CannotRun, Order
from ringlog.testing.real_engine import wait_until
from tests.support.machine import has_processes

ROOT = Path(__file__).parents[2]
UNSYNCED = (
    "import os, runpy, sys; os.fdatasync = os.fsync = lambda fd: None; "
    "sys.argv = sys.argv[1:]; runpy.run_path(sys.argv[0], run_name='__main__')"
)
"""A driver whose syncs succeed without effect, so that acknowledged data is only in the guest's memory."""


def lives(tmp_path: Path, count: int, **options: Any) -> Account:
    """Run `count` guests on one image. Each guest checks the state that its predecessor left."""
    try:
        need_kernel()
    except CannotRun as e:
        pytest.skip(str(e))
    account = Account()
    order = Order("kernels", 3, 60.0, tmp_path)
    slot = Slot(order, account, build_shim(tmp_path), 0, {**KNOWN, "acks": 12, "lives": 99}, **options)
    for _ in range(count):
        slot.live()
    slot.live(is_last=True)
    return account


@pytest.mark.timeout(120)
def test_a_kernel_death_loses_no_acknowledged_record(tmp_path: Path) -> None:
    """The guest kernel ends at a random moment (RF-63)."""
    account = lives(tmp_path, 2)
    assert account.findings == []
    assert account.counts["kernel_deaths"] + account.counts["early_deaths"] == 2
    assert account.counts["recovered_records"] > 0


@pytest.mark.night
@pytest.mark.timeout(120)
def test_syncs_without_effect_are_detected(tmp_path: Path) -> None:
    """The guest acknowledges records before they are durable (mutant 1)."""
    account = lives(tmp_path, 1, program=(sys.executable, "-P", "-c", UNSYNCED, str(DRIVER)))
    assert account.findings != []


ABANDONED = """
import os, signal, sys, time
from pathlib import Path
from chaos.kernels.guest import Guest
scratch = Path(sys.argv[1])
guest = Guest(scratch, scratch / "no.so", scratch / "no.img", "g")
guest.start(["true"], {})
while guest.line(time.monotonic() + 20) not in {"up", None}:
    continue  # The dynamic linker complains about the shim.
print(guest._process.pid, flush=True)
os.kill(os.getpid(), signal.SIGKILL)
"""


def test_a_killed_harness_leaves_no_guest_behind(tmp_path: Path) -> None:
    """A guest has its own session, and several processes of the host. None survives the harness."""
    program = tmp_path / "linux.uml"
    program.write_text("#!/bin/sh\nsleep 600 &\necho up\nexec sleep 600\n")
    program.chmod(0o700)
    environ = {**os.environ, "PATH": f"{tmp_path}:{os.environ['PATH']}", "PYTHONPATH": str(ROOT)}
    command = [sys.executable, "-c", ABANDONED, str(tmp_path)]
    done = subprocess.run(command, env=environ, capture_output=True, text=True, timeout=50, check=False)
    assert done.returncode == -signal.SIGKILL, done.stderr
    wait_until(lambda: not has_processes(int(done.stdout)), 20, "all processes of the guest to end")


# -- the judge ------------------------------------------------------------------------------------------


def said(**topics: list[tuple[int, str]]) -> str:
    """Return a guest's `@state` line with these records."""
    every = {"f": [], "d": [], **topics}
    state = {name: {"records": records, "lost": [], "head": 0} for name, records in every.items()}
    return "@state " + base64.b64encode(zlib.compress(json.dumps(state).encode())).decode()


def heard() -> tuple[Story, list[tuple[int, str]]]:
    """Return a story in which life 1 acknowledged two frames of the fsync topic, and their records."""
    story, records = Story(), []
    for frame in (1, 2):
        count = load.count_of(1, frame)
        assert story.hear(1, f"@ack f {frame} {len(records) + 1} {count}")
        records += [(len(records) + 1 + i, f"1.{frame}.{i}") for i in range(count)]
    return story, records


def test_exactly_the_acknowledged_records_are_accepted() -> None:
    story, records = heard()
    assert story.judge(2, said(f=records)) == len(records)
    assert story.wrong == []


@pytest.mark.parametrize("lie", ["lost", "half", "doubled", "made up", "too new", "moved", "error"])
def test_each_wrong_report_is_detected(lie: str) -> None:
    story, records = heard()
    late = 3 * load.UNHEARD_ACKS_MAX + 1  # A frame so far ahead that no console can have delayed its acks.
    following = [(len(records) + 1 + i, f"1.{late}.{i}") for i in range(load.count_of(1, late))]
    shown = {
        "lost": records[: load.count_of(1, 1)],
        "half": records[:-1],
        "doubled": [*records, (len(records) + 1, records[-1][1])],
        "made up": [*records, (len(records) + 1, "")],
        "too new": [*records, *following],
        "moved": [(seq + 1, tag) for seq, tag in records],
        "error": records,
    }[lie]
    if lie == "error":
        story.hear(2, "@error CorruptData: the log is damaged")
    story.judge(2, said(f=shown))
    assert story.wrong != []


def test_a_record_that_disappears_after_a_read_is_reported() -> None:
    story, records = heard()
    extra = [(len(records) + 1 + i, f"1.4.{i}") for i in range(load.count_of(1, 4))]
    assert story.hear(1, f"@ack d 3 1 {load.count_of(1, 3)}")
    others = [(1 + i, f"1.3.{i}") for i in range(load.count_of(1, 3))]
    story.judge(2, said(f=[*records, *extra], d=others))
    assert story.wrong == []
    story.judge(3, said(f=records, d=others))
    assert story.wrong != []
