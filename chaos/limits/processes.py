"""Limits of one process: memory, descriptors, children, threads, CPU; locks and pids of dead processes."""

from __future__ import annotations

import contextlib
import ctypes
import os
import random
import resource
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import psutil

import ringlog
from chaos.order import CannotRun
from chaos.rigs.bench import Bench, is_refused, process_cpu_s, topics_of
from chaos.rigs.cases import Case
from chaos.rigs.cgroups import group
from ringlog.drill.checks import GuaranteeBroken, require
from ringlog.drill.load import ACKED, SLOW_S
from ringlog.storage.layout import LOCK_NAME
from ringlog.supervision.tree import BACKGROUND
from ringlog.testing.children import debug_environ

MIB = 1 << 20
MEMORY_ROOM = 4 * MIB
CONNECTED_S = 10.0
"""Time (s) within which a connected client must make progress, unless the shard cannot create a log file."""
STARVED_S = 8.0
STARVED_PART = 0.05
EPHEMERAL_BYTES = 256 << 10
FILES_ROLLED = 2
"""Number of log files of 1 MiB that a shard fills while no thread can be started."""
_PIDFD_GETFD = 438
_libc = ctypes.CDLL(None, use_errno=True)


# -- memory -------------------------------------------------------------------------------------------


def no_memory(bench: Bench, chance: random.Random) -> None:
    """Exhaust a shard's memory, so that the kernel kills it and not the supervisor (RF-17).

    The cgroup contains only the shard. Ephemeral records are in shared memory, which no death frees, so the
    kernel would kill every process of a larger cgroup.
    """
    before, shard = bench.pids, chance.randrange(2)
    scores = {name: int(Path(f"/proc/{pid}/oom_score_adj").read_text()) for name, pid in before.items()}
    least = min(score for name, score in scores.items() if name != "supervisor")
    require(scores["supervisor"] < least, f"nothing protects the supervisor: {scores}")
    topic = topics_of("eph")[shard]
    bench.client.topics.create(topic, durability="ephemeral", exist_ok=True)
    victim = f"wal_shard-{shard:02d}"
    with group("memory") as limited:
        limited.take([before[victim]])
        limited.limit_memory(limited.memory_used + MEMORY_ROOM)
        data = bytes(EPHEMERAL_BYTES)
        deadline = time.monotonic() + SLOW_S
        while not limited.killed:
            is_refused(lambda: bench.client.append(topic, data))
            require(time.monotonic() < deadline, f"no process was killed at {limited.memory_used >> 20} MiB")
        bench.account.count_work("oom_kills", limited.killed)
        bench.host.wait_ready()
    bench.need_work()
    require(bench.pids[victim] != before[victim], "the shard was not replaced")
    bench.need_same(before, but=victim)


# -- descriptors --------------------------------------------------------------------------------------


def _descriptors(pid: int) -> set[int]:
    """Return the open descriptors of a process, except the one on its own descriptor directory."""
    used = set()
    for name in os.listdir(f"/proc/{pid}/fd"):
        with contextlib.suppress(FileNotFoundError):
            if os.readlink(f"/proc/{pid}/fd/{name}") != f"/proc/{pid}/fd":
                used.add(int(name))
    return used


@contextlib.contextmanager
def _no_descriptors(pid: int) -> Iterator[None]:
    """Prevent the process from opening further descriptors within the block."""
    used = _descriptors(pid)
    limits = resource.prlimit(pid, resource.RLIMIT_NOFILE)
    # Set the limit to the lowest free number. Open descriptors above it stay open.
    free = next(number for number in range(len(used) + 1) if number not in used)
    resource.prlimit(pid, resource.RLIMIT_NOFILE, (free, limits[1]))
    try:
        yield
    finally:
        # If the process died, there is no limit to lift.
        with contextlib.suppress(ProcessLookupError):
            resource.prlimit(pid, resource.RLIMIT_NOFILE, limits)


