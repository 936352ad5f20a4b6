"""Starts two engines on one directory in every order of their disk calls, with at most one kill (RF-120).

Each engine is a process that locks and prepares the directories with the supervisor's own code
(`EngineResources`), allocates an incarnation number, and releases everything. It stops before every disk call
that reads names or changes something, until the explorer lets it continue. A kill is a real SIGKILL. Each
order runs from its start, orders with fewer switches first.

Guarantees: two engines are never up at the same time. No incarnation number is used twice. The second engine
is refused and changes nothing. After any death, the next start succeeds and leaves no shared memory.
"""

from __future__ import annotations

import itertools
import logging
import os
import select
import signal
import time
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NoReturn

from ringlog import config as settings
from ringlog.clock import SystemClock
from ringlog.drill.checks import GuaranteeBroken
from ringlog.entropy import random_hex
from ringlog.errors import StartRefused
from ringlog.hardening import die_with_parent
from ringlog.storage.real_disk import RealDisk
from ringlog.supervision import run_dir
from ringlog.supervision.engine_resources import EngineResources
from ringlog.supervision.tree import build_tree

STEP_S = 10.0
"""Time limit (s) for an engine to reach its next call."""
STEPS_MAX = 200
ORDERS_MIN = 60
"""Number of orders that are explored even if the time is over."""
GATED = frozenset(
    {"create", "open_read", "lock", "unlock", "rename", "unlink", "make_dir", "remove_dir", "sync_dir",
     "sync_file", "write_at", "exists", "list_dir"}
)  # fmt: skip


class _Gate:
    """The engine's end of the control pipes: reports events and waits for permission to continue."""

    def __init__(self, out: int, go: int) -> None:
        self._out, self._go = out, go

    def say(self, *words: object) -> None:
        os.write(self._out, (" ".join(map(str, words)) + "\n").encode())

    def wait(self, *words: object) -> None:
        self.say("at", *words)
        if not os.read(self._go, 1):
            os._exit(0)


class _GatedDisk:
    """A Disk that waits for permission before each call in GATED."""

    def __init__(self, gate: _Gate) -> None:
        self._disk, self._gate = RealDisk(), gate

    def __getattr__(self, name: str) -> Any:
        call = getattr(self._disk, name)
        if name not in GATED:
            return call

        def gated(*args: Any) -> Any:
            self._gate.wait(name)
            return call(*args)

        return gated


def _config(root: Path) -> settings.Config:
    return settings.Config(
        data=settings.DataConfig(dir=str(root / "data"), min_free_bytes=0),
        run=settings.RunConfig(dir=str(root / "run"), allow_root=True),
    )


def _engine(root: Path, gate: _Gate) -> None:
    """Run one engine up to and including locks, shared memory and one incarnation number."""
    logging.disable(logging.CRITICAL)
    make = run_dir.make_shm_dir

    def random_and_say(count: int) -> str:
        """Report the name before the directory exists, so that the explorer can always check for it."""
        text = random_hex(count)
        gate.say("shm", f"{run_dir.SHM_ROOT}/ringlog-{os.geteuid()}-{text}")
        return text

    def make_and_wait(record: Callable[[str], None]) -> str:
        path = make(record)
        gate.wait("shm")
        return path

    vars(run_dir)["random_hex"] = random_and_say
    run_dir.make_shm_dir = make_and_wait
    config = _config(root)
    tree = build_tree(config)
    disk: Any = _GatedDisk(gate)
    try:
        ground = EngineResources(config, tree, disk=disk, clock=SystemClock(), is_cancelled=lambda: False)
    except StartRefused as e:
        gate.say("refused", e.message)
        return
    gate.say("up", ground.boot_incarnation, ground.identity.allocate_incarnation(), ground.shm_dir)
    gate.wait("serving")
    gate.say("down")
    ground.close()


@dataclass(slots=True)
class _Process:
    """The explorer's end of one engine."""

    pid: int
    pidfd: int
    out: int
    go: int
    is_over: bool = False
    is_up: bool = False
    was_up: bool = False
    refused: str = ""
    numbers: tuple[int, int] = (0, 0)
    shm: str = ""
    calls: list[str] = field(default_factory=list)
    _left: bytes = b""

    @classmethod
    def start(cls, root: Path) -> _Process:
        """Fork an engine and wait until it reaches its first call."""
        (out, its_out), (its_go, go) = os.pipe(), os.pipe()
        parent = os.getpid()
        pid = os.fork()
        if pid == 0:
            _child(root, its_out, its_go, (out, go), parent)
        os.close(its_out)
        os.close(its_go)
        made = cls(pid, os.pidfd_open(pid), out, go)
        made._hear()
        return made

    def step(self) -> None:
        """Let the engine make its next call."""
        os.write(self.go, b".")
        self._hear()

    def kill(self) -> None:
        """Kill with SIGKILL and wait. Its locks are free when this returns."""
        signal.pidfd_send_signal(self.pidfd, signal.SIGKILL)
        self._reap()
        self.is_up = False

    def close(self) -> None:
        """Kill the engine if it still runs, and close its descriptors."""
        if not self.is_over:
            self.kill()
        for fd in (self.pidfd, self.out, self.go):
            os.close(fd)

    def _reap(self) -> None:
        os.waitpid(self.pid, 0)
        self.is_over = True

    def _hear(self) -> None:
        """Read its reports until it waits or exits.

        Raises GuaranteeBroken if it does neither, or reports a failure.
        """
        while True:
            line = self._line()
            if line is None:
                self._reap()
                return
            word, *rest = line.split()
            match word:
                case "at":
                    self.calls.append(rest[0])
                    return
                case "up":
                    self.is_up = self.was_up = True
                    self.numbers = int(rest[0]), int(rest[1])
                case "down":
                    self.is_up = False
                case "shm":
                    self.shm = rest[0]
                case "refused":
                    self.refused = " ".join(rest)
                case "failed":
                    raise GuaranteeBroken("an engine ended with " + " ".join(rest))

    def _line(self) -> str | None:
        while b"\n" not in self._left:
            if not select.select([self.out], [], [], STEP_S)[0]:
                raise GuaranteeBroken(f"an engine is stuck after {self.calls[-1:]}")
            data = os.read(self.out, 4096)
            if not data:
                return None
            self._left += data
        line, _, self._left = self._left.partition(b"\n")
        return line.decode()


