"""engine(): a real engine for a test, in its own directory, with methods to kill its processes.

    with ringlog.testing.engine(wal={"shards": 2}) as running:
        client = ringlog.connect(running.url)
        running.kill("wal_shard", shard=0)

It runs as `ringlog serve` does, in its own processes (see ringlog.testing.launcher). Each wait polls a
condition and has a deadline. At the end of the block the engine is stopped in an orderly way.
Remaining processes are then killed, and shared memory is removed.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import tempfile
from collections.abc import Callable, Iterable, Iterator, Mapping
from itertools import pairwise
from pathlib import Path
from typing import Any

import zmq

import ringlog
from ringlog.board.board import Board, BoardError, ProcessField
from ringlog.board.processes import (
    HTTP_GATEWAY,
    KINDS,
    SCHEDULER,
    SUPERVISOR,
    WAL_SHARD,
    http_gateway_slot,
    scheduler_slot,
    shard_slot,
    slot_of,
    socket_of,
)
from ringlog.clock import SystemClock
from ringlog.envelope.engine_file import EngineInfo
from ringlog.envelope.messages import EngineStatus, EngineStatusReply
from ringlog.envelope.wire import decode, encode
from ringlog.errors import NotConnected, RequestTimeout, StartRefused, UsageError
from ringlog.link.address import read_engine_file
from ringlog.testing.children import package_environ
from ringlog.testing.launcher import EngineProcess, launch

READY_S = 20.0
STOP_S = 20.0
STATUS_S = 5.0
POLL_INTERVAL_S = 0.005
LOG_TAIL_CHARS = 4_000
LOG_FILE_BYTES = 4 << 20
"""Default of `wal.file_bytes` in bytes. Each shard fills its first two files with zeros when it starts: with
64 MiB, that is a third of the CPU time of a short engine."""


class TestEngine:
    """A running engine. `url`, `run_dir` and `data_dir` do not change over restarts."""

    __test__ = False  # Tells pytest that this is not a test class, despite its name.
    ready_s = READY_S
    """Timeout of a start in seconds."""

    def __init__(self, root: Path, settings: Mapping[str, Any], environ: Mapping[str, str]) -> None:
        self.data_dir: str = str(root / "data")
        self.run_dir: str = str(root / "data" / "run")
        self.url: str = f"ringlog://{self.run_dir}"
        self.log_path: Path = root / "engine.log"
        self._settings = dict(settings)
        self._environ = package_environ(environ)
        self._process: EngineProcess | None = None
        self._clock = SystemClock()
        self._shm_dir_known = ""

    def change(self, key: str, value: Any) -> None:
        """Set a setting, such as `wal.shards`, for the next start. Other settings do not change."""
        self._settings[key] = value

    # -- lifetime -----------------------------------------------------------------------------------

    def start(self) -> EngineInfo:
        """Start the engine and wait until it is ready; raise StartRefused with the end of its log."""
        before = self.begin_start()
        return self.end_start(before)

    def begin_start(self) -> EngineInfo | None:
        """Start the engine without waiting; return the engine file of the previous engine, or None."""
        if self._process is not None and self._process.poll() is None:
            raise UsageError("the engine is running", data_dir=self.data_dir)
        settings = {"run.allow_root": True, **self._settings}
        sets = [f"{key}={_text(value)}" for key, value in settings.items()]
        before = read_engine_file(self.run_dir)
        with self.log_path.open("ab") as log:
            self._process = launch(self.data_dir, sets, self._environ, log.fileno())
        return before

    def end_start(self, before: EngineInfo | None) -> EngineInfo:
        """Wait until the engine from `begin_start` is ready; raise StartRefused."""
        found: list[EngineInfo] = []

        def is_ready() -> bool:
            info = read_engine_file(self.run_dir)
            if info is not None and (before is None or info.start_id != before.start_id):
                found.append(info)
            return bool(found) or self._has_ended()

        wait_until(is_ready, self.ready_s, "the engine to be ready", self._log_tail)
        if not found:
            raise StartRefused("the engine ended while starting", log=self._log_tail())
        self._shm_dir_known = found[0].shm_dir
        return found[0]

    def stop(self, timeout: float = STOP_S) -> int:
        """Stop the engine with SIGTERM and return its exit status; kill it after `timeout` seconds."""
        process = self._process
        if process is None:
            return 0
        shm_dir = self._shm_dir()
        if process.poll() is None:
            process.send_signal(signal.SIGTERM)
        try:
            status = process.wait(timeout)
        except TimeoutError:
            self.kill("supervisor")
            raise RequestTimeout("the engine did not stop", timeout_s=timeout, log=self._log_tail()) from None
        finally:
            self._remove_leftovers(shm_dir)
            self._process = None
        return status

    def restart(self) -> EngineInfo:
        """Stop the engine in an orderly way and start it again on the same data."""
        self.stop()
        return self.start()

    def crash(self) -> None:
        """Kill all processes of the engine at once, like a power loss that keeps the page cache.

        Then `start`.
        """
        if self._process is not None:
            # List the children first: a stopped child does not notice the death of its parent.
            children = _children_of(self.pid)
            for pid in (self.pid, *children):
                _kill(pid)
            self._process.wait(STOP_S)
            for pid in children:
                wait_until(lambda pid=pid: not _is_alive(pid), STOP_S, f"process {pid} to end")  # type: ignore[misc]

    def power_off(self) -> None:
        """Crash the engine and remove its shared memory: only its data directory remains."""
        shm_dir = self._shm_dir()
        self.crash()
        self._process = None
        self._remove_leftovers(shm_dir)

    def kill(self, kind: str, *, shard: int = 0) -> int:
        """Kill one process with SIGKILL and return its pid.

        `kind` is "supervisor", "wal_shard", "scheduler" or "http_gateway" (number `shard`), or another kind.
        The call returns after the process has exited; its successor may not exist yet (see `wait_ready`).
        """
        if kind == "supervisor":
            pid = self.pid
            _kill(pid)
            if self._process is not None:
                self._process.wait(STOP_S)
            return pid
        pid = self.pid_of(kind, shard)
        _kill(pid)
        wait_until(lambda: not _is_alive(pid), STOP_S, f"{kind} {pid} to end")
        return pid

    # -- state --------------------------------------------------------------------------------------

    @property
    def pid(self) -> int:
        """Pid of the supervisor."""
        if self._process is None:
            raise UsageError("the engine is not running")
        return self._process.pid

    @property
    def info(self) -> EngineInfo:
        """The engine file; raises NotConnected if there is none."""
        info = read_engine_file(self.run_dir)
        if info is None:
            raise NotConnected("no engine is running", run_dir=self.run_dir)
        return info

    @property
    def http_url(self) -> str:
        """URL of the HTTP gateway for clients on this host. Raises UsageError if it does not run."""
        url = self.info.http_url
        if not url:
            raise UsageError("the HTTP gateway does not run: start the engine with http={'enabled': True}")
        return url

    def pid_of(self, kind: str, shard: int = 0) -> int:
        """Return the pid of a live actor. Waits for a successor that is starting."""
        info = self.info
        if kind not in KINDS or (kind == WAL_SHARD and shard >= info.shards):
            raise UsageError("no such process", kind=kind, shard=shard, shards=info.shards)
        slot = slot_of(kind, info.shards)
        if kind in {WAL_SHARD, SCHEDULER}:
            slot = shard_slot(shard) if kind == WAL_SHARD else scheduler_slot(info.shards, shard)
        elif kind == HTTP_GATEWAY:
            slot = http_gateway_slot(shard)
        found: list[int] = []

        def is_there() -> bool:
            pid = self._word(info, slot, ProcessField.PID)
            if pid and _is_alive(pid):
                found.append(pid)
            return bool(found)

        wait_until(is_there, READY_S, f"{kind} {shard} to be there", self._log_tail)
        return found[0]

    def status(self) -> EngineStatusReply:
        """Return the supervisor's status; raise RequestTimeout."""
        context: zmq.Context[Any] = zmq.Context()
        socket = context.socket(zmq.DEALER)
        try:
            socket.setsockopt(zmq.LINGER, 0)
            socket.connect(socket_of(self.info.shm_dir, SUPERVISOR))
            socket.send(encode(EngineStatus(), 1))
            if not socket.poll(STATUS_S * 1000):
                raise RequestTimeout(
                    "the supervisor did not answer", timeout_s=STATUS_S, log=self._log_tail()
                )
            message = decode(socket.recv()).message
        finally:
            socket.close(0)
            context.term()
        assert isinstance(message, EngineStatusReply), message
        return message

    def wait_ready(self, kind: str = "wal_shard", *, timeout: float = READY_S) -> None:
        """Wait until every process of this kind is ready. A killed one does not count as ready."""

        def is_ready() -> bool:
            found = [process for process in self.status().processes if process.kind == kind]
            return bool(found) and all(each.state == "ready" and _is_alive(each.pid) for each in found)

        wait_until(is_ready, timeout, f"{kind} to be ready", self._log_tail)

    # -- internals ----------------------------------------------------------------------------------

    def _word(self, info: EngineInfo, slot: int, word: ProcessField) -> int:
        try:
            board = Board.open(info.shm_dir, writable=False)
        except BoardError:
            return 0
        try:
            return board.process(slot).get(word)
        finally:
            board.close()

    def _has_ended(self) -> bool:
        return self._process is None or self._process.poll() is not None

    def _shm_dir(self) -> str:
        try:
            return self.info.shm_dir
        except (NotConnected, UsageError):  # UsageError: a test removed the disk.
            return self._shm_dir_known

    def _remove_leftovers(self, shm_dir: str) -> None:
        """Kill all processes of this engine and remove its shared memory."""
        left = [pid for pid in _processes_of(self.data_dir) if pid != os.getpid()]
        for pid in left:
            _kill(pid)
        for pid in [*left, *_exiting(_pids_on_board(shm_dir))]:
            wait_until(lambda pid=pid: not _is_alive(pid), STOP_S, f"process {pid} to end")  # type: ignore[misc]
        if shm_dir and Path(shm_dir).is_dir():
            shutil.rmtree(shm_dir, ignore_errors=True)

    def _log_tail(self) -> str:
        try:
            return self.log_path.read_text(errors="replace")[-LOG_TAIL_CHARS:]
        except OSError:
            return ""


