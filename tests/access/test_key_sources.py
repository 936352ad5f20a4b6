"""The keys file, the variable RINGLOG_API_KEYS, and keys that change while a gateway runs."""

from __future__ import annotations

import itertools

import pytest

from ringlog.access.key_ring import BEARER_CHARS_MAX, Keys, key_id
from ringlog.access.key_sources import (
    KEYS_MAX,
    KEYS_POLL_NS,
    PREFIXES_PER_KEY_MAX,
    KeySource,
    keys_of,
    parse_api_keys,
    parse_keys,
    short_keys,
)
from ringlog.access.keys import Principal
from ringlog.access.permissions import SCOPES
from ringlog.errors import ConfigError
from ringlog.link.curve import new_key

ANNE, BERT = new_key(), new_key()
WEB = "rl_" + "w" * 43


def keys_text(*entries: str) -> str:
    return "\n".join(f"[[keys]]\n{entry}" for entry in entries)


def bearer(name: str, key: str, more: str = "") -> str:
    return f'name = "{name}"\nbearer_sha256 = "{key_id(key)}"\n{more}'


def test_a_keys_file_maps_key_digests_to_principals() -> None:
    """The rings store digests and no public key. An entry without `scopes` has all scopes."""
    text = keys_text(
        f'name = "anne"\npublic_key = "{ANNE.public.decode()}"\nscopes = ["read"]\nprefixes = ["a."]',
        f'name = "bert"\npublic_key = "{BERT.public.decode()}"',
        bearer("web", WEB, 'scopes = ["write"]'),
    )
    keys = keys_of(parse_keys(text, "keys.toml"))
    ring = keys.curve
    anne = ring.find(key_id(ANNE.public.decode()))
    assert anne == Principal("anne", frozenset({"read"}), ("a.",))
    bert = ring.find(key_id(BERT.public.decode()))
    assert bert is not None
    assert bert.scopes == SCOPES
    assert ring.find(ANNE.public.decode()) is None
    assert ring.find("") is None
    assert ANNE.public.decode() not in repr(vars(ring))
    assert keys.bearer.find(f"Bearer {WEB}") == Principal("web", frozenset({"write"}))


@pytest.mark.parametrize(
    ("entry", "says"),
    [
        ('name = "x"\npublic_key = "short"', "Z85"),
        ('name = ""\npublic_key = "{k}"', "name"),
        ('name = "x"\npublic_key = "{k}"\nscopes = ["root"]', "scopes"),
        ('name = "x"\npublic_key = "{k}"\nprefixes = []', "prefixes"),
        ('name = "x"\npublic_key = "{k}"\nprefixes = [""]', "prefixes"),
        (f'name = "x"\npublic_key = "{{k}}"\nprefixes = {["a"] * (PREFIXES_PER_KEY_MAX + 1)}', "at most"),
        ('name = "x"\npublic_key = "{k}"\ncolour = "red"', "colour"),
        ('name = "x"', "public_key"),
        ('name = "x"\npublic_key = "{k}"\nbearer_sha256 = "{d}"', "one of"),
        ('name = "x"\nbearer_sha256 = "{k}"', "hex digits"),
        ('name = "x"\nbearer_sha256 = "{D}"', "lower-case"),
        (f'name = "x"\nbearer_sha256 = "{key_id("")}"', "empty key"),
        ('name = "x"\nbearer_sha256 = 7', "str"),
        ('name = "x"\nbearer = "{k}"', "bearer"),
        ("name = ", "TOML"),
    ],
)
def test_an_invalid_entry_is_reported_without_its_key(entry: str, says: str) -> None:
    """The error names the invalid field and never quotes the key."""
    key = ANNE.public.decode()
    text = entry.replace("{k}", key).replace("{d}", key_id(key)).replace("{D}", key_id(key).upper())
    with pytest.raises(ConfigError) as e:
        parse_keys(keys_text(text), "keys.toml")
    assert says in str(e.value)
    assert key not in str(e.value)


@pytest.mark.parametrize("text", ["keys = 1", "[keys]", "x = 1", "keys = [1]", "a=" + "[" * 5_000])
def test_a_file_of_another_shape_is_refused(text: str) -> None:
    with pytest.raises(ConfigError):
        parse_keys(text, "keys.toml")


def test_one_key_under_two_names_is_refused() -> None:
    for entry in (f'name = "x"\npublic_key = "{ANNE.public.decode()}"', bearer("x", WEB)):
        with pytest.raises(ConfigError, match="twice"):
            parse_keys(keys_text(entry, entry), "keys.toml")


def test_a_key_in_the_file_and_in_the_variable_is_refused() -> None:
    with pytest.raises(ConfigError, match="twice"):
        keys_of(parse_keys(keys_text(bearer("x", WEB)), "keys.toml"), parse_api_keys(WEB))


def test_too_many_keys_are_refused() -> None:
    with pytest.raises(ConfigError, match="too many"):
        parse_api_keys(",".join(f"key{n}" for n in range(KEYS_MAX + 1)))


# -- RINGLOG_API_KEYS -------------------------------------------------------------------------------------


@pytest.mark.parametrize("text", ["", "  ", "\n"])
def test_an_empty_variable_has_no_keys(text: str) -> None:
    assert parse_api_keys(text) == []