def no_descriptors_in_a_shard(bench: Bench, chance: random.Random) -> None:
    """Take all descriptors from a shard (RF-19). Open files work; rings and log files open again afterwards.

    Processes of the engine sometimes connect to a shard, and libzmq may then abort it: see `no_sockets`.
    """
    shard = chance.randrange(2)
    topic, bulk = topics_of("new", 2)[2 * shard : 2 * shard + 2]
    pid, before, size = bench.host.pid_of("wal_shard", shard), bench.pids, bench.log_size
    with ringlog.connect(bench.host.url, timeout_ms=1_500) as known:
        known.topics.create(topic, exist_ok=True)  # Connected to its shard, without a ring yet.
        bench.client.append(bulk, b"x")
        with _no_descriptors(pid):
            fate = is_refused(lambda: known.append(topic, b"during"))
            # Enough to need new log files: refused, or written to the file prepared in advance.
            for _ in range(12):
                is_refused(lambda: bench.client.append(bulk, bytes(200_000)))
            require(bench.load.is_alive, "the load died")
        aborted = bench.pids[f"wal_shard-{shard:02d}"] != pid
        # A successor has descriptors and may serve before the client's timeout.
        require(fate is not None or aborted, "a shard without descriptors opened a ring")
        require("Too many open files" in bench.said_since(size), "the log does not report it")
        bench.wait("service", lambda: is_refused(lambda: known.append(topic, b"after")) is None)
    bench.need_work()
    _need_same_or_aborted(bench, before, f"wal_shard-{shard:02d}", size)


def no_descriptors_in_the_gateway(bench: Bench, _: random.Random) -> None:
    """Take all descriptors from the gateway (RF-19). It must not die, and reads must work again afterwards.

    Reads that it refuses in the meantime are counted.
    """
    pid = bench.host.pid_of("gateway")
    before, topic = bench.pids, topics_of("gw")[0]
    with ringlog.connect(bench.host.url, transport="ipc", timeout_ms=1_500) as known:
        known.append(topic, b"before")
        # No client has read this topic, so the gateway has none of its files open.
        bench.client.append(topic + "-unread", b"x")
        known.topics.state(topic + "-unread")
        with _no_descriptors(pid):
            cpu = process_cpu_s(pid)
            refusals = [is_refused(lambda: list(known.reader(topic + "-unread"))) for _ in range(3)]
            known.append(topic, b"during")
            spent = process_cpu_s(pid) - cpu
        known.append(topic, b"after")
        require(len(list(known.reader(topic + "-unread"))) >= 1, "nothing is read once there is room")
    bench.account.figures["gateway_reads_refused"] = sum(each is not None for each in refusals)
    bench.account.figures["gateway_cpu_without_descriptors_s"] = round(spent, 2)
    bench.need_same(before)
    bench.need_work()


def no_sockets(bench: Bench, chance: random.Random) -> None:
    """Connect to a process without descriptors (RF-19).

    libzmq (4.3.5) aborts the process in that case: its listener on local sockets does not expect EMFILE. The
    process therefore stops listening in time. Connected clients continue, new clients wait, and no process
    dies.
    """
    shard = chance.randrange(2)
    topic = topics_of("sock")[shard]
    for name, transport in ((f"wal_shard-{shard:02d}", "ring"), ("gateway", "ipc")):
        before, size = bench.pids, bench.log_size
        with _no_descriptors(before[name]):
            bench.wait("it to stop listening", lambda: "new connections paused" in bench.said_since(size))  # noqa: B023
            fate = _try_new_client(bench, topic, 700, transport)
            _need_work_or_no_file(bench, size)
        require(fate is not None, f"{name} had descriptors left")
        bench.wait("it to listen", lambda: "new connections resumed" in bench.said_since(size))  # noqa: B023
        bench.wait("a new client", lambda: _try_new_client(bench, topic, 3_000, transport) is None)  # noqa: B023
        bench.need_same(before)
    bench.need_work()


def _need_work_or_no_file(bench: Bench, size: int) -> None:
    """Check that connected clients continue until the log needs a new file. That failure must be logged."""
    try:
        bench.need_work(within_s=CONNECTED_S)
    except GuaranteeBroken:
        if "cannot create the next WAL file" not in bench.said_since(size):
            raise
        bench.account.count_work("logs_without_a_next_file")


