"""Changes of a keys file keep everything else in it."""

from __future__ import annotations

import contextlib

import pytest

from ringlog.access.key_ring import KeyKind, key_id
from ringlog.access.key_sources import parse_keys
from ringlog.access.keys_text import HEADER, entry_text, with_entry, without_entries
from ringlog.errors import ConfigError

FILE = f"""{HEADER}
# The billing team.
[[keys]]
name = "billing"            # since March
public_key = "{"a" * 40}"
prefixes = [
  "billing.",
  "audit.",
]

# Web servers.
# Both of them.
[[keys]]
name = "web"
bearer_sha256 = "{key_id("w")}"

[[keys]]
name = "last"
bearer_sha256 = "{key_id("l")}"
"""


def names(text: str) -> list[str]:
    return [entry.principal.name for entry in parse_keys(text, "keys.toml")]


def bearer(name: str, key: str) -> str:
    return entry_text(name, KeyKind.BEARER, key_id(key))


@pytest.mark.parametrize(
    "prefix", ["orders.", 'a"b', "a\\b", "a\nb", "tab\t", "é", "\x7f", "\x00", "[[keys]]", "'''", '"""', "#"]
)
def test_any_text_is_quoted(prefix: str) -> None:
    text = entry_text("n", KeyKind.CURVE, "b" * 40, ["read"], [prefix, "b"])
    (entry,) = parse_keys(text, "keys.toml")
    assert entry.principal.prefixes == (prefix, "b")
    assert without_entries(with_entry(FILE, text, "keys.toml"), "n", "keys.toml") == FILE + "\n"


def test_a_new_entry_is_appended_and_the_rest_stays() -> None:
    changed = with_entry(FILE, bearer("new", "n"), "keys.toml")
    assert changed.startswith(FILE)
    assert names(changed) == ["billing", "web", "last", "new"]


@pytest.mark.parametrize("text", ["", "\n\n"])
def test_the_first_entry_gets_a_header(text: str) -> None:
    changed = with_entry(text, bearer("new", "n"), "keys.toml")
    assert changed.startswith(HEADER)
    assert without_entries(changed, "new", "keys.toml") == HEADER + "\n"


@pytest.mark.parametrize("name", ["billing", "web", "last"])
def test_an_entry_is_removed_with_its_comments_only(name: str) -> None:
    changed = without_entries(FILE, name, "keys.toml")
    assert names(changed) == [each for each in ("billing", "web", "last") if each != name]
    assert changed.startswith(HEADER)
    assert ("The billing team" in changed) == (name != "billing")
    assert ("Both of them" in changed) == (name != "web")
    with_all = FILE.splitlines()
    assert set(changed.splitlines()) <= set(with_all)


def test_all_entries_of_a_name_are_removed() -> None:
    text = with_entry(FILE, bearer("web", "second"), "keys.toml")
    assert names(without_entries(text, "web", "keys.toml")) == ["billing", "last"]


@pytest.mark.parametrize(
    "text",
    [
        f'keys = [{{name = "x", bearer_sha256 = "{key_id("x")}"}}]\n',
        f'[[keys]]\nname = "x"\nbearer_sha256 = "{key_id("x")}"\nprefixes = ["""\n[[keys]]\n"""]\n',
        f'[[ keys ]]\nname = """\nx"""\nbearer_sha256 = """\\\n{key_id("x")}"""\n'
        f'[[keys]] # [[keys]]\nname="y"\nbearer_sha256="{key_id("y")}"\n',
    ],
    ids=["inline", "table-in-a-text", "unusual"],
)
def test_a_file_in_another_layout_never_gets_other_rights(text: str) -> None:
    """The change is right, or the file is refused."""
    before = parse_keys(text, "keys.toml")
    added = parse_keys(bearer("new", "n"), "keys.toml")
    rest = [entry for entry in before if entry.principal.name != "x"]
    with contextlib.suppress(ConfigError):
        assert parse_keys(with_entry(text, bearer("new", "n"), "keys.toml"), "keys.toml") == before + added
    with contextlib.suppress(ConfigError):
        assert parse_keys(without_entries(text, "x", "keys.toml"), "keys.toml") == rest


def test_a_list_in_one_line_is_refused_with_the_remedy() -> None:
    text = f'keys = [{{name = "x", bearer_sha256 = "{key_id("x")}"}}]\n'
    with pytest.raises(ConfigError, match="editor"):
        with_entry(text, bearer("new", "n"), "keys.toml")
    with pytest.raises(ConfigError, match="editor"):
        without_entries(text, "x", "keys.toml")


def test_a_listed_key_is_not_added_again() -> None:
    with pytest.raises(ConfigError, match="twice"):
        with_entry(FILE, bearer("other", "w"), "keys.toml")
