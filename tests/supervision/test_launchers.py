"""An engine under launchers and service managers: inherited state, and the signals that they send."""

from __future__ import annotations

import os
import re
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import pytest

from ringlog.testing.real_engine import _processes_of, wait_until

pytestmark = [pytest.mark.slow, pytest.mark.timeout(90)]

ROOT = Path(__file__).parent.parent.parent
MAIN = "import sys; sys.argv[0] = 'supervisor'; from supervisor import main; sys.exit(main())"
SETTINGS = (
    "run.allow_root=true",
    "wal.shards=1",
    "run.ring_bytes=1MiB",
    "wal.file_bytes=1MiB",
    "log.format=json",
)
DEADLINE_S = 40.0


class Launched:
    """An engine that another program started. `log` is its log file."""

    def __init__(self, directory: Path, before: Sequence[str], cwd: str) -> None:
        self.data_dir, self._log_path = directory / "data", directory / "log"
        command = [*before, sys.executable, "-P", "-c", MAIN, "--data-dir", str(self.data_dir)]
        for setting in (*SETTINGS, f"log.file={self._log_path}"):
            command += ["--set", setting]
        clean = {name: value for name, value in os.environ.items() if not name.startswith("RINGLOG_")}
        self.process = subprocess.Popen(
            command, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, cwd=cwd,
            env={**clean, "PYTHONPATH": str(ROOT)}, start_new_session=True,
        )  # fmt: skip

    @property
    def log(self) -> str:
        return self._log_path.read_text(errors="replace") if self._log_path.exists() else ""

    def pids(self) -> list[int]:
        """Return the pids of the supervisor and its children."""
        return _processes_of(str(self.data_dir))

    def supervisor(self) -> int:
        """Return the pid of the supervisor, whichever program started it."""
        return next(pid for pid in self.pids() if b"--data-dir" in _command(pid))

    def ready(self, children: int = 5) -> Launched:
        """Wait until every child is ready."""
        wait_until(
            lambda: self.log.count('"child ready"') >= children or self.process.poll() is not None,
            DEADLINE_S, "children to be ready", lambda: self.log[-4000:],
        )  # fmt: skip
        return self

    def wait(self) -> int:
        return self.process.wait(DEADLINE_S)

    def end(self) -> None:
        found = re.search(r'"shm_dir":"([^"]+)"', self.log)
        for pid in self.pids():
            os.kill(pid, signal.SIGKILL)
        self.process.kill()
        self.process.communicate()
        wait_until(lambda: not self.pids(), DEADLINE_S, "its processes to end")
        if found:
            shutil.rmtree(found[1], ignore_errors=True)


def _command(pid: int) -> list[bytes]:
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0")
    except OSError:
        return []


Launch = Callable[..., Launched]


@pytest.fixture
def launch(data_dir: Path) -> Iterator[Launch]:
    """Start an engine. `before` is a command prefix."""
    launched: list[Launched] = []

    def launch(before: Sequence[str] = (), cwd: str = "/") -> Launched:
        launched.append(Launched(data_dir.parent, before, cwd))
        return launched[-1]

    yield launch
    for each in launched:
        each.end()


@pytest.mark.parametrize("second", [signal.SIGTERM, signal.SIGINT])
def test_two_signals_at_once_are_one_request(launch: Launch, second: signal.Signals) -> None:
    """`timeout` and wrappers that forward terminal signals send two signals.

    In an earlier version the second signal killed every process, and the engine exited with status 1.
    """
    engine = launch().ready()
    os.kill(engine.process.pid, signal.SIGTERM)
    wait_until(
        lambda: "engine stops" in engine.log or engine.process.poll() is not None, DEADLINE_S, "the stop"
    )
    if engine.process.poll() is None:
        os.kill(engine.process.pid, second)
    assert engine.wait() == 0, engine.log[-4000:]
    assert "second stop signal" not in engine.log


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_to_every_process_of_the_engine_is_an_orderly_stop(
    launch: Launch, number: signal.Signals
) -> None:
    """systemd does this with KillMode=control-group.

    In an earlier version the exits of children before the supervisor gave status 1.
    """
    engine = launch().ready()
    # The supervisor gets its signal last, after it saw a child exit: this order failed before.
    pids, supervisor = engine.pids(), engine.supervisor()
    os.kill(supervisor, signal.SIGSTOP)
    for pid in pids:
        os.kill(pid, number)
    wait_until(lambda: len(engine.pids()) == 1, DEADLINE_S, "the children to end")
    os.kill(supervisor, signal.SIGCONT)
    assert engine.wait() == 0, engine.log[-4000:]


