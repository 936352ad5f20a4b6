"""Generate the synchronous client from the asyncio client: `python tools/unasync.py`.

The modules in FACADES are written once, for asyncio, in ringlog/aio. Their synchronous twins in
ringlog/client are generated and committed. A twin has no `async` and no `await`; names are replaced by NAMES,
and texts by TEXTS. Where the two differ, both packages have modules or methods of the same name, most of them
in `shell`. A function that only asyncio has is marked: its first line ends with `# asyncio only`.

`make fmt` writes the twins. `make check` fails if a twin is not current (tests/source/test_unasync.py).
"""

from __future__ import annotations

import ast
import io
import re
import subprocess
import sys
import tokenize
from collections.abc import Iterable
from pathlib import Path

ROOT = Path(__file__).parent.parent
SOURCE, TARGET = "ringlog/aio", "ringlog/client"
FACADES = (
    "batch_iteration",
    "claims",
    "group",
    "job",
    "job_iteration",
    "lease_client",
    "operations",
    "queue",
    "reader",
    "routers",
    "tailer",
    "ticket",
    "topics",
    "watch",
)

NAMES = {
    "AsyncIterator": "Iterator",
    "LoopShell": "ThreadedShell",
    "__aenter__": "__enter__",
    "__aexit__": "__exit__",
    "__aiter__": "__iter__",
    "aio": "client",
    "asyncio": "threading",
    "run_reading": "run",
}
"""Replacements of whole names in code."""
TEXTS = {
    r"\basync (def|for|with) ": r"\1 ",
    r"\bawait (?!ticket`)": "",
    r"\bringlog\.aio\b": "ringlog.client",
    r"; `await ticket` gives their numbers\.": ". Thread-safe.",
    r"\bTimeoutError when `timeout` ended": "RequestTimeout too when `timeout` ended",
    r"\bOne task at a time\b": "One thread at a time",
    r"\bfrom the loop; soon if": "from any thread; at once if",
}
"""Replacements of patterns in docstrings and comments."""
ELSEWHERE = re.compile(r"\bringlog\.client\.(shell|ref_count)\b")
"""Modules of ringlog/aio whose counterparts are in a subpackage of the client."""
ONLY = "# asyncio only"
TIDY = ["check", "--quiet", "--select=F401,I,SIM117,UP028", "--fix-only", "--unsafe-fixes"]
"""Ruff rules that remove unused imports, sort imports, and simplify code that no longer needs `async`."""

Edit = tuple[int, int, str]
"""(start, end, replacement)."""


def converted(source: str) -> str:
    """Return the synchronous form of the source; the code is not formatted."""
    starts = [0]
    for line in source.splitlines(keepends=True):
        starts.append(starts[-1] + len(line))
    left_out = list(_left_out(source))
    edits: list[Edit] = [(starts[first], starts[end], "") for first, end in left_out]
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        row = token.start[0] - 1
        if any(first <= row < end for first, end in left_out):
            continue
        begin, end = starts[row] + token.start[1], starts[token.end[0] - 1] + token.end[1]
        if token.string in {"async", "await"}:
            edits.append((begin, end + 1, ""))  # Including the space after it.
        elif token.type == tokenize.NAME and token.string in NAMES:
            edits.append((begin, end, NAMES[token.string]))
        elif token.type in {tokenize.STRING, tokenize.COMMENT}:
            edits.append((begin, end, _reworded(token.string)))
    for begin, end, text in sorted(edits, reverse=True):
        source = source[:begin] + text + source[end:]
    return ELSEWHERE.sub(r"ringlog.client.connection.\1", source)


def _left_out(source: str) -> Iterable[tuple[int, int]]:
    """Yield (first line, line after the last) of each function that only asyncio has."""
    lines = source.splitlines()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            first = min([node.lineno, *(each.lineno for each in node.decorator_list)])
            if lines[first - 1].endswith(ONLY):
                yield first - 1, int(node.end_lineno or 0)


def _reworded(text: str) -> str:
    for pattern, instead in TEXTS.items():
        text = re.sub(pattern, instead, text)
    return text


def generate(name: str) -> str:
    """Return the synchronous twin of an asyncio module, formatted as it is committed."""
    written = f"{SOURCE}/{name}.py"
    header = f"# Generated from {written} by tools/unasync.py: do not edit; `make fmt` regenerates it.\n"
    text = header + converted((ROOT / written).read_text())
    for arguments in (TIDY, ["format", "--quiet"]):
        ruff = [sys.executable, "-m", "ruff", *arguments, f"--stdin-filename={TARGET}/{name}.py", "-"]
        text = subprocess.run(ruff, input=text, capture_output=True, text=True, check=True, cwd=ROOT).stdout
    return text


def main() -> None:
    """Write the twins that are not current."""
    for name in FACADES:
        twin, text = ROOT / TARGET / f"{name}.py", generate(name)
        if not twin.exists() or twin.read_text() != text:
            twin.write_text(text)


if __name__ == "__main__":
    main()
