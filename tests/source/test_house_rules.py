"""Coding rules that a program can check. Each rule is tested on a few lines that break it.

A rule has exceptions by file, each with its reason. An exception that is not needed must be removed.
"""

from __future__ import annotations

import ast
import io
import re
import subprocess
import tokenize
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from fnmatch import fnmatch
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent.parent
EVERYWHERE = ("ringlog/*", "actors/*", "supervisor.py")

Check = Callable[[str], Iterator[int]]
"""Source -> lines that break the rule."""


@dataclass(frozen=True)
class Rule:
    """One rule: its check, its scope, its exceptions, and samples that break and keep it."""

    name: str
    check: Check
    bad: tuple[str, ...]
    good: tuple[str, ...]
    scope: tuple[str, ...] = EVERYWHERE
    excused: dict[str, str] = field(default_factory=dict)
    most: dict[str, int] = field(default_factory=dict)
    """Maximum number of findings in an excused file."""


@cache
def nodes(source: str) -> list[ast.AST]:
    """Return every node of a module, parsed once for all rules."""
    return list(ast.walk(ast.parse(source)))


def calls(source: str) -> Iterator[ast.Call]:
    return (node for node in nodes(source) if isinstance(node, ast.Call))


def dotted(node: ast.expr) -> str:
    """Return `os.path.join` as text, or only the last name if the part before it is not a plain name."""
    if isinstance(node, ast.Name):
        return node.id
    if isinstance(node, ast.Attribute):
        before = dotted(node.value)
        return f"{before}.{node.attr}" if before else f".{node.attr}"
    return ""


# -- calls that change the disk ---------------------------------------------------------------------------

OS_CHANGES = {
    "chmod", "chown", "copy_file_range", "fchmod", "fchown", "fdatasync", "fsync", "ftruncate", "lchown",
    "link", "makedirs", "mkdir", "mkfifo", "mknod", "posix_fallocate", "pwrite", "pwritev", "remove",
    "removedirs", "rename", "renames", "replace", "rmdir", "sendfile", "splice", "symlink", "sync",
    "truncate", "unlink", "utime", "write", "writev",
}  # fmt: skip
WRITE_FLAGS = {"O_WRONLY", "O_RDWR", "O_CREAT", "O_TRUNC", "O_APPEND", "O_TMPFILE"}
SHUTIL_LOOKS = {"shutil.disk_usage", "shutil.get_terminal_size", "shutil.which"}
PATH_CHANGES = {"write_text", "write_bytes", "touch", "mkdir", "rmdir", "symlink_to", "hardlink_to", "lchmod"}
MODE = re.compile(r"[rwaxbtU+]{1,4}")


def disk_changes(source: str) -> Iterator[int]:
    for node in nodes(source):
        if isinstance(node, ast.Import) and any(alias.name == "os" and alias.asname for alias in node.names):
            yield node.lineno  # calls through another name cannot be detected
        if isinstance(node, ast.ImportFrom) and _imports_a_change(node):
            yield node.lineno
        if isinstance(node, ast.Call) and _changes_the_disk(node):
            yield node.lineno


def loops_over_a_shared_dictionary(source: str) -> Iterator[int]:
    """Find loops over a dictionary that outlives the call and whose body calls something."""
    for loop in nodes(source):
        if not isinstance(loop, ast.For) or not isinstance(loop.iter, ast.Call):
            continue
        view = loop.iter.func
        is_shared = isinstance(view, ast.Attribute) and isinstance(view.value, ast.Attribute)
        if (
            is_shared
            and view.attr in {"values", "items", "keys"}
            and any(isinstance(node, ast.Call) for each in loop.body for node in ast.walk(each))
        ):
            yield loop.lineno


def _imports_a_change(node: ast.ImportFrom) -> bool:
    names = {alias.name for alias in node.names}
    return (
        (node.module == "os" and bool(names & {*OS_CHANGES, "open", "fdopen", "*"}))
        or (node.module == "shutil" and not {f"shutil.{name}" for name in names} <= SHUTIL_LOOKS)
        or node.module == "tempfile"
    )


