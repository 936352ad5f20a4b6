"""The check of JSON bodies in the kernel: depth, and keys that an object has twice."""

from __future__ import annotations

import json
import random
from typing import Any

import pytest

from ringlog._kernel import json_structure as structure

NAMES = b"tag\0node\0meta\0"
TEXTS = 3_000
MANY = 20_000


def json_structure(text: bytes, seed: int) -> tuple[int, int, bool]:
    return structure(text, seed, 0, b"")[:3]


def has_repeated_key(text: str) -> bool:
    found = False

    def pairs(items: list[tuple[str, Any]]) -> dict[str, Any]:
        nonlocal found
        found = found or len(dict(items)) < len(items)
        return dict(items)

    json.loads(text, object_pairs_hook=pairs)
    return found


def random_json(rng: random.Random, depth: int = 0) -> str:
    kind = rng.random()
    if depth > 4 or kind < 0.4:
        return rng.choice(["1", '"a"', '"\\"}"', "null", '"k1,"', '"\\\\"', '"a\\\\\\"k"'])
    if kind < 0.6:
        return "[" + ",".join(random_json(rng, depth + 1) for _ in range(rng.randint(0, 4))) + "]"
    count = rng.choice([0, 1, 2, 3, 15, 16, 17, 18, 40]) if depth < 2 else rng.choice([0, 1, 2])
    names = rng.choice([30, 1_000_000])
    pairs = [f'"k{rng.randint(0, names)}": {random_json(rng, depth + 1)}' for _ in range(count)]
    return "{" + " , ".join(pairs) + "}"


def test_repeated_keys_are_found_as_a_parser_finds_them() -> None:
    rng = random.Random(1)
    seen = {True: 0, False: 0}
    for _ in range(TEXTS):
        text = random_json(rng)
        _, at, _ = json_structure(text.encode(), rng.getrandbits(64))
        assert (at >= 0) == has_repeated_key(text), text
        seen[at >= 0] += 1
    assert min(seen.values()) > TEXTS // 20


@pytest.mark.parametrize(
    ("text", "depth", "at"),
    [
        ("", 0, -1),
        ("{}", 1, -1),
        ('{"a":1,"a":2}', 1, 7),
        ('[[{"a":{"a":1}},{"a":1}]]', 4, -1),
        ('{"a":{"b":1},"b":2}', 2, -1),
        ('{"":1,"":2}', 1, 6),
        ("[" * 128, 128, -1),
        ("[" * 100_000, 129, -1),
    ],
)
def test_depth_and_place(text: str, depth: int, at: int) -> None:
    assert json_structure(text.encode(), 0)[:2] == (depth, at)


@pytest.mark.parametrize("text", ['{"a', '"', '{"a\\', "}}]]{", '{"a":1,"', "\\", '{"\\"', ",,,"])
def test_text_that_is_no_json_is_read_to_its_end(text: str) -> None:
    depth, at, _ = json_structure(text.encode(), 7)
    assert 0 <= depth <= 2
    assert at == -1


def test_a_large_object_is_checked() -> None:
    names = [f'"k{number}":1' for number in range(MANY)]
    assert json_structure(("{" + ",".join(names) + "}").encode(), 3) == (1, -1, True)
    depth, at, _ = json_structure(("{" + ",".join([*names, '"k0":2']) + "}").encode(), 3)
    assert (depth, at >= 0) == (1, True)


@pytest.mark.parametrize(
    ("text", "is_compact"),
    [
        ('{"a b":" \\n"}', True),
        ('{"a": 1}', False),
        ("[1,\n2]", False),
        ("[\t]", False),
        ("[1]\r", False),
        ("", True),
    ],
)
def test_white_space_between_tokens(text: str, is_compact: bool) -> None:
    assert json_structure(text.encode(), 0)[2] == is_compact


@pytest.mark.parametrize(
    ("text", "found"),
    [
        ('{"records":[{"data":1}]}', 0),
        ('{"records":[{"data":1,"tag":2}]}', 1),
        ('{"records":[{"data":1},{"node":"x","data":2}]}', 2),
        ('{"records":[{"meta":1,"tag":2}],"node":1}', 5),
        ('{"tag":1,"records":[{"data":{"tag":1}}],"meta":[["node"]]}', 0),
        ('{"records":[{"t\\u0061g":1}]}', 7),
        ('{"records":[{"tags":1,"ta":2,"":3}]}', 0),
    ],
)
def test_names_at_a_level(text: str, found: int) -> None:
    assert structure(text.encode(), 0, 3, NAMES)[3] == found


def test_names_are_checked() -> None:
    many = b"x\0" * 32
    assert structure(b'{"x":1}', 0, 1, many)[3] == 1
    for names in (many + b"y\0", b"x"):
        with pytest.raises(ValueError, match="names must be at most"):
            structure(b"{}", 0, 1, names)


@pytest.mark.parametrize(
    ("text", "has_escapes"), [('{"a":"\\n"}', False), ('{"a\\n":1}', True), ('[{"b":{"\\u0061":1}}]', True)]
)
def test_escapes_in_keys(text: str, has_escapes: bool) -> None:
    assert structure(text.encode(), 0, 0, b"")[4] == has_escapes
