"""Tag filters: one table for readers, groups, routers and deletes."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ringlog.errors import InvalidRequest
from ringlog.tags import TagMatch, parse_match, parse_stored_match, request_form

TABLE = [
    ("a", ["a"], ["ab", "a/b", "b"]),
    ("a/b", ["a/b"], ["a", "a/b/c", "a/bc"]),
    ("+", ["a", "ab"], ["a/b", "/a", "$a"]),
    ("#", ["a", "a/b", "/", "/a"], ["$a", "$a/b"]),
    ("a/#", ["a", "a/", "a/b", "a/b/c"], ["ab", "b/a", "ab/c"]),
    ("a/+", ["a/b", "a/"], ["a", "a/b/c", "b/b"]),
    ("a/+/c", ["a/b/c", "a//c"], ["a/c", "a/b/d", "a/b/c/d"]),
    ("+/b/#", ["a/b", "/b", "a/b/c/d"], ["b", "a/c/b", "$a/b"]),
    ("+/+", ["a/b", "/a"], ["a", "a/b/c"]),
    ("/+", ["/a", "/"], ["a", "a/b"]),
    ("/#", ["/", "/a", "/a/b"], ["a"]),
    ("$a/#", ["$a", "$a/b"], ["a", "$ab"]),
    ("a.c", ["a.c"], ["abc"]),
    ("a\n+/b", [], []),
]


@pytest.mark.parametrize(("pattern", "matched", "others"), [row for row in TABLE if "\n" not in row[0]])
def test_level_patterns_match_like_mqtt_topic_filters(
    pattern: str, matched: list[str], others: list[str]
) -> None:
    match = parse_match(["tag", "Levels", pattern])
    assert [tag for tag in [*matched, *others, ""] if match.test(tag.encode())] == matched
    assert all(tag.encode().startswith(match.tag) for tag in matched), "an index is searched by it"
    assert (parse_stored_match(match.text), request_form(match.text)) == (match, ["tag", "Levels", pattern])


@pytest.mark.parametrize("pattern", ["", "a+", "a/b#", "#/a", "a/#/b", "++", "a/+b/c", "a" * 257])
def test_an_invalid_pattern_is_refused(pattern: str) -> None:
    with pytest.raises(InvalidRequest):
        parse_match(["tag", "Levels", pattern])


def test_a_newline_matches_like_any_byte() -> None:
    match = parse_match(["tag", "Levels", "a/#"])
    assert match.test(b"a/b\nc")
    assert not match.test(b"a\n")


@pytest.mark.parametrize(
    ("wanted", "matched", "others"),
    [
        ("*", ["a", "a/b", "$a", "$a/b", "*"], [""]),
        ("a*", ["a", "ab", "a/b"], ["", "$a", "b"]),
        ("$*", ["$", "$a"], ["", "a", "a$"]),
    ],
)
def test_a_prefix_matches_every_tag_that_begins_with_it(
    wanted: str, matched: list[str], others: list[str]
) -> None:
    """Unlike a wildcard of a level pattern, `*` also matches tags that begin with `$`."""
    match = parse_match(wanted)
    assert [tag for tag in [*matched, *others] if match.test(tag.encode())] == matched


@pytest.mark.parametrize(
    ("wanted", "match", "form"),
    [
        ("a", TagMatch(b"a"), ["tag", "Eq", "a"]),
        ("a*", TagMatch(b"a", True), ["tag", "Glob", "a*"]),
        ("*", TagMatch(b"", True), ["tag", "Glob", "*"]),
        ("a/+/#", TagMatch(b"a/+/#"), ["tag", "Eq", "a/+/#"]),
        (("tag", "Eq", "a*"), TagMatch(b"a*"), ["tag", "Eq", "a*"]),
    ],
)
def test_the_short_forms_are_a_tag_or_a_prefix(wanted: object, match: TagMatch, form: list[str]) -> None:
    assert parse_match(wanted) == match
    assert request_form(match.text) == form
    assert parse_stored_match(match.text) == match


@pytest.mark.parametrize("text", ["", "a", "?a", "~", "~a+"])
def test_an_invalid_stored_filter_is_refused(text: str) -> None:
    with pytest.raises(InvalidRequest):
        parse_stored_match(text)


@pytest.mark.parametrize(
    ("found", "wanted"),
    [
        ("a", TagMatch(b"a", False)),
        ("a*", TagMatch(b"a", True)),
        ("*", TagMatch(b"", True)),
        ("a**", TagMatch(b"a*", True)),
        (["tag", "Eq", "a*"], TagMatch(b"a*", False)),
        (("tag", "Glob", "é*"), TagMatch("é".encode(), True)),
    ],
)
def test_filters_of_every_form(found: object, wanted: TagMatch) -> None:
    """A filter is a string or a list of field, operator and value."""
    assert parse_match(found) == wanted


@pytest.mark.parametrize(
    "found",
    [
        3, [], ["tag", "Eq"], ["tag", "Eq", 1], ["key", "Eq", "a"], ["tag", "Glob", "a"], "\ud800",
        ["tag", ["tag"], "a"], ["tag", {}, "a"], [["tag"], "Eq", "a"],
    ],
)  # fmt: skip
def test_an_invalid_filter_is_refused(found: object) -> None:
    """The field is always `tag`, and the value must be valid UTF-8."""
    with pytest.raises(InvalidRequest):
        parse_match(found)


@given(
    st.lists(st.sampled_from(["a", "b", "", "+", "$"]), min_size=1, max_size=5), st.booleans(),
    st.lists(st.sampled_from(["a", "b", "", "$", "a\n"]), min_size=1, max_size=6),
)  # fmt: skip
def test_any_pattern_matches_level_by_level(levels: list[str], has_rest: bool, tag: list[str]) -> None:
    pattern, text = "/".join([*levels, "#"] if has_rest else levels), "/".join(tag)
    if not pattern:
        return
    wanted = all(level in ("+", other) for level, other in zip(levels, tag, strict=False))
    wanted &= len(tag) >= len(levels) if has_rest else len(tag) == len(levels)
    wanted &= bool(text) and not (text.startswith("$") and levels[0] == "+")
    match = parse_match(["tag", "Levels", pattern])
    assert match.test(text.encode()) == wanted
    assert not wanted or text.encode().startswith(match.tag)
