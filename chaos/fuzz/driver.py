"""Runs libFuzzer over one target after another: `python -m chaos.fuzz.driver ORDER.json`.

Everything that is fuzzed is imported once, instrumented; each target then runs in a fork of its own, since
libFuzzer ends its process. What it says goes to a file, what crashes it to another; `chaos.fuzz` reads both.
"""

from __future__ import annotations

import ctypes
import hashlib
import importlib
import os
import resource
import signal
import sys
import tempfile
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Protocol

import msgspec

CORPUS = Path(__file__).parent.parent / "corpus"
TARGETS = (
    "frame", "envelope", "gateway", "settle", "wal", "segment", "snapshot", "config", "names", "handshake",
    "verify", "shard",
)  # fmt: skip
"""Modules `fuzz_NAME`; each says what it promises."""
CRASHES_MAX = 16
"""Different ones of one target that are kept."""
INPUT_S_MAX = 2
RSS_MIB_MAX = 512
INSTRUMENTED = ("ringlog", "actors")
_PR_SET_PDEATHSIG = 1


class Target(Protocol):
    """What a module `fuzz_NAME` offers."""

    MAX_LEN: int
    SHARE: float
    """Part of the time it gets, relative to the others."""

    def check(self, data: bytes) -> None:
        """Whatever the bytes: return, and raise for a broken promise only."""

    def seeds(self) -> Iterable[bytes]:
        """Inputs to begin with, besides those kept in the corpus."""


class DriverOrder(msgspec.Struct):
    """What the driver is asked for."""

    out: str
    """Directory for `NAME.log` and `NAME.crash-*`."""
    seed: int
    seconds: dict[str, float]
    """By target."""
    parent_pid: int
    planted: str = ""
    """`module:function` that spoils something first, for the tests of the harness."""


def load(name: str) -> Target:
    """The module of a target."""
    module: Target = importlib.import_module(f"chaos.fuzz.fuzz_{name}")
    return module


def kept(name: str) -> list[bytes]:
    """Inputs of the corpus: past crashers and what is worth keeping."""
    folder = CORPUS / name
    return [path.read_bytes() for path in sorted(folder.iterdir())] if folder.is_dir() else []


def main() -> int:
    """Fuzz what the order says; exit status 0 also when something was found: the files tell."""
    order = msgspec.json.decode(Path(sys.argv[1]).read_bytes(), type=DriverOrder)
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, int(signal.SIGKILL))
    if os.getppid() != order.parent_pid:
        return 1
    import atheris

    with atheris.instrument_imports(include=list(INSTRUMENTED)):
        for name in order.seconds:
            load(name)
    if order.planted:
        module, _, function = order.planted.partition(":")
        getattr(importlib.import_module(module), function)()
    for name, seconds in order.seconds.items():
        _fork(lambda name=name, seconds=seconds: _fuzz(name, seconds, order))  # type: ignore[misc]
    return 0


def _fork(act: Callable[[], None]) -> None:
    pid = os.fork()
    if pid == 0:
        try:
            ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, int(signal.SIGKILL))
            act()
        finally:
            os._exit(1)
    os.waitpid(pid, 0)


def _fuzz(name: str, seconds: float, order: DriverOrder) -> None:
    import atheris

    target = load(name)
    log = os.open(f"{order.out}/{name}.log", os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
    os.dup2(log, 1)
    os.dup2(log, 2)
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    tempfile.tempdir = order.out  # What a target makes goes with the rest, also when it is killed.
    corpus = tempfile.mkdtemp(prefix=f"{name}-")
    for number, data in enumerate((*target.seeds(), *kept(name))):
        Path(corpus, f"{number:04d}").write_bytes(data[: target.MAX_LEN])
    arguments = [
        f"fuzz_{name}", corpus, f"-max_total_time={max(1, round(seconds))}", f"-seed={order.seed}",
        f"-max_len={target.MAX_LEN}", f"-timeout={INPUT_S_MAX * 5}", f"-rss_limit_mb={RSS_MIB_MAX * 2}",
        f"-malloc_limit_mb={RSS_MIB_MAX}", f"-artifact_prefix={order.out}/{name}.", "-print_final_stats=1",
        "-len_control=0", "-verbosity=1",
    ]  # fmt: skip
    atheris.Setup(arguments, guarded(name, target.check, Path(order.out)), internal_libfuzzer=True)
    atheris.Fuzz()


def guarded(name: str, check: Callable[[bytes], None], out: Path) -> Callable[[bytes], None]:
    """The target, with what it raises written down, once for each place, so that the others are found too."""
    seen: set[tuple[str, str, int]] = set()

    def guard(data: bytes) -> None:
        try:
            check(data)
        except BaseException as e:  # noqa: BLE001
            place = _place(e)
            if place not in seen and len(seen) < CRASHES_MAX:
                seen.add(place)
                digest = hashlib.sha256(data).hexdigest()[:16]
                (out / f"{name}.crash-{digest}").write_bytes(data)
                print(f"== {place}: {e}", file=sys.stderr, flush=True)

    return guard


def _place(error: BaseException) -> tuple[str, str, int]:
    """What was raised, and the innermost line of ours it came through."""
    file, line = "", 0
    trace = error.__traceback__
    while trace is not None:
        here = trace.tb_frame.f_code.co_filename
        if not file or any(f"/{package}/" in here for package in (*INSTRUMENTED, "chaos")):
            file, line = here, trace.tb_lineno
        trace = trace.tb_next
    return type(error).__name__, file, line


if __name__ == "__main__":
    sys.exit(main())
