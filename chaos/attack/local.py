"""Attacks from the same host: another user, planted files, and socket paths bound by another process."""

from __future__ import annotations

import errno
import json
import os
import random
import shutil
import signal
import socket
import stat
import subprocess
import sys
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import ringlog
from chaos.attack.arena import Arena
from chaos.order import CannotRun
from ringlog.cli.maintenance import COMPACTOR, request_actor
from ringlog.drill.checks import GuaranteeBroken, require
from ringlog.envelope.messages import CheckpointMade, CheckpointNow
from ringlog.testing.children import package_environ
from ringlog.testing.real_engine import engine, wait_until

NOBODY = 65_534
PROC_FILES = ("environ", "mem", "maps", "auxv", "stack", "pagemap")
PROC_LINKS = ("cwd", "root", "exe")
START_S = 30


def other_user(arena: Arena, dice: random.Random) -> int:
    """Try to open every file, socket, ring and /proc entry of the engine as another user (RF-110)."""
    del dice
    info = arena.running.info
    roots = [arena.running.data_dir, info.shm_dir, str(arena.root.parent / "server.key")]
    targets = [Path(root) for root in roots]
    paths = [str(path) for root in targets for path in (root, *root.rglob("*"))]
    pids = list(arena.census().pids.values())
    opened = as_nobody(lambda: _intrude(paths, pids))
    require(not opened, f"another user could open {opened[:10]}")
    require(len(paths) > 20, f"expected more than 20 paths to try, got {len(paths)}")
    wrong = loose_modes([arena.running.data_dir, info.shm_dir])
    require(not wrong, f"mode permits access by group or others: {wrong[:10]}")
    return len(paths) + len(pids) * (len(PROC_FILES) + len(PROC_LINKS) + 1)


def loose_modes(roots: list[str]) -> list[str]:
    """Return the engine's files and directories whose mode has a bit for group or others.

    `_intrude` cannot find them if a parent directory is closed to others.
    """
    found = []
    for root in roots:
        for path in (Path(root), *Path(root).rglob("*")):
            try:
                facts = path.lstat()
            except FileNotFoundError:  # the running engine removes files that it no longer needs
                continue
            # A socket's mode follows the umask. The mode of its directory decides.
            if not stat.S_ISLNK(facts.st_mode) and facts.st_mode & 0o077:
                found.append(f"{path.name} {oct(stat.S_IMODE(facts.st_mode))}")
    return found


def _intrude(paths: list[str], pids: list[int]) -> list[str]:
    got = []
    for path in paths:
        for flags, what in ((os.O_RDONLY, "read"), (os.O_WRONLY, "write")):
            if _may(lambda p=path, f=flags: os.close(os.open(p, f | os.O_NONBLOCK))):  # type: ignore[misc]
                got.append(f"{what} {path}")
        if path.endswith(".sock") and _may(lambda p=path: _connect(p)):  # type: ignore[misc]
            got.append(f"connect {path}")
    for pid in pids:
        acts: dict[str, Callable[[], object]] = {
            name: partial(_read, f"/proc/{pid}/{name}") for name in PROC_FILES
        }
        acts |= {name: partial(os.readlink, f"/proc/{pid}/{name}") for name in PROC_LINKS}
        acts["fd"] = partial(os.listdir, f"/proc/{pid}/fd")
        acts["a signal"] = partial(_signal, pid)
        got += [f"/proc/{pid}: {name}" for name, act in acts.items() if _may(act)]
    return got


def _signal(pid: int) -> None:
    pidfd = os.pidfd_open(pid)
    try:
        signal.pidfd_send_signal(pidfd, 0)
    finally:
        os.close(pidfd)


def _connect(path: str) -> None:
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as raw:
        raw.settimeout(1.0)
        raw.connect(path)


def _read(path: str) -> None:
    with open(path, "rb") as file:
        if not file.read(1):
            raise PermissionError(path)


def _may(act: Callable[[], object]) -> bool:
    try:
        act()
    except OSError:
        return False
    return True


