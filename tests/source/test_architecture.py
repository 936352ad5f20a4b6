"""One table of allowed imports between packages, and the rule that pure modules import only pure modules.

An import of a higher layer usually means that a type is defined one layer too high. The checks work on
{module name: source}, so that each check is itself tested on a few lines that break it.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent.parent

BASE = {
    "errors", "types", "limits", "clock", "config", "config_sources", "metrics", "stop_points", "hardening",
    "signals", "logs",
    "shm", "governor", "payload", "process_id", "tags", "digests", "environment", "bounded_cache",
    "compilation", "native_kernel",
    "entropy", "settings", "names", "descriptors", "spin_wait", "placement", "observers", "quantities",
}  # fmt: skip

PURE_STORAGE = {"storage.layout", "storage.index", "storage.tags", "storage.recovery"}
WIRE = {"base", "frame", "ring", "board", "envelope"}
# The interface of the disk, and the one module that changes it.
DISK = {"storage.disk", "storage.real_disk"}
# `DISK`: the doctor command tests the disk under a data directory.
CLI = {
    *WIRE, *DISK, "access", "link", "client", "supervision", "verify", "storage.identity_file",
    "storage.layout", "storage.log_register", "storage.reader", "storage.segment_hold", "cli", "root",
}  # fmt: skip

# Modules that a process needs to read a topic's records wherever they are stored.
READ_PATH = {
    "storage.reader", "storage.log_map", "storage.visibility", "storage.segment_cache",
    "storage.record_index", "storage.extents", "storage.frame_run",
}  # fmt: skip

MAY_IMPORT: dict[str, set[str]] = {
    # The compiled kernel has no imports of its own.
    "base": {"base", "_kernel"},
    "frame": {"base", "frame"},
    "ring": {"base", "ring"},
    "board": {"base", "board"},
    "envelope": {"base", "frame", "envelope"},
    # Keys, scopes and prefixes: the rights of a client, for both gateways.
    "access": {"base", "envelope", "leases", "access"},
    "storage": {"base", "frame", "storage"},
    "storage.reader": {"base", "frame", "storage", "storage.segment_cache", "segment", "board"},
    # Segment files: written by the compactor and the reclaimer, read by every reader.
    "segment": {"base", "frame", "envelope", "storage.disk", "storage.layout", "segment"},
    # Positions, sizes, times and tags of one topic's records, wherever they are stored.
    "storage.record_index": {"base", "frame", "storage", "storage.reader", "storage.tail", "segment",
    "board"},
    "storage.tail": {"base", "frame", "storage.disk", "storage.extents", "storage.tail"},
    # The stores of cold segments; the only caller of the package `obstore`.
    "tier": {"base", "frame", "segment", "storage.disk", "storage.layout", "tier"},
    "storage.segment_cache": {"base", "frame", "storage.disk", "segment"},
    "storage.snapshot": {"base", "storage", "segment"},
    "topic": {"base", "frame", "topic", "leases", *PURE_STORAGE},
    # The segments of a shard, in the form of messages.
    "topic.segment_catalog": {"base", "frame", "envelope", "topic"},
    # The leases of records, which a shard keeps beside the log.
    "leases": {"base", "leases"},
    "contract": {"base", "frame", "envelope"},
    "runtime": {*WIRE, "contract", "runtime", "runtime.listener", "root"},
    "runtime.listener": {"base", "runtime.listener"},
    "link": {*WIRE, "access", "link"},
    # On the engine's host the client reads files itself: with the reader, through the Disk interface, and
    # with the same tombstone decision as the gateway.
    "client": {*WIRE, *DISK, "link", "client", *READ_PATH, "topic.tombstone", "root"},
    "aio": {*WIRE, "link", "client", "storage.reader", "aio"},
    # A client that plans by segment indexes, reads and audits files, and stages data on disk.
    "spark": {
        *DISK, "base", "frame", "envelope", "link", "client", "segment", *READ_PATH,
        "storage.vectored_write", "topic.tombstone", "spark", "spark.cold_client", "root",
    },
    # The cold tier without its engine: the snapshots of shards, and the stores of segments.
    "spark.cold_client": {
        *DISK, "base", "board", "frame", "envelope", "link", "segment", "storage.log_map",
        "storage.snapshot", "storage.identity_file", "tier", "topic.row", "topic.state", "spark",
        "spark.cold_client",
    },
    # The supervisor locks the data directory and writes meta/engine. Only one module changes the disk.
    "supervision": {
        *DISK, "base", "ring", "board", "envelope", "access", "storage.layout",
        "storage.identity_file", "runtime", "runtime.listener", "supervision", "root",
    },
    "storage.identity_file": {"base", "storage.disk", "storage.layout"},
    "supervisor": {"base", "supervision", "root"},
    # Written from the format page, so that it shares no decoder with the engine.
    "verify": {"base", "verify"},
    # A user's program in its own processes, over the asyncio client. A job imports few modules.
    "worker": {"base", "link", "client", "aio", "worker", "root"},
    "cli.worker": {*CLI, "aio", "worker"},
    # A repair writes the rest of damaged segments as the engine writes segments.
    "cli.repair": {*CLI, "cli.repair", "segment"},
    # A restore makes the engine the owner of the cold tier.
    "cli.restore": {*CLI, "cli.restore", "tier"},
    "cli": CLI,
    "__main__": {"base", "cli"},
    # Code that an engine process runs before any other import.
    "actors": {"base"},
    # Jobs on Spark, loaded when one runs.
    "cli.spark": {*CLI, "spark"},
    "cli.chaos": {*CLI, "drill"},
    # Engines and clients that a drill starts, kills and checks.
    "drill": {*WIRE, "link", "client", "supervision", "verify", "testing", "drill", "root"},
    "testing": {
        *WIRE, "contract", "runtime", "runtime.listener", "storage", "storage.reader", "segment", "topic",
        "link", "client", "spark", "supervision", "verify", "testing", "root",
    },
    "actors.core": {
        "base", "frame", "envelope", "access", "contract", "topic", "topic.segment_catalog", "leases",
        "segment.layout", "board.layout", *PURE_STORAGE, "root",
    },
    # A client of the engine in an event loop of its own.
    "actors.http_gateway": {
        *WIRE, "access", "client", "aio", "leases", "link", "runtime", "contract", "topic.priority", "root",
    },
    "actors.shell": {
        *WIRE, "access", "contract", "topic", "topic.segment_catalog", "runtime", "runtime.listener",
        "storage", *READ_PATH,
        "link", "storage.snapshot", "segment", "tier", "root",
        # Routers read their sources like every reader on the host.
        "client.read.local_source", "client.read.fetch_result", "client.connection.read_connection",
        "client.read.pages", "client.read.record_batches",
        "client.read.paging", "client.watches.topic_keep_alive",
        # Schedulers and clients share the definition of a dead letter.
        "client.leases.dead_letters", "leases",
    },
    "actors.__main__": {"base", "envelope", "runtime"},
    # Public names are loaded at their first use.
    "root": {"base", "client", "aio", "spark", "testing"},
}  # fmt: skip
"""Unit -> units that it may import. An actor also imports modules of its own package; see `own_package`."""

SHELL_SIDE: dict[str, str] = {
    "ringlog.actors.wal_shard.shell": "the effect table",
    "ringlog.actors.wal_shard.commit.scheduler_notifier": "writes news in shared memory",
    "ringlog.actors.wal_shard.requests.poison_requests": "notes in shared memory what a shard died of",
    "ringlog.actors.wal_shard.io.flusher": "the thread that syncs",
    "ringlog.actors.wal_shard.metrics.load_monitor": "measures pressure, and says so on the board",
    "ringlog.actors.wal_shard.leases.job_prefetcher": "reads jobs ahead for who claims them",
    "ringlog.actors.wal_shard.io.log_io": "writes and syncs the log",
    "ringlog.actors.wal_shard.io.reader_board": "shows topics and the ends of the log to readers",
    "ringlog.actors.wal_shard.io.idle_wait": "spins and sleeps",
    "ringlog.actors.wal_shard.requests.request_transport": "requests and replies by socket and call ring",
    "ringlog.actors.wal_shard.recovery.shard_start": "locks the log and starts the core after recovery",
    "ringlog.actors.wal_shard.io.read_only_probe": "looks whether a directory takes writes",
    "ringlog.actors.wal_shard.leases.worker_liveness": "looks whether workers on this host live",
    "ringlog.actors.wal_shard.metrics.queue_board": "shows what queues count on the board",
    "ringlog.actors.wal_shard.metrics.group_board": "shows what consumer groups count on the board",
    "ringlog.actors.wal_shard.io.preparer": "the thread that makes the next WAL file",
    "ringlog.actors.wal_shard.recovery.recovery": "reads the data directory for the pure replay",
    "ringlog.actors.wal_shard.recovery.recovery_result": "deletes and truncates files after it",
    "ringlog.actors.wal_shard.recovery.log_files": "finds and opens the log files for it",
    "ringlog.actors.wal_shard.recovery.log_chain": "reads registers and marks of log files for it",
    "ringlog.actors.wal_shard.recovery.file_replay": "reads one log file after the other for it",
    "ringlog.actors.wal_shard.recovery.file_ends": "syncs log files of other shard counts for it",
    "ringlog.actors.wal_shard.recovery.baseline": "reads snapshots and indexes of segments for it",
    "ringlog.actors.wal_shard.io.rings": "drains and settles rings in shared memory",
    "ringlog.actors.wal_shard.requests.call_rings": "requests about jobs in shared memory",
    "ringlog.actors.wal_shard.io.volatile_log": "writes the volatile log in shared memory",
    "ringlog.actors.gateway.shell": "the effect table",
    "ringlog.actors.gateway.requests.ring_push": "frames in the gateway's own ring",
    "ringlog.actors.gateway.front_end.zap": "answers libzmq's question about a connection",
    "ringlog.actors.gateway.front_end.zmq_frontend": "the sockets, bounded",
    "ringlog.actors.gateway.reads.frame_reader": "reads the log for remote clients",
    "ringlog.actors.gateway.front_end.sockets": "all sockets, bound together",
    "ringlog.actors.gateway.reads.stored_reads": "reads files and marks for remote clients",
    "ringlog.actors.gateway.reads.topic_watches": "looks whether watched topics changed",
    "ringlog.actors.gateway.reads.subscription_relay": "subscriptions of remote clients at schedulers",
    "ringlog.actors.compactor.shell": "the loop, and the socket for operators",
    "ringlog.actors.compactor.checkpoint": "makes segments and snapshots, unlinks the log",
    "ringlog.actors.compactor.logfile": "reads the log",
    "ringlog.actors.compactor.pass_executor": "runs passes in threads",
    "ringlog.actors.compactor.deletion_marks": "marks deleted records in segments",
    "ringlog.actors.relocator.shell": "the socket, the threads that fetch and the one that moves",
    "ringlog.actors.relocator.mover": "copies segments and deletes what was copied",
    "ringlog.actors.scheduler.shell": "the socket, news and topic tables of all shards",
    "ringlog.actors.scheduler.forwarding.forwarder": "follows and reads sources, sends passes to shards",
    "ringlog.actors.scheduler.forwarding.sources": "a reader's connection from within, open files of sources",
    "ringlog.actors.scheduler.forwarding.source_keep_alive": "asks shards for the sources of routers",
    "ringlog.actors.scheduler.forwarding.dead_letters": "reads spent jobs, sends their copies to shards",
    "ringlog.actors.scheduler.forwarding.redrive": "reads dead letters, sends their copies to shards",
    "ringlog.actors.scheduler.forwarding.dead_letter_stamps": "makes copies of dead letters from records",
    "ringlog.actors.scheduler.forwarding.forward_batch": "makes frames with the writer of segments",
    "ringlog.actors.scheduler.forwarding.router_admin": "asks shards to make routers and topics",
    "ringlog.actors.scheduler.forwarding.router_catch_up": "asks schedulers, reads topic tables of shards",
    "ringlog.actors.scheduler.delivery.grant_rings": "turns for clients on the host, in shared memory",
    "ringlog.actors.scheduler.delivery.load_monitor": "measures pressure, and says so on the board",
    "ringlog.actors.reclaimer.shell": "the socket, the free space, the threads that work",
    "ringlog.actors.reclaimer.reclaim_round": "rewrites segments, and lets files be removed",
    "ringlog.actors.reclaimer.shard_client": "asks shards",
    "ringlog.actors.reclaimer.segment_indexes": "reads indexes of segments",
    "ringlog.actors.reclaimer.orphan_sweep": "removes files",
    "ringlog.actors.reclaimer.rewriter": "writes segments from segments",
    "ringlog.actors.reclaimer.scrubber": "reads everything at rest, and heals",
}
"""Modules of actors that may do I/O, each with its purpose. Every other module of an actor is pure."""

IMPURE = {
    "asyncio", "concurrent", "fcntl", "logging", "mmap", "multiprocessing", "os", "random", "secrets",
    "select", "selectors", "signal", "socket", "subprocess", "tempfile", "threading", "time", "uuid", "zmq",
}  # fmt: skip

IMPURE_ALLOWED = {
    ("ringlog.frame.compress", "threading"): "one compressor for each thread; no thread is started",
}

PURE_UNITS = {
    "frame",
    "envelope",
    "access",
    "topic",
    "topic.segment_catalog",
    "leases",
    "contract",
    "actors.core",
}
PURE_MODULES = {
    "ringlog.errors",
    "ringlog.types",
    "ringlog._kernel",
    "ringlog.native_kernel",
    "ringlog.limits",
    "ringlog.tags",
    "ringlog.names",
    "ringlog.placement",
    "ringlog.observers",
    "ringlog.board.layout",
    "ringlog.settings",
    "ringlog.digests",
    "ringlog.environment",
    "ringlog.governor",
    "ringlog.segment.layout",
    *(f"ringlog.{name}" for name in PURE_STORAGE),
}
PURE_TO_NAME = {"ringlog", "ringlog.clock"}
"""Modules that pure code may import: the version, and the Clock that it receives."""


@dataclass(frozen=True)
class Import:
    """One import statement: the target module, the line, and whether it runs when the module is loaded."""

    target: str
    line: int
    is_at_load: bool


Sources = dict[str, str]


@cache
def tree_of(source: str) -> ast.Module:
    return ast.parse(source)


def sources() -> Sources:
    """Return every module by dotted name."""
    files = [*(ROOT / "ringlog").rglob("*.py"), *(ROOT / "actors").rglob("*.py"), *ROOT.glob("supervisor.py")]
    return {name_of(file): file.read_text() for file in files}


def name_of(file: Path) -> str:
    parts = file.relative_to(ROOT).with_suffix("").parts
    parts = ("ringlog", *parts) if parts[0] == "actors" else parts  # As imported: ringlog/actors is a link.
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def imports_of(module: str, modules: Sources) -> Iterator[Import]:
    """Return the imports of a module; names of submodules are resolved to them."""
    tree = tree_of(modules[module])
    at_load = set(map(id, _run_at_load(tree)))
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            for alias in node.names:
                yield Import(alias.name, node.lineno, id(node) in at_load)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{module}:{node.lineno} imports relatively"
            for alias in node.names:
                inner = f"{node.module}.{alias.name}"
                yield Import(
                    inner if inner in modules else str(node.module), node.lineno, id(node) in at_load
                )


def _run_at_load(tree: ast.AST) -> Iterator[ast.AST]:
    """Return the nodes outside of functions and of `if TYPE_CHECKING`."""
    for node in ast.iter_child_nodes(tree):
        is_typing = isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test)
        if not is_typing and not isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            yield node
            yield from _run_at_load(node)


def unit_of(module: str) -> str:
    """Return the row of the table to which a module belongs."""
    first, *rest = module.split(".")
    if first == "supervisor":
        return "supervisor"
    if not rest:
        return "root"
    if rest[0] == "actors":
        if not rest[1:]:
            return "actors"
        if rest[1] == "http_gateway" and rest[-1] != "__main__":
            return "actors.http_gateway"
        if module in SHELL_SIDE:
            return "actors.shell"
        return "actors.__main__" if rest[-1] == "__main__" else "actors.core"
    if rest[0] in BASE:
        return "base"
    dotted = ".".join(rest[:2])
    return dotted if dotted in MAY_IMPORT else rest[0]


def is_allowed(importer: str, target: str) -> bool:
    """Return True if the table allows the import."""
    if importer.startswith("ringlog.actors.") and target.startswith("ringlog.actors."):
        return own_package(importer, target)
    allowed = MAY_IMPORT[unit_of(importer)]
    unit = unit_of(target)
    return unit in allowed or target.removeprefix("ringlog.") in allowed


def own_package(importer: str, target: str) -> bool:
    """Return True if both modules belong to one actor, and no pure module imports its shell."""
    is_own = importer.split(".")[2] == target.split(".")[2]
    is_pure_side = unit_of(importer) == "actors.core"
    return is_own and not (is_pure_side and unit_of(target) != "actors.core")


def is_ours(target: str) -> bool:
    return target.split(".", maxsplit=1)[0] in {"ringlog", "supervisor", "tests", "chaos", "bench"}


def is_pure(module: str) -> bool:
    return unit_of(module) in PURE_UNITS or module in PURE_MODULES


def upward_imports(modules: Sources) -> list[str]:
    """Return the imports between own modules that the table does not allow."""
    return [
        f"{module}:{each.line} imports {each.target}"
        for module in sorted(modules)
        for each in imports_of(module, modules)
        if is_ours(each.target) and not is_allowed(module, each.target)
    ]


def impure_imports(modules: Sources) -> list[str]:
    """Return the imports of pure modules that do I/O, read a clock or use random numbers."""
    found = []
    for module in filter(is_pure, sorted(modules)):
        for each in imports_of(module, modules):
            first = each.target.split(".")[0]
            ours = is_ours(each.target) and not is_pure(each.target) and each.target not in PURE_TO_NAME
            theirs = first in IMPURE and (module, first) not in IMPURE_ALLOWED
            if theirs or (ours and not _is_empty_package(each.target, modules)):
                found.append(f"{module}:{each.line} imports {each.target}")
    return found


def _is_empty_package(target: str, modules: Sources) -> bool:
    return any(name.startswith(target + ".") for name in modules) and not list(imports_of(target, modules))


def cycle(modules: Sources) -> list[str]:
    """Return one import cycle of modules at load time, or an empty list."""
    graph = {
        module: {
            each.target for each in imports_of(module, modules) if each.is_at_load and each.target in modules
        }
        for module in modules
    }
    try:
        TopologicalSorter(graph).prepare()
    except CycleError as e:
        return list(e.args[1])
    return []


# -- the source tree ----------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def modules() -> Sources:
    found = sources()
    assert len(found) > 40, "the tree was found"
    return found


def test_every_module_has_a_row_in_the_table(modules):
    unknown = [name for name in modules if unit_of(name) not in {*MAY_IMPORT, "actors"}]
    assert not unknown


def test_every_import_is_allowed_by_the_table(modules):
    assert not upward_imports(modules)


def test_pure_modules_import_only_pure_modules(modules):
    assert not impure_imports(modules)


def test_no_modules_import_each_other_in_a_cycle(modules):
    assert not cycle(modules)


def test_every_exception_of_the_purity_rule_is_used(modules):
    for module, library in IMPURE_ALLOWED:
        if module in modules:
            assert library in {each.target for each in imports_of(module, modules)}, module


def test_importing_ringlog_loads_no_client(modules):
    """`import ringlog` starts nothing and stays cheap: it imports no other module of ours."""
    found = [each for each in imports_of("ringlog", modules) if each.is_at_load and is_ours(each.target)]
    assert [each.target for each in found] == ["ringlog.compilation"]
    ours = [each for each in imports_of("ringlog.compilation", modules) if is_ours(each.target)]
    assert not ours, "what it imports could not come compiled"


# -- tests of the checks ------------------------------------------------------------------------------

UPWARD = {
    "ringlog.errors": "from ringlog.frame import layout",
    "ringlog.frame.codec": "from ringlog.ring.layout import X",
    "ringlog.ring.ring": "import ringlog.frame.layout",
    "ringlog.envelope.wire": "from ringlog.contract import Tick",
    "ringlog.storage.wal": "from ringlog.board.board import Board",
    "ringlog.topic.state": "from ringlog.storage.disk import Disk",
    "ringlog.client.reader": "from ringlog.storage.wal import WalWriter",
    "ringlog.client.api": "from ringlog.actors.wal_shard.core import Core",
    "ringlog.link.peer": "from ringlog.client import connect",
    "ringlog.runtime.process": "def f():\n    from ringlog.topic.state import Topic",
    "ringlog.supervision.tree": "from ringlog.actors.gateway import core",
    "ringlog.verify.files": "from ringlog.frame.codec import decode",
    "ringlog.cli.serve": "from ringlog.testing import ManualClock",
    "ringlog.clock": "import tests.conftest",
    "ringlog.actors.gateway.core": "from ringlog.actors.wal_shard.events import X",
    "ringlog.actors.gateway.shell": "from ringlog.client import connect",
    "ringlog.actors.gateway.route": "from ringlog.actors.gateway.shell import Shell",
    "ringlog.actors.wal_shard.shell": "from ringlog.testing.clock import ManualClock",
    "ringlog.actors.wal_shard.__main__": "from ringlog.storage.real_disk import RealDisk",
    "supervisor": "from ringlog.actors.wal_shard import core",
}
STUBS = {
    "ringlog.frame.layout": "", "ringlog.frame.codec": "", "ringlog.ring.layout": "", "ringlog.contract": "",
    "ringlog.board.board": "", "ringlog.storage.disk": "", "ringlog.storage.real_disk": "",
    "ringlog.storage.wal": "", "ringlog.client": "",
    "ringlog.topic.state": "", "ringlog.testing": "", "ringlog.testing.clock": "",
    "ringlog.actors.gateway": "", "ringlog.actors.gateway.core": "", "ringlog.actors.gateway.shell": "",
    "ringlog.actors.wal_shard.core": "", "ringlog.actors.wal_shard.events": "", "ringlog.actors.wal_shard":
    "",
}  # fmt: skip


@pytest.mark.parametrize("module", UPWARD)
def test_an_upward_import_is_reported(module):
    assert len(upward_imports({**STUBS, module: UPWARD[module]})) == 1


@pytest.mark.parametrize(
    ("module", "source"),
    [
        ("ringlog.storage.reader", "from ringlog.board.board import Board"),
        ("ringlog.client.tailer", "from ringlog.storage.reader import TopicReader"),
        (
            "ringlog.actors.gateway.shell",
            "from ringlog.link.peer import Peer\nfrom ringlog.actors.gateway.core import Core",
        ),
        ("ringlog.topic.state", "from ringlog.storage.layout import pack_file"),
        ("ringlog.supervision.engine", "from ringlog.storage.real_disk import RealDisk"),
    ],
)
def test_an_allowed_import_is_not_reported(module, source):
    assert not upward_imports({**STUBS, module: source})


@pytest.mark.parametrize("library", sorted(IMPURE))
@pytest.mark.parametrize(
    "module", ["ringlog.actors.gateway.core", "ringlog.placement", "ringlog.storage.recovery"]
)
def test_an_impure_import_in_pure_code_is_reported(module, library):
    for source in (f"import {library}", f"from {library} import x", f"def f():\n    import {library}.inner"):
        assert len(impure_imports({module: source})) == 1


@pytest.mark.parametrize(
    ("module", "source"),
    [
        ("ringlog.actors.gateway.core", "from ringlog.storage.disk import Disk"),
        ("ringlog.actors.gateway.route", "from ringlog import stop_points"),
        ("ringlog.topic.state", "from ringlog.shm import make_file"),
        ("ringlog.frame.codec", "from ringlog.logs import log"),
    ],
)
def test_pure_code_that_does_io_through_own_modules_is_reported(module, source):
    stubs = {"ringlog.storage.disk": "", "ringlog.stop_points": "", "ringlog.shm": "", "ringlog.logs": ""}
    assert len(impure_imports({**stubs, module: source})) == 1


def test_a_shell_may_import_impure_modules():
    assert not impure_imports(
        {"ringlog.actors.gateway.shell": "import zmq, os, time", "ringlog.ring.region": "import mmap"}
    )


def test_a_cycle_at_load_time_is_reported_and_a_lazy_one_is_not():
    at_load = {"ringlog.a": "from ringlog import b", "ringlog.b": "import ringlog.a", "ringlog": ""}
    lazily = {**at_load, "ringlog.b": "def f():\n    import ringlog.a"}
    for_types = {**at_load, "ringlog.b": "if TYPE_CHECKING:\n    import ringlog.a"}
    assert set(cycle(at_load)) == {"ringlog.a", "ringlog.b"}
    assert not cycle(lazily)
    assert not cycle(for_types)
