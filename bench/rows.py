"""Result rows: the content of bench/results/AREA.json, and the printed table.

A row states what was measured (`id`, `value`, `unit`), the lowest and highest round (`spread`), the floor or
peer of the same rounds (`against`), the median of the rounds' ratios (`ratio`), the target (`reach`), and
whether it is met (`met`).
"""

from __future__ import annotations

import json
import os
import statistics
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from ringlog import environment

SCALE = environment.BENCH_SCALE
"""Environment variable with the share of the data to measure. Below 1 to try a benchmark out."""
RESULTS = Path(__file__).parent / "results"

MOMENT = ("at", "page_first_us", "page_after_pause_us")
"""Facts of the machine that each row contains."""

Row = dict[str, Any]


def row(
    id: str,
    unit: str,
    values: Sequence[float],
    floors: Sequence[float] = (),
    *,
    reach: dict[str, float] | None = None,
    note: str = "",
) -> Row:
    """Build one row from the rounds.

    `reach` may contain `min` and `max` (of the value), `ratio` (minimum), `ratio_max` and `above_floor`.
    """
    value = statistics.median(values)
    against = statistics.median(floors) if floors else None
    ratios = [v / f for v, f in zip(values, floors, strict=True)] if floors else []
    ratio = statistics.median(ratios) if ratios else None
    met = True
    for kind, bound in (reach or {}).items():
        if kind == "min":
            met &= value >= bound
        elif kind == "max":
            met &= value <= bound
        elif kind == "ratio":
            met &= ratio is not None and ratio >= bound
        elif kind == "ratio_max":
            met &= ratio is not None and ratio <= bound
        elif kind == "above_floor":
            met &= against is not None and value - against <= bound
    return {
        "id": id,
        "value": value,
        "unit": unit,
        "spread": [min(values), max(values)],
        "against": against,
        "ratio": ratio,
        "reach": reach,
        "met": met,
        "note": note,
    }


def skipped(id: str, unit: str, reason: str) -> Row:
    """Return a row that could not be measured here, with the reason."""
    return {
        "id": id,
        "value": None,
        "unit": unit,
        "spread": [None, None],
        "against": None,
        "ratio": None,
        "reach": None,
        "met": None,
        "note": f"skipped: {reason}",
    }


def number(value: float | None) -> str:
    """Return a number with three digits, or in whole units from 1,000 on."""
    if value is None:
        return "-"
    if abs(value) >= 1000:
        return f"{value:,.0f}"
    return f"{value:.3g}"


def show(rows: Sequence[Row]) -> None:
    """Print the table."""
    head = ("workload", "value", "unit", "spread", "against", "ratio", "reach", "met")
    lines = [head]
    for r in rows:
        reach = ", ".join(f"{kind} {number(bound)}" for kind, bound in (r["reach"] or {}).items())
        spread = f"{number(r['spread'][0])} .. {number(r['spread'][1])}"
        met = "skipped" if r["met"] is None else "yes" if r["met"] else "NO"
        lines.append(
            (
                r["id"],
                number(r["value"]),
                r["unit"],
                spread,
                number(r["against"]),
                number(r["ratio"]),
                reach,
                met,
            )
        )
    table(lines)


def table(lines: Sequence[Sequence[str]]) -> None:
    """Print lines of equally many cells. The first line contains the names of the columns."""
    widths = [max(len(line[i]) for line in lines) for i in range(len(lines[0]))]
    for line in lines:
        print("  ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)).rstrip())


def save(area: str, rows: Sequence[Row], machine: dict[str, Any], *, keep_others: bool) -> Path:
    """Write bench/results/AREA.json. With `keep_others`, rows that were not measured now stay as they were.

    Each row states when it was measured, and the speed of the machine at that time.
    """
    RESULTS.mkdir(exist_ok=True)
    path = RESULTS / f"{area}.json"
    moment = {name: machine[name] for name in MOMENT}
    measured = {row["id"]: {**row, **moment} for row in rows}
    if keep_others and path.exists():
        before = json.loads(path.read_text())
        kept = [row for row in before["rows"] if row["id"] not in measured]
        measured = {row["id"]: row for row in kept} | measured
    write(path, area, list(measured.values()), machine)
    return path


def write(path: Path, area: str, rows: Sequence[Row], machine: dict[str, Any]) -> None:
    """Write rows and the facts of the machine to a file."""
    path.write_text(json.dumps({"area": area, "machine": machine, "rows": list(rows)}, indent=1) + "\n")


def scaled(count: int, least: int = 1) -> int:
    """Return `count`, or the share of it that --scale sets; at least `least`."""
    return max(round(count * float(os.environ.get(SCALE, "1"))), least)


def part_of(amount: float, least: float) -> float:
    """Return `amount` (such as seconds), or the share of it that --scale sets; at least `least`."""
    return max(amount * float(os.environ.get(SCALE, "1")), least)


def progress(text: str) -> None:
    """Print progress to standard error."""
    print(text, file=sys.stderr, flush=True)
