""""""

from __future__ import annotations

import ast
import asyncio
import builtins
import contextlib
import inspect
import os
import re
import signal
import subprocess
import sys
import textwrap
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from ringlog import errors
from ringlog.testing.real_engine import TestEngine, engine
from tests.support.machine import has_processes

ROOT = Path(__file__).parent.parent.parent
PYTHON = {"python"}

SHELL = {"sh", "console"}

BLOCK_S = 60

END_S = 10

FENCE = re.compile(r"^( *)(`{3,}|~{3,})([^`\n]*)$")

COMMENT = re.compile(r"^ *<!-- (not run|file|exit|raises|engine): (.+) -->$")

ENGINE_STEP = re.compile(r"^ *<!-- engine (stops|starts) -->$")


@dataclass(frozen=True, slots=True)
class Block:
    """One fenced block, or a step between blocks (`info` is then "engine")."""

    page: str
    line: int
    info: str
    code: str
    options: dict[str, str] = field(default_factory=dict)

    @property
    def is_code(self) -> bool:
        """True for Python and shell blocks."""
        return self.info in PYTHON | SHELL

    @property
    def where(self) -> str:
        """Page and line, for messages."""
        return f"{self.page}:{self.line}"


def blocks_of(page: str) -> list[Block]:
    """Return the blocks and steps of a page, in order."""
    lines = (ROOT / page).read_text().splitlines()
    found: list[Block] = []
    options: dict[str, str] = {}
    at = 0
    while at < len(lines):
        line = lines[at]
        at += 1
        if comment := COMMENT.match(line):
            if comment[1] != "engine":
                options[comment[1]] = comment[2]
        elif step := ENGINE_STEP.match(line):
            found.append(Block(page, at, "engine", step[1]))
        elif fence := FENCE.match(line):
            first = at
            while lines[at].strip() != fence[2]:
                at += 1
            code = textwrap.dedent("\n".join(lines[first:at]) + "\n")
            found.append(Block(page, first + 1, fence[3].strip(), code, options))
            options = {}
            at += 1
        elif line.strip():
            assert not options, f"{page}:{at}: a comment about a block has no block behind it"
    return found


def settings_of(page: str) -> dict[str, str]:
    """Return the settings of the page's engine."""
    comments = filter(None, map(COMMENT.match, (ROOT / page).read_text().splitlines()))
    pairs = " ".join(each[2] for each in comments if each[1] == "engine").split()
    return dict(pair.split("=", 1) for pair in pairs)


class PageRunner:
    """Runs the blocks of one page in a directory."""

    def __init__(self, page: str, directory: Path, running: TestEngine) -> None:
        self.engine = running
        self.names: dict[str, Any] = {"__name__": page}
        self._directory = directory
        self._loop = asyncio.Runner()
        self._groups: list[int] = []
        programs = directory / ".bin"
        programs.mkdir()
        for program, call in (
            ("ringlog", "-c 'import sys; from ringlog.cli import main; sys.exit(main())'"),
            ("python", ""),
        ):
            path = programs / program
            path.write_text(f'#!/bin/sh\nexec {sys.executable} {call} "$@"\n')
            path.chmod(0o755)
        self._environ = {
            "PATH": f"{programs}:{os.environ['PATH']}", "PYTHONPATH": f"{directory}:{ROOT}",
            "RINGLOG_ALLOW_ROOT": "true",
        }  # fmt: skip

    def run(self, block: Block) -> None:
        """Run a block, or write it to its file."""
        if "not run" in block.options:
            return
        if path := block.options.get("file"):
            (self._directory / path).write_text(block.code)
        elif block.info == "engine":
            self.engine.stop() if block.code == "stops" else self.engine.start()
        elif block.info in PYTHON:
            self._run_python(block)
        elif block.info in SHELL:
            self._run_shell(block)

    def close(self) -> None:
        """Close the objects and end the processes that the blocks created."""
        for value in reversed(list(self.names.values())):
            if type(value).__module__.startswith("ringlog.") and hasattr(value, "close"):
                with contextlib.suppress(errors.RinglogError, AttributeError):
                    closing = value.close()
                    if inspect.isawaitable(closing):
                        self._loop.run(_awaited(closing))
        self._loop.close()
        for signum in (signal.SIGTERM, signal.SIGKILL):
            for group in self._groups:
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(group, signum)
            deadline = time.monotonic() + END_S
            while any(map(has_processes, self._groups)) and time.monotonic() < deadline:
                time.sleep(0.02)

    def _run_python(self, block: Block) -> None:
        code = compile(
            "\n" * (block.line - 1) + block.code, block.page, "exec", ast.PyCF_ALLOW_TOP_LEVEL_AWAIT
        )
        expected = block.options.get("raises")
        kind = getattr(errors, expected, None) or getattr(builtins, expected) if expected else None
        with pytest.raises(kind) if kind else contextlib.nullcontext():
            result = eval(code, self.names)
            if inspect.iscoroutine(result):
                self._loop.run(result)

    def _run_shell(self, block: Block) -> None:
        output = self._directory / ".output"
        with output.open("wb") as out:
            process = subprocess.Popen(
                ["bash", "-c", f"set -eu\n{commands(block.code)}"], cwd=self._directory, stdout=out,
                stderr=out, stdin=subprocess.DEVNULL, start_new_session=True,
                env=os.environ | self._environ,
            )  # fmt: skip
            self._groups.append(process.pid)
            try:
                status = process.wait(BLOCK_S)
            except subprocess.TimeoutExpired:
                os.killpg(process.pid, signal.SIGKILL)
                status = process.wait()
        shown = output.read_text(errors="replace")
        assert status == int(block.options.get("exit", "0")), (
            f"{block.where} exits with {status}\n{block.code}\n{shown}"
        )


def commands(code: str) -> str:
    """Return the commands of a shell block: the lines after `$ `, or the whole block without any."""
    if not code.startswith("$ "):
        return code
    kept: list[str] = []
    continues = False
    for line in code.splitlines():
        if continues or line.startswith("$ "):
            kept.append(line if continues else line[2:])
            continues = line.endswith("\\")
    return "\n".join(kept)


async def _awaited(what: Any) -> None:
    await what


@contextlib.contextmanager
def page_runner(page: str, directory: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[PageRunner]:
    """Make a runner for the page with its own engine, and change to the directory."""
    settings = {"wal.shards": "2", "delivery.schedulers": "1"} | settings_of(page)
    with engine(directory=directory / ".engine", **settings) as running:
        (directory / "ringlog-data").symlink_to(running.data_dir)
        monkeypatch.setenv("RINGLOG_URL", running.url)
        if running.info.http_url:
            monkeypatch.setenv("HTTP", running.http_url)
        monkeypatch.chdir(directory)
        monkeypatch.syspath_prepend(directory)
        modules, environ = set(sys.modules), dict(os.environ)
        runner = PageRunner(page, directory, running)
        try:
            yield runner
        finally:
            runner.close()
            os.environ.clear()
            os.environ.update(environ)
            for module in set(sys.modules) - modules:
                if str(getattr(sys.modules[module], "__file__", "")).startswith(str(directory)):
                    del sys.modules[module]