@pytest.mark.parametrize(
    ("entry", "scopes", "prefixes"),
    [
        ("K", SCOPES, ()),
        (" K ", SCOPES, ()),
        ("K:", SCOPES, ()),
        ("K::", SCOPES, ()),
        ("K:read", {"read"}, ()),
        ("K:read+write", {"read", "write"}, ()),
        ("K:read:a.", {"read"}, ("a.",)),
        ("K::a.|b.", SCOPES, ("a.", "b.")),
        ("K:delete:a:b|c", {"delete"}, ("a:b", "c")),
    ],
)
def test_an_entry_of_the_variable_has_a_key_and_maybe_scopes_and_prefixes(entry, scopes, prefixes) -> None:
    first, second = parse_api_keys(f"{entry.replace('K', WEB)},other")
    assert first.digest == key_id(WEB)
    assert first.principal == Principal("env-1", frozenset(scopes), prefixes)
    assert second.principal == Principal("env-2", SCOPES)


@pytest.mark.parametrize(
    ("text", "says"),
    [
        (",", "visible ASCII"),
        ("SECRET,", "visible ASCII"),
        (":read", "visible ASCII"),
        ("SECRET SECRET", "visible ASCII"),
        ("SECRETé", "visible ASCII"),
        ("SECRET:SECRET", "scopes"),
        ("SECRET:read+", "scopes"),
        ("SECRET:read,SECRET", "twice"),
        ("SECRET:read:SECRET|", "prefixes"),
        ("SECRET" + "x" * BEARER_CHARS_MAX, "at most"),
    ],
)
def test_an_invalid_variable_is_reported_without_its_keys(text: str, says: str) -> None:
    """The error names the entry by its number, since its text may be a part of a key."""
    with pytest.raises(ConfigError, match="RINGLOG_API_KEYS") as e:
        parse_api_keys(text)
    assert says in str(e.value)
    assert "SECRET" not in str(e.value)


def test_a_key_of_less_than_16_characters_is_called_short() -> None:
    entries = parse_api_keys(f"{'a' * 15},{'b' * 16},{'c' * 3}:read")
    assert short_keys(entries) == ["env-1", "env-3"]


# -- changes ----------------------------------------------------------------------------------------------


class MemoryFile:
    """A keys file whose text a test replaces."""

    path = "keys.toml"

    def __init__(self, text: str) -> None:
        self.text = text
        self.reads = 0

    def state(self) -> object:
        return self.text

    def read(self) -> str:
        self.reads += 1
        if not self.text:
            raise ConfigError("key file cannot be opened", file=self.path)
        return self.text


class Followed:
    """A key source, its file, and what it reported."""

    def __init__(self, api_keys: str = "") -> None:
        self.file = MemoryFile(keys_text(bearer("one", WEB)))
        self.errors: list[ConfigError] = []
        self.changes: list[Keys] = []
        self.source = KeySource(self.file, api_keys, self.errors.append, self.changes.append)
        self._times = itertools.count(0, KEYS_POLL_NS)

    def poll(self) -> Keys | None:
        """Poll when the file is due again."""
        return self.source.poll(next(self._times))

    def name_of(self, key: str) -> str | None:
        found = self.source.keys.bearer.find(f"Bearer {key}")
        return found.name if found else None


def test_an_unchanged_file_is_read_once() -> None:
    followed = Followed()
    assert [followed.poll() for _ in range(5)] == [None] * 5
    assert followed.file.reads == 1


def test_a_changed_file_replaces_the_keys_when_it_is_due() -> None:
    followed = Followed(api_keys="rl_of-the-environment")
    followed.poll()
    followed.file.text = keys_text(bearer("two", "rl_two"))
    assert followed.source.poll(1) is None, "not due"
    assert followed.name_of(WEB) == "one"
    changed = followed.poll()
    assert changed is followed.source.keys
    assert followed.changes == [changed]
    assert (followed.name_of(WEB), followed.name_of("rl_two")) == (None, "two")
    assert followed.name_of("rl_of-the-environment") == "env-1"


def test_a_reload_reads_at_the_next_poll_also_a_file_that_seems_unchanged() -> None:
    followed = Followed()
    followed.poll()
    followed.source.reload()
    assert followed.source.poll(1) is not None
    assert followed.file.reads == 2
    assert followed.source.poll(2) is None


@pytest.mark.parametrize(
    "text", ["", "not toml [", keys_text('name = "x"'), keys_text(bearer("x", "rl_env"))],
    ids=["no-file", "no-toml", "no-key", "key-of-the-variable"],
)  # fmt: skip
def test_an_invalid_file_changes_nothing_and_is_reported_once(text: str) -> None:
    """Also one that lists a key of the variable."""
    followed = Followed(api_keys="rl_env")
    followed.file.text = text
    assert [followed.poll() for _ in range(4)] == [None] * 4
    assert len(followed.errors) == 1
    assert not followed.changes
    assert followed.name_of(WEB) == "one"
    followed.file.text = keys_text(bearer("again", WEB))
    assert followed.poll() is not None
    assert followed.name_of(WEB) == "again"


def test_an_invalid_file_at_the_start_is_an_error() -> None:
    with pytest.raises(ConfigError):
        KeySource(MemoryFile("not toml ["))
    with pytest.raises(ConfigError):
        KeySource(None, ",")


def test_without_a_file_there_is_nothing_to_poll() -> None:
    source = KeySource(None, f"short,{WEB}")
    source.reload()
    assert source.poll(KEYS_POLL_NS) is None
    assert source.short_keys == ["env-1"]
    assert len(source.keys.bearer) == 2
