"""The supervisor with real shards: start, replace, refuse, drain."""

from __future__ import annotations

import fcntl
import itertools
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

import psutil
import pytest
import zmq

from ringlog.clock import SystemClock
from ringlog.config import Config, DataConfig, RunConfig, WalConfig
from ringlog.envelope.engine_file import EngineInfo
from ringlog.envelope.messages import (
    EngineStatusReply,
    ErrorReply,
    Hello,
    Message,
    Ping,
    Pong,
    ProcessStatus,
    Read,
    RingClose,
    RingClosed,
    RingOpen,
    RingOpened,
    Welcome,
)
from ringlog.envelope.wire import decode, encode
from ringlog.errors import NotConnected, RinglogError, StartRefused, Status
from ringlog.limits import SECOND_SIGNAL_S
from ringlog.placement import home_shard, shard_of
from ringlog.process_id import process_started_ticks
from ringlog.storage.real_disk import RealDisk
from ringlog.supervision import control_client, engine_resources
from ringlog.supervision.engine_resources import EngineResources
from ringlog.supervision.run_dir import GATEWAY_SOCKET, RUN_LOCK, read_engine_json
from ringlog.supervision.tree import build_tree

pytestmark = pytest.mark.slow

DEADLINE_S = 30.0
SMALL = {
    "run.allow_root": "true", "gateway.enabled": "false", "wal.shards": "2", "run.ring_bytes": "1MiB",
    "delivery.schedulers": "0", "wal.file_bytes": "1MiB", "log.format": "json", "storage.enabled": "false",
}  # fmt: skip


class EngineProcess:
    """`python -m supervisor` on a data directory."""

    def __init__(self, data_dir: Path, *, environ: Mapping[str, str] | None = None, **settings: str) -> None:
        self.data_dir = data_dir
        self.run_dir = str(data_dir / "run")
        flags = SMALL | {key.replace("__", "."): value for key, value in settings.items()}
        command = [sys.executable, "-m", "supervisor", "--data-dir", str(data_dir)]
        for pair in (f"{key}={value}" for key, value in flags.items()):
            command += ["--set", pair]
        self.log_path = data_dir.parent / f"log-{time.monotonic_ns()}"
        root = Path(__file__).parent.parent.parent
        clean = {name: value for name, value in os.environ.items() if not name.startswith("RINGLOG_")}
        with self.log_path.open("wb") as log:
            self.process = subprocess.Popen(
                command, stdout=log, stderr=log, cwd=root, env={**clean, **(environ or {})}
            )

    @property
    def log(self) -> str:
        return self.log_path.read_text(errors="replace")

    def wait_until(self, condition: Callable[[], bool], what: str) -> None:
        deadline = time.monotonic() + DEADLINE_S
        while not condition():
            assert time.monotonic() < deadline, f"waited in vain for {what}\n{self.log[-4000:]}"
            time.sleep(0.01)

    def ready(self) -> EngineProcess:
        self.wait_until(lambda: "engine ready" in self.log or self.process.poll() is not None, "ready")
        assert self.process.poll() is None, self.log[-4000:]
        return self

    def status(self) -> EngineStatusReply:
        return control_client.fetch_status(self.run_dir)

    def shard(self, n: int = 0) -> ProcessStatus:
        return self.status().processes[n]

    def wait_shard(self, condition: Callable[[ProcessStatus], bool], what: str, n: int = 0) -> ProcessStatus:
        self.wait_until(lambda: condition(self.shard(n)), what)
        return self.shard(n)

    def wait(self) -> int:
        return self.process.wait(DEADLINE_S)

    def stop(self) -> int:
        self.process.send_signal(signal.SIGTERM)
        return self.wait()


Start = Callable[..., EngineProcess]


