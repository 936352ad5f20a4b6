"""Log lines: named values, no formatting, and counted repeats."""

from __future__ import annotations

import json
import logging
from collections.abc import Iterator
from pathlib import Path

import pytest

from ringlog import logs
from ringlog.errors import ConfigError


@pytest.fixture
def root_logger() -> Iterator[logging.Logger]:
    root = logging.getLogger()
    before, level = root.handlers[:], root.level
    yield root
    for handler in root.handlers[:]:
        if handler not in before:
            handler.close()
    root.handlers[:] = before
    root.setLevel(level)


def configured(root: logging.Logger, path: Path, **changes: str) -> logging.Logger:
    root.handlers[:] = []
    settings = {"level": "info", "format": "json", "file": str(path), "actor": "test"} | changes
    logs.configure(**settings, incarnation=4)
    return logging.getLogger("ringlog.testlog")


def lines(path: Path) -> list[dict[str, object]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_a_line_contains_the_actor_and_the_values_by_name(
    root_logger: logging.Logger, tmp_path: Path
) -> None:
    log = configured(root_logger, tmp_path / "log")
    logs.log_event(log, logging.INFO, "ring attached", ring="%s {x} \n", seq=3)
    [line] = lines(tmp_path / "log")
    assert (line["event"], line["ring"], line["seq"]) == ("ring attached", "%s {x} \n", 3)
    assert (line["actor"], line["incarnation"], line["level"]) == ("test", 4, "info")
    assert str(line["ts"]).endswith("+00:00")


def test_a_value_cannot_replace_a_field_of_the_line(root_logger: logging.Logger, tmp_path: Path) -> None:
    log = configured(root_logger, tmp_path / "log")
    logs.log_event(log, logging.INFO, "x", actor="intruder", ts=0)
    [line] = lines(tmp_path / "log")
    assert (line["actor"], line["fact_actor"], line["fact_ts"]) == ("test", "intruder", 0)


def test_the_console_shows_control_characters_escaped(root_logger: logging.Logger, tmp_path: Path) -> None:
    log = configured(root_logger, tmp_path / "log", format="console")
    logs.log_event(log, logging.ERROR, "x", topic="a\x1b[31m\n")
    text = (tmp_path / "log").read_text()
    assert "\x1b" not in text
    assert text.count("\n") == 1


def test_levels_are_set_by_logger(root_logger: logging.Logger, tmp_path: Path) -> None:
    log = configured(root_logger, tmp_path / "log", level="error,ringlog.testlog.deep=debug")
    logs.log_event(log, logging.INFO, "shallow")
    deep = logging.getLogger("ringlog.testlog.deep")
    logs.log_event(deep, logging.DEBUG, "deep")
    deep.setLevel(logging.NOTSET)
    assert [line["event"] for line in lines(tmp_path / "log")] == ["deep"]
    with pytest.raises(ConfigError, match="unknown level"):
        logs.parse_levels("loud")


def test_repeated_warnings_are_counted_and_errors_are_never_suppressed(
    root_logger: logging.Logger, tmp_path: Path
) -> None:
    filter = logs.RepeatFilter()

    def passes(level: int, at: float) -> logging.LogRecord | None:
        record = logging.LogRecord("a", level, "", 0, "busy", None, None)
        record.created = at
        return record if filter.filter(record) else None

    assert passes(logging.WARNING, 100.0) is not None
    assert [passes(logging.WARNING, 100.0 + n) for n in range(1, 10)] == [None] * 9
    late = passes(logging.WARNING, 111.0)
    assert late is not None
    assert late.facts == {"repeated": 9}
    assert all(passes(logging.ERROR, 111.0) is not None for _ in range(3))


def test_the_filter_remembers_a_bounded_number_of_warnings() -> None:
    filter = logs.RepeatFilter()
    for n in range(3 * logs.REPEATS_REMEMBERED_MAX):
        record = logging.LogRecord("a", logging.WARNING, "", 0, f"event {n}", None, None)
        assert filter.filter(record)
    assert len(filter._last) == logs.REPEATS_REMEMBERED_MAX


def test_reopen_writes_to_a_new_file_after_a_rename(root_logger: logging.Logger, tmp_path: Path) -> None:
    log = configured(root_logger, tmp_path / "log")
    logs.log_event(log, logging.INFO, "before")
    (tmp_path / "log").rename(tmp_path / "log.1")
    logs.reopen()
    logs.log_event(log, logging.INFO, "after")
    assert [line["event"] for line in lines(tmp_path / "log")] == ["after"]
    assert [line["event"] for line in lines(tmp_path / "log.1")] == ["before"]


def test_a_log_file_that_cannot_be_opened_is_a_config_error(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="log file"):
        logs.configure(level="info", format="json", file=str(tmp_path / "no" / "log"), actor="x")