def _need_same_or_aborted(bench: Bench, before: dict[str, int], name: str, size: int) -> bool:
    """Return whether libzmq aborted the process, see `no_sockets`.

    Raises GuaranteeBroken if it died for another reason.
    """
    bench.need_same(before, but=name)
    died = bench.pids[name] != before[name]
    said = bench.said_since(size)
    require(not died or "ipc_listener.cpp" in said, f"{name} died of something else: {said[-2_000:]}")
    bench.account.count_work("libzmq_aborts", int(died))
    return died


def _try_new_client(bench: Bench, topic: str, timeout_ms: int, transport: str = "auto") -> object:
    """Return the error that a new client gets; None if its write was accepted."""
    options: dict[str, object] = {"transport": transport, "timeout_ms": timeout_ms}
    with ringlog.connect(bench.host.url, **options) as client:  # type: ignore[arg-type]
        return is_refused(lambda: client.append(topic, b"new"))


# -- children and threads -----------------------------------------------------------------------------


def _tree(bench: Bench) -> list[int]:
    """Return the pids of the supervisor and all its descendants, including the forkserver."""
    above = psutil.Process(bench.host.pid)
    return [above.pid, *(each.pid for each in above.children(recursive=True))]


def no_processes(bench: Bench, chance: random.Random) -> None:
    """Prevent the start of a dead shard's successor (RF-20). It is logged, and the other processes serve.

    Background processes may exit for lack of threads and return; the other shard must not.
    """
    shard = chance.randrange(2)
    dead, other = bench.shard_topic(shard), bench.shard_topic(1 - shard)
    before, size = bench.pids, bench.log_size
    with group("pids") as limited:
        limited.take(_tree(bench))
        # Below the current number of tasks, so that nothing can start even if some tasks exit.
        limited.limit_tasks(1)
        bench.host.kill("wal_shard", shard=shard)
        bench.wait("a start that fails", lambda: bench.said_since(size).count("not started") >= 2)
        bench.load.need(ACKED, None, 20, topic=other)
        require(limited.tasks_refused, "the limit was never hit")
        limited.limit_tasks(-1)
        bench.host.wait_ready()
        bench.load.need(ACKED, None, 10, topic=dead)
    now = bench.pids
    for name in ("supervisor", f"wal_shard-{1 - shard:02d}"):
        require(now[name] == before[name], f"{name} was replaced")


def no_threads(bench: Bench, chance: random.Random) -> None:
    """Let the successor's process start but not its threads (RF-20).

    The other shard needs no thread, not even for its next log files.
    """
    shard = chance.randrange(2)
    other, bulk = bench.shard_topic(1 - shard), topics_of("bulk")[1 - shard]
    before, size = bench.pids, bench.log_size
    victim = before[f"wal_shard-{shard:02d}"]
    with group("pids") as limited:
        limited.take(_tree(bench))
        threads = len(os.listdir(f"/proc/{victim}/task"))
        # One more task than the successor itself: the process that forks it exists for a moment, too.
        limited.limit_tasks(limited.tasks - threads + 2)
        bench.host.kill("wal_shard", shard=shard)
        bench.wait("a successor that ends", lambda: bench.said_since(size).count("child ended") >= 2)
        # A successor that exits frees its tasks. A limit below the current number prevents their reuse.
        limited.limit_tasks(1)
        for _ in range(FILES_ROLLED * 5):
            bench.client.append(bulk, bytes(200_000))
        bench.load.need(ACKED, None, 10, topic=other)
        require(limited.tasks_refused, "the limit was never hit")
        limited.limit_tasks(-1)
        bench.host.wait_ready()
    bench.need_work()
    needed = {name: pid for name, pid in before.items() if name not in BACKGROUND}
    bench.need_same(needed, but=f"wal_shard-{shard:02d}")


# -- CPU ----------------------------------------------------------------------------------------------


def starved(bench: Bench, _: random.Random) -> None:
    """Give the tree 5 % of one CPU for longer than the stuck timeout (RF-21).

    It is slow; no process is killed.
    """
    before, size = bench.pids, bench.log_size
    with group("cpu") as limited:
        limited.limit_cpu(STARVED_PART)
        limited.take(before.values())
        mark = bench.load.mark()
        end = time.monotonic() + STARVED_S
        bench.wait("the time to pass", lambda: time.monotonic() > end)
        require(limited.times_throttled > 10, "the limit was never hit")
        bench.account.figures["acks_starved"] = bench.load.count(ACKED, mark)
        bench.load.need(ACKED, mark, 1)
    require("no progress" not in bench.said_since(size), f"killed as stuck:\n{bench.said_since(size)}")
    bench.need_same(before)
    bench.need_work()