@pytest.fixture
def start(data_dir: Path) -> Iterator[Start]:
    """Start engines, on one data directory if none is given. Engines that still run afterwards are stopped in
    an orderly way."""
    engines: list[EngineProcess] = []

    def start(at: Path = data_dir, **settings: object) -> EngineProcess:
        engines.append(EngineProcess(at, **settings))
        return engines[-1]

    yield start
    for engine in engines:
        if engine.process.poll() is None:
            engine.process.send_signal(signal.SIGTERM)
            try:
                engine.process.wait(DEADLINE_S)
            except subprocess.TimeoutExpired:
                engine.process.kill()
                engine.process.wait()


def test_the_supervisors_environment_is_not_visible_in_its_children(start: Start) -> None:
    """Environment variables can contain secrets."""
    secret = "RINGLOG_TEST_SECRET_9d41"
    supervisor = psutil.Process(start(environ={"SOMEBODYS_TOKEN": secret}).ready().process.pid)
    shown = {
        process.name().partition("-")[0]: secret.encode() in Path(f"/proc/{process.pid}/environ").read_bytes()
        for process in (supervisor, *supervisor.children())
    }
    assert shown == {"ringlog": True, "forkserver": False, "wal_shard": False}


def is_alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in {"Z", "X"}
    except OSError:
        return False


def test_an_engine_starts_announces_itself_and_stops_without_leftovers(start: Start) -> None:
    engine = start().ready()
    info = read_engine_json(engine.run_dir)
    assert (info.shards, info.supervisor_pid, info.gateway_ipc) == (2, engine.process.pid, "")
    assert os.stat(info.shm_dir).st_mode & 0o777 == 0o700
    status = engine.status()
    assert (status.state, status.engine_id, status.rings) == ("ready", info.engine_id, 0)
    assert [process.state for process in status.processes] == ["ready", "ready"]
    assert all(process.resident_bytes > 1 << 20 for process in status.processes)
    assert f"listens   ringlog://{engine.run_dir}" in engine.log
    assert engine.stop() == 0
    assert not os.path.exists(info.shm_dir)
    assert not any(is_alive(process.pid) for process in status.processes)
    with pytest.raises(NotConnected):
        engine.status()


def test_a_restart_keeps_the_engine_id_and_changes_the_start_id(start: Start) -> None:
    infos, incarnations = [], []
    for _ in range(2):
        engine = start().ready()
        infos.append(read_engine_json(engine.run_dir))
        incarnations += [process.incarnation for process in engine.status().processes]
        assert engine.stop() == 0
    assert infos[0].engine_id == infos[1].engine_id
    assert infos[0].start_id != infos[1].start_id
    assert incarnations == sorted(set(incarnations))


def test_a_second_engine_on_the_directory_is_refused_without_changes(start: Start, data_dir: Path) -> None:
    """The lock on the data directory is taken first (D5)."""
    engine = start().ready()

    def facts() -> dict[Path, int]:
        # The running engine still writes its log.
        return {p: 0 if p.suffix == ".log" else p.stat().st_mtime_ns for p in data_dir.rglob("*")}

    before = facts()
    second = start()
    assert second.wait() == 1
    assert "another engine runs on this data directory" in second.log
    assert f"pid {engine.process.pid}" in second.log
    assert facts() == before
    assert engine.status().state == "ready"


def test_a_second_engine_in_the_run_directory_is_refused_until_the_first_ends(
    start: Start, data_dir: Path, tmp_path: Path
) -> None:
    """Otherwise clients of the first would silently reach the second. A kill ends it as well as a stop."""
    first = start().ready()
    before = read_engine_json(first.run_dir)
    for killed in (False, True):
        second = start(tmp_path / "other", run__dir=first.run_dir)
        assert second.wait() == 1
        for said in (
            "give each engine its own run.dir",
            first.run_dir,
            f"pid {first.process.pid}",
            before.data_dir,
        ):
            assert said in second.log
        assert read_engine_json(first.run_dir) == before
        assert first.status().state == "ready"
        if killed:
            first.process.kill()
            first.wait()
    third = start(tmp_path / "other", run__dir=first.run_dir).ready()
    assert read_engine_json(first.run_dir).data_dir == str(tmp_path / "other")
    assert third.stop() == 0
    assert start().ready().stop() == 0  # It removes the shared memory of the killed one.


