"""Parsing of times and of start positions."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta

import pytest

from ringlog.cli.option_parsing import (
    human_bytes,
    human_count,
    parse_milliseconds,
    parse_moment,
    parse_start,
    parse_timeout,
    rfc3339,
)
from ringlog.client.read.pages import EARLIEST, LATEST, Cursor
from ringlog.errors import UsageError
from ringlog.testing.clock import ManualClock

NOW = datetime(2026, 3, 1, 12, 0, tzinfo=UTC)


@pytest.fixture
def noon() -> ManualClock:
    return ManualClock(now_us=round(NOW.timestamp() * 1_000_000))


@pytest.mark.parametrize(("text", "seconds"), [("5s", 5.0), ("100ms", 0.1), ("2h", 7200.0), ("3", 3.0)])
def test_a_timeout_is_a_duration_or_a_number_of_seconds(text: str, seconds: float) -> None:
    assert parse_timeout(text, "--timeout") == pytest.approx(seconds)


@pytest.mark.parametrize("text", ["0", "0s", "", "soon", "-5s", "5 parsecs"])
def test_an_invalid_timeout_is_a_usage_error(text: str) -> None:
    with pytest.raises(UsageError):
        parse_timeout(text, "--timeout")


@pytest.mark.parametrize(("text", "ms"), [("7d", 604_800_000), ("100ms", 100), ("250", 250), ("1.5s", 1500)])
def test_a_lifetime_is_read_as_milliseconds(text: str, ms: int) -> None:
    assert parse_milliseconds(text, "--ttl") == ms


@pytest.mark.parametrize("text", ["-15m", "15m"])
def test_a_duration_means_that_long_before_now(text: str, noon: ManualClock) -> None:
    assert parse_moment(text, noon, "--since") == NOW - timedelta(minutes=15)


@pytest.mark.parametrize("text", ["2026-03-01T11:45:00Z", "2026-03-01T12:45:00+01:00"])
def test_a_time_is_parsed_with_its_zone(text: str, noon: ManualClock) -> None:
    assert parse_moment(text, noon, "--since") == NOW - timedelta(minutes=15)


def test_a_time_without_a_zone_is_refused(noon: ManualClock) -> None:
    with pytest.raises(UsageError, match="zone"):
        parse_moment("2026-03-01T12:00:00", noon, "--since")


def test_a_time_before_the_calendar_is_refused(noon: ManualClock) -> None:
    with pytest.raises(UsageError):
        parse_moment("-999999999d", noon, "--since")


@pytest.mark.parametrize(
    ("text", "start"),
    [
        ("start", EARLIEST),
        ("end", LATEST),
        ("1", 1),
        ("0", 0),
        ("42", 42),
        ("3:17", Cursor(3, 17)),
        ("-15m", NOW - timedelta(minutes=15)),
        ("2026-03-01T12:00:00Z", NOW),
    ],
)
def test_parse_start_accepts_every_form(text: str, start: object, noon: ManualClock) -> None:
    """A seq is the first record wanted, as in the client."""
    assert parse_start(text, noon, "--from") == start


@pytest.mark.parametrize("text", ["", "banana", "1:2:3", "-", ":", "٤٢"])
def test_an_invalid_start_is_a_usage_error(text: str, noon: ManualClock) -> None:
    with pytest.raises(UsageError):
        parse_start(text, noon, "--from")


def test_rfc3339_shows_utc_with_milliseconds() -> None:
    assert rfc3339(round(NOW.timestamp() * 1_000_000) + 123_456) == "2026-03-01T12:00:00.123Z"


def test_sizes_and_counts_are_short() -> None:
    assert [human_bytes(n) for n in (0, 1023, 1536, 200 << 20, 3 << 40)] == [
        "0 B", "1023 B", "1.5 KiB", "200 MiB", "3.0 TiB",
    ]  # fmt: skip
    assert [human_count(n) for n in (12, 12_345, 1_234_567)] == ["12", "12,345", "1.23 M"]
