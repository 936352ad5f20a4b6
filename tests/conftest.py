"""Fixtures for all tests, and the check that a test leaves no process and no shared memory behind."""

from __future__ import annotations

import gc
import logging
import multiprocessing
import os
import secrets
import shutil
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TypeVar

import pytest
from hypothesis import HealthCheck, settings

import ringlog
from ringlog.client import Client
from ringlog.compilation import is_compiled
from ringlog.testing.clock import ManualClock
from ringlog.testing.real_engine import TestEngine

pytest.register_assert_rewrite("tests.support")
# The Java machines of tests live for seconds: the slower, optimizing compiler takes half of their CPU time.
os.environ.setdefault("JDK_JAVA_OPTIONS", "-XX:TieredStopAtLevel=1")

from tests.support import quick  # noqa: E402

T = TypeVar("T", bound="dict | set")
SHM = Path("/dev/shm")
SETTLE_S = 5.0
# A parallel test that crashes its whole engine leaves an unused directory until it starts the next engine.
REGIONS_SETTLE_S = 30.0 if "PYTEST_XDIST_WORKER" in os.environ else SETTLE_S
EXEC_LOOKS_MAX = 200
LAUNCHER = "ringlog.testing.launcher"
KEPT_CHILDREN = ("multiprocessing.resource_tracker", "multiprocessing.forkserver", LAUNCHER)

# The speed of an example depends more on other load of the machine than on the code.
settings.register_profile(
    "ringlog", deadline=None, database=None, suppress_health_check=[HealthCheck.too_slow], print_blob=True
)
settings.load_profile("ringlog")


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--quick", action="store_true", help="only tests that start no process")


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """Skip modules and folders without a quick test."""
    return True if config.option.quick and quick.is_left_out(collection_path) else None


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item], config: pytest.Config) -> None:
    """Mark tests that use an engine, and leave them out of quick runs. Skip tests that replace parts of a
    class where ringlog is compiled."""
    for item in items:
        if quick.has_engine(item):
            item.add_marker("slow")
        if is_compiled() and item.get_closest_marker("interpreted"):
            item.add_marker(pytest.mark.skip(reason="replaces a part of a compiled class"))
    if config.option.quick:
        left = [item for item in items if item.get_closest_marker("slow")]
        config.hook.pytest_deselected(items=left)
        items[:] = [item for item in items if not item.get_closest_marker("slow")]


def pytest_collection_finish() -> None:
    """Keep ten thousand collected tests out of each later collection of the garbage collector."""
    freeze_heap()


@pytest.fixture(scope="module")
def quick_collections() -> None:
    """For modules that collect often: keep what earlier tests have left out of each collection."""
    freeze_heap()


def freeze_heap() -> None:
    gc.collect()
    gc.freeze()


@pytest.fixture(autouse=True, scope="session")
def starts_no_process(request: pytest.FixtureRequest, keeps_a_tracker: None) -> Iterator[None]:
    """In a quick run, fail each test that starts a process."""
    yield from quick.refuse_processes() if request.config.option.quick else [None]


@pytest.fixture
def clock() -> ManualClock:
    """A clock that moves only when the test moves it."""
    return ManualClock()


@pytest.fixture
def running(ringlog_engine: TestEngine) -> TestEngine:
    """The engine of `client`: the one of the whole run. Modules that damage it replace it by one of their
    own."""
    return ringlog_engine


@pytest.fixture
def client(running: TestEngine) -> Iterator[Client]:
    """A client that is connected to the running engine."""
    with ringlog.connect(running.url, wait=20) as connected:
        yield connected


@pytest.fixture(params=["ring", "ipc"])
def transport(request: pytest.FixtureRequest) -> str:
    """Each way from a client on the engine's host: rings in shared memory, and the gateway."""
    return request.param


@pytest.fixture
def topic(ringlog_topic: Callable[[str], str]) -> str:
    """The name of a topic of the shared engine that no other test uses."""
    return ringlog_topic("topic")


@pytest.fixture
def shm_dir() -> Iterator[Path]:
    """An empty 0700 directory in /dev/shm."""
    path = Path(f"/dev/shm/ringtest-{os.getuid()}-{secrets.token_hex(4)}")
    path.mkdir(mode=0o700)
    yield path
    shutil.rmtree(path)


@pytest.fixture
def data_dir(tmp_path: Path) -> Iterator[Path]:
    """An empty 0700 directory. After the test, no process may have its path on its command line."""
    path = tmp_path / "data"
    path.mkdir(mode=0o700)
    yield path
    left = _until_empty(lambda: processes_naming(str(path)))
    assert not left, f"the test left processes that work on its data directory: {left}"


