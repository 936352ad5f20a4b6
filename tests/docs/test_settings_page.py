"""The settings page lists what the table holds, row by row."""

from __future__ import annotations

from pathlib import Path

import pytest

from ringlog.settings import GROUP_SETTINGS, TOPIC_SETTINGS, Setting

PAGE = (Path(__file__).parents[2] / "docs/settings.md").read_text()


@pytest.mark.parametrize("row", TOPIC_SETTINGS.values(), ids=lambda row: row.name)
def test_the_page_says_of_a_topic_setting_what_the_table_says(row: Setting) -> None:
    takes, default, topics, meaning = topic_rows()[row.name]
    assert takes == row.allowed
    assert default == f"`{shown(row.default)}`"
    assert topics == (row.only or "all")
    assert meaning


def test_the_page_lists_no_other_settings() -> None:
    assert list(topic_rows()) == list(TOPIC_SETTINGS)
    for row in GROUP_SETTINGS.values():
        assert f"| `{row.name}` | {row.allowed} | `{shown(row.default)}` |" in PAGE


def topic_rows() -> dict[str, list[str]]:
    table = PAGE.partition("## Topics")[2].partition("## Consumer groups")[0]
    rows = (line.strip("|").split("|") for line in table.splitlines() if line.startswith("| `"))
    return {cells[0].strip("` "): [cell.strip() for cell in cells[1:]] for cells in rows}


def shown(value: object) -> str:
    return "null" if value is None else str(value).lower() if isinstance(value, bool) else str(value)
