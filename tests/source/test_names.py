"""Names: one class for each class name, nouns for modules, limits that are used, and existing files in
docstrings."""

from __future__ import annotations

import ast
import re
from collections import defaultdict
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent.parent
PRODUCT = ("ringlog", "actors", "pyspark_ringlog")
TWINS = ("ringlog/aio/", "ringlog/client/")
"""The asyncio and the synchronous client have the same names on purpose."""
MESSAGES = "ringlog/envelope/messages/"
"""Messages have their own namespace, and their names are those of the protocol."""

NOUNS = {
    "forwarding", "hardening", "mapping", "paging", "parsing", "routing", "staging", "testing", "tuning",
}  # fmt: skip
"""Words with the ending of a participle or an adverb that are nouns of the field."""
PARTICIPLE = re.compile(r"[a-z]{3,}(ing|ed|ly)")


@cache
def tree_of(file: Path) -> ast.Module:
    return ast.parse(file.read_text())


def product() -> list[Path]:
    found = [file for top in PRODUCT for file in (ROOT / top).rglob("*.py")]
    assert len(found) > 300, "the tree was found"
    return [*found, ROOT / "supervisor.py"]


def relative(file: Path) -> str:
    return str(file.relative_to(ROOT))


# -- classes ----------------------------------------------------------------------------------------------


def doubled(classes: dict[str, list[str]]) -> dict[str, list[str]]:
    """Return the class names with more than one owner, each with its files."""
    found = {}
    for name, files in classes.items():
        owners = [file for file in files if not file.startswith(MESSAGES)]
        faces = {file.startswith(TWINS[0]) for file in owners if file.startswith(TWINS)}
        if len(owners) > 1 and not (len(owners) == len(faces) == 2):
            found[name] = owners
    return found


def test_every_class_name_occurs_once():
    classes = defaultdict(list)
    for file in product():
        for node in ast.walk(tree_of(file)):
            if isinstance(node, ast.ClassDef):
                classes[node.name].append(relative(file))
    assert not doubled(classes)


def test_two_classes_with_one_name_are_found():
    assert doubled({"Entry": ["ringlog/tier/a.py", "actors/gateway/b.py"]})
    assert not doubled({"Queue": ["ringlog/aio/queue.py", "ringlog/client/queue.py"]})
    assert doubled({"Queue": ["ringlog/client/queue.py", "ringlog/client/other.py"]})
    assert not doubled({"GrantsReturned": [MESSAGES + "delivery.py", "ringlog/board/row_ring.py"]})


# -- words -------------------------------------------------------------------------------------------------

RETIRED = {
    "alike": "equal", "crowded": "contended", "doze": "timer", "hurry": "force", "hush": "suppress",
    "lives": "incarnations", "lone": "single", "portion": "FetchResult", "spent": "exhausted",
    "stretch": "SeqRange", "ward": "ChildState", "wish": "ClaimRequest",
}  # fmt: skip
"""Words that named several things, and the term that each has now."""
GLOSSARY = ROOT / "docs/reference/glossary.md"


def defined_names(tree: ast.Module) -> Iterator[str]:
    for node in ast.walk(tree):
        if isinstance(node, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            yield node.name
        elif isinstance(node, ast.arg):
            yield node.arg
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            yield node.id
        elif isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store):
            yield node.attr


def retired_words(name: str) -> list[str]:
    return [word for word in re.findall(r"[A-Z]?[a-z]+", name) if word.lower() in RETIRED]


def test_no_name_has_a_retired_word():
    found = {
        f"{relative(file)}: {name}, use {RETIRED[word.lower()]}"
        for file in product()
        for name in defined_names(tree_of(file))
        for word in retired_words(name)
    }
    assert not found


def test_a_retired_word_is_found():
    names = list(
        defined_names(ast.parse("class OneWish:\n    def f(self, lone_frame):\n        self.x_spent = 1"))
    )
    assert [word for name in names for word in retired_words(name)] == ["Wish", "lone", "spent"]
    assert retired_words("forward alone PurgeWards StretchedExactly") == []