# -- locks and numbers of the dead --------------------------------------------------------------------


def lock_outlives_its_shard(bench: Bench, chance: random.Random) -> None:
    """Hold a dead shard's lock (RF-15). No successor writes, the log names the holder, the others continue.

    The lock is released before the successor's timeout, and the shard serves again.
    """
    shard = chance.randrange(2)
    _hold_lock(bench, shard, is_for_long=False)
    bench.host.wait_ready()
    bench.need_work()


def lock_is_never_freed(bench: Bench, chance: random.Random) -> None:
    """Hold a dead shard's lock until the shard is given up (RF-15).

    After a restart everything serves again.
    """
    _hold_lock(bench, chance.randrange(2), is_for_long=True)
    bench.host.restart()
    bench.need_work()


def _hold_lock(bench: Bench, shard: int, *, is_for_long: bool) -> None:
    dead, other = bench.shard_topic(shard), bench.shard_topic(1 - shard)
    pid, size = bench.host.pid_of("wal_shard", shard), bench.log_size
    held = _copy_of_lock(pid)
    folder = f"{bench.host.data_dir}/wal/shard-{shard:02d}"
    try:
        bench.host.kill("wal_shard", shard=shard)
        mark, names = bench.load.mark(), set(os.listdir(folder))
        bench.wait("the holder to be named", lambda: f"pid {pid}" in bench.said_since(size), 15.0)
        require(LOCK_NAME in bench.said_since(size), "the log does not say which lock")
        if is_for_long:
            bench.wait("the shard to be given up", lambda: "given up" in bench.said_since(size), 120.0)
        bench.load.need(ACKED, None, 10, topic=other)
        require(set(os.listdir(folder)) <= names, "files were created without the lock")
        require(not bench.load.count(ACKED, mark, dead), "acknowledged although no shard serves")
    finally:
        os.close(held)


def _copy_of_lock(pid: int) -> int:
    """Return a second descriptor of the open file that holds the shard's lock, like a forked child has."""
    for name in os.listdir(f"/proc/{pid}/fd"):
        with contextlib.suppress(OSError):
            if os.readlink(f"/proc/{pid}/fd/{name}").endswith(f"/{LOCK_NAME}"):
                pidfd = os.pidfd_open(pid)
                try:
                    fd = int(_libc.syscall(_PIDFD_GETFD, pidfd, int(name), 0))
                finally:
                    os.close(pidfd)
                if fd < 0:
                    raise CannotRun(f"pidfd_getfd: {os.strerror(ctypes.get_errno())}")
                return fd
    raise GuaranteeBroken("the shard holds no lock")


_STRANGER = """
import ctypes, os, signal, sys
class Args(ctypes.Structure):
    _fields_ = [(name, ctypes.c_uint64) for name in ("flags", "pidfd", "child_tid", "parent_tid",
        "exit_signal", "stack", "stack_size", "tls", "set_tid", "set_tid_size", "cgroup")]
tid = (ctypes.c_int * 1)(int(sys.argv[1]))
args = Args(exit_signal=17, set_tid=ctypes.addressof(tid), set_tid_size=1)
libc = ctypes.PyDLL(None, use_errno=True)
got = libc.syscall(435, ctypes.byref(args), ctypes.sizeof(args))
if got == 0:
    libc.prctl(1, signal.SIGKILL, 0, 0, 0)
    os.execv("/bin/sleep", ["sleep", "600"])
print(got, ctypes.get_errno(), flush=True)
sys.stdin.read()
os.kill(got, signal.SIGKILL) if got > 0 else None
"""
"""Starts a process with a given pid, and kills it when standard input ends."""


