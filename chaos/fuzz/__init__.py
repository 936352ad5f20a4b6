"""Coverage-guided fuzzing of every decoder, of recovery and of the offline verifier (RF-102, RF-114).

A target is a module `fuzz_NAME` in this package. Its docstrings state the guarantee for any bytes. A finding
is a crash, or an input that takes more than 2 s of CPU time or more than 512 MiB. A case is `TARGET/HEX`.

Settings: `targets` (list of names; empty: all), `planted` (a deliberate bug, for the tests of the harness).
"""

from __future__ import annotations

import os
import re
import resource
import subprocess
import sys
import time
from pathlib import Path

import msgspec

from chaos.fuzz.driver import INPUT_S_MAX, RSS_MIB_MAX, TARGETS, DriverOrder, load
from chaos.order import Account, CannotRun, Order

KNOWN = {"targets": [], "planted": ""}
START_S = 6.0
"""Part of the time (s) that the instrumented import of all modules takes."""
GRACE_S = 60.0
REPLAY_LIMIT_S = 20.0
MIB = 1 << 20
BOMBS = "envelope", "gateway"
FILES = "wal", "segment", "snapshot", "verify"
_UNITS = re.compile(r"stat::number_of_executed_units:\s*(\d+)")
_STATUS = re.compile(r"^#(\d+)\s", re.MULTILINE)
_STORY_CHARS = 3_000
_ONE = "import sys; from chaos.fuzz import try_one; try_one(sys.argv[1], bytes.fromhex(sys.stdin.read()))"


def run(order: Order, account: Account) -> None:
    """Fuzz the targets one after another within `order.seconds`.

    Raises CannotRun if atheris is not installed.
    """
    chosen = order.choose(KNOWN)
    try:
        import atheris  # noqa: F401
    except ImportError as e:
        raise CannotRun("atheris is not installed: pip install ringlog[fuzz]") from e
    names = tuple(chosen["targets"] or TARGETS)
    shares = {name: load(name).SHARE for name in names}
    whole = sum(shares.values())
    seconds = {name: (order.seconds - START_S) * share / whole for name, share in shares.items()}
    asked = DriverOrder(str(order.scratch), order.seed, seconds, os.getpid(), chosen["planted"])
    path = order.scratch / "driver.json"
    path.write_bytes(msgspec.json.encode(asked))
    with (order.scratch / "driver.log").open("wb") as log:
        subprocess.run(
            [sys.executable, "-m", "chaos.fuzz.driver", str(path)], stdin=subprocess.DEVNULL, stdout=log,
            stderr=log, check=False, timeout=order.seconds + GRACE_S,
        )  # fmt: skip
    for name in names:
        _judge(order, account, name)


def _judge(order: Order, account: Account, name: str) -> None:
    log = order.scratch / f"{name}.log"
    text = log.read_text(errors="replace") if log.exists() else ""
    executions = executions_of(text)
    account.figures[f"{name}_executions"] = executions
    rows = [row for row, targets in (("RF-102", BOMBS), ("RF-114", FILES)) if name in targets]
    account.count_work("executions", executions, *rows)
    if name in FILES:
        account.count_work("file_executions", executions)
    account.count_work("targets", 1 if executions else 0)
    found = [path for path in sorted(order.scratch.glob(f"{name}.*-*")) if path.is_file()]
    for path in found:
        data = path.read_bytes()
        # Run the input alone in a new process. A slow host, or the memory of earlier inputs, is not a
        # finding.
        story = trouble_with(name, data, chosen_planted(order))
        if story:
            account.report_finding(
                f"fuzz_{name}: {story.strip().splitlines()[-1][:300]}", f"{name}/{data.hex()}", story
            )
        else:
            account.count_work("not_repeated")
    if not _UNITS.search(text) and not found:
        driver = (order.scratch / "driver.log").read_text(errors="replace")
        account.report_finding(
            f"fuzz_{name} did not run to its end", f"{name}/", (driver + text)[-_STORY_CHARS:]
        )


def chosen_planted(order: Order) -> str:
    """Return the deliberate bug that a test of the harness requested, or an empty string."""
    planted: str = order.choose(KNOWN)["planted"]
    return planted


def executions_of(text: str) -> int:
    """Return the number of inputs that libFuzzer ran, read from its log."""
    final = _UNITS.search(text)
    if final:
        return int(final[1])
    seen = _STATUS.findall(text)
    return int(seen[-1]) if seen else 0


def trouble_with(name: str, data: bytes, planted: str = "") -> str:
    """Run one input in its own process; return a description of the failure, or "" if it passes."""
    environ = {**os.environ, "CHAOS_FUZZ_PLANTED": planted}
    try:
        done = subprocess.run(
            [sys.executable, "-c", _ONE, name], input=data.hex(), capture_output=True, text=True, check=False,
            timeout=REPLAY_LIMIT_S, env=environ,
        )  # fmt: skip
    except subprocess.TimeoutExpired:
        return f"took more than {REPLAY_LIMIT_S:.0f} s"
    if done.returncode == 0:
        return ""
    return (done.stderr or f"ended with status {done.returncode}")[-_STORY_CHARS:]


def try_one(name: str, data: bytes) -> None:
    """Run one input within the limits of CPU time and memory.

    Raises the errors of the target, or AssertionError if a limit is exceeded.
    """
    planted = os.environ.get("CHAOS_FUZZ_PLANTED", "")
    target = load(name)
    if planted:
        module, _, function = planted.partition(":")
        getattr(__import__(module, fromlist=[function]), function)()
    target.check(b"")
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    begun = time.process_time()
    target.check(data)
    took = time.process_time() - begun
    grown = (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) << 10
    if took > INPUT_S_MAX:
        raise AssertionError(f"took {took:.1f} s of CPU time")
    if grown > RSS_MIB_MAX * MIB:
        raise AssertionError(f"took {grown // MIB} MiB")


def replay(order: Order, case: str) -> None:
    """Run one input again. Raises AssertionError with its details if it fails."""
    name, _, data = case.partition("/")
    story = trouble_with(name, bytes.fromhex(data), chosen_planted(order))
    if story:
        raise AssertionError(story)


def save(name: str, data: bytes) -> Path:
    """Store an input in the corpus; return its path."""
    import hashlib

    path = Path(__file__).parent.parent / "corpus" / name / hashlib.sha256(data).hexdigest()[:16]
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(data)
    return path