def test_an_engine_stopped_and_continued_by_a_terminal_serves(launch: Launch) -> None:
    engine = launch().ready()
    os.killpg(engine.process.pid, signal.SIGSTOP)
    os.killpg(engine.process.pid, signal.SIGCONT)
    os.killpg(engine.process.pid, signal.SIGINT)
    assert engine.wait() == 0, engine.log[-4000:]


@pytest.mark.parametrize(
    "leaves",
    [
        "signal.pthread_sigmask(signal.SIG_BLOCK, {1, 2, 15, 17})",
        "signal.signal(signal.SIGCHLD, signal.SIG_IGN)",
    ],
)
def test_signals_blocked_or_ignored_by_the_launcher_still_stop_the_engine(
    launch: Launch, leaves: str
) -> None:
    """The signal mask and ignored signals are inherited.

    In an earlier version SIGTERM had no effect, and the exit of a child ended the engine.
    """
    program = f"import os, signal, sys; {leaves}; os.execv(sys.argv[1], sys.argv[1:])"
    engine = launch(before=[sys.executable, "-c", program]).ready()
    victim = next(pid for pid in engine.pids() if _command(pid)[0].startswith(b"ringlog: scheduler"))
    os.kill(victim, signal.SIGKILL)
    engine.ready(children=6)
    os.kill(engine.process.pid, signal.SIGTERM)
    assert engine.wait() == 0, engine.log[-4000:]


def test_an_engine_without_standard_descriptors_opens_dev_null_for_them(launch: Launch) -> None:
    """In an earlier version the engine exited at once with status 1 and no message, or wrote messages into
    other files."""
    engine = launch(before=["sh", "-c", 'exec "$0" "$@" <&- >&- 2>&-']).ready()
    for pid in engine.pids():
        found = [os.readlink(f"/proc/{pid}/fd/{number}") for number in range(3)]
        assert found == [os.devnull] * 3, _command(pid)
    os.kill(engine.process.pid, signal.SIGTERM)
    assert engine.wait() == 0, engine.log[-4000:]


def test_a_start_in_a_deleted_working_directory_is_refused(launch: Launch, tmp_path: Path) -> None:
    gone = tmp_path / "gone"
    gone.mkdir()
    engine = launch(before=["sh", "-c", 'rmdir "$PWD" && exec "$0" "$@"'], cwd=str(gone))
    _, err = engine.process.communicate(timeout=DEADLINE_S)
    assert engine.process.returncode == 2
    assert err.decode().strip() == "ringlog: the working directory was deleted: start in one that exists"


@pytest.mark.parametrize(
    ("before", "status", "reason"),
    [
        (["sh", "-c", 'ulimit -n 40; exec "$0" "$@"'], 1, "too few open files are allowed"),
        (["env", b"RINGLOG_COLD_DIR=/tmp/\xff"], 2, "cold.dir must be UTF-8"),
    ],
)
def test_a_start_under_unusable_conditions_is_refused_with_the_reason(
    launch: Launch, before: Sequence[str], status: int, reason: str
) -> None:
    """In an earlier version the engine printed a traceback, or `no shard could start: failed 2 times in a
    row`."""
    engine = launch(before=before)
    _, err = engine.process.communicate(timeout=DEADLINE_S)
    assert (engine.process.returncode, err.count(b"\n")) == (status, 1), err.decode()
    assert reason in err.decode()


def _can_unshare() -> bool:
    if shutil.which("unshare") is None or shutil.which("nsenter") is None:
        return False
    command = ["unshare", "--pid", "--fork", "--mount-proc", "true"]
    return subprocess.run(command, check=False, capture_output=True, timeout=20).returncode == 0


def _state(pid: str) -> str:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except OSError:
        return ""


def test_an_engine_as_pid_1_of_a_container_reaps_orphans_and_stops(launch: Launch) -> None:
    """In an earlier version, zombies of health checks and shells in the container stayed forever."""
    if not _can_unshare():
        pytest.skip("no right to make a pid namespace")
    engine = launch(before=["unshare", "--pid", "--fork", "--mount-proc", "--kill-child"]).ready()
    (first,) = Path(f"/proc/{engine.process.pid}/task/{engine.process.pid}/children").read_text().split()
    children = Path(f"/proc/{first}/task/{first}/children")
    ours = set(children.read_text().split())
    inside = ["nsenter", "-t", first, "-p", "-m", "sh", "-c", "sh -c 'exec sleep 0.2' & exit 0"]
    subprocess.run(inside, check=True, timeout=20)
    # The orphan becomes a child of pid 1 when its parent exits. Pid 1 must reap it after its exit.
    wait_until(lambda: set(children.read_text().split()) <= ours, DEADLINE_S, "the orphan to be collected")
    assert not [pid for pid in children.read_text().split() if _state(pid) == "Z"]
    os.kill(int(first), signal.SIGTERM)
    assert engine.wait() == 0, engine.log[-4000:]