def as_nobody(act: Callable[[], list[str]]) -> list[str]:
    """Run `act` in a child process as user NOBODY; return its result.

    Raises GuaranteeBroken if the child failed, CannotRun if this process is not root.
    """
    if os.geteuid() != 0:
        raise CannotRun("switching to another user needs root: run as root")
    reader, writer = os.pipe()
    pid = os.fork()
    if pid == 0:
        code = 1
        try:
            os.close(reader)
            os.setgroups([])
            os.setresgid(NOBODY, NOBODY, NOBODY)
            os.setresuid(NOBODY, NOBODY, NOBODY)
            with os.fdopen(writer, "w") as out:
                json.dump(act(), out)
            code = 0
        finally:
            os._exit(code)
    os.close(writer)
    with os.fdopen(reader) as said:
        text = said.read()
    _, status = os.waitpid(pid, 0)
    if status != 0:
        raise GuaranteeBroken(f"the child process of the other user exited with wait status {status}")
    found: list[str] = json.loads(text)
    return found


# -- paths of the engine bound by another process ----------------------------------------------------------


def bound(arena: Arena, dice: random.Random) -> int:
    """Bind the engine's socket paths as another user, and start a second engine on the same data (RF-112).

    Both attempts must fail, and the sockets of the first engine must not change.
    """
    del dice
    paths = [endpoint.removeprefix("ipc://") for endpoint in arena.sockets()]
    got = as_nobody(lambda: [path for path in paths if _may(lambda p=path: _bind(p))])  # type: ignore[misc]
    require(not got, f"another user bound {got}")
    before = {path: os.stat(path).st_ino for path in paths}
    words = refusal_of(arena.root, arena.root.parent / "second.log")
    is_refused = words and arena.running.data_dir in words
    require(is_refused, f"a second engine was not refused with the path of the data directory: {words!r}")
    require(
        before == {path: os.stat(path).st_ino for path in paths},
        "a second engine touched the first's sockets",
    )
    return len(paths) + 1


def _bind(path: str) -> None:
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as raw:
        try:
            raw.bind(path)
        except OSError as e:
            if e.errno != errno.EADDRINUSE:
                raise
            # To take over the path of a live socket, a process must remove it first.
            os.unlink(path)
            raw.bind(path)


def refusal_of(root: Path, log: Path) -> str:
    """Start an engine on `root`/data; return its log if it refuses, or "" if it starts.

    It also refuses if it gives up a shard. An engine that starts is stopped with SIGTERM.
    """
    command = [sys.executable, "-m", "supervisor", "--data-dir", str(root / "data")]
    for setting in (
        "run.allow_root=true",
        "wal.shards=1",
        "gateway.enabled=false",
        "supervisor.restart_max=1",
    ):
        command += ["--set", setting]
    with log.open("wb") as out:
        child = subprocess.Popen(
            command, stdin=subprocess.DEVNULL, stdout=out, stderr=out, env=package_environ()
        )

    def is_up() -> bool:
        return child.poll() is not None or b"engine ready" in log.read_bytes()

    try:
        wait_until(is_up, START_S, "an engine to start or to refuse", lambda: log.read_text()[-2_000:])
    finally:
        ended = child.poll() is not None
        if not ended:
            child.send_signal(signal.SIGTERM)
        try:
            child.wait(START_S)
        except subprocess.TimeoutExpired:
            child.kill()
            child.wait()
    text = log.read_text(errors="replace")
    # If a shard is given up, the engine serves the other shards. Its log names the refused file.
    return text if ended or "child given up" in text else ""


# -- planted files ----------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Plant:
    """A link, pipe or directory instead of a file or directory of the engine."""

    what: str
    find: str
    """Glob pattern below the data directory. The first match is replaced."""
    how: Callable[[Path, Path], None]
    """Called with the path to replace and a path outside the data directory."""


def _as_symlink(path: Path, outside: Path) -> None:
    shutil.move(path, outside)
    path.symlink_to(outside)


def _as_hard_link(path: Path, outside: Path) -> None:
    os.link(path, outside)


def _as_pipe(path: Path, outside: Path) -> None:
    shutil.move(path, outside)
    os.mkfifo(path, 0o600)


