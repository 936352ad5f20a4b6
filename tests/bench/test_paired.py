"""Paired comparisons of two revisions: gains, intervals and verdicts on made-up numbers."""

from __future__ import annotations

from itertools import pairwise

import pytest

from bench.paired import Comparison, compare, gain, interval_of_median, is_rate, show
from bench.rows import Row, row, skipped


def runs(*values: float, id: str = "acks", unit: str = "acks/s") -> list[list[Row]]:
    return [[row(id, unit, [value])] for value in values]


def verdict_on(new: list[float], old: list[float], unit: str = "acks/s") -> Comparison:
    pairs = zip(runs(*new, unit=unit), runs(*old, unit=unit), strict=True)
    (found,) = compare(list(pairs)).comparisons
    return found


@pytest.mark.parametrize(
    ("count", "low", "high", "confidence"),
    [(1, 1, 1, 0.0), (5, 1, 5, 0.9375), (6, 1, 6, 0.96875), (7, 1, 7, 0.984375), (9, 2, 8, 0.9609375)],
)
def test_the_interval_ends_at_the_values_of_the_sign_test(
    count: int, low: float, high: float, confidence: float
) -> None:
    found = interval_of_median([float(n) for n in range(count, 0, -1)])
    assert (found.low, found.high) == (low, high)
    assert found.confidence == pytest.approx(confidence)


def test_more_pairs_exclude_more_values_from_the_interval() -> None:
    cuts = [interval_of_median([float(n) for n in range(count)]).low for count in range(6, 60)]
    assert all(before <= after for before, after in pairwise(cuts))
    assert cuts[-1] > 15


def test_each_pair_has_a_ratio_and_the_result_is_their_median() -> None:
    found = verdict_on([100, 120, 90, 100, 100, 100, 110], [100, 100, 100, 50, 100, 100, 100])
    assert found.gains == pytest.approx([1, 1.2, 0.9, 2, 1, 1, 1.1])
    assert found.gain == 1
    assert not found.is_below


def test_a_higher_latency_is_a_loss() -> None:
    found = verdict_on([110.0] * 7, [100.0] * 7, unit="us")
    assert found.gain == pytest.approx(100 / 110)
    assert found.is_below
    assert found.is_certain


@pytest.mark.parametrize(("value", "is_below"), [(94.9, True), (95.1, False), (100.0, False), (140.0, False)])
def test_the_bound_is_five_percent(value: float, is_below: bool) -> None:
    assert verdict_on([value] * 7, [100.0] * 7).is_below is is_below


def test_an_interval_on_both_sides_of_the_bound_is_uncertain() -> None:
    assert not verdict_on([90, 90, 90, 90, 90, 90, 101], [100.0] * 7).is_certain
    assert verdict_on([90, 90, 90, 90, 90, 90, 94], [100.0] * 7).is_certain


def test_the_reach_of_a_row_determines_which_direction_is_better() -> None:
    assert is_rate(row("a", "frames", [1], reach={"min": 1}))
    assert not is_rate(row("a", "acks/s", [1], reach={"max": 1}))
    assert is_rate(row("a", "bytes/s", [1]))
    assert not is_rate(row("a", "MiB", [1]))


def test_values_that_are_not_positive_have_no_ratio() -> None:
    grown = row("memory", "KiB", [-3])
    assert gain(grown, -3, 5) is None
    assert gain(grown, 0, 0) == 1
    found = verdict_on([-3.0] + [1.0] * 6, [1.0] * 7, unit="KiB")
    assert found.gain is None
    assert found.is_below is None
    assert not found.is_certain


def test_rows_of_only_one_revision_are_named_and_not_compared(capsys: pytest.CaptureFixture[str]) -> None:
    new = [row("both", "s", [1.0]), row("added", "s", [1.0]), skipped("absent", "s", "no program")]
    old = [row("both", "s", [1.0]), row("removed", "s", [1.0]), row("absent", "s", [1.0])]
    found = compare([(new, old)] * 7)
    assert [each.id for each in found.comparisons] == ["both"]
    assert (found.only_new, found.only_old) == (["added"], ["removed", "absent"])
    show(found, "here", "there")
    said = capsys.readouterr().out
    assert "here alone, not compared: added" in said
    assert "there alone, not compared: removed, absent" in said


def test_the_table_shows_ratio_interval_and_verdict(capsys: pytest.CaptureFixture[str]) -> None:
    new = [[row("loss", "acks/s", [80.0]), row("gain", "us", [50.0])]] * 7
    old = [[row("loss", "acks/s", [100.0]), row("gain", "us", [100.0])]] * 7
    show(compare(list(zip(new, old, strict=True))), "here", "there")
    lines = {line.split()[0]: line.split() for line in capsys.readouterr().out.splitlines() if line}
    assert lines["loss"] == ["loss", "acks/s", "100", "80", "0.8", "0.8", "..", "0.8", "YES"]
    assert lines["gain"] == ["gain", "us", "100", "50", "2", "2", "..", "2", "no"]
    assert lines["ratio:"][-1] == "98.4%"


def test_a_comparison_without_pairs_is_empty() -> None:
    assert compare([]).comparisons == []