class Resources:
    """The resources of engines without processes, with one run directory and different data directories."""

    def __init__(self, root: Path) -> None:
        self.run_dir = root / "run"
        self._root = root

    def take(self, name: str) -> EngineResources:
        config = Config(
            data=DataConfig(dir=str(self._root / name), min_free_bytes=0),
            run=RunConfig(dir=str(self.run_dir), allow_root=True),
            wal=WalConfig(shards=1),
        )
        return EngineResources(
            config, build_tree(config), disk=RealDisk(), clock=SystemClock(), is_cancelled=lambda: False
        )

    def announce(self, taken: EngineResources) -> EngineInfo:
        info = EngineInfo(
            engine_id=taken.identity.engine_id, start_id=taken.start_id, shm_dir=taken.shm_dir,
            data_dir=taken.data_dir, shards=1, protocol=1, version="1", supervisor_pid=os.getpid(),
        )  # fmt: skip
        taken.announce(info)
        (self.run_dir / GATEWAY_SOCKET).touch()
        return info


def test_the_run_directory_belongs_to_one_engine_before_it_is_announced(tmp_path: Path) -> None:
    both = Resources(tmp_path)
    first = both.take("one")
    try:
        with pytest.raises(StartRefused, match=r"own run\.dir") as caught:
            both.take("two")
        assert (caught.value.detail["dir"], caught.value.detail["holder"]) == (
            str(both.run_dir), f"pid {os.getpid()}",
        )  # fmt: skip
        info = both.announce(first)
        with pytest.raises(StartRefused, match=r"own run\.dir") as caught:
            both.take("two")
        assert caught.value.detail["data_dir"] == info.data_dir
        assert read_engine_json(str(both.run_dir)) == info
        assert (both.run_dir / GATEWAY_SOCKET).exists()
    finally:
        first.close()
    assert {path.name for path in both.run_dir.iterdir()} == {RUN_LOCK}
    both.take("two").close()


def test_a_stop_keeps_what_another_engine_announced(tmp_path: Path) -> None:
    """The directory was removed while the first ran, so its lock did not stop the second."""
    both = Resources(tmp_path)
    first = both.take("one")
    both.announce(first)
    port_file = str(tmp_path / "port")
    shutil.rmtree(both.run_dir)
    second = both.take("two")
    try:
        info = both.announce(second)
        second.write_port_file(port_file, "127.0.0.1:2")
        first.remove_port_file(port_file, "127.0.0.1:1")
        first.close()
        assert read_engine_json(str(both.run_dir)) == info
        assert (both.run_dir / GATEWAY_SOCKET).exists()
        assert Path(port_file).read_text() == "127.0.0.1:2\n"
    finally:
        second.remove_port_file(port_file, "127.0.0.1:2")
        second.close()
    assert not Path(port_file).exists()
    assert {path.name for path in both.run_dir.iterdir()} == {RUN_LOCK}


def test_a_killed_shard_gets_a_successor_and_the_others_continue(start: Start) -> None:
    """The successor has a greater incarnation."""
    engine = start().ready()
    victim, other = engine.status().processes
    os.kill(victim.pid, signal.SIGKILL)
    after = engine.wait_shard(lambda p: p.restarts == 1 and p.state == "ready", "a successor")
    assert after.incarnation > max(victim.incarnation, other.incarnation)
    assert (after.last_exit, after.pid != victim.pid) == ("SIGKILL", True)
    assert (engine.shard(1).pid, engine.shard(1).restarts) == (other.pid, 0)
    assert engine.stop() == 0


def test_a_stopped_shard_is_killed_and_replaced(start: Start) -> None:
    """The shard is alive and makes no progress."""
    engine = start(supervisor__stuck_after_s="3").ready()
    victim = engine.shard()
    os.kill(victim.pid, signal.SIGSTOP)
    after = engine.wait_shard(lambda p: p.restarts == 1 and p.state == "ready", "a successor")
    assert not is_alive(victim.pid)
    assert "no progress" in after.last_exit
    assert engine.shard(1).restarts == 0, "an idle shard still beats"
    assert engine.stop() == 0


