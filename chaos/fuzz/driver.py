"""Run libFuzzer on one target after another: `python -m chaos.fuzz.driver ORDER.json`.

The driver imports all fuzzed modules once, instrumented. Each target then runs in its own fork, because
libFuzzer ends its process. Output goes to one file for each target, and each crashing input to its own file.
`chaos.fuzz` reads these files.
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
    "verify", "shard", "http",
)  # fmt: skip
"""Names of the targets. Target NAME is the module `fuzz_NAME`."""
CRASHES_MAX = 16
"""Maximum number of distinct crashes that are kept for one target."""
INPUT_S_MAX = 2
RSS_MIB_MAX = 512
INSTRUMENTED = ("ringlog",)
_PR_SET_PDEATHSIG = 1


class Target(Protocol):
    """Interface of a module `fuzz_NAME`."""

    MAX_LEN: int
    SHARE: float
    """Share of the time, relative to the shares of the other targets."""

    def check(self, data: bytes) -> None:
        """Run one input. Return for any bytes; raise only if a guarantee is broken."""

    def seeds(self) -> Iterable[bytes]:
        """Yield initial inputs, in addition to the corpus."""


class DriverOrder(msgspec.Struct):
    """Task of the driver."""

    out: str
    """Directory for `NAME.log` and `NAME.crash-*`."""
    seed: int
    seconds: dict[str, float]
    """Time (s) by target."""
    parent_pid: int
    planted: str = ""
    """`module:function` that installs a deliberate bug first, for the tests of the harness."""


def load(name: str) -> Target:
    """Import and return the module of a target."""
    module: Target = importlib.import_module(f"chaos.fuzz.fuzz_{name}")
    return module


def kept(name: str) -> list[bytes]:
    """Return the inputs of a target in the corpus, for example inputs of earlier crashes."""
    folder = CORPUS / name
    return [path.read_bytes() for path in sorted(folder.iterdir())] if folder.is_dir() else []


def main() -> int:
    """Fuzz the targets of the order.

    Returns 0 even if a target crashed, because `chaos.fuzz` reads the result files. Returns 1 if the process
    that started the driver has exited.
    """
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
    tempfile.tempdir = order.out  # Temporary files of a target are removed with `out`, even if it is killed.
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
    """Return a function that runs `check` and stores the first input for each distinct place of an error.

    It continues after an error, so that one crash does not hide others.
    """
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
    """Return the type of an error, and file and line of the innermost frame in fuzzed code."""
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
