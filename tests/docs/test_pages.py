"""The pages agree with the code: links resolve, files exist, nothing is left out, nothing is foreign."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from ringlog.cli.outcome import Exit
from ringlog.config import ENVIRONMENT
from ringlog.envelope.messages import KINDS
from ringlog.errors import ExitCode, Status

ROOT = Path(__file__).parent.parent.parent
PAGES = sorted([*(ROOT / "docs").rglob("*.md"), ROOT / "README.md"])
LINK = re.compile(r"\]\(([^)#\s]+)(?:#[^)]*)?\)")
NAMED_FILE = re.compile(r"`((?:ringlog|actors|tests|demo|bench|chaos)/[A-Za-z0-9_/.-]+)")
FOREIGN = re.compile(r"(?<![\w.])/(?:work|tmp|home|root|Users)/")


def name(page: Path) -> str:
    return str(page.relative_to(ROOT))


def text(page: str) -> str:
    return (ROOT / page).read_text()


@pytest.mark.parametrize("page", PAGES, ids=name)
def test_links_lead_somewhere(page: Path) -> None:
    targets = [t for t in LINK.findall(page.read_text()) if "://" not in t]
    missing = [t for t in targets if not (page.parent / t).exists()]
    assert not missing


@pytest.mark.parametrize("page", PAGES, ids=name)
def test_files_that_are_named_exist(page: Path) -> None:
    named = {found.rstrip(".") for found in NAMED_FILE.findall(page.read_text())}
    missing = sorted(n for n in named if not (ROOT / n).exists() and not n.startswith("bench/results"))
    assert not missing


@pytest.mark.parametrize("page", PAGES, ids=name)
def test_no_page_names_a_machine(page: Path) -> None:
    assert not FOREIGN.findall(page.read_text())


def test_every_page_is_in_the_index() -> None:
    index = text("docs/README.md") + text("docs/decisions/README.md")
    pages = [page for page in PAGES if page.name != "README.md"]
    missing = [name(page) for page in pages if f"{page.name})" not in index]
    assert not missing


@pytest.mark.parametrize("kind", sorted(KINDS))
def test_every_message_is_on_the_protocol_page_with_its_fields(kind: str) -> None:
    page = text("docs/protocol.md")
    shown = re.search(rf"`{kind}\(([^)]*)\)", page)
    assert shown, f"{kind} is not described"
    fields = [field.strip() for field in shown[1].split(",") if field.strip()]
    assert fields == list(KINDS[kind].__struct_fields__)


def test_every_status_is_on_the_protocol_page() -> None:
    page = text("docs/protocol.md")
    missing = [status for status in Status if status and f"`{status.name.lower()}`" not in page]
    assert not missing


def test_every_exit_code_is_on_the_operations_page() -> None:
    page = text("docs/operations.md")
    for code in ExitCode:
        assert f"| {code.value} | `{code.name.lower()}` |" in page
    for exit in Exit:
        assert re.search(rf"(?:· |: ){exit.value} \w", page), exit


def test_settings_named_on_pages_exist() -> None:
    """A setting is written section.key = value, or with --set."""
    sections = "|".join({key.split(".")[0] for key in ENVIRONMENT})
    used = re.compile(rf"(?:--set |`)((?:{sections})\.[a-z_]+)(?: ?=|`)")
    for page in PAGES:
        named = {key for key in used.findall(page.read_text()) if not key.endswith((".py", ".sock"))}
        assert named <= set(ENVIRONMENT), page