def _changes_the_disk(call: ast.Call) -> bool:
    name = dotted(call.func)
    head, _, last = name.rpartition(".")
    if head == "os" and last in OS_CHANGES:
        return True
    if name == "os.open":
        # Flags in a variable cannot be checked, so they must be literal.
        flags = {node.attr for node in ast.walk(call) if isinstance(node, ast.Attribute)}
        return bool(flags & WRITE_FLAGS) or not flags & {"O_RDONLY", "O_PATH"}
    if head in {"shutil", "tempfile"}:
        return name not in SHUTIL_LOOKS
    if name in {"open", "io.open", "os.fdopen", "io.FileIO", "FileIO"}:
        return _mode_writes(call, position=1, otherwise="r")
    if last == "open":
        return _mode_writes(call, position=0, otherwise="r", only_if_mode=True)
    # Disk.rename and Disk.unlink take one argument more than the methods of pathlib.
    is_of_path = (last == "unlink" and not call.args) or (last == "rename" and len(call.args) == 1)
    return bool(head or name.startswith(".")) and (last in PATH_CHANGES or is_of_path)


def _mode_writes(call: ast.Call, *, position: int, otherwise: str, only_if_mode: bool = False) -> bool:
    named = [each.value for each in call.keywords if each.arg == "mode"]
    given = named or call.args[position : position + 1]
    mode = given[0] if given else ast.Constant(otherwise)
    if not isinstance(mode, ast.Constant) or not isinstance(mode.value, str):
        return not only_if_mode
    if only_if_mode and not MODE.fullmatch(mode.value):
        return False
    return bool(set(mode.value) & set("wax+"))


# -- time -------------------------------------------------------------------------------------------------

NOW = {"now", "utcnow", "today"}


def time_asked(source: str) -> Iterator[int]:
    for node in nodes(source):
        if isinstance(node, ast.Import) and any(alias.name == "time" for alias in node.names):
            yield node.lineno
        if isinstance(node, ast.ImportFrom) and node.module == "time":
            yield node.lineno
        if isinstance(node, ast.Call):
            head, _, last = dotted(node.func).rpartition(".")
            if last in NOW and head.split(".")[-1] in {"datetime", "date"}:
                yield node.lineno


# -- the rest ---------------------------------------------------------------------------------------------


def packs_into(source: str) -> Iterator[int]:
    for node in nodes(source):
        name = node.attr if isinstance(node, ast.Attribute) else node.id if isinstance(node, ast.Name) else ""
        is_imported = isinstance(node, ast.ImportFrom) and any(
            each.name == "pack_into" for each in node.names
        )
        if name == "pack_into" or is_imported:
            yield node.lineno


