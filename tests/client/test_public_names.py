"""Public names can be imported, and importing loads no module that the program does not use."""

from __future__ import annotations

import ast
import json
import subprocess
import sys
from pathlib import Path

import pytest

import ringlog
from ringlog import client

ROOT = Path(__file__).parent.parent.parent
HEAVY = {"msgspec", "numpy", "pyarrow", "zmq"}


def modules_after(code: str) -> set[str]:
    """Return the names of all modules that an interpreter has loaded after this code."""
    program = f"{code}\nimport json, sys; print(json.dumps(sorted(sys.modules)))"
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=True, timeout=50
    )
    return set(json.loads(done.stdout))


@pytest.mark.slow
@pytest.mark.parametrize("code", ["import ringlog", "from ringlog import connect", "import ringlog.client"])
def test_import_loads_no_heavy_module(code):
    loaded = modules_after(code)
    assert not HEAVY & loaded
    assert {name for name in loaded if name.startswith("ringlog.")} <= {
        "ringlog.client",
        "ringlog.compilation",
    }


@pytest.mark.slow
@pytest.mark.parametrize(
    "modules",
    [
        "ringlog.client.client",
        "ringlog.supervision.serve",
        *(
            f"ringlog.actors.{kind}.__main__"
            for kind in ("wal_shard", "gateway", "scheduler", "compactor", "reclaimer")
        ),
    ],
)
def test_neither_the_client_nor_the_engine_loads_asyncio_or_openssl(modules):
    """They take 15 ms of each start and 5 MiB, and only programs with keys or ids need them."""
    assert not {"asyncio", "_hashlib", "_ssl"} & modules_after(f"import {modules}")


@pytest.mark.slow
def test_the_pytest_plugin_loads_no_heavy_module():
    before, after = modules_after("import pytest"), modules_after("import ringlog.testing.pytest_plugin")
    assert not HEAVY & after
    ours = {"ringlog", "ringlog.compilation", "ringlog.testing", "ringlog.testing.pytest_plugin"}
    assert {name for name in after - before if name.startswith("ringlog")} == ours


@pytest.mark.parametrize("name", sorted(set(ringlog.__all__) - {"spark"}))
def test_every_public_name_can_be_imported(name):
    assert getattr(ringlog, name) is not None
    assert name in dir(ringlog)


def test_an_unknown_name_raises_attribute_error():
    with pytest.raises(AttributeError, match="no_such_name"):
        ringlog.no_such_name  # noqa: B018
    with pytest.raises(AttributeError, match="no_such_name"):
        client.no_such_name  # noqa: B018


def imported_for_types(path: str) -> dict[str, str]:
    """Return the names that a module imports only for type checkers, with their modules."""
    tree = ast.parse((ROOT / path).read_text())
    (block,) = [node for node in tree.body if isinstance(node, ast.If)]
    return {
        alias.name: str(node.module)
        for node in block.body
        if isinstance(node, ast.ImportFrom)
        for alias in node.names
    }


def test_type_checkers_and_programs_import_a_name_from_one_module():
    assert imported_for_types("ringlog/client/__init__.py") == client._HOMES
    assert {*client._HOMES, "connect"} == set(client.__all__)
    packages = {"aio", "client", "errors", "spark", "testing"}
    assert set(imported_for_types("ringlog/__init__.py")) == {*client.__all__, *packages}
    assert set(ringlog.__all__) == {*client.__all__, *packages, "__version__"}
