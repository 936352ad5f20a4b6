"""Compiled cores are used only for the exact sources from which they were made, and unless a program disables
them."""

from __future__ import annotations

import ast
import json
import os
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

import compile_cores
from ringlog import cores
from ringlog.testing import engine
from ringlog.testing.children import debug_environ
from ringlog.testing.real_engine import wait_until


@pytest.fixture
def made(tmp_path: Path) -> tuple[Path, Path]:
    """A tree with one source, and a manifest that says that it was compiled."""
    (tmp_path / "a.py").write_text("x = 1\n")
    target = tmp_path / "cores"
    target.mkdir()
    manifest = {"suffix": cores.SUFFIX, "sources": {"a.py": cores.digest(tmp_path / "a.py")}}
    (target / "manifest.json").write_text(json.dumps(manifest))
    return target, tmp_path


def test_cores_of_the_current_sources_are_used(made) -> None:
    assert cores.stale_reason(*made) == ""


def test_cores_of_a_changed_source_are_stale(made) -> None:
    target, root = made
    (root / "a.py").write_text("x = 2\n")
    assert cores.stale_reason(target, root) == "a.py has changed since"
    (root / "a.py").unlink()
    assert cores.stale_reason(target, root) == "not compiled"


def test_cores_of_another_interpreter_are_stale(made) -> None:
    target, root = made
    manifest = json.loads((target / "manifest.json").read_text())
    (target / "manifest.json").write_text(json.dumps(manifest | {"suffix": ".other.so"}))
    assert cores.stale_reason(target, root) == "compiled for another Python"


@pytest.mark.parametrize("text", ["", "[]", "{}", '{"suffix": 1, "sources": 2}', "\xff"])
def test_an_invalid_manifest_means_not_compiled(made, text: str) -> None:
    target, root = made
    (target / "manifest.json").write_bytes(text.encode("latin-1"))
    assert cores.stale_reason(target, root) in {"not compiled", "compiled for another Python"}


def run(code: str, wish: str) -> list[str]:
    """Return the output lines of a new process that runs with RINGLOG_CORES=`wish`."""
    environ = {**os.environ, cores.VARIABLE: wish}
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, env=environ, cwd=cores.ROOT
    )
    return done.stdout.splitlines()


HAS_CORES = not cores.stale_reason(cores.TARGET, cores.ROOT)
WHERE_FROM = "import ringlog.client.connection.shell as it; print(it.__file__.endswith('.py'))"


@pytest.mark.parametrize(
    ("wish", "is_source"), [("1", not HAS_CORES), ("0", True), ("actors", True), ("", not HAS_CORES)]
)
def test_a_program_runs_the_compiled_client_unless_cores_are_disabled(wish: str, is_source: bool) -> None:
    assert run(WHERE_FROM, wish) == [str(is_source)]


def test_no_compiled_module_is_used_after_a_source_module() -> None:
    """Its classes would differ. A finder that is installed late, or removed meanwhile, finds no module."""
    code = (
        "import sys, ringlog; from ringlog import cores;"
        "late = [sys.meta_path.pop(0)]; import ringlog.topic.state as it; cores.install_finder();"
        "print(it.__file__.endswith('.py')); print(cores.disabled_reason())"
    )
    from_source, why = run(code, "1")
    assert from_source == "True"
    assert ("is imported already" in why) if HAS_CORES else why


