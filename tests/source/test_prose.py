"""Checks of texts for readers: every cited rule id is defined, and no dialect word is used."""

from __future__ import annotations

import ast
import io
import re
import tokenize
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent.parent
PRODUCT = ("ringlog", "actors", "pyspark_ringlog", "native", "supervisor.py")
PAGES = ("docs/index.md", "docs/tutorial.md", "docs/how-to/*.md", "docs/explanation/*.md", "README.md")
PAGES_OF_WORK = ("CONTRIBUTING.md", "CHANGELOG.md")

ID = re.compile(r"(?<![\w.-])(?:[A-Z]{1,3}-\d{1,3}|(?<=\()[A-Z]{1,2}\d{1,2}(?=[,)]))(?![\w-])")
"""A rule id: `G-12` anywhere, or `W3` in parentheses."""
NOT_AN_ID = {"SHA-1", "SHA-256", "UTF-8", "UTF-16", "UTF-32", "X86", "Z85"}
DIALECT = {
    "whoever": "name the component",
    "nobody": "name the component",
    "somebody": "name the component",
    "anew": "again",
    "for ever": "forever",
    "of its own accord": "by itself",
    "is told so": "name the error or the reply",
    "are told so": "name the error or the reply",
    "looks on": "polls",
    "sees to it": "name the call",
}
"""Words that readers had to decode, and their replacements."""


def files(patterns: tuple[str, ...]) -> list[Path]:
    found: list[Path] = []
    for pattern in patterns:
        for path in sorted(ROOT.glob(pattern)):
            found += [path] if path.is_file() else sorted(path.rglob("*.[cp]*"))
    kept = {".c", ".md", ".py", ".pyi"}
    return [path for path in found if path.suffix in kept]


@cache
def texts(path: Path) -> list[tuple[int, str]]:
    """Return comments, docstrings and bare strings of a source file, or the lines of a page, each with its
    line."""
    text = path.read_text()
    if path.suffix == ".md":
        return list(enumerate(text.splitlines(), 1))
    if path.suffix == ".c":
        return [
            (text.count("\n", 0, each.start()) + 1, each.group())
            for each in re.finditer(r"/\*.*?\*/|//[^\n]*", text, re.DOTALL)
        ]
    return [*_comments(text), *_strings(text)]


def _comments(source: str) -> Iterator[tuple[int, str]]:
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type == tokenize.COMMENT:
            yield token.start[0], token.string


def _strings(source: str) -> Iterator[tuple[int, str]]:
    for node in ast.walk(ast.parse(source)):
        value = node.value if isinstance(node, ast.Expr) else None
        if isinstance(value, ast.Constant) and isinstance(value.value, str):
            yield node.lineno, value.value


@cache
def defined_ids() -> frozenset[str]:
    invariants = (ROOT / "docs/reference/invariants.md").read_text()
    faults = (ROOT / "chaos/faults.toml").read_text()
    rows = re.findall(r"^\| ([A-Z]+\d+) \|", invariants, re.MULTILINE)
    plans = "".join(plan.read_text() for plan in (ROOT / "chaos/plans").glob("*.toml"))
    targets = re.findall(r'^target = "([^"]+)"', plans, re.MULTILINE)
    return frozenset([*rows, *targets, *re.findall(r'^id = "([^"]+)"', faults, re.MULTILINE)])


def undefined_ids(text: str) -> list[str]:
    """Return the rule ids in a text that no table of the repository defines."""
    return [each for each in ID.findall(text) if each not in defined_ids() | NOT_AN_ID]


def dialect_words(text: str) -> list[str]:
    """Return the dialect words in a text, also across line breaks."""
    plain = " ".join(re.sub(r"^[#*/ ]+", "", line) for line in text.lower().splitlines())
    return [word for word in DIALECT if re.search(rf"\b{word}\b", plain)]


def test_the_tables_of_ids_were_read():
    assert {"W1", "RF-1"} <= defined_ids()


def test_every_cited_id_is_defined():
    cited = {
        f"{path.relative_to(ROOT)}:{line}": found
        for path in files((*PRODUCT, *PAGES, *PAGES_OF_WORK))
        for line, text in texts(path)
        if (found := undefined_ids(text))
    }
    assert not cited


@pytest.mark.parametrize(
    ("text", "found"),
    [("must hold (G-12)", ["G-12"]), ("see CL-10", ["CL-10"]), ("(W99)", ["W99"]), ("(W1), UTF-8, RF-1", [])],
)
def test_an_undefined_id_is_found(text: str, found: list[str]):
    assert undefined_ids(text) == found


def test_no_dialect_word_is_used():
    used = {
        f"{path.relative_to(ROOT)}:{line}": {word: DIALECT[word] for word in found}
        for path in files((*PRODUCT, *PAGES, *PAGES_OF_WORK))
        for line, text in texts(path)
        if (found := dialect_words(text))
    }
    assert not used


def test_a_dialect_word_is_found_across_lines():
    assert dialect_words("It waits for\n    # ever, and Whoever asks") == ["whoever", "for ever"]
