"""The synchronous client is the output of tools/unasync.py for the asyncio client."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest

from tools import unasync

ROOT = Path(__file__).parent.parent.parent
WRITTEN = {name: (ROOT / unasync.SOURCE / f"{name}.py").read_text() for name in unasync.FACADES}


@pytest.mark.parametrize("name", unasync.FACADES)
def test_a_generated_module_is_current(name):
    found = (ROOT / unasync.TARGET / f"{name}.py").read_text()
    assert found == unasync.generate(name), "run `make fmt`"


@pytest.mark.parametrize("name", unasync.FACADES)
def test_a_generated_module_has_no_asynchronous_code(name):
    tree = ast.parse(unasync.generate(name))
    kinds = (ast.AsyncFunctionDef, ast.AsyncFor, ast.AsyncWith, ast.Await)
    assert not [node.lineno for node in ast.walk(tree) if isinstance(node, kinds)]
    assert "asyncio" not in unasync.generate(name)


def test_every_text_pattern_is_used():
    for pattern in unasync.TEXTS:
        assert any(re.search(pattern, source) for source in WRITTEN.values()), pattern


@pytest.mark.parametrize(
    ("written", "generated"),
    [
        ("async def f(x):\n    return await g(x)\n", "def f(x):\n    return g(x)\n"),
        ("async for x in y:\n    await z()\n", "for x in y:\n    z()\n"),
        ("async with (await f()) as x: pass\n", "with (f()) as x: pass\n"),
        (
            "from ringlog.aio.shell import LoopShell\n",
            "from ringlog.client.connection.shell import ThreadedShell\n",
        ),
        ("def f():  # asyncio only\n    pass\n\n\nx = 1\n", "\n\nx = 1\n"),
        ("@a  # asyncio only\n@b\ndef f():\n    pass\nx = 1\n", "x = 1\n"),
        ('f("async with it: await this")\n', 'f("with it: this")\n'),
        ("x.await_all(asyncs)  # await it\n", "x.await_all(asyncs)  # it\n"),
    ],
)
def test_converted_removes_asyncio_syntax(written, generated):
    assert unasync.converted(written) == generated
