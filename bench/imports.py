"""Time that an import of ringlog adds to a program, and its pytest plug-in to a test run that does not use
it.

The floor of a row is the same process without ringlog, started in turns with it.
"""

from __future__ import annotations

import subprocess
import sys
import tempfile
import time
from pathlib import Path

from bench.rows import Row, row

ROUNDS = 15
CONNECT_MS_MAX = 120.0
PLUGIN_MS_MAX = 20.0
IMPORT = ("-c", "from ringlog import connect")
BARE = ("-c", "")


def rows() -> list[Row]:
    """Measure both rows, in milliseconds."""
    with tempfile.TemporaryDirectory(prefix="bench-imports-") as directory:
        test = Path(directory, "test_nothing.py")
        test.write_text("def test_nothing():\n    pass\n")
        run = ("-m", "pytest", "-q", "-p", "no:cacheprovider", f"--rootdir={directory}", str(test))
        return [
            _row("import_connect", IMPORT, BARE, CONNECT_MS_MAX),
            _row("pytest_plugin_unused", run, (*run, "-p", "no:ringlog"), PLUGIN_MS_MAX),
        ]


def _row(name: str, ours: tuple[str, ...], bare: tuple[str, ...], above_ms_max: float) -> Row:
    values: list[float] = []
    floors: list[float] = []
    for _ in range(ROUNDS):
        values.append(_run_ms(ours))
        floors.append(_run_ms(bare))
    return row(name, "ms", values, floors, reach={"above_floor": above_ms_max})


def _run_ms(arguments: tuple[str, ...]) -> float:
    began = time.perf_counter()
    subprocess.run([sys.executable, *arguments], check=True, stdout=subprocess.DEVNULL)
    return (time.perf_counter() - began) * 1_000