@pytest.fixture(autouse=True)
def leaves_nothing_behind() -> Iterator[None]:
    """Check that the test leaves no new child process and no new shared-memory directory."""
    children, regions, kept = own_children(), shm_entries(), kept_children()
    yield
    assert kept <= kept_children(), "the test ended a process of the test run"
    left = _until_empty(lambda: {k: v for k, v in own_children().items() if k not in children})
    assert not left, f"the test left child processes: {left}"
    left_regions = _until_empty(lambda: ours_in_shm(shm_entries() - regions), REGIONS_SETTLE_S)
    assert not left_regions, f"the test left shared memory: {sorted(left_regions)}"


@pytest.fixture(autouse=True, scope="session")
def keeps_a_tracker() -> None:
    """Start the resource tracker of multiprocessing, so that a test that ends the tracker is detected."""
    multiprocessing.get_context("spawn").Lock()


@pytest.fixture(autouse=True)
def leaves_the_process_as_it_was() -> Iterator[None]:
    """Check that the test keeps umask, logging and our variables for the next test of this worker."""
    before = _process_wide()
    yield
    after = _process_wide()
    os.umask(before[0])
    logging.disable(before[1])
    logging.getLogger("ringlog").setLevel(before[2])
    for name in after[3].keys() - before[3].keys():
        del os.environ[name]
    os.environ.update(before[3])
    assert after == before, "the test left another (umask, logging.disable, level of ringlog, environment)"


def _process_wide() -> tuple[int, int, int, dict[str, str]]:
    umask = os.umask(0o077)
    os.umask(umask)
    ours = {name: value for name, value in os.environ.items() if name.startswith("RINGLOG_")}
    return umask, logging.root.manager.disable, logging.getLogger("ringlog").level, ours


def _until_empty(look: Callable[[], T], settle_s: float = SETTLE_S) -> T:
    """Poll until `look` returns an empty result or the deadline passes: a killed process needs a moment to
    exit."""
    deadline = time.monotonic() + settle_s
    while (found := look()) and time.monotonic() < deadline:
        time.sleep(0.01)
    return found


def command_of(pid: int) -> str:
    """Return a process's command line with spaces. It is empty if the process exited or is a zombie."""
    try:
        return (
            Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode("utf-8", "replace").strip()
        )
    except OSError:
        return ""


def own_children() -> dict[int, str]:
    """Return pid and command of the direct children, including zombies, and of the engines that launchers
    forked. The launchers and what multiprocessing keeps are left out."""
    found = {}
    for pid, command in _children_of("self"):
        if LAUNCHER in command:
            found |= dict(_children_of(str(pid)))
        elif not _is_kept(command):
            found[pid] = command
    return found


def kept_children() -> set[int]:
    """Return the pids of the processes that multiprocessing keeps running for this process."""
    return {pid for pid, command in _children_of("self") if _is_kept(command) and LAUNCHER not in command}


def _is_kept(command: str) -> bool:
    return any(kept in command for kept in KEPT_CHILDREN)


def _children_of(process: str) -> Iterator[tuple[int, str]]:
    try:
        tasks = list(Path(f"/proc/{process}/task").iterdir())
    except OSError:
        return
    for task in tasks:
        try:
            pids = (task / "children").read_text().split()
        except OSError:
            continue
        for pid in map(int, pids):
            yield pid, command_of(pid)


def processes_naming(path: str) -> dict[int, str]:
    """Return the other processes whose command line contains `path`."""
    pids = [int(entry) for entry in os.listdir("/proc") if entry.isdigit() and int(entry) != os.getpid()]
    return {pid: command for pid in pids if path in (command := settled_command_of(pid))}


def settled_command_of(pid: int) -> str:
    """Return command_of(pid), and wait for a process that just called exec: its command line is empty for a
    moment."""
    for _ in range(EXEC_LOOKS_MAX):
        command = command_of(pid)
        if command or not os.path.exists(f"/proc/{pid}/exe"):
            break
        time.sleep(0.001)
    return command


def shm_entries() -> set[str]:
    """Return the names of shared-memory directories with the engine's name pattern."""
    return {name for name in os.listdir(SHM) if name.startswith("ringlog-")}


def ours_in_shm(names: set[str]) -> set[str]:
    """Return the names that no process outside of this test run uses: the engine of another run is no
    leak."""
    return {name for name in names if (SHM / name).exists() and not _used_by_strangers(name)}


def _used_by_strangers(name: str) -> bool:
    mine = own_children()
    return any(
        pid not in mine and pid != os.getpid() and _uses(pid, name)
        for pid in map(int, filter(str.isdigit, os.listdir("/proc")))
    )


def _uses(pid: int, name: str) -> bool:
    try:
        return name in command_of(pid) or name in Path(f"/proc/{pid}/maps").read_text()
    except OSError:
        return False
