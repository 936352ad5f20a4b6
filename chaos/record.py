"""What was reached, kept in the repository: of each class its last good run, with commit, date and seed.

Only a class that passed is recorded, and only from a committed tree. The tables on
docs/explanation/reliability.md are made from these files and from nothing else.
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
    """One class, once."""

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
    """Keep the classes of a report that passed; returns their names. Nothing from a tree with changes."""
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
    """What is recorded of a plan, by class."""
    path = RESULTS / f"{plan}.json"
    return msgspec.json.decode(path.read_bytes(), type=dict[str, Reached]) if path.exists() else {}


def table(plan: str) -> str:
    """Markdown: each class of the plan, its floors, what was reached, when and from which commit."""
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
    """What is recorded of a plan; for a class of the night that it lacks, what the long plan recorded.

    Only where both have the same settings: then the long run did all that the night asks, and more.
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
    """Put the tables of all plans that have a place on the page where they belong."""
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
    """Whether anything that is run differs from the commit; results and pages may."""
    found: Any = subprocess.run(
        ["git", "status", "--porcelain", "--", "ringlog", "actors", "supervisor.py", "chaos/**.py"],
        cwd=ROOT, capture_output=True, text=True, check=False,
    )  # fmt: skip
    return found.returncode != 0 or bool(found.stdout.strip())
