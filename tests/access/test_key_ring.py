"""Lookup of CURVE keys and of bearer keys."""

from __future__ import annotations

import pytest

from ringlog.access.key_ring import BEARER_CHARS_MAX, BearerKeys, KeyRing, key_id
from ringlog.access.key_sources import bearer_key, keys_of, parse_keys
from ringlog.access.keys import ANYONE, Principal
from ringlog.access.permissions import SCOPES

KEY = bearer_key(bytes(32))
WEB = Principal("web", SCOPES)


def keys(*entries: str) -> BearerKeys:
    return BearerKeys([(key_id(key), Principal(f"k{n}", SCOPES)) for n, key in enumerate(entries)])


def test_a_bearer_key_of_ours_has_a_prefix_and_43_characters() -> None:
    key = bearer_key(bytes(range(224, 256)))
    assert key == "rl_4OHi4-Tl5ufo6err7O3u7_Dx8vP09fb3-Pn6-_z9_v8"
    assert len(key) == 3 + 43


def test_a_bearer_key_is_found_by_its_header_every_time() -> None:
    """The second lookup uses the digests that were found before."""
    ring = keys("rl_other", KEY)
    for _ in range(2):
        found = ring.find(f"Bearer {KEY}")
        assert found is not None
        assert found.name == "k1"
    assert KEY not in repr(vars(ring)) + repr(vars(ring._ring))


@pytest.mark.parametrize(
    "header",
    [
        None,
        "",
        KEY,
        "Bearer",
        "Bearer ",
        f"bearer {KEY}",
        f"BEARER {KEY}",
        f"Basic {KEY}",
        f"Bearer  {KEY}",
        f" Bearer {KEY}",
        f"Bearer {KEY} ",
        f"Bearer {KEY}\n",
        f"Bearer\t{KEY}",
        f"Bearer {KEY},Bearer {KEY}",
        f"Bearer {KEY[:-1]}",
        f"Bearer {KEY.lower()}",
        f"Bearer {key_id(KEY)}",
        "Bearer \udcff",
        "Bearer ключ",
        "Bearer " + "x" * (BEARER_CHARS_MAX + 1),
    ],
)
def test_every_other_header_is_refused(header: str | None) -> None:
    assert keys(KEY).find(header) is None


def test_without_configured_keys_every_request_is_admitted() -> None:
    """Also a request without a header, or with any other one."""
    found = keys_of(None).bearer
    assert found.admits_all
    for header in (None, "", "Bearer x", "Basic y"):
        assert found.find(header) is ANYONE


def test_a_file_without_bearer_keys_admits_no_http_request() -> None:
    found = keys_of([])
    assert not found.bearer.admits_all
    assert found.bearer.find(f"Bearer {KEY}") is None
    assert found.curve.find(key_id("x")) is None


def test_bearer_keys_of_the_variable_alone_admit_every_curve_key() -> None:
    """The variable has no CURVE keys. Without a keys file, TCP is served on loopback addresses only."""
    found = keys_of(None, parse_keys(f'[[keys]]\nname = "w"\nbearer_sha256 = "{key_id(KEY)}"', "f"))
    assert found.curve.find(key_id("x")) is ANYONE
    assert found.bearer.find(None) is None


def test_a_public_curve_key_is_no_bearer_key() -> None:
    """A public key is no secret. The digest of a bearer key is no user id of a CURVE connection, either."""
    public = "0" * 40
    text = (
        f'[[keys]]\nname = "c"\npublic_key = "{public}"\n'
        f'[[keys]]\nname = "b"\nbearer_sha256 = "{key_id(KEY)}"\n'
    )
    found = keys_of(parse_keys(text, "f"))
    assert found.bearer.find(f"Bearer {public}") is None
    assert found.curve.find(key_id(KEY)) is None
    assert found.curve.find(key_id(public)) is not None
    assert len(found) == 2


def test_an_empty_ring_admits_no_key() -> None:
    assert KeyRing().find(key_id("x")) is None
    assert KeyRing([(key_id("x"), WEB)]).find("") is None


def test_a_changed_key_is_told_from_a_kept_one() -> None:
    """By its digest and its rights: a name may have several keys, and get another one."""

    def keys(secret: str, *prefixes: str) -> BearerKeys:
        principal = Principal("web", frozenset({"read"}), prefixes, digest=key_id(secret))
        return BearerKeys([(key_id(secret), principal)])

    found = keys("rl_one", "a.").find("Bearer rl_one")
    assert found is not None
    assert keys("rl_one", "a.").still_admits(found)
    assert not keys("rl_one", "b.").still_admits(found)
    assert not keys("rl_two", "a.").still_admits(found)
    assert not BearerKeys().still_admits(found)
    assert BearerKeys(admits_all=True).still_admits(ANYONE)