def test_a_shard_that_dies_too_often_is_given_up_and_the_others_continue(start: Start) -> None:
    """The limit is `supervisor.restart_max` deaths within `supervisor.restart_window_s`."""
    engine = start(supervisor__restart_max="1").ready()
    os.kill(engine.shard().pid, signal.SIGKILL)
    second = engine.wait_shard(lambda p: p.restarts == 1 and p.state == "ready", "a successor")
    os.kill(second.pid, signal.SIGKILL)
    failed = engine.wait_shard(lambda p: p.state == "given_up", "giving up")
    assert (failed.pid, failed.last_exit) == (0, "died 2 times in 60 s")
    assert (engine.status().state, engine.shard(1).state) == ("degraded", "ready")
    assert engine.stop() == 1, "a degraded stop says so"


def test_a_shard_that_cannot_start_again_is_given_up_after_few_attempts(start: Start, data_dir: Path) -> None:
    """A file replaces the shard's directory while the engine runs. The other shard continues to serve."""
    engine = start(supervisor__restart_max="3").ready()
    stream = data_dir / "wal" / "shard-00"
    stream.rename(data_dir / "aside")
    stream.write_text("")
    os.kill(engine.shard().pid, signal.SIGKILL)
    failed = engine.wait_shard(lambda p: p.state == "given_up", "giving up")
    assert failed.restarts <= 3
    assert (engine.status().state, engine.shard(1).state) == ("degraded", "ready")
    started = engine.log.count('"child started"')
    assert engine.stop() == 1
    assert engine.log.count('"child started"') == started, "nothing was started any more"


def prepare_wal(data_dir: Path) -> Path:
    """Create a data directory that an engine used before. Return the directory of its first shard's log."""
    (data_dir / "meta").mkdir(mode=0o700)
    (data_dir / "meta" / "engine").write_text(f'{{"engine_id":"{"0" * 32}","next_incarnation":9}}')
    (data_dir / "wal").mkdir(mode=0o700)
    return data_dir / "wal" / "shard-00"


def test_damaged_data_gives_up_each_shard_at_once_and_is_not_changed(start: Start, data_dir: Path) -> None:
    """Damage needs a decision of the operator. Every shard reads all streams, so no shard starts."""
    assert start().ready().stop() == 0
    [log] = (data_dir / "wal" / "shard-00").glob("wal-*-0.log")
    damaged = b"\xff" * 4096 + log.read_bytes()[4096:]
    log.write_bytes(damaged)
    engine = start()
    assert engine.wait() == 1
    assert "stored data is damaged" in engine.log
    assert engine.log.count('"child started"') == 2, "each shard met it once"
    assert log.read_bytes() == damaged


def test_an_engine_exits_if_no_shard_can_start(start: Start, data_dir: Path) -> None:
    prepare_wal(data_dir).write_text("")
    engine = start(wal__shards="1", supervisor__restart_max="2")
    assert engine.wait() == 1
    assert "no shard could start" in engine.log
    assert engine.log.count('"child started"') == 3


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
@pytest.mark.parametrize("seen", ["engine starts", "child started", "engine ready"])
def test_a_stop_while_children_start_is_orderly(start: Start, seen: str, number: signal.Signals) -> None:
    """A process that does not serve yet has nothing to drain."""
    engine = start()
    engine.wait_until(lambda: seen in engine.log, seen)
    engine.process.send_signal(number)
    assert engine.wait() == 0, engine.log[-4000:]


