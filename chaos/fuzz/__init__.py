"""Coverage-guided fuzzing of every decoder, of recovery and of the verifier (RF-102, RF-114).

Targets are the modules `fuzz_NAME` here; each says what it promises for any bytes. A crash, an input that
takes more than two seconds of CPU time or more than 512 MiB is a finding; its case is `TARGET/HEX`.

Settings: `targets` (empty: all), `planted` (for the tests of the harness).
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
"""What importing everything instrumented takes of the time."""
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
    """Fuzz the targets one after another for `seconds` in all; raises CannotRun without atheris."""
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
    account.did("executions", executions, *rows)
    if name in FILES:
        account.did("file_executions", executions)
    account.did("targets", 1 if executions else 0)
    found = [path for path in sorted(order.scratch.glob(f"{name}.*-*")) if path.is_file()]
    for path in found:
        data = path.read_bytes()
        # A slow machine is no finding, and neither is what only a process full of other inputs runs into.
        story = trouble_with(name, data, chosen_planted(order))
        if story:
            account.found(
                f"fuzz_{name}: {story.strip().splitlines()[-1][:300]}", f"{name}/{data.hex()}", story
            )
        else:
            account.did("not_repeated")
    if not _UNITS.search(text) and not found:
        driver = (order.scratch / "driver.log").read_text(errors="replace")
        account.found(f"fuzz_{name} did not run to its end", f"{name}/", (driver + text)[-_STORY_CHARS:])


def chosen_planted(order: Order) -> str:
    """What the tests of the harness spoil."""
    planted: str = order.choose(KNOWN)["planted"]
    return planted


def executions_of(text: str) -> int:
    """How many inputs libFuzzer says it ran."""
    final = _UNITS.search(text)
    if final:
        return int(final[1])
    seen = _STATUS.findall(text)
    return int(seen[-1]) if seen else 0


def trouble_with(name: str, data: bytes, planted: str = "") -> str:
    """Run one input in a process of its own; what is wrong with it, or "" when nothing is."""
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
    """One input, with its bounds in time and memory; raises what the target raises, or AssertionError."""
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
    """One input again; raises AssertionError with its story."""
    name, _, data = case.partition("/")
    story = trouble_with(name, bytes.fromhex(data), chosen_planted(order))
    if story:
        raise AssertionError(story)


def save(name: str, data: bytes) -> Path:
    """Keep an input in the corpus; returns where."""
    import hashlib

    path = Path(__file__).parent.parent / "corpus" / name / hashlib.sha256(data).hexdigest()[:16]
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(data)
    return path