def shares_memory_the_wrong_way(source: str) -> Iterator[int]:
    for node in nodes(source):
        if isinstance(node, ast.Import):
            names = {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            names = {f"{node.module}.{alias.name}" for alias in node.names} | {str(node.module)}
        else:
            continue
        if any(
            re.match(r"multiprocessing\.(shared_memory|resource_tracker|managers)\b", name) for name in names
        ):
            yield node.lineno


def forks(source: str) -> Iterator[int]:
    for call in calls(source):
        if dotted(call.func) in {"os.fork", "os.forkpty", "pty.fork"}:
            yield call.lineno
        if any(keyword.arg == "preexec_fn" for keyword in call.keywords):
            yield call.lineno
        if dotted(call.func).endswith("get_context") and "fork" in ast.unparse(call):
            yield call.lineno


def keeps_locks_in_children(source: str) -> Iterator[int]:
    """Return locks of a module that has no hook for forked children."""
    locks = {"Lock", "RLock", "Condition", "Semaphore", "BoundedSemaphore", "Event", "allocate_lock"}
    if any(dotted(call.func) == "os.register_at_fork" for call in calls(source)):
        return
    for node in ast.parse(source).body:
        made = node.value if isinstance(node, ast.Assign | ast.AnnAssign) else None
        if isinstance(made, ast.Call) and dotted(made.func).rpartition(".")[2] in locks:
            yield node.lineno


def prints(source: str) -> Iterator[int]:
    return (
        call.lineno for call in calls(source) if dotted(call.func) in {"print", "pprint", "pprint.pprint"}
    )


BROAD = {"Exception", "BaseException"}


def catches_everything(source: str) -> Iterator[int]:
    """Return broad handlers that do not end with a bare `raise`, and broad suppress() calls."""
    for node in nodes(source):
        if isinstance(node, ast.ExceptHandler):
            caught = node.type.elts if isinstance(node.type, ast.Tuple) else [node.type]
            is_broad = any(each is None or dotted(each) in BROAD for each in caught)
            last = node.body[-1]
            is_raised_again = isinstance(last, ast.Raise) and last.exc is None
            if is_broad and not is_raised_again:
                yield node.lineno
        is_suppress = isinstance(node, ast.Call) and dotted(node.func).endswith("suppress")
        if is_suppress and any(dotted(each) in BROAD for each in node.args):
            yield node.lineno


def comments(source: str) -> Iterator[tuple[int, str]]:
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type == tokenize.COMMENT:
            yield token.start[0], token.string


def ignores_all_types(source: str) -> Iterator[int]:
    return (line for line, text in comments(source) if re.search(r"type:\s*ignore(?!\[[a-z-]+)", text))


def promises_later(source: str) -> Iterator[int]:
    return (line for line, text in comments(source) if re.search(r"\b(TODO|FIXME|XXX|HACK)\b", text))


def does_nothing(source: str) -> Iterator[int]:
    return (node.lineno for node in nodes(source) if isinstance(node, ast.Pass))


RULES = [
    Rule(
        "disk changes go through storage/real_disk.py (ST-8)",
        disk_changes,
        bad=(
            "os.open(p, os.O_RDWR | os.O_CREAT)",
            "os.open(p, flags)",
            *(f"os.{name}(x)" for name in sorted(OS_CHANGES)),
            "import os as system",
            "from os import pwrite",
            "from os import *",
            "from shutil import rmtree",
            "from tempfile import mkstemp",
            "shutil.rmtree(p)",
            "tempfile.mkdtemp()",
            "open(p, 'w')",
            "open(p, 'ab')",
            "open(p, 'r+b')",
            "open(p, mode='x')",
            "open(p, mode)",
            "io.open(p, 'wb')",
            "os.fdopen(fd, 'wb')",
            "p.open('w')",
            "Path(p).open(mode='a')",
            "(p / 'x').write_text('a')",
            "p.write_bytes(b'')",
            "p.mkdir()",
            "p.touch()",
            "p.unlink()",
            "p.unlink(missing_ok=True)",
            "Path(p).unlink()",
            "p.rename(q)",
        ),
        good=(
            "os.open(p, os.O_RDONLY | os.O_CLOEXEC)",
            "open(p)",
            "open(p, 'rb')",
            "open(p, mode='r')",
            "p.open()",
            "p.open('rb')",
            "p.read_text()",
            "Board.open(dir, writable=True)",
            "disk.unlink(path)",
            "disk.rename(a, b)",
            "shutil.disk_usage(p)",
            "name.replace('a', 'b')",
            "os.read(fd, 1)",
        ),
        excused={
            "ringlog/storage/real_disk.py": "the one place",
            "ringlog/shm.py": "shared memory: makes files that are mapped, never durable ones",
            "ringlog/runtime/listener.py": "hides the name of a socket in shared memory, no durable file",
            "ringlog/descriptors.py": "the null device",
            "ringlog/ring/region.py": "shared memory: removes rings",
            "ringlog/ring/doorbell.py": "named pipes and eventfds, which carry wake-ups",
            "ringlog/supervision/*": "the shared-memory directory, its leftovers and the run directory",
            "ringlog/hardening.py": "settings under /proc",
            "ringlog/cli/*": "files the operator asks for",
            "ringlog/testing/*": "tools of tests",
            "ringlog/drill/*": "journals in a temporary directory, for real processes",
            "ringlog/spark/spark_home.py": "links in the user's cache, made again when they are gone",
            "ringlog/spark/jvm_jar.py": "a jar in the user's cache, compiled again when it is gone",
            "actors/wal_shard/io/volatile_log.py": "the volatile log is in shared memory, never durable",
        },
    ),
    Rule(
        "only clock.py asks for the time (CK-1)",
        time_asked,
        bad=(
            "import time",
            "from time import sleep",
            "datetime.now()",
            "datetime.datetime.utcnow()",
            "date.today()",
        ),
        good=("clock.now_us()", "datetime.fromtimestamp(x, UTC)", "import datetime", "self.now()"),
        excused={
            "ringlog/clock.py": "the one place",
            "ringlog/drill/*": "measures real processes from outside",
        },
    ),
    Rule(
        "shared words are written through a typed view, never pack_into (RD-10)",
        packs_into,
        bad=("struct.pack_into('<Q', m, 0, 1)", "S.pack_into(m, 0, 1)", "from struct import pack_into"),
        good=("view[0] = 1", "'''struct.pack_into tears'''", "S.unpack_from(m)"),
    ),
    Rule(
        "multiprocessing's shared memory is not used (RD-14)",
        shares_memory_the_wrong_way,
        bad=(
            "from multiprocessing import shared_memory",
            "import multiprocessing.shared_memory",
            "from multiprocessing.shared_memory import SharedMemory",
            "from multiprocessing import resource_tracker",
        ),
        good=("import mmap", "from multiprocessing import get_context"),
    ),
    Rule(
        "processes are spawned, never forked (RD-7)",
        forks,
        bad=("os.fork()", "subprocess.Popen(a, preexec_fn=f)", "multiprocessing.get_context('fork')"),
        good=("subprocess.Popen(a, close_fds=True)", "multiprocessing.get_context('spawn')"),
        excused={
            "ringlog/runtime/forkserver.py": "holds no lock, has no thread and does nothing else; nor does "
            "the supervisor yet, when it makes the first one",
            "ringlog/testing/launcher.py": "has one thread and no lock either",
            "ringlog/drill/nursery.py": "has one thread and no lock either",
        },
        most={
            "ringlog/runtime/forkserver.py": 3,
            "ringlog/testing/launcher.py": 1,
            "ringlog/drill/nursery.py": 1,
        },
    ),
    Rule(
        "a module with a lock makes it again in a forked child of the program",
        keeps_locks_in_children,
        bad=("_lock = threading.Lock()", "_lock: RLock = RLock()", "_done = threading.Event()"),
        good=(
            "_lock = threading.Lock()\nos.register_at_fork(after_in_child=renew)",
            "def call():\n    done = threading.Lock()",
        ),
        excused={
            "ringlog/spark/*": "Spark forks its workers from a daemon that has one thread",
            "ringlog/testing/*": "tools of tests",
        },
    ),
    Rule(
        "the library does not print",
        prints,
        bad=("print('x')", "pprint(x)"),
        good=("sys.stderr.write('x')", "log.info('x')", "self.print(x)"),
        excused={
            "ringlog/cli/*": "talks to a person",
            "ringlog/runtime/process.py": "says why a process cannot boot before there is a log",
        },
    ),
    Rule(
        "what is caught is named; a catch-all ends the process or raises again",
        catches_everything,
        bad=(
            "try:\n    f()\nexcept Exception:\n    g()",
            "try:\n    f()\nexcept:\n    g()",
            "try:\n    f()\nexcept BaseException as e:\n    raise E from e",
            "try:\n    f()\nexcept (OSError, Exception):\n    g()",
            "with contextlib.suppress(Exception):\n    f()",
        ),
        good=(
            "try:\n    f()\nexcept OSError:\n    g()",
            "try:\n    f()\nexcept BaseException:\n    g()\n    raise",
            "with contextlib.suppress(OSError):\n    f()",
        ),
        excused={
            "ringlog/runtime/process.py": "the top of an actor's loop: the process ends here",
            "ringlog/link/futures.py": "a failed operation's error travels to whoever waits for its result",
            "ringlog/client/connection/callbacks.py": "a callback.s error is logged",
            "ringlog/client/connection/shell.py": "an operation.s error is its own; "
            "what an interrupt left half made may raise anything while it is ended",
            "actors/gateway/core.py": "a request's error is its sender's; the gateway holds no facts",
            "actors/gateway/shell.py": "the same, while the core's effects are performed",
            "actors/http_gateway/application.py": "the same: one request of HTTP must not end the gateway",
            "ringlog/cli/app.py": "the top of a command: a person gets one line, a script an exit code",
            "ringlog/client/leases/job_payloads.py": "a codec may raise anything: why a job is rejected",
            "ringlog/client/leases/job_facts.py": "an exception may raise as text; its job is returned",
            "ringlog/client/connection/exit_hooks.py": "the process exits, and closes its other clients",
            "ringlog/client/connection/finalizer.py": "nobody waits for it: errors go to the log",
            "ringlog/drill/nursery.py": "the top of a client process: the process ends here",
            "ringlog/worker/wire.py": "the text of a program's exception may raise anything",
            "ringlog/worker/child.py": "a program's module, codec and function may raise anything: that is "
            "the fate of the job, or why the worker does not start",
        },
        most={
            "ringlog/runtime/process.py": 1,
            "ringlog/link/futures.py": 2,
            "ringlog/client/connection/callbacks.py": 1,
            "ringlog/client/connection/exit_hooks.py": 1,
            "ringlog/client/connection/shell.py": 4,
            "ringlog/cli/app.py": 1,
            "ringlog/client/leases/job_payloads.py": 1,
            "ringlog/worker/child.py": 3,
        },
    ),
    Rule(
        "where callbacks run inside of a loop, it goes over a copy of a dictionary that they may change",
        loops_over_a_shared_dictionary,
        bad=(
            "for each in self._waiting.values():\n    each.wake()",
            "for key, feed in subscription.feeds.items():\n    if key:\n        self.grant(feed)",
        ),
        good=(
            "for each in list(self._waiting.values()):\n    each.wake()",
            "for each in self._waiting.values():\n    each.count += 1",
            "for each in waiting.values():\n    each.wake()",
        ),
        scope=("ringlog/link/*", "actors/gateway/*", "actors/scheduler/forwarding/*"),
        excused={"actors/scheduler/forwarding/forwarding_core.py": "pure: calls no callbacks"},
    ),
    Rule(
        "a type error that is ignored says which",
        ignores_all_types,
        bad=("x = 1  # type: ignore", "x = 1  # type:ignore # why"),
        good=("x = 1  # type: ignore[misc]", "x = '# type: ignore'"),
    ),
    Rule(
        "no notes about what is to be done later",
        promises_later,
        bad=("# TODO write this", "x = 1  # FIXME"),
        good=("# What is to be done is done.", "x = 'TODO'"),
    ),
    Rule(
        "no empty bodies",
        does_nothing,
        bad=("def f():\n    pass", "try:\n    f()\nexcept OSError:\n    pass"),
        good=("def f():\n    '''Does nothing on purpose.'''", "class P(Protocol):\n    def f(self): ..."),
    ),
]

VAGUE = {"utils", "util", "common", "helpers", "helper", "manager", "managers", "misc", "stuff", "core2"}


def files() -> list[str]:
    found = [
        *(ROOT / "ringlog").rglob("*.py"), *(ROOT / "actors").rglob("*.py"), *ROOT.glob("supervisor.py"),
    ]  # fmt: skip
    return sorted(str(file.relative_to(ROOT)) for file in found)


def names_of(rule: Rule) -> str:
    return rule.name


def is_excused(path: str, rule: Rule) -> bool:
    return any(fnmatch(path, pattern) for pattern in rule.excused)


@pytest.mark.parametrize("rule", RULES, ids=names_of)
def test_every_file_keeps_the_rule(rule):
    paths = [path for path in files() if any(fnmatch(path, pattern) for pattern in rule.scope)]
    assert len(paths) > 40, "the tree was found"
    broken = {path: list(rule.check((ROOT / path).read_text())) for path in paths}
    unexcused = [
        f"{path}:{line}" for path, lines in broken.items() if not is_excused(path, rule) for line in lines
    ]
    assert not unexcused, rule.name
    too_many = [path for path, most in rule.most.items() if len(broken.get(path, [])) > most]
    assert not too_many, rule.name


@pytest.mark.parametrize("rule", RULES, ids=names_of)
def test_every_exception_of_a_rule_is_needed(rule):
    """The test covers exceptions for single files. Exceptions for folders may stay unused."""
    existing = [path for path in rule.excused if (ROOT / path).is_file()]
    unused = [path for path in existing if not list(rule.check((ROOT / path).read_text()))]
    assert not unused, rule.name


@pytest.mark.parametrize(("rule", "sample"), [(rule, sample) for rule in RULES for sample in rule.bad])
def test_a_sample_that_breaks_a_rule_is_found(rule, sample):
    assert list(rule.check(sample)), rule.name


@pytest.mark.parametrize(("rule", "sample"), [(rule, sample) for rule in RULES for sample in rule.good])
def test_a_sample_that_keeps_a_rule_is_not_found(rule, sample):
    assert not list(rule.check(sample)), rule.name


def vague_names(paths: list[str]) -> list[str]:
    return [path for path in paths if VAGUE & {part.removesuffix(".py") for part in path.split("/")}]


def test_no_module_has_a_vague_name():
    assert not vague_names(files())
    assert vague_names(["ringlog/utils.py", "ringlog/helpers/x.py", "ringlog/frame/codec.py"]) == [
        "ringlog/utils.py",
        "ringlog/helpers/x.py",
    ]


def doubled_names(paths: list[str]) -> set[str]:
    names = [path.rpartition("/")[2] for path in paths]
    return {name for name in names if names.count(name) > 1}


def test_no_two_test_modules_have_the_same_name():
    """pytest imports test modules by name, and loads only the first of two."""
    assert not doubled_names([str(path) for path in (ROOT / "tests").rglob("test_*.py")])
    assert doubled_names(["tests/a/test_x.py", "tests/b/test_x.py", "tests/b/test_y.py"]) == {"test_x.py"}


TEST_IMPORT = re.compile(
    r"^\s*(?:import|from) ((?:\w+\.)*(?:test_\w+|conftest)|tests(?:\.\w+)* import (?:test_\w+|conftest))\b",
    re.MULTILINE,
)


STOPWATCHES = {"perf_counter", "perf_counter_ns", "process_time", "process_time_ns", "thread_time"}


def stopwatches(source: str) -> list[int]:
    if not any(word in source for word in STOPWATCHES):
        return []
    return [call.lineno for call in calls(source) if dotted(call.func).rpartition(".")[2] in STOPWATCHES]


def test_no_test_measures_speed() -> None:
    """A busy machine fails such a test. Tests count steps, calls or bytes; `bench` measures."""
    assert stopwatches("took = time.perf_counter() - began")
    found = {str(path): stopwatches(path.read_text()) for path in (ROOT / "tests").rglob("*.py")}
    assert len(found) > 300, "the tests were found"
    assert not {path: lines for path, lines in found.items() if lines}


def test_nobody_imports_a_test_module_or_a_conftest():
    """What several tests share is in tests/support."""
    found = {
        str(path.relative_to(ROOT)): names
        for folder in ("tests", "chaos", "bench", "demo", "tools")
        for path in (ROOT / folder).rglob("*.py")
        if (names := TEST_IMPORT.findall(path.read_text()))
    }
    assert not found
    wrong = [
        "import test_a",
        "from conftest import x",
        "from tests.b.test_c import d",
        "from tests.e import conftest",
    ]
    right = ["from tests.support.e import f", "from ringlog.testing.disk import SimulatedDisk"]
    assert [bool(TEST_IMPORT.search(line)) for line in (*wrong, *right)] == [True] * 4 + [False] * 2


def missing_tests(command: str) -> list[str]:
    named = re.findall(r"\btests/[\w./]+", command)
    return [path for path in named if not (ROOT / path).exists()]


def test_the_makefile_names_only_existing_tests():
    """pytest runs no test at all if one path does not exist."""
    printed = subprocess.run(
        ["make", "-n", "test-wheel"], cwd=ROOT, capture_output=True, text=True, check=True, timeout=60
    ).stdout
    assert "tests/client" in printed
    assert not missing_tests(printed)
    assert missing_tests("pytest tests/client tests/no_such_thing") == ["tests/no_such_thing"]


# -- unused code --------------------------------------------------------------------------------------------

USERS = ("actors", "ringlog", "supervisor.py", "pyspark_ringlog", "chaos", "bench", "demo", "tools")
CALLED_BY_OTHERS = {
    # Python and its libraries
    "__getattr__", "__dir__", "data_received",
    # Spark's data source API
    "streamReader", "streamWriter", "initialOffset", "getDefaultReadLimit", "latestOffset",
    "reportLatestOffset", "prepareForTriggerAvailableNow",
    # commands and options of the command line
    "chaos", "env", "list_dead_letters", "list_keys", "repair", "revoke",
    # fixtures of the pytest plug-in
    "ringlog_engine", "ringlog_topic",
    # the public API
    "is_clean", "memoryviews", "view_reader",
}  # fmt: skip
FOR_TESTS = {"NewsRow", "close_clients", "references", "stop_engine", "unsynced"}
"""What only tests look at, and cannot see from outside."""


def test_every_definition_of_the_product_is_used() -> None:
    """Functions, classes, methods and properties that only tests use do not count as used."""
    from vulture import Vulture

    finder = Vulture()
    finder.scavenge([str(ROOT / name) for name in USERS])
    found = {
        f"{Path(item.filename).relative_to(ROOT)}: {item.name}"
        for item in finder.get_unused_code(min_confidence=60)
        if item.typ in {"function", "class", "method", "property"}
        and item.name not in CALLED_BY_OTHERS | FOR_TESTS
        and Path(item.filename).relative_to(ROOT).parts[0] in {"actors", "ringlog", "supervisor.py"}
        and "testing" not in Path(item.filename).parts
    }
    assert not found, found


# -- class attributes ----------------------------------------------------------------------------------------


def _classes() -> dict[str, list[ast.ClassDef]]:
    found: dict[str, list[ast.ClassDef]] = {}
    for path in (*(ROOT / "ringlog").rglob("*.py"), *(ROOT / "actors").rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.ClassDef):
                found.setdefault(node.name, []).append(node)
    return found


def _ancestors(node: ast.ClassDef, classes: dict[str, list[ast.ClassDef]]) -> Iterator[ast.ClassDef]:
    for base in node.bases:
        name = base.id if isinstance(base, ast.Name) else base.attr if isinstance(base, ast.Attribute) else ""
        for each in classes.get(name, []):
            if each is not node:
                yield each
                yield from _ancestors(each, classes)


def _overrides(node: ast.ClassDef) -> set[str]:
    return {
        target.id
        for each in node.body if isinstance(each, ast.Assign)
        for target in each.targets if isinstance(target, ast.Name)
    }  # fmt: skip


def _instance_attributes(node: ast.ClassDef) -> set[str]:
    return {
        each.target.id
        for each in node.body
        if isinstance(each, ast.AnnAssign) and isinstance(each.target, ast.Name)
        and "ClassVar" not in ast.unparse(each.annotation)
    }  # fmt: skip


def test_class_attributes_that_subclasses_override_are_class_variables() -> None:
    """In a compiled subclass an override of another attribute has no effect: the base's value stays."""
    classes = _classes()
    wrong = {
        f"{node.name}.{name} overrides {base.name}.{name}"
        for nodes in classes.values() for node in nodes for base in _ancestors(node, classes)
        for name in _overrides(node) & _instance_attributes(base)
    }  # fmt: skip
    assert not wrong, wrong