def test_a_second_signal_ends_the_drain(start: Start) -> None:
    """A shard that does not drain changes the exit status to 1, and the engine still exits."""
    engine = start(supervisor__drain_s="600").ready()
    os.kill(engine.shard().pid, signal.SIGSTOP)
    engine.process.send_signal(signal.SIGTERM)
    engine.wait_until(lambda: "engine stops" in engine.log, "the drain")
    second_from = time.monotonic() + SECOND_SIGNAL_S  # An earlier signal counts as the same request.
    engine.wait_until(lambda: time.monotonic() > second_from, "time to pass")
    engine.process.send_signal(signal.SIGINT)
    assert engine.wait() == 1


def test_a_shard_that_does_not_drain_in_time_is_killed(start: Start) -> None:
    engine = start(supervisor__drain_s="0.5").ready()
    shm_dir = read_engine_json(engine.run_dir).shm_dir
    os.kill(engine.shard().pid, signal.SIGSTOP)
    assert engine.stop() == 1
    assert "drain limit reached" in engine.log
    assert not os.path.exists(shm_dir)


def test_an_operator_stops_the_engine_by_message(start: Start) -> None:
    engine = start().ready()
    control_client.stop_engine(engine.run_dir)
    assert engine.wait() == 0


def test_children_of_a_killed_supervisor_end_and_the_next_engine_cleans_up(start: Start) -> None:
    """No child outlives its supervisor (P3)."""
    engine = start().ready()
    pids, info = [p.pid for p in engine.status().processes], read_engine_json(engine.run_dir)
    engine.process.kill()
    engine.wait()
    successor = start().ready()
    assert not any(map(is_alive, pids)), "no second engine beside orphans"
    assert not os.path.exists(info.shm_dir)
    assert read_engine_json(successor.run_dir).start_id != info.start_id
    assert successor.stop() == 0


def test_an_engine_does_not_start_beside_orphans_and_kills_none(start: Start, data_dir: Path) -> None:
    """If the orphans do not exit in time, the start is refused (P3). The test holds the orphan's lock."""
    engine = start(wal__shards="1").ready()
    shm_dir = read_engine_json(engine.run_dir).shm_dir
    with open(f"{shm_dir}/board", "rb") as held:
        fcntl.flock(held, fcntl.LOCK_SH)
        engine.process.kill()
        engine.wait()
        second = start(wal__shards="1", supervisor__drain_s="0")
        assert second.wait() == 1
        assert "still running" in second.log
        assert os.path.exists(shm_dir), "what an orphan uses is left alone"
        third = start(wal__shards="1", supervisor__drain_s="60")
    assert third.ready().stop() == 0
    assert not os.path.exists(shm_dir)


def test_hangup_and_quit_leave_the_engine_running(start: Start) -> None:
    engine = start().ready()
    engine.process.send_signal(signal.SIGHUP)
    engine.process.send_signal(signal.SIGQUIT)
    engine.wait_until(
        lambda: engine.log.count("most recent call first") >= 3, "stacks of all three processes"
    )
    assert [p.restarts for p in engine.status().processes] == [0, 0]
    assert engine.stop() == 0


def test_topics_of_the_configuration_file_are_created_at_start(
    start: Start, data_dir: Path, tmp_path: Path
) -> None:
    file = tmp_path / "ringlog.toml"
    file.write_text('[topics."orders.eu"]\ncap_records = 7\n')
    engine = start(environ={"RINGLOG_CONFIG": str(file)}).ready()
    assert engine.stop() == 0
    file.write_text('[topics."orders.eu"]\ncap_records = 8\n')
    engine = start(environ={"RINGLOG_CONFIG": str(file)}).ready()
    engine.wait_until(lambda: "topic differs from the configuration file" in engine.log, "drift")
    assert engine.stop() == 0