@contextlib.contextmanager
def engine(
    *,
    directory: str | os.PathLike[str] | None = None,
    environ: Mapping[str, str] | None = None,
    **config: Any,
) -> Iterator[TestEngine]:
    """Run an engine in a temporary directory, or in `directory`, which is not deleted, during the block.

    `config` has settings by section: `engine(wal={"shards": 2}, run={"ring_bytes": 1 << 20})`; or by dotted
    key: `engine(**{"wal.shards": 2})`. `environ` adds environment variables.
    """
    root = Path(directory) if directory is not None else Path(tempfile.mkdtemp(prefix="ringlog-test-"))
    root.mkdir(mode=0o700, parents=True, exist_ok=True)
    running = TestEngine(root, _flatten(config), engine_environ(environ or {}))
    try:
        running.start()
        yield running
    finally:
        try:
            running.stop()
        finally:
            if directory is None:
                shutil.rmtree(root, ignore_errors=True)


def wait_until(
    condition: Callable[[], bool], timeout: float, what: str, facts: Callable[[], str] = lambda: ""
) -> None:
    """Poll a condition until it is true; raise RequestTimeout with `what` after `timeout` seconds."""
    clock = SystemClock()
    deadline = clock.monotonic_ns() + round(timeout * 1e9)
    while not condition():
        if clock.monotonic_ns() >= deadline:
            raise RequestTimeout(
                f"timeout after {timeout:g} s: waited for {what}", timeout_s=timeout, facts=facts()
            )
        clock.sleep(POLL_INTERVAL_S)


