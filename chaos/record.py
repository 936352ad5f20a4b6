"""Results in the repository: the last passing run of each class, with commit, date and seed.

A class is recorded only if it passed, and only from a committed tree. The tables of
docs/explanation/reliability.md are generated from these files alone.
"""

from __future__ import annotations

import subprocess
from pathlib import Path
from typing import Any

import msgspec

from chaos.plan import load_plan
from chaos.run import ROOT, Report

RESULTS = Path(__file__).parent / "results"
PAGE = ROOT / "docs" / "explanation" / "reliability.md"


class Reached(msgspec.Struct, kw_only=True):
    """One recorded run of one class."""

    target: str
    at: str
    commit: str
    seed: int
    seconds: float
    counts: dict[str, int]
    figures: dict[str, float]
    skipped: list[str]
    host: dict[str, str]


def record(report: Report) -> list[str]:
    """Record the classes of a report that passed. Returns their names.

    Records nothing if the tree has uncommitted changes.
    """
    if not report.commit or _has_changes():
        return []
    known = load_results(report.plan)
    names = []
    for verdict in report.verdicts:
        if not verdict.wrong and verdict.account.counts:
            known[verdict.name] = Reached(
                target=verdict.target, at=report.begun, commit=report.commit, seed=verdict.seed,
                seconds=verdict.seconds, counts=dict(verdict.account.counts), figures=verdict.account.figures,
                skipped=[f"{skip.what}: {skip.why}" for skip in verdict.account.skipped], host=report.host,
            )  # fmt: skip
            names.append(verdict.name)
    if not names:
        return []
    RESULTS.mkdir(exist_ok=True)
    encoded = msgspec.json.encode(dict(sorted(known.items())))
    (RESULTS / f"{report.plan}.json").write_bytes(msgspec.json.format(encoded, indent=1) + b"\n")
    return names


def load_results(plan: str) -> dict[str, Reached]:
    """Return the recorded runs of a plan, by class."""
    path = RESULTS / f"{plan}.json"
    return msgspec.json.decode(path.read_bytes(), type=dict[str, Reached]) if path.exists() else {}


def table(plan: str) -> str:
    """Return a Markdown table: each class with its floors, what it reached, when, and at which commit."""
    results = _with_longer(plan)
    lines = [
        "| figure | class | at least | reached | seconds | date, commit, seed |",
        "|---|---|---|---|---|---|",
    ]
    for entry in load_plan(plan).entries:
        floors = ", ".join(f"{number:,} {_words(what)}" for what, number in entry.floors.items())
        found = results.get(entry.name)
        if found is None:
            lines.append(f"| {entry.target} | `{entry.name}` | {floors} | not run yet | | |")
            continue
        counts = ", ".join(f"{number:,} {_words(what)}" for what, number in sorted(found.counts.items()))
        when = f"{found.at[:10]}, {found.commit}, {found.seed}"
        lines.append(
            f"| {entry.target} | `{entry.name}` | {floors} | {counts} | {found.seconds:.0f} | {when} |"
        )
    return "\n".join(lines)


def _with_longer(plan: str) -> dict[str, Reached]:
    """Return the recorded runs of a plan.

    A class of the night that has no run takes its run of the long plan, if both plans have the same settings.
    Then the long run did everything that the night requires, and more.
    """
    results = load_results(plan)
    if plan != "night":
        return results
    entries, longer = load_plan("long").by_name, load_results("long")
    same = {
        entry.name: longer[entry.name]
        for entry in load_plan(plan).entries
        if entry.name in longer and entries[entry.name].settings == entry.settings
    }
    return {**same, **results}


def write_page(page: Path = PAGE) -> None:
    """Write the tables of all plans into the page, between their markers."""
    text = page.read_text()
    for plan in ("ci", "night", "long"):
        begin, end = f"<!-- reached:{plan} -->", f"<!-- end:{plan} -->"
        if begin in text and end in text:
            before, _, rest = text.partition(begin)
            _, _, after = rest.partition(end)
            text = f"{before}{begin}\n{table(plan)}\n{end}{after}"
    page.write_text(text)


def _words(name: str) -> str:
    return name.replace("_", " ")


def _has_changes() -> bool:
    """Whether any code that runs differs from the commit. Results and pages may differ."""
    found: Any = subprocess.run(
        ["git", "status", "--porcelain", "--", "ringlog", "actors", "supervisor.py", "chaos/**.py"],
        cwd=ROOT, capture_output=True, text=True, check=False,
    )  # fmt: skip
    return found.returncode != 0 or bool(found.stdout.strip())