def test_topics_of_the_file_are_compared_at_their_owner_after_a_change_of_the_shards(
    start: Start, tmp_path: Path
) -> None:
    """The home shard of the name only says which shard owns the topic."""

    def owner(name: str, shards: int) -> int:
        """Return the owner of the first topic of an engine with two shards."""
        ids = (n for n in itertools.count(1) if shard_of(n, 2) == home_shard(name, 2))
        return shard_of(next(ids), shards)

    name = next(name for name in map("t{}".format, range(99)) if owner(name, 3) != home_shard(name, 3))

    def run(shards: int, cap: int) -> EngineProcess:
        file = tmp_path / "ringlog.toml"
        file.write_text(f'[topics."{name}"]\ncap_records = {cap}\n')
        return start(environ={"RINGLOG_CONFIG": str(file)}, wal__shards=str(shards)).ready()

    assert run(2, 7).stop() == 0
    engine = run(3, 8)
    engine.wait_until(lambda: "topic differs from the configuration file" in engine.log, "drift")
    assert engine.stop() == 0
    (line,) = (line for line in engine.log.splitlines() if "topic differs" in line)
    assert json.loads(line)["is_now"] == {"cap_records": 7}


@pytest.mark.parametrize(
    ("settings", "status", "words"),
    [
        ({"wal__shrds": "2"}, 2, "did you mean wal.shards?"),
        ({"native__endpoint": "tcp://0.0.0.0:5555"}, 2, "native.curve_key_file"),
        ({"data__min_free_bytes": "1000TB"}, 1, "free disk space is below data.min_free_bytes"),
    ],
)
def test_an_impossible_start_is_refused_with_the_reason(
    start: Start, data_dir: Path, settings: dict[str, str], status: int, words: str
) -> None:
    engine = start(**settings)
    assert engine.wait() == status
    assert words in engine.log
    assert "Traceback" not in engine.log
    assert not (data_dir / "wal").exists()


