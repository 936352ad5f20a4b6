"""Checks of all pages: links, named files and settings, indexes, and no paths of one machine."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from ringlog.environment import SETTING_VARIABLES
from ringlog.errors import ExitCode

ROOT = Path(__file__).parent.parent.parent
PAGES = sorted([*(ROOT / "docs").rglob("*.md"), ROOT / "README.md"])
INDEXES = ("index.md", "README.md")
ANCHORED_LINK = re.compile(r"\]\(([^)#\s]*)#([^)]+)\)")
LINK = re.compile(r"\]\(([^)#\s]+)(?:#[^)]*)?\)")
NAMED_FILE = re.compile(r"`((?:ringlog|actors|tests|demo|bench|chaos)/[A-Za-z0-9_/.-]+)")
FOREIGN = re.compile(r"(?<![\w.])/(?:work|tmp|home|root|Users)/")


def name(page: Path) -> str:
    return str(page.relative_to(ROOT))


@pytest.mark.parametrize("page", PAGES, ids=name)
def test_linked_files_exist(page: Path) -> None:
    targets = [t for t in LINK.findall(page.read_text()) if "://" not in t]
    missing = [t for t in targets if not (page.parent / t).exists()]
    assert not missing


@pytest.mark.parametrize("page", PAGES, ids=name)
def test_named_files_exist(page: Path) -> None:
    named = {found.rstrip(".") for found in NAMED_FILE.findall(page.read_text())}
    missing = sorted(n for n in named if not (ROOT / n).exists() and not n.startswith("bench/results"))
    assert not missing


@pytest.mark.parametrize("page", PAGES, ids=name)
def test_no_page_contains_a_path_of_one_machine(page: Path) -> None:
    assert not FOREIGN.findall(page.read_text())


@pytest.mark.parametrize("page", PAGES, ids=name)
def test_linked_headings_exist(page: Path) -> None:
    missing = []
    for target, anchor in ANCHORED_LINK.findall(page.read_text()):
        linked = page.parent / target if target else page
        if "://" not in target and linked.exists() and anchor not in anchors_of(linked.read_text()):
            missing.append(f"{target}#{anchor}")
    assert not missing


def anchors_of(page: str) -> set[str]:
    """Return the anchors that GitHub and MyST derive from the headings."""
    headings = re.findall(r"^#+ (.+)$", re.sub(r"^```.*?^```$", "", page, flags=re.M | re.S), re.M)
    plain = (re.sub(r"\]\([^)]*\)", "", heading).lower() for heading in headings)
    return {re.sub(r"[^\w\- ]", "", heading).strip().replace(" ", "-") for heading in plain}


@pytest.mark.parametrize(
    "page", [page for page in PAGES if page.parent.is_relative_to(ROOT / "docs")], ids=name
)
def test_every_page_is_in_the_index_of_its_directory(page: Path) -> None:
    if page.name in INDEXES:
        return
    indexes = [index for each in INDEXES if (index := page.parent / each).exists()]
    assert any(f"({page.name})" in index.read_text() for index in indexes), "no index links to this page"


def test_every_exit_code_is_on_the_operations_page() -> None:
    page = (ROOT / "docs/how-to/operate.md").read_text()
    for code in ExitCode:
        assert f"| {code.value} | `{code.name.lower()}` |" in page


def test_settings_named_on_pages_exist() -> None:
    """A page writes a setting as `section.key = value` or with `--set`."""
    sections = "|".join({key.split(".")[0] for key in SETTING_VARIABLES})
    used = re.compile(rf"(?:--set |`)((?:{sections})\.[a-z_]+)(?: ?=|`)")
    for page in PAGES:
        named = {key for key in used.findall(page.read_text()) if not key.endswith((".py", ".sock"))}
        assert named <= set(SETTING_VARIABLES), page


def test_every_invariant_has_a_unique_id() -> None:
    ids = re.findall(r"^\| ([A-Z]+\d+) \|", (ROOT / "docs/reference/invariants.md").read_text(), re.M)
    assert len(ids) > 100
    assert [each for each in ids if ids.count(each) > 1] == []
