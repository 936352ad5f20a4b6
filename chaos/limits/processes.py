"""One process at its limit: memory, descriptors, children, threads, CPU; locks and numbers of the dead."""

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
from chaos.order import Broken, CannotRun, require
from chaos.rigs.bench import Bench, is_refused, process_cpu_s, topics_of
from chaos.rigs.cases import Case
from chaos.rigs.cgroups import group
from chaos.rigs.load import ACKED, SLOW_S
from ringlog.storage.layout import LOCK_NAME
from ringlog.supervision.tree import BACKGROUND
from ringlog.testing.children import debug_environ

MIB = 1 << 20
MEMORY_ROOM = 4 * MIB
CONNECTED_S = 10.0
"""Who is connected waits no longer, unless the log is at its end."""
STARVED_S = 8.0
STARVED_PART = 0.05
EPHEMERAL_BYTES = 256 << 10
FILES_ROLLED = 2
"""How many log files of 1 MiB a shard fills where no more threads can be made."""
_PIDFD_GETFD = 438
_libc = ctypes.CDLL(None, use_errno=True)


# -- memory -------------------------------------------------------------------------------------------


def no_memory(bench: Bench, chance: random.Random) -> None:
    """RF-17: a shard's memory ends and the kernel kills it; the supervisor would be the last to be taken.

    Only the shard is in the group: ephemeral records lie in shared memory, which nobody's death gives back,
    so that a group of all of them would be killed to the last.
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
            require(time.monotonic() < deadline, f"nobody was killed at {limited.memory_used >> 20} MiB")
        bench.account.did("oom_kills", limited.killed)
        bench.host.wait_ready()
    bench.need_work()
    require(bench.pids[victim] != before[victim], "the shard was not replaced")
    bench.need_same(before, but=victim)


# -- descriptors --------------------------------------------------------------------------------------


def _descriptors(pid: int) -> set[int]:
    """What a process has open; not the directory of its own descriptors, at which it looks for a moment."""
    used = set()
    for name in os.listdir(f"/proc/{pid}/fd"):
        with contextlib.suppress(FileNotFoundError):
            if os.readlink(f"/proc/{pid}/fd/{name}") != f"/proc/{pid}/fd":
                used.add(int(name))
    return used


@contextlib.contextmanager
def _no_descriptors(pid: int) -> Iterator[None]:
    """The process can open nothing beyond the descriptors it has."""
    used = _descriptors(pid)
    limits = resource.prlimit(pid, resource.RLIMIT_NOFILE)
    # The lowest free number: those above it that are open stay open, and nothing else can be.
    free = next(number for number in range(len(used) + 1) if number not in used)
    resource.prlimit(pid, resource.RLIMIT_NOFILE, (free, limits[1]))
    try:
        yield
    finally:
        # Whoever died of it has no limit to be lifted.
        with contextlib.suppress(ProcessLookupError):
            resource.prlimit(pid, resource.RLIMIT_NOFILE, limits)


def no_descriptors_in_a_shard(bench: Bench, chance: random.Random) -> None:
    """RF-19: rings and log files cannot be opened; what is open works, and the rest when there is room.

    Processes of the engine connect to a shard now and then, so that libzmq may abort it: see `no_sockets`.
    """
    shard = chance.randrange(2)
    topic, bulk = topics_of("new", 2)[2 * shard : 2 * shard + 2]
    pid, before, size = bench.host.pid_of("wal_shard", shard), bench.pids, bench.log_size
    with ringlog.connect(bench.host.url, timeout_ms=1_500) as known:
        known.topics.create(topic, exist_ok=True)  # Connected to its shard; it has no ring yet.
        bench.client.append(bulk, b"x")
        with _no_descriptors(pid):
            fate = is_refused(lambda: known.append(topic, b"during"))
            # Enough to need new log files: refused, or taken by the one that was ready.
            for _ in range(12):
                is_refused(lambda: bench.client.append(bulk, bytes(200_000)))
            require(bench.load.is_alive, "the load died")
        aborted = bench.pids[f"wal_shard-{shard:02d}"] != pid
        # Its successor has descriptors, and may be there before the client's patience is over.
        require(fate is not None or aborted, "a shard without descriptors opened a ring")
        require("Too many open files" in bench.said_since(size), "it is not said")
        bench.wait("service", lambda: is_refused(lambda: known.append(topic, b"after")) is None)
    bench.need_work()
    _need_same_or_aborted(bench, before, f"wal_shard-{shard:02d}", size)


def no_descriptors_in_the_gateway(bench: Bench, _: random.Random) -> None:
    """RF-19: it cannot open the files it reads: a typed error, no death, and it reads when there is room."""
    pid = bench.host.pid_of("gateway")
    before, topic = bench.pids, topics_of("gw")[0]
    with ringlog.connect(bench.host.url, transport="ipc", timeout_ms=1_500) as known:
        known.append(topic, b"before")
        # Not read yet by anybody: whatever the gateway needs for it is not open.
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
    """RF-19: a new connection meets a process without descriptors.

    libzmq (4.3.5) would abort it: its listener on local sockets does not expect EMFILE. So nobody listens any
    more by then: who is connected goes on, who is new has to wait, and nobody dies.
    """
    shard = chance.randrange(2)
    topic = topics_of("sock")[shard]
    for name, transport in ((f"wal_shard-{shard:02d}", "ring"), ("gateway", "ipc")):
        before, size = bench.pids, bench.log_size
        with _no_descriptors(before[name]):
            bench.wait("it to stop listening", lambda: "no new connections" in bench.said_since(size))  # noqa: B023
            fate = _try_new_client(bench, topic, 700, transport)
            _need_work_or_no_file(bench, size)
        require(fate is not None, f"{name} had descriptors left")
        bench.wait("it to listen", lambda: "taken again" in bench.said_since(size))  # noqa: B023
        bench.wait("a new client", lambda: _try_new_client(bench, topic, 3_000, transport) is None)  # noqa: B023
        bench.need_same(before)
    bench.need_work()


def _need_work_or_no_file(bench: Bench, size: int) -> None:
    """Who is connected goes on, until the log needs a file, which takes a descriptor and has to be said."""
    try:
        bench.need_work(within_s=CONNECTED_S)
    except Broken:
        if "cannot make the next WAL file" not in bench.said_since(size):
            raise
        bench.account.did("logs_without_a_next_file")


def _need_same_or_aborted(bench: Bench, before: dict[str, int], name: str, size: int) -> bool:
    """Whether libzmq aborted that process, as it may (see `no_sockets`); it ended in no other way."""
    bench.need_same(before, but=name)
    died = bench.pids[name] != before[name]
    said = bench.said_since(size)
    require(not died or "ipc_listener.cpp" in said, f"{name} died of something else: {said[-2_000:]}")
    bench.account.did("libzmq_aborts", int(died))
    return died


def _try_new_client(bench: Bench, topic: str, timeout_ms: int, transport: str = "auto") -> object:
    """What a client that was not there before is told; None when its write was taken."""
    options: dict[str, object] = {"transport": transport, "timeout_ms": timeout_ms}
    with ringlog.connect(bench.host.url, **options) as client:  # type: ignore[arg-type]
        return is_refused(lambda: client.append(topic, b"new"))


# -- children and threads -----------------------------------------------------------------------------


def _tree(bench: Bench) -> list[int]:
    """The supervisor and all that lives below it, the servers that actors are forked from among them."""
    above = psutil.Process(bench.host.pid)
    return [above.pid, *(each.pid for each in above.children(recursive=True))]


def no_processes(bench: Bench, chance: random.Random) -> None:
    """RF-20: a dead shard's successor cannot be started; it is said, the others serve, and then it can.

    Who works in the background may end for want of threads and come back; the other shard may not.
    """
    shard = chance.randrange(2)
    dead, other = bench.shard_topic(shard), bench.shard_topic(1 - shard)
    before, size = bench.pids, bench.log_size
    with group("pids") as limited:
        limited.take(_tree(bench))
        # Below what there is: nothing more can be started, whoever ends meanwhile.
        limited.limit_tasks(1)
        bench.host.kill("wal_shard", shard=shard)
        bench.wait("a start that fails", lambda: bench.said_since(size).count("not started") >= 2)
        bench.load.need(ACKED, None, 20, topic=other)
        require(limited.tasks_refused, "the limit was not met")
        limited.limit_tasks(-1)
        bench.host.wait_ready()
        bench.load.need(ACKED, None, 10, topic=dead)
    now = bench.pids
    for name in ("supervisor", f"wal_shard-{1 - shard:02d}"):
        require(now[name] == before[name], f"{name} was replaced")


def no_threads(bench: Bench, chance: random.Random) -> None:
    """RF-20: the successor's process can start and its threads cannot. The other shard needs none, also for
    its next log files."""
    shard = chance.randrange(2)
    other, bulk = bench.shard_topic(1 - shard), topics_of("bulk")[1 - shard]
    before, size = bench.pids, bench.log_size
    victim = before[f"wal_shard-{shard:02d}"]
    with group("pids") as limited:
        limited.take(_tree(bench))
        threads = len(os.listdir(f"/proc/{victim}/task"))
        # One more than the successor alone: who forks it is there for a moment, too.
        limited.limit_tasks(limited.tasks - threads + 2)
        bench.host.kill("wal_shard", shard=shard)
        bench.wait("a successor that ends", lambda: bench.said_since(size).count("child ended") >= 2)
        # A successor that ends gives back what it had: below what there is, nobody gets it.
        limited.limit_tasks(1)
        for _ in range(FILES_ROLLED * 5):
            bench.client.append(bulk, bytes(200_000))
        bench.load.need(ACKED, None, 10, topic=other)
        require(limited.tasks_refused, "the limit was not met")
        limited.limit_tasks(-1)
        bench.host.wait_ready()
    bench.need_work()
    needed = {name: pid for name, pid in before.items() if name not in BACKGROUND}
    bench.need_same(needed, but=f"wal_shard-{shard:02d}")


# -- CPU ----------------------------------------------------------------------------------------------


def starved(bench: Bench, _: random.Random) -> None:
    """RF-21: the tree gets 5 % of one processor for longer than "stuck" is: slow, and nobody is killed."""
    before, size = bench.pids, bench.log_size
    with group("cpu") as limited:
        limited.limit_cpu(STARVED_PART)
        limited.take(before.values())
        mark = bench.load.mark()
        end = time.monotonic() + STARVED_S
        bench.wait("the time to pass", lambda: time.monotonic() > end)
        require(limited.times_throttled > 10, "the limit was not met")
        bench.account.figures["acks_starved"] = bench.load.count(ACKED, mark)
        bench.load.need(ACKED, mark, 1)
    require("no progress" not in bench.said_since(size), f"killed as stuck:\n{bench.said_since(size)}")
    bench.need_same(before)
    bench.need_work()


# -- locks and numbers of the dead --------------------------------------------------------------------


def lock_outlives_its_shard(bench: Bench, chance: random.Random) -> None:
    """RF-15: somebody holds the dead shard's lock: no successor writes, who holds it is said at once, others
    go on. It is freed before the successor's patience ends, and all is as before."""
    shard = chance.randrange(2)
    _hold_lock(bench, shard, is_for_long=False)
    bench.host.wait_ready()
    bench.need_work()