@contextlib.contextmanager
def stranger(pid: int) -> Iterator[None]:
    """Run an unrelated process under the pid of a dead one within the block.

    Raises GuaranteeBroken if it is signalled.
    """
    with subprocess.Popen(
        [sys.executable, "-c", _STRANGER, str(pid)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as parent:
        assert parent.stdin is not None
        assert parent.stdout is not None
        try:
            got, errno = map(int, parent.stdout.readline().split())
            if got != pid:
                raise CannotRun(f"clone3 with a given pid: {os.strerror(errno)}")
            yield
            # The parent has not reaped it, so the pid is still its own. The state is checked instead of the
            # command line, which is empty during execve.
            state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
            require(state not in {"Z", "X"}, f"the stranger was killed: state {state}")
        finally:
            parent.stdin.close()
            parent.wait()


def number_of_a_dead_client(bench: Bench, _: random.Random) -> None:
    """Give a dead client's pid to an unrelated process while the supervisor is stopped (RF-14).

    The client's rings are removed although the pid exists. The unrelated process stays alive.
    """
    before = set(os.listdir(bench.host.info.shm_dir))

    def rings() -> set[str]:
        return {name for name in set(os.listdir(bench.host.info.shm_dir)) - before if name.endswith(".ring")}

    client = subprocess.Popen(
        [sys.executable, "-c", _CLIENT, bench.host.url, bench.shard_topic(0) + "-x"],
        stdout=subprocess.PIPE, text=True, env=debug_environ(),
    )  # fmt: skip
    try:
        assert client.stdout is not None
        require(client.stdout.readline().strip() == "ok", "the client could not write")
        require(rings(), "the client has no ring")
        _signal(bench.host.pid, signal.SIGSTOP)
        try:
            client.kill()
            client.wait()
            with stranger(client.pid):
                _signal(bench.host.pid, signal.SIGCONT)
                bench.wait("the dead client's rings to go", lambda: not rings())
        finally:
            _signal(bench.host.pid, signal.SIGCONT)
    finally:
        client.kill()
        client.wait()
        if client.stdout is not None:
            client.stdout.close()
    bench.need_work()


_CLIENT = """
import sys, ringlog
client = ringlog.connect(sys.argv[1])
client.append(sys.argv[2], b"x")
print("ok", flush=True)
sys.stdin.read()
import signal; signal.pause()
"""


def number_of_a_dead_shard(bench: Bench, chance: random.Random) -> None:
    """Give a dead shard's pid to an unrelated process (RF-14). The engine must not signal that process."""
    shard = chance.randrange(2)
    pid = bench.host.kill("wal_shard", shard=shard)
    name = f"wal_shard-{shard:02d}"
    # Wait until the board names the successor. Otherwise the next kill would use the old pid.
    bench.wait(
        "the successor",
        lambda: any(
            x.name == name and x.pid not in {0, pid} and x.state == "ready"
            for x in bench.host.status().processes
        ),
    )
    with stranger(pid):
        bench.host.kill("wal_shard", shard=shard)
        bench.host.wait_ready()
        bench.need_work(5)
        bench.host.crash()
        bench.host.start()
        bench.need_work(5)


def _signal(pid: int, number: signal.Signals) -> None:
    fd = os.pidfd_open(pid)
    try:
        signal.pidfd_send_signal(fd, number)
    finally:
        os.close(fd)


CASES: tuple[Case[Bench], ...] = (
    Case("shard-descriptors", ("RF-19",), no_descriptors_in_a_shard),
    Case("gateway-descriptors", ("RF-19",), no_descriptors_in_the_gateway),
    Case("no-sockets", ("RF-19",), no_sockets),
    Case("no-processes", ("RF-20",), no_processes, is_long=True),
    Case("no-threads", ("RF-20",), no_threads, is_long=True),
    Case("no-memory", ("RF-17",), no_memory, is_long=True),
    Case("starved", ("RF-21",), starved, is_long=True),
    Case("client-number", ("RF-14",), number_of_a_dead_client, is_long=True),
    Case("shard-number", ("RF-14",), number_of_a_dead_shard, is_long=True),
    Case("held-lock", ("RF-15",), lock_outlives_its_shard),
    Case("kept-lock", ("RF-15",), lock_is_never_freed, is_long=True),
)
__all__ = ["CASES", "stranger"]