def _as_directory(path: Path, outside: Path) -> None:
    shutil.move(path, outside)
    path.mkdir(0o700)


LOG, IDX, SNAPSHOT = "wal/shard-*/wal-*.log", "**/*.idx", "meta/snapshot-*"
PLANTS = (
    Plant("log file as a symlink", LOG, _as_symlink), Plant("log file as a pipe", LOG, _as_pipe),
    Plant("log file with a second name", LOG, _as_hard_link),
    Plant("log file as a directory", LOG, _as_directory),
    Plant("index as a symlink", IDX, _as_symlink), Plant("index as a pipe", IDX, _as_pipe),
    Plant("snapshot as a symlink", SNAPSHOT, _as_symlink), Plant("snapshot as a pipe", SNAPSHOT, _as_pipe),
    Plant("wal as a symlink", "wal", _as_symlink), Plant("shard as a symlink", "wal/shard-00", _as_symlink),
    Plant("meta as a symlink", "meta", _as_symlink), Plant("run as a symlink", "run", _as_symlink),
    Plant("lock as a pipe", "LOCK", _as_pipe), Plant("identity as a symlink", "meta/engine", _as_symlink),
)  # fmt: skip


def planted(arena: Arena, dice: random.Random, *, most: int = len(PLANTS)) -> int:
    """Replace the engine's files by links, pipes and directories (RF-111).

    The start must be refused with a typed error that names the file. Nothing outside may change.
    """
    plants = dice.sample(PLANTS, min(most, len(PLANTS)))
    tried = 0
    with tempfile.TemporaryDirectory(prefix="planted-", dir=arena.root.parent) as place:
        kept = Path(place) / "kept"
        _left_behind(kept)
        for number, plant in enumerate(plants):
            root = Path(place) / f"plant-{number}"
            shutil.copytree(kept, root, symlinks=True)
            found = sorted((root / "data").glob(plant.find))
            if found:
                _judge_plant(plant, found[0], root)
                tried += 1
            shutil.rmtree(root)
    require(tried == len(plants), f"only {tried} of {len(plants)} plants had a place")
    return tried


def _judge_plant(plant: Plant, path: Path, root: Path) -> None:
    outside = root / "outside"
    plant.how(path, outside)
    before = _contents(outside)
    try:
        words = refusal_of(root, root / "planted.log")
    finally:
        _remove_shared_memory(root)
    name = path.name
    if not words and plant.find == IDX:
        # The engine starts. It halts only the topics of that segment, and its log names the segment.
        words, name = (root / "planted.log").read_text(), path.stem
    require(words, f"{plant.what}: the engine started, expected a refusal")
    require(name in words, f"{plant.what}: the refusal does not name {name}: {words[-500:]}")
    is_typed = "Traceback" not in words or "ringlog.errors." in words
    require(is_typed, f"{plant.what}: untyped error instead of a refusal: {words[-1500:]}")
    require(_contents(outside) == before, f"{plant.what}: something outside was changed")


def _remove_shared_memory(root: Path) -> None:
    """Remove the shared memory of a killed engine. `meta/engine` in its directory names the path."""
    try:
        shm_dir = Path(json.loads((root / "data" / "meta" / "engine").read_bytes()).get("shm_dir", ""))
    except (OSError, ValueError):
        return
    if shm_dir.parent == Path("/dev/shm") and shm_dir.name.startswith("ringlog-"):
        shutil.rmtree(shm_dir, ignore_errors=True)


def _contents(path: Path) -> dict[str, bytes]:
    files = [path] if path.is_file() else sorted(path.rglob("*"))
    return {str(each): each.read_bytes() for each in files if each.is_file()}


def _left_behind(root: Path) -> None:
    """Create the directory of a stopped engine, with a log, a segment and a snapshot."""
    with engine(directory=root, wal={"shards": 1}, storage={"enabled": True}) as running:
        running.wait_ready("compactor")
        with ringlog.connect(running.url, wait=START_S) as client:
            client.topics.create("t", durability="fsync")
            client.append("t", b"sealed")
            request_actor(running.info.shm_dir, COMPACTOR, CheckpointNow(), CheckpointMade)
            client.append("t", b"in the log")