def lock_is_never_freed(bench: Bench, chance: random.Random) -> None:
    """RF-15: the same until the shard is given up; with the lock free a restart brings everything back."""
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
        require(set(os.listdir(folder)) <= names, "somebody made files without the lock")
        require(not bench.load.count(ACKED, mark, dead), "acknowledged although no shard serves")
    finally:
        os.close(held)


def _copy_of_lock(pid: int) -> int:
    """A second descriptor of the very open file that holds the shard's lock, as a forked child has it."""
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
    raise Broken("the shard holds no lock")


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
"""Starts a process that has the number it was told, and kills it when standard input ends."""


@contextlib.contextmanager
def stranger(pid: int) -> Iterator[None]:
    """A process of no concern to the engine, under the number of a dead one."""
    with subprocess.Popen(
        [sys.executable, "-c", _STRANGER, str(pid)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as parent:
        assert parent.stdin is not None
        assert parent.stdout is not None
        try:
            got, errno = map(int, parent.stdout.readline().split())
            if got != pid:
                raise CannotRun(f"clone3 with a number of our choice: {os.strerror(errno)}")
            yield
            # Not reaped by its parent yet, so the number is still its own. Its state and not its command
            # line, which a process has not while it becomes another program.
            state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
            require(state not in {"Z", "X"}, f"the stranger was killed: state {state}")
        finally:
            parent.stdin.close()
            parent.wait()


def number_of_a_dead_client(bench: Bench, _: random.Random) -> None:
    """RF-14: a client dies while the supervisor sleeps, and its number goes to a stranger at once.

    Its rings go, whether the supervisor had met it or was just being asked by it; the stranger lives.
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
    """RF-14: a stranger has a dead shard's number while its successor works: nobody signals the stranger."""
    shard = chance.randrange(2)
    pid = bench.host.kill("wal_shard", shard=shard)
    name = f"wal_shard-{shard:02d}"
    # Not before the board names the successor: the next kill would go by the number there, the stranger's.
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
