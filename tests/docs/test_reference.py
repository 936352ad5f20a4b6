"""The reference pages list what the code defines: settings, errors, commands, metrics, events, options."""

from __future__ import annotations

import importlib
import re
from pathlib import Path

import pytest

from ringlog import environment, errors
from ringlog.envelope.messages import KINDS
from ringlog.errors import Status
from ringlog.spark.options import SINK_NAMES, SOURCE_NAMES, UNSUPPORTED_OPTIONS, VIEWS
from tools import log_events, reference

ROOT = Path(__file__).parents[2]
PAGES = sorted((ROOT / "docs/reference").glob("*.md"))
TABLES = [page for page in PAGES if "<!-- table: " in page.read_text()]
AUTODOC = re.compile(r"^\.\. auto\w+:: (\S+)$", re.MULTILINE)


def name(page: Path) -> str:
    return page.name


def text(page: str) -> str:
    return (ROOT / "docs/reference" / page).read_text()


@pytest.mark.slow
@pytest.mark.parametrize("page", TABLES, ids=name)
def test_generated_tables_are_current(page: Path) -> None:
    found = page.read_text()
    assert reference.current(found) == found, "run `make reference`, then fill in what is empty"


@pytest.mark.parametrize("page", TABLES, ids=name)
def test_every_row_has_a_meaning(page: Path) -> None:
    assert not reference.empty_cells(page.read_text())


def test_every_table_is_on_a_page() -> None:
    named = [region[2] for page in TABLES for region in reference.REGION.finditer(page.read_text())]
    assert sorted(named) == sorted([*reference.TABLES, "commands"])


def test_every_logger_has_a_table() -> None:
    tables = {f"ringlog.{name.removeprefix('log.')}" for name in reference.TABLES if name.startswith("log.")}
    assert {event.logger for event in log_events.events()} <= tables


def test_a_renamed_row_keeps_its_meaning() -> None:
    table = reference.Table(("event", "level"), ("meaning",), [("`new`", "info"), ("`same`", "error")])
    before = {"`old`": ["`old`", "info", "kept"], "`same`": ["`same`", "error", "stays"]}
    assert reference.render(table, before).splitlines()[2:] == [
        "| `new` | info | kept |", "| `same` | error | stays |",
    ]  # fmt: skip


def test_every_error_class_is_on_the_errors_page() -> None:
    page = text("errors.md")
    kinds = [kind for kind in vars(errors).values() if isinstance(kind, type) and issubclass(kind, Exception)]
    assert not [
        kind.__name__ for kind in kinds if f"`{kind.__name__}`" not in page.replace("ringlog.errors.", "")
    ]


@pytest.mark.parametrize("kind", sorted(KINDS))
def test_every_message_is_on_the_protocol_page_with_its_fields(kind: str) -> None:
    shown = re.search(rf"`{kind}\(([^)]*)\)", text("protocol.md"))
    assert shown, f"{kind} is not described"
    fields = [field.strip() for field in shown[1].split(",") if field.strip()]
    assert fields == list(KINDS[kind].__struct_fields__)


def test_the_variables_whose_wrong_value_is_an_error_are_listed() -> None:
    sentence = re.search(r"It is an error for (.*?)\.\n", text("engine-settings.md"), re.DOTALL)
    assert sentence
    assert re.findall(r"`([^`]+)`", sentence[1]) == sorted(environment.STRICT_ENVIRONMENT_KEYS)


def test_every_status_is_on_the_protocol_page() -> None:
    page = text("protocol.md")
    assert not [status for status in Status if status and f"`{status.name.lower()}`" not in page]


def test_every_spark_option_is_on_its_page() -> None:
    page = text("spark-options.md")
    cells = [line.split("|")[1] for line in page.splitlines() if line.startswith("| `")]
    assert {*SOURCE_NAMES, *SINK_NAMES} <= set(re.findall(r"`([A-Za-z]+)`", " ".join(cells)))
    assert all(f"`{view}`" in page for view in VIEWS)
    assert not [option for option in UNSUPPORTED_OPTIONS if f"`{option}`" not in page.lower()]


def test_names_on_the_api_page_exist() -> None:
    for path in AUTODOC.findall(text("api.md")):
        module, _, attribute = path.rpartition(".")
        if not module.startswith("ringlog.spark"):
            assert getattr(importlib.import_module(module), attribute).__doc__, path