def _flatten(config: Mapping[str, Any]) -> dict[str, Any]:
    flat: dict[str, Any] = {
        "wal.shards": 1, "wal.file_bytes": LOG_FILE_BYTES, "gateway.enabled": False,
        "storage.enabled": False, "delivery.schedulers": 0,
    }  # fmt: skip
    for section, value in config.items():
        if isinstance(value, Mapping):
            flat |= {f"{section}.{key}": one for key, one in value.items()}
        else:
            flat[section] = value
    return flat


def _text(value: Any) -> str:
    return str(value).lower() if isinstance(value, bool) else str(value)


def engine_environ(added: Mapping[str, str]) -> dict[str, str]:
    """Return this process's environment without RINGLOG_ variables, and with this code first on the path."""
    root = str(Path(ringlog.__file__).resolve().parent.parent)
    kept = {name: value for name, value in os.environ.items() if not name.startswith("RINGLOG_")}
    kept["PYTHONPATH"] = os.pathsep.join(filter(None, (root, kept.get("PYTHONPATH", ""))))
    return kept | dict(added)


def _kill(pid: int) -> None:
    """Send SIGKILL through a pidfd."""
    try:
        pidfd = os.pidfd_open(pid)
    except ProcessLookupError:
        return
    try:
        signal.pidfd_send_signal(pidfd, signal.SIGKILL)
    except ProcessLookupError:
        return
    finally:
        os.close(pidfd)


def _is_alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in {"Z", "X"}
    except OSError:
        return False


def _pids_on_board(shm_dir: str) -> list[int]:
    """Return the pids of the engine's actors, dead or alive; none if its shared memory is gone."""
    try:
        board = Board.open(shm_dir, writable=False)
    except BoardError:
        return []
    try:
        return [board.process(slot).get(ProcessField.PID) for slot in range(board.processes)]
    finally:
        board.close()


def _exiting(pids: Iterable[int]) -> list[int]:
    """Return those processes that are alive but have no command line: they have returned their memory."""
    found = []
    for pid in pids:
        with contextlib.suppress(OSError):
            if pid and not Path(f"/proc/{pid}/cmdline").read_bytes() and _is_alive(pid):
                found.append(pid)
    return found


def _children_of(pid: int) -> list[int]:
    found = []
    for entry in os.listdir("/proc"):
        with contextlib.suppress(OSError):
            if entry.isdigit():
                facts = Path(f"/proc/{entry}/stat").read_text().rpartition(")")[2].split()
                found += [int(entry)] if int(facts[1]) == pid else []
    return found


def _processes_of(data_dir: str) -> list[int]:
    """Return the pids of supervisors and actors of this directory. Clients are left alone.

    A client's command line may contain the directory too, in its URL; it waits for the next start."""
    found = []
    for entry in os.listdir("/proc"):
        if not entry.isdigit():
            continue
        try:
            line = Path(f"/proc/{entry}/cmdline").read_bytes()
        except OSError:
            continue
        command, directory = line.split(b"\0"), data_dir.encode()
        is_supervisor = (b"--data-dir", directory) in pairwise(command)
        is_actor_process = line.startswith(b"ringlog: ") or any(
            module.startswith(b"ringlog.actors") for flag, module in pairwise(command) if flag == b"-m"
        )
        is_on_it = is_supervisor or (is_actor_process and directory in line)
        if is_on_it and _is_alive(int(entry)):
            found.append(int(entry))
    return found
