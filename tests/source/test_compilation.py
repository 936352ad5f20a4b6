"""Compiled modules: which ones there are, and their imports."""

from __future__ import annotations

import ast
import importlib.util
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest

pytestmark = pytest.mark.slow

ROOT = Path(__file__).parent.parent.parent
PLAIN_BASES = {"Protocol", "NamedTuple", "Enum", "IntEnum", "StrEnum", "IntFlag"}


def setup_script() -> ModuleType:
    spec = importlib.util.spec_from_file_location("setup_script", ROOT / "setup.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture
def compiled(monkeypatch: pytest.MonkeyPatch) -> set[str]:
    """The files that a wheel has compiled."""
    monkeypatch.chdir(ROOT)
    found = setup_script().libraries()
    assert sorted(found) == ["ringlog._client", "ringlog._lines", "ringlog._shard", "ringlog._state"]
    files = [file for files in found.values() for file in files]
    assert len(files) == len(set(files)) > 100
    return set(files)


def delegations(path: Path) -> dict[str, int]:
    """The functions that a module calls in `yield from`, each with a line."""
    calls = [node.value for node in ast.walk(ast.parse(path.read_text())) if isinstance(node, ast.YieldFrom)]
    return {
        each.func.attr if isinstance(each.func, ast.Attribute) else ast.unparse(each.func): each.lineno
        for each in calls
        if isinstance(each, ast.Call)
    }


def generators(path: Path) -> set[str]:
    return {
        node.name
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.FunctionDef)
        and any(isinstance(inner, ast.Yield | ast.YieldFrom) for inner in ast.walk(node))
    }


def test_no_compiled_generator_delegates_to_an_interpreted_one(compiled: set[str]) -> None:
    """mypyc passes an exception on with a call that is deprecated since Python 3.12. A test run that turns
    warnings into errors would fail in it. `yield from delegate(...)` has no such call."""
    product = {
        str(path.relative_to(ROOT)) for top in ("actors", "ringlog") for path in (ROOT / top).rglob("*.py")
    }
    native = {name for file in compiled for name in generators(ROOT / file)}
    plain = {
        name
        for file in product
        if file not in compiled and f"ringlog/{file}" not in compiled
        for name in generators(ROOT / file)
    }
    found = {
        f"{file}:{line} {name}"
        for file in compiled
        for name, line in delegations(ROOT / file).items()
        if name in plain - native
    }
    assert not found


def test_no_interpreted_class_derives_from_a_compiled_one(compiled: set[str]) -> None:
    """Such a class cannot be instantiated in processes that run compiled."""
    natives = {
        (module_of(file), node.name)
        for file in compiled
        for node in classes_of(ROOT / file)
        if not PLAIN_BASES & set(bases_of(node))
    }
    found = []
    for package in ("actors", "bench", "chaos", "demo", "examples", "pyspark_ringlog", "ringlog"):
        for path in (ROOT / package).rglob("*.py"):
            file = str(path.relative_to(ROOT))
            if file in compiled or f"ringlog/{file}" in compiled:
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


def test_actors_have_one_import_name() -> None:
    code = "import actors"
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=False)
    assert "import ringlog.actors instead" in done.stderr