def test_a_term_of_the_glossary_occurs_once_and_is_not_retired():
    headings = re.findall(r"^### (.+)$", GLOSSARY.read_text(), re.MULTILINE)
    terms = [term for heading in headings for term in heading.split(", ")]
    assert len(terms) > 50, "the page was read"
    assert sorted(terms) == sorted(set(terms))
    assert not [term for term in terms if retired_words(term)]


# -- modules ----------------------------------------------------------------------------------------------


def is_noun(stem: str) -> bool:
    """Return False if the last word of the name looks like a participle or an adverb."""
    last = stem.rpartition("_")[2]
    return last in NOUNS or not PARTICIPLE.fullmatch(last)


def test_every_module_name_is_a_noun():
    names = {part.removesuffix(".py") for file in product() for part in file.relative_to(ROOT).parts}
    assert not sorted(name for name in names if not is_noun(name))


@pytest.mark.parametrize("stem", ["working", "sealed", "told_quickly", "asking"])
def test_a_participle_or_an_adverb_is_found(stem):
    assert not is_noun(stem)


# -- limits -----------------------------------------------------------------------------------------------


def names_read(file: Path) -> Iterator[str]:
    for node in ast.walk(tree_of(file)):
        if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Load):
            yield node.id
        elif isinstance(node, ast.Attribute):
            yield node.attr
        elif isinstance(node, ast.ImportFrom):
            yield from (alias.name for alias in node.names)


def test_every_limit_is_read():
    limits = ROOT / "ringlog/limits.py"
    defined = {
        target.id
        for node in tree_of(limits).body
        if isinstance(node, ast.Assign)
        for target in node.targets
        if isinstance(target, ast.Name)
    }
    read = {name for file in product() for name in names_read(file)}
    assert defined > {"MIB"}
    assert not sorted(defined - read)


# -- private constants ------------------------------------------------------------------------------------


def unread_constants(tree: ast.Module) -> list[str]:
    """Return the private constants of a module that it does not read. Tuples of constants count as one."""
    defined: dict[str, set[str]] = {}
    for node in tree.body:
        target = node.targets[0] if isinstance(node, ast.Assign) else getattr(node, "target", None)
        names = {each.id for each in ast.walk(target) if isinstance(each, ast.Name)} if target else set()
        defined |= {name: names for name in names if re.match("_[A-Z]", name)}
    read = {
        node.id for node in ast.walk(tree) if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Load)
    }
    return sorted(name for name, beside in defined.items() if not beside & read)


def test_every_private_constant_is_read():
    unread = {relative(file): names for file in product() if (names := unread_constants(tree_of(file)))}
    assert not unread


def test_an_unread_constant_is_found():
    assert unread_constants(ast.parse("_A = 1\n_B: int = 2\n_C, _D = 3, 4\nprint(_C)")) == ["_A", "_B"]


# -- files ------------------------------------------------------------------------------------------------

FILE = re.compile(r"(?<![\w/.])((?:[a-z_]+/)+[a-z_0-9]+\.(?:py|md|toml|c))\b")


def missing_files(text: str) -> list[str]:
    """Return the files that a text names with their folder and that do not exist."""
    return [
        name
        for name in FILE.findall(text)
        if not any((ROOT / top / name).exists() for top in ("", "ringlog", "actors", "docs", "tests"))
    ]


def texts_in(file: Path) -> Iterator[str]:
    """Return docstrings and bare strings."""
    for node in ast.walk(tree_of(file)):
        if (
            isinstance(node, ast.Expr)
            and isinstance(node.value, ast.Constant)
            and isinstance(node.value.value, str)
        ):
            yield node.value.value


def test_every_file_named_in_a_docstring_exists():
    missing = {
        relative(file): names
        for file in product()
        for text in texts_in(file)
        if (names := missing_files(text))
    }
    assert not missing


def test_a_missing_file_is_found():
    assert missing_files("see link/no_such_thing.py and ringlog/limits.py") == ["link/no_such_thing.py"]
