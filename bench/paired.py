"""Statistics of two revisions measured in pairs: gain of each pair, and interval of the median gain."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass

from bench.rows import Row, number, table

LOSS_MAX = 0.05
"""A row that loses more than this share of its value is reported."""
CONFIDENCE = 0.95
PAIRS = 7
"""Minimum number of pairs. The interval reaches its confidence with 6 or more."""

HIGHER_IS_BETTER = ("min", "ratio")
LOWER_IS_BETTER = ("max", "ratio_max", "above_floor")


@dataclass(frozen=True)
class Interval:
    """A sign-test interval of the median of independent values, without assumptions on their distribution."""

    low: float
    high: float
    confidence: float
    """Probability that the interval contains the true median: at least CONFIDENCE with enough values."""


@dataclass(frozen=True)
class Comparison:
    """One row of both revisions. A gain above 1 means that the new revision is better, whatever the unit."""

    id: str
    unit: str
    new: float
    """Median of the new revision's values."""
    old: float
    gains: Sequence[float]
    """One per pair. Empty if a value is not above 0, since then there is no ratio."""

    @property
    def gain(self) -> float | None:
        """Median gain; None without gains."""
        return statistics.median(self.gains) if self.gains else None

    @property
    def interval(self) -> Interval | None:
        """Interval of the median gain; None without gains."""
        return interval_of_median(self.gains) if self.gains else None

    @property
    def is_below(self) -> bool | None:
        """Whether the median gain is more than 5 % below 1; None without gains."""
        return None if self.gain is None else self.gain < 1 - LOSS_MAX

    @property
    def is_certain(self) -> bool:
        """Whether the whole interval is on the same side of that bound."""
        found = self.interval
        return found is not None and not found.low < 1 - LOSS_MAX <= found.high

    def as_row(self) -> Row:
        """Return the row of the JSON file."""
        found = self.interval
        return {
            "id": self.id,
            "unit": self.unit,
            "new": self.new,
            "old": self.old,
            "ratio": self.gain,
            "interval": [found.low, found.high] if found else None,
            "confidence": found.confidence if found else None,
            "ratios": list(self.gains),
            "more_than_5_percent_below": self.is_below,
            "certain": self.is_certain,
        }


@dataclass(frozen=True)
class Verdict:
    """All pairs: comparable rows, and rows that only one revision has."""

    comparisons: Sequence[Comparison]
    only_new: Sequence[str]
    only_old: Sequence[str]


def interval_of_median(values: Sequence[float], confidence: float = CONFIDENCE) -> Interval:
    """Return the narrowest symmetric sign-test interval with `confidence`, or [min, max] if none has it.

    Its ends are two of the values: the k-th smallest and the k-th largest.
    """
    ordered, count = sorted(values), len(values)
    cut, outside = 0, 2 * 0.5**count
    while cut + 1 <= (count - 1) // 2:
        wider = outside + 2 * math.comb(count, cut + 1) * 0.5**count
        if 1 - wider < confidence:
            break
        cut, outside = cut + 1, wider
    return Interval(ordered[cut], ordered[count - 1 - cut], max(1 - outside, 0.0))


def is_rate(row: Row) -> bool:
    """Whether a greater value is better.

    The row's target decides. Without a target the unit decides: only rates end with /s.
    """
    kinds = row["reach"] or {}
    if any(kind in kinds for kind in LOWER_IS_BETTER):
        return False
    return any(kind in kinds for kind in HIGHER_IS_BETTER) or str(row["unit"]).endswith("/s")


def gain(row: Row, new: float, old: float) -> float | None:
    """Return by which factor the new value is better; None if one of them is not above 0."""
    if new == old:
        return 1.0
    if min(new, old) <= 0:
        return None
    return new / old if is_rate(row) else old / new


def compare(pairs: Sequence[tuple[Sequence[Row], Sequence[Row]]]) -> Verdict:
    """Compare rows of (new, old) runs. Only rows that every run of both revisions measured are compared."""
    news = [_measured(new) for new, _ in pairs]
    olds = [_measured(old) for _, old in pairs]
    in_new, in_old = _in_all(news), _in_all(olds)
    comparisons = []
    for id, row in in_new.items():
        if id not in in_old:
            continue
        values = [(new[id]["value"], old[id]["value"]) for new, old in zip(news, olds, strict=True)]
        gains = [gain(row, new, old) for new, old in values]
        comparisons.append(
            Comparison(
                id,
                row["unit"],
                statistics.median(new for new, _ in values),
                statistics.median(old for _, old in values),
                [] if None in gains else [each for each in gains if each is not None],
            )
        )
    return Verdict(
        comparisons, [id for id in in_new if id not in in_old], [i for i in in_old if i not in in_new]
    )


def _measured(rows: Sequence[Row]) -> dict[str, Row]:
    return {row["id"]: row for row in rows if row["value"] is not None}


def _in_all(runs: Sequence[dict[str, Row]]) -> dict[str, Row]:
    if not runs:
        return {}
    return {id: row for id, row in runs[0].items() if all(id in run for run in runs)}


def show(verdict: Verdict, new: str, old: str) -> None:
    """Print the table of a comparison. `new` and `old` are the names of the revisions."""
    lines = [("workload", "unit", old, new, "ratio", "interval", "more than 5 % below")]
    for each in verdict.comparisons:
        found = each.interval
        said = "-" if each.is_below is None else "YES" if each.is_below else "no"
        unsure = "" if each.is_certain or each.is_below is None else ", unsure"
        lines.append(
            (
                each.id,
                each.unit,
                number(each.old),
                number(each.new),
                number(each.gain),
                f"{number(found.low)} .. {number(found.high)}" if found else "-",
                said + unsure,
            )
        )
    table(lines)
    sizes = {len(each.gains) for each in verdict.comparisons if each.gains}
    for size in sorted(sizes):
        confidence = interval_of_median([1.0] * size).confidence
        print(f"\nratio: median of {size} pairs, above 1 is better; sign-test interval, {confidence:.1%}")
    for name, ids in ((new, verdict.only_new), (old, verdict.only_old)):
        if ids:
            print(f"measured in {name} alone, not compared: {', '.join(ids)}")