def _child(root: Path, out: int, go: int, others: tuple[int, ...], parent: int) -> NoReturn:
    code = 0
    try:
        for fd in others:
            os.close(fd)
        die_with_parent(parent)
        gate = _Gate(out, go)
        try:
            _engine(root, gate)
        except Exception as e:  # noqa: BLE001  told to the explorer, which fails
            gate.say("failed", type(e).__name__, e)
            code = 1
    finally:
        os._exit(code)


@dataclass(slots=True)
class Starts:
    """Runs orders. `orders`, `kills` and `calls` count the work done."""

    root: Path
    orders: int = 0
    kills: int = 0
    calls: int = 0
    refused: int = 0
    exhausted: int = -1
    """Number of switches up to which every order was explored; -1 = none."""

    def run_order(self, order: str) -> list[tuple[str, str]]:
        """Run one order in an empty directory.

        In `order`, 0 and 1 name the engine that makes its next call, a and b the engine that is killed. After
        the end of `order` engine 0 runs to its end, then engine 1. Returns (action, other possible engines)
        for each action taken. Raises GuaranteeBroken.
        """
        home = self.root / f"order-{self.orders}"
        home.mkdir(mode=0o700)
        self.orders += 1
        engines: list[_Process] = []
        try:
            engines.append(_Process.start(home))
            engines.append(_Process.start(home))
            taken = self._interleave(engines, order)
            self._judge(home, engines)
        except GuaranteeBroken as e:
            raise GuaranteeBroken(f"{e}; order {order}") from e
        finally:
            for engine in engines:
                engine.close()
        return taken

    def _interleave(self, engines: list[_Process], order: str) -> list[tuple[str, str]]:
        taken: list[tuple[str, str]] = []
        for number in range(STEPS_MAX):
            alive = [str(n) for n, engine in enumerate(engines) if not engine.is_over]
            if not alive:
                return taken
            action = order[number] if number < len(order) else _default(taken, alive)
            if action in "ab":
                engines["ab".index(action)].kill()
                self.kills += 1
            elif action in alive:
                engines[int(action)].step()
                self.calls += 1
            taken.append((action, "".join(alive)))
            if engines[0].is_up and engines[1].is_up:
                raise GuaranteeBroken("two engines are up at once")
        raise GuaranteeBroken(f"the engines did not exit within {STEPS_MAX} steps")

    def _judge(self, home: Path, engines: list[_Process]) -> None:
        killed = [engine for engine in engines if not engine.refused and not engine.was_up]
        if not killed and not any(engine.was_up for engine in engines):
            raise GuaranteeBroken(f"both engines were refused: {[engine.refused for engine in engines]}")
        self.refused += sum(bool(engine.refused) for engine in engines)
        last = _Process.start(home)
        try:
            for _ in range(STEPS_MAX):
                if last.is_over:
                    break
                last.step()
            if not last.was_up:
                raise GuaranteeBroken(f"the next start is refused: {last.refused}")
            ups = sorted(engine.numbers for engine in [*engines, last] if engine.was_up)
            if any(first[1] >= then[0] for first, then in itertools.pairwise(ups)):
                raise GuaranteeBroken(f"incarnation numbers are handed out twice: {ups}")
            if ups[-1] != last.numbers:
                raise GuaranteeBroken(f"the last start got {last.numbers}, others {ups}")
        finally:
            last.close()
            left = [e.shm for e in [*engines, last] if e.shm and os.path.exists(e.shm)]
            for path in left:
                run_dir.remove_shm_dir(path)
        if left:
            raise GuaranteeBroken(
                f"shared memory is left behind although a later start and stop went well: {left}"
            )

    def explore(self, switches: int, until: float, found: Callable[[GuaranteeBroken, str], None]) -> None:
        """Explore every order with at most `switches` switches, each also with one kill.

        Ends at `until` (monotonic, s), but not before ORDERS_MIN orders.
        """
        waiting: deque[tuple[int, str]] = deque([(0, "")])
        level = 0
        while waiting:
            cost, prefix = waiting.popleft()
            if cost > level:
                self.exhausted, level = level, cost
            if time.monotonic() > until and self.orders >= ORDERS_MIN:
                return
            try:
                taken = self.run_order(prefix)
            except GuaranteeBroken as e:
                found(e, prefix)
                continue
            waiting.extend((cost + 1, each) for each in _variants(taken, len(prefix)) if cost < switches)
        self.exhausted = switches


def _default(taken: list[tuple[str, str]], alive: list[str]) -> str:
    """Return the default action: the engine of the last action continues."""
    last = next((action for action, _ in reversed(taken) if action in "01"), "0")
    return last if last in alive else alive[0]


def _variants(taken: list[tuple[str, str]], start: int) -> Iterator[str]:
    """Yield orders that differ at one later place: the other engine continues, or this one is killed."""
    done = "".join(action for action, _ in taken)
    is_killed = any(action in "ab" for action in done)
    for at in range(start, len(taken)):
        action, alive = taken[at]
        for other in alive:
            if other != action:
                yield done[:at] + other
            elif not is_killed:
                yield done[:at] + "ab"[int(action)]