def test_root_is_refused_unless_allowed_or_in_a_container(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """In a container, root gives only a warning."""
    mark = tmp_path / ".dockerenv"
    monkeypatch.setattr(engine_resources, "CONTAINER_FILES", (str(mark),))
    monkeypatch.setattr(engine_resources.os, "geteuid", lambda: 0)
    with pytest.raises(StartRefused, match=r"run\.allow_root=true"):
        engine_resources.refuse_root(Config())
    engine_resources.refuse_root(Config(run=RunConfig(allow_root=True)))
    assert not caplog.records
    mark.touch()
    engine_resources.refuse_root(Config())
    assert "running as root in a container" in caplog.text


def test_a_data_directory_open_to_others_is_refused(start: Start, data_dir: Path) -> None:
    """The error contains the chmod command that corrects the mode."""
    data_dir.chmod(0o755)
    engine = start()
    assert engine.wait() == 1
    assert f"chmod 700 {data_dir}" in engine.log
    assert list(data_dir.iterdir()) == []


def test_check_and_show_do_not_start_an_engine(data_dir: Path) -> None:
    root = Path(__file__).parent.parent.parent
    for option, words in (("--check", "settings are valid"), ("--show", "  wal_shard-01  ")):
        done = subprocess.run(
            [sys.executable, "-m", "supervisor", option, "--data-dir", str(data_dir),
             "--set", "wal.shards=2"],
            cwd=root, capture_output=True, text=True, timeout=DEADLINE_S, check=False,
        )  # fmt: skip
        assert done.returncode == 0
        assert words in done.stdout
    assert list(data_dir.iterdir()) == []


def test_an_engine_starts_after_shard_and_supervisor_were_killed(start: Start) -> None:
    """The supervisor is killed just before it replaces the killed shard."""
    engine = start(environ={"RINGLOG_TEST_STOP_POINTS": "supervisor_before_respawn:1:kill"}).ready()
    os.kill(engine.shard().pid, signal.SIGKILL)
    assert engine.wait() == -signal.SIGKILL
    assert start().ready().stop() == 0


def test_a_ring_is_removed_after_its_client_exits(start: Start, tmp_path: Path) -> None:
    """A real shard drains the ring first (R7). A kill of the shard in between changes nothing."""
    engine = start().ready()
    info = read_engine_json(engine.run_dir)
    client = subprocess.Popen([sys.executable, "-c", "import signal; signal.pause()"])
    try:
        opened = ask(
            info.shm_dir, RingOpen("test", client.pid, 0, pid_started=process_started_ticks(client.pid))
        )
        assert isinstance(opened, RingOpened)
        assert engine.status().rings == 1
        os.kill(engine.shard().pid, signal.SIGKILL)
        engine.wait_shard(lambda p: p.restarts == 1 and p.state == "ready", "a successor")
        assert os.path.exists(f"{info.shm_dir}/{opened.ring}")
    finally:
        client.kill()
        client.wait()
    engine.wait_until(lambda: engine.status().rings == 0, "the ring to go")
    assert not os.path.exists(f"{info.shm_dir}/{opened.ring}")
    assert not os.path.exists(f"{info.shm_dir}/{opened.bell}")
    closed = ask(info.shm_dir, RingOpen("test", os.getpid(), 1))
    assert isinstance(closed, RingOpened)
    assert ask(info.shm_dir, RingClose(closed.ring)) == RingClosed(closed.ring)
    engine.wait_until(lambda: not os.path.exists(f"{info.shm_dir}/{closed.ring}"), "the closed ring to go")
    assert engine.stop() == 0


def ask(shm_dir: str, request: Message) -> Message:
    with zmq.Context() as context, context.socket(zmq.DEALER) as socket:
        socket.setsockopt(zmq.LINGER, 0)
        socket.connect(f"ipc://{shm_dir}/supervisor.sock")
        socket.send(encode(request, 7))
        assert socket.poll(DEADLINE_S * 1000), "the supervisor did not answer"
        envelope = decode(socket.recv())
    assert envelope.corr == 7
    return envelope.message


def test_an_invalid_request_to_the_supervisor_is_refused(start: Start) -> None:
    engine = start().ready()
    shm_dir = read_engine_json(engine.run_dir).shm_dir
    for request in (RingOpen("x", 1, 99), RingOpen("x", 1, 0, 3), Read("t", 0)):
        reply = ask(shm_dir, request)
        assert isinstance(reply, ErrorReply)
        assert reply.status == Status.INVALID_REQUEST
    with zmq.Context() as context, context.socket(zmq.DEALER) as socket:
        socket.setsockopt(zmq.LINGER, 0)
        socket.connect(f"ipc://{shm_dir}/supervisor.sock")
        for parts in ([b""], [b"\xc1" * 100], [b"a"] * 20, [b"\x94\x01"]):
            socket.send_multipart(parts)
            assert socket.poll(DEADLINE_S * 1000)
            assert isinstance(decode(socket.recv()).message, ErrorReply)
    assert isinstance(ask(shm_dir, Ping()), Pong)
    welcome = ask(shm_dir, Hello(1, "x"))
    assert isinstance(welcome, Welcome)
    assert (welcome.shards, welcome.shard) == (2, -1)
    assert engine.stop() == 0


def test_serve_works_if_another_package_is_named_supervisor(data_dir: Path, tmp_path: Path) -> None:
    """`ringlog serve` never imports the top-level module `supervisor`, which a widely installed package
    shadows."""
    (tmp_path / "site" / "supervisor").mkdir(parents=True)
    (tmp_path / "site" / "supervisor" / "__init__.py").write_text("raise SystemExit('not ours')")
    root = Path(__file__).parent.parent.parent
    path = os.pathsep.join([str(tmp_path / "site"), str(root)])
    code = "import sys; from ringlog.cli import main; sys.exit(main(['serve', '--check']))"
    done = subprocess.run(
        [sys.executable, "-c", code], env={**os.environ, "PYTHONPATH": path}, cwd=data_dir,
        capture_output=True, text=True, timeout=DEADLINE_S, check=False,
    )  # fmt: skip
    assert (done.returncode, "not ours" in done.stdout + done.stderr) == (0, False), done.stderr


def test_fetch_status_without_an_engine_raises_not_connected(tmp_path: Path) -> None:
    with pytest.raises(RinglogError, match="no engine"):
        control_client.fetch_status(str(tmp_path))