def test_no_interpreted_class_derives_from_a_compiled_one() -> None:
    """Such a class cannot be instantiated in processes that run compiled."""
    compiled = {file for files in compile_cores.sources().values() for file in files}
    natives = {
        (module_of(file), node.name)
        for file in compiled
        for node in classes_of(cores.ROOT / file)
        if not {"Protocol", "NamedTuple", "Enum", "IntEnum", "StrEnum", "IntFlag"} & set(bases_of(node))
    }
    found = []
    for package in ("actors", "bench", "chaos", "demo", "examples", "pyspark_ringlog", "ringlog"):
        for path in (cores.ROOT / package).rglob("*.py"):
            file = str(path.relative_to(cores.ROOT))
            if file in compiled:
                continue
            tree = ast.parse(path.read_text())
            known = {
                alias.asname or alias.name: (node.module, alias.name)
                for node in ast.walk(tree)
                if isinstance(node, ast.ImportFrom)
                for alias in node.names
            }
            found += [
                f"{file}: {node.name}({base})"
                for node in classes_of(path)
                for base in bases_of(node)
                if known.get(base) in natives
            ]
    assert not found


def module_of(file: str) -> str:
    """Return the dotted name of a path relative to the root."""
    return file.removesuffix(".py").replace("/", ".")


def classes_of(path: Path) -> list[ast.ClassDef]:
    """Return all classes that a file defines."""
    return [node for node in ast.walk(ast.parse(path.read_text())) if isinstance(node, ast.ClassDef)]


def bases_of(node: ast.ClassDef) -> list[str]:
    """Return the names of the base classes, without type parameters."""
    plain = (base.value if isinstance(base, ast.Subscript) else base for base in node.bases)
    return [base.id for base in plain if isinstance(base, ast.Name)]


def test_the_test_process_is_no_actor_process() -> None:
    assert not cores.is_actor_process()


@pytest.mark.slow
@pytest.mark.parametrize("wish", ["1", "0"])
def test_shards_log_whether_they_run_compiled(wish: str) -> None:
    """They run compiled if cores exist, and never if cores are disabled."""
    is_compiled = wish == "1" and not cores.stale_reason(cores.TARGET, cores.ROOT)

    def said() -> list[str]:
        lines = running.log_path.read_text().splitlines()
        return [each for each in lines if '"event":"ready","actor":"wal_shard' in each]

    with engine(environ={"RINGLOG_CORES": wish}, wal={"shards": 1}) as running:
        wait_until(lambda: bool(said()), 20, "the shard to say it")
        assert json.loads(said()[0])["compiled"] is is_compiled


FIRST_USES = """
    import gc, os, sys
    import ringlog.client

    class Hit(KeyboardInterrupt):
        pass

    def use():
        client = ringlog.connect(sys.argv[1], client_id="c")
        for begin in (
            lambda: client.queue("q"), lambda: client.reader("t"), lambda: client.tailer("t"),
            lambda: client.watch("t"), lambda: client.group("t", "g"),
            lambda: client.numbered_producer("t", 7),
        ):
            begin()
        client.close(0)

    def interrupted_at(call):
        calls = 0

        def count(*_):
            nonlocal calls
            calls += 1
            if calls == call:
                sys.setprofile(None)
                raise Hit

        sys.setprofile(count)
        try:
            use()
        except Hit:
            pass
        sys.setprofile(None)
        gc.collect()
        use()

    for call in map(int, sys.argv[2:]):
        pid = os.fork()
        if pid == 0:
            interrupted_at(call)
            os._exit(0)
        print(call, os.waitpid(pid, 0)[1])
"""
CALLS = [200, 600, 2_000, 4_000, 6_000, 8_000, 10_000]


@pytest.mark.skipif(not HAS_CORES, reason="needs compiled cores")
def test_a_client_whose_first_use_was_interrupted_works_the_second_time(tmp_path: Path) -> None:
    """An exception during the import of a compiled module would end the process, then or at the next attempt.

    A profile hook of the interpreter raises the exception at a counted call. Signals and exceptions of other
    threads occur at such points.
    """
    program = [sys.executable, "-c", textwrap.dedent(FIRST_USES), f"ringlog://{tmp_path}", *map(str, CALLS)]
    done = subprocess.run(
        program, capture_output=True, text=True, timeout=100, check=False, env=debug_environ(), cwd=cores.ROOT
    )
    assert done.stdout.splitlines() == [f"{call} 0" for call in CALLS], done.stderr
