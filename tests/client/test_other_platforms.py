"""Programs on systems other than Linux on x86-64.

TCP clients work there. An engine refuses to start and reports the reason in one line.

The systems are simulated: functions that their Python lacks are removed before ringlog is imported.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from urllib.parse import quote

import pytest

from ringlog.link.curve import key_file_text, new_key
from ringlog.testing import engine
from tests.support.machine import free_port

pytestmark = [pytest.mark.slow, pytest.mark.timeout(120)]

SIMULATE = '''
import asyncio, multiprocessing, os, platform, select, selectors, signal, socket, subprocess, sys
import cyclopts, lz4.frame, msgpack, msgspec, numpy, psutil, pyroaring, xxhash, zmq, zmq.asyncio, zstandard
import rich.console, logging.handlers, ctypes, tempfile, shutil, concurrent.futures, http.server
system = sys.argv.pop(1)
lost = """
    sched_getaffinity pidfd_open eventfd eventfd_read eventfd_write EFD_NONBLOCK EFD_CLOEXEC memfd_create
    posix_fallocate fdatasync posix_fadvise sendfile splice copy_file_range O_PATH O_TMPFILE setns unshare
""".split()
if system == "Windows":
    lost += """
    fork forkpty register_at_fork geteuid getuid getegid getgid setsid killpg getpgid mkfifo O_CLOEXEC
    O_NONBLOCK O_NOFOLLOW O_DIRECTORY pread preadv pwrite pwritev sched_yield statvfs fchmod fchown
    set_blocking waitid WNOHANG nice getpriority setpriority getloadavg sysconf
    """.split()
for name in lost:
    if hasattr(os, name):
        delattr(os, name)
for name in ("epoll", "EPOLLIN", "EPOLLOUT", "EPOLLERR", "EPOLLHUP", "EPOLLET"):
    delattr(select, name)
selectors.DefaultSelector = selectors.SelectSelector
blocked = []
if system == "Windows":
    unix, pair = socket.AF_UNIX, socket.socketpair
    socket.socketpair = lambda *_: pair(unix)
    del select.poll, socket.AF_UNIX
    for name in "SIGHUP SIGPIPE SIGKILL SIGUSR1 pthread_sigmask SIGCHLD SIGALRM sigwait".split():
        if hasattr(signal, name):
            delattr(signal, name)
    blocked = ["fcntl", "resource", "pwd", "grp", "termios", "tty", "_posixshmem", "syslog", "readline"]
class Blocked:
    def find_spec(self, name, path=None, target=None):
        if name in blocked:
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)
sys.meta_path.insert(0, Blocked())
for name in blocked:
    sys.modules.pop(name, None)
sys.platform = {"Windows": "win32", "Darwin": "darwin", "Linux": "linux"}[system]
platform.system = lambda: system
platform.machine = lambda: {"Windows": "AMD64", "Darwin": "arm64", "Linux": "aarch64"}[system]
'''
CLIENT = """
import ringlog, ringlog.aio
url = sys.argv[1]
topic = f"from-{system}"
with ringlog.connect(url, wait=20) as log:
    log.topics.create(topic)
    with log.producer(topic) as producer:
        for n in range(100):
            producer.send(b"%d" % n)
    assert [int(r.data) for r in log.reader(topic)] == list(range(100))
    log.topics.create(topic + ".jobs", type="queue")
    log.queue(topic + ".jobs").put(b"work")
    [job] = log.queue(topic + ".jobs").claim(1)
    job.ack()
async def main():
    async with ringlog.aio.connect(url) as log:
        await log.append(topic, b"100")
        assert len([r async for r in log.reader(topic)]) == 101
loop = asyncio.SelectorEventLoop(selectors.SelectSelector())
loop.run_until_complete(main())
loop.close()
try:
    ringlog.connect("ringlog:///somewhere/run", wait=0.1)
except ringlog.errors.RinglogError as e:
    print(e)
"""
COMMAND = """
import ringlog.cli
sys.exit(ringlog.cli.main(sys.argv[1:]))
"""
SUPERVISOR = """
import supervisor
sys.exit(supervisor.main())
"""
SYSTEMS = ["Darwin", "Windows", "Linux"]


@pytest.fixture(scope="module")
def url(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """The URL of an engine that listens on TCP and accepts every key."""
    server = new_key()
    key_file = tmp_path_factory.mktemp("keys") / "server.key"
    key_file.write_text(key_file_text(server))
    key_file.chmod(0o600)
    port = free_port()
    native = {"endpoint": f"tcp://127.0.0.1:{port}", "curve_key_file": str(key_file)}
    with engine(wal={"shards": 1}, gateway={"enabled": True}, native=native):
        yield f"ringlog://127.0.0.1:{port}?server_key={quote(server.public, safe='')}"


def run(
    system: str, program: str, *arguments: str, environ: dict[str, str] | None = None
) -> subprocess.CompletedProcess[str]:
    environ = {**os.environ, **(environ or {})}
    command = [sys.executable, "-c", SIMULATE + program, system, *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=60, check=False, env=environ)


@pytest.mark.parametrize("system", SYSTEMS)
def test_a_tcp_client_works(url: str, system: str, tmp_path: Path) -> None:
    key_file = tmp_path / "client.key"
    key_file.write_text(key_file_text(new_key()))
    key_file.chmod(0o600)
    done = run(system, CLIENT, url, environ={"RINGLOG_KEY_FILE": str(key_file)})
    assert done.returncode == 0, done.stderr
    assert "engines need Linux on x86-64" in done.stdout, "asked for an engine on this host"


@pytest.mark.parametrize("system", SYSTEMS)
def test_the_command_line_works_against_a_remote_engine(url: str, system: str, tmp_path: Path) -> None:
    text = tmp_path / "text"
    text.write_text("one")
    for arguments in (
        ("topic", "create", f"cli-{system}"), ("write", f"cli-{system}", str(text)),
        ("read", f"cli-{system}"), ("topic", "list"), ("version",), ("--help",),
    ):  # fmt: skip
        done = run(system, COMMAND, *arguments, environ={"RINGLOG_URL": url})
        assert done.returncode == 0, (arguments, done.stdout, done.stderr)
        assert "Traceback" not in done.stderr
    assert "one" in run(system, COMMAND, "read", f"cli-{system}", environ={"RINGLOG_URL": url}).stdout


@pytest.mark.parametrize("system", SYSTEMS)
@pytest.mark.parametrize("command", ["serve", "doctor", "supervisor"])
def test_an_engine_reports_in_one_line_that_it_needs_linux_on_x86_64(system: str, command: str) -> None:
    done = run(system, SUPERVISOR) if command == "supervisor" else run(system, COMMAND, command)
    assert done.returncode == 1, done.stderr
    assert done.stderr.startswith("engines need Linux on x86-64"), done.stderr
    assert done.stderr.count("\n") == 1
