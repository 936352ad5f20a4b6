"""Where keys come from: the keys file (`auth.keys_file`) and the variable RINGLOG_API_KEYS. Pure.

The file has one table per key:

    [[keys]]
    name = "billing"
    public_key = "…40 characters…"      # CURVE: clients of the socket gateway
    scopes = ["read", "write"]          # read, write, delete, admin; absent = all four
    prefixes = ["billing.", "audit."]   # byte prefixes of topic names; absent = every topic

    [[keys]]
    name = "web"
    bearer_sha256 = "…64 hex digits…"   # HTTP: the digest of the bearer key, never the key itself

The variable has bearer keys, separated by commas. Each is `KEY`, `KEY:scopes` or `KEY:scopes:prefixes`, with
scopes joined by `+` and prefixes by `|`. Empty scopes are all four, empty prefixes every topic.

    RINGLOG_API_KEYS=rl_a…,rl_b…:read+write:billing.|audit.,rl_c…::web.

No error contains a key, or text that may be a part of one.
"""

from __future__ import annotations

import re
import tomllib
from base64 import urlsafe_b64encode
from collections.abc import Callable, Iterable, Sequence
from typing import Protocol

import msgspec

from ringlog.access.key_ring import BEARER_CHARS_MAX, BearerKeys, KeyEntry, KeyKind, KeyRing, Keys, key_id
from ringlog.access.keys import Principal
from ringlog.access.permissions import SCOPES
from ringlog.environment import API_KEYS
from ringlog.errors import ConfigError

KEYS_MAX = 10_000
PREFIXES_PER_KEY_MAX = 256
KEYS_POLL_NS = 2_000_000_000
"""A key that is removed from the file is refused after this time and one pass of the loop."""
BEARER_RANDOM_BYTES = 32
BEARER_CHARS_SHORT = 16
"""A shorter bearer key may be guessed: the engine warns at its start."""
_CURVE_CHARS = 40
_DIGEST = re.compile(r"[0-9a-f]{64}")
_BEARER = re.compile(r"[!-~]+")


class _FileEntry(msgspec.Struct, forbid_unknown_fields=True):
    name: str
    public_key: str | None = None
    bearer_sha256: str | None = None
    scopes: list[str] | None = None
    prefixes: list[str] | None = None


class _File(msgspec.Struct, forbid_unknown_fields=True):
    keys: list[_FileEntry] = []


def bearer_key(random: bytes) -> str:
    """Return a bearer key: `rl_` and 43 characters of URL-safe base64. `random` has BEARER_RANDOM_BYTES."""
    return "rl_" + urlsafe_b64encode(random).rstrip(b"=").decode()


def parse_keys(text: str, file: str) -> list[KeyEntry]:
    """Parse a keys file. Raises ConfigError with file, key name and field, but never with a key."""
    try:
        entries = msgspec.convert(tomllib.loads(text), _File).keys
    except tomllib.TOMLDecodeError:
        raise ConfigError("keys file is not TOML", file=file) from None
    except msgspec.ValidationError as e:
        raise ConfigError("keys file has an invalid entry", file=file, reason=str(e)) from None
    except RecursionError:
        raise ConfigError("keys file is nested too deeply", file=file) from None
    found = []
    for entry in entries:
        reason = "" if entry.name else "name must not be empty"
        reason = reason or _wrong_key(entry) or _wrong_rights(entry.scopes, entry.prefixes)
        if reason:
            raise ConfigError("keys file has an invalid entry", file=file, name=entry.name, reason=reason)
        if entry.public_key is not None:
            kind, digest = KeyKind.CURVE, key_id(entry.public_key)
        else:
            kind, digest = KeyKind.BEARER, str(entry.bearer_sha256)
        found.append(KeyEntry(kind, digest, _principal(entry.name, entry.scopes, entry.prefixes, digest)))
    _require_distinct(found, file)
    return found


def _wrong_key(entry: _FileEntry) -> str:
    if (entry.public_key is None) == (entry.bearer_sha256 is None):
        return "give one of public_key (CURVE) and bearer_sha256 (HTTP)"
    if entry.public_key is not None:
        is_curve = len(entry.public_key) == _CURVE_CHARS
        return "" if is_curve else f"public_key must be {_CURVE_CHARS} characters of Z85"
    if not _DIGEST.fullmatch(entry.bearer_sha256 or ""):
        return "bearer_sha256 must be 64 lower-case hex digits: the SHA-256 of the key, not the key"
    return "bearer_sha256 is the digest of an empty key" if entry.bearer_sha256 == key_id("") else ""


def parse_api_keys(text: str) -> list[KeyEntry]:
    """Parse RINGLOG_API_KEYS. An empty text has no keys. Raises ConfigError, which never contains a key.

    The principal of entry N is named `env-N`.

    Example:
        >>> [each.principal.prefixes for each in parse_api_keys("rl_one,rl_two:read:a.|b.")]
        [(), ('a.', 'b.')]
    """
    found = []
    for number, entry in enumerate(text.split(","), 1) if text.strip() else ():
        key, _, rights = entry.strip().partition(":")
        scopes_text, _, prefixes_text = rights.partition(":")
        scopes = scopes_text.split("+") if scopes_text else None
        prefixes = prefixes_text.split("|") if prefixes_text else None
        reason = ""
        if not _BEARER.fullmatch(key):
            reason = "a key must have 1 or more visible ASCII characters"
        elif len(key) > BEARER_CHARS_MAX:
            reason = f"a key must have at most {BEARER_CHARS_MAX} characters, got {len(key)}"
        if reason := reason or _wrong_rights(scopes, prefixes):
            raise ConfigError(f"{API_KEYS} has an invalid entry", entry=number, reason=reason)
        digest, is_short = key_id(key), len(key) < BEARER_CHARS_SHORT
        principal = _principal(f"env-{number}", scopes, prefixes, digest)
        found.append(KeyEntry(KeyKind.BEARER, digest, principal, is_short))
    _require_distinct(found, API_KEYS)
    return found


def short_keys(entries: Iterable[KeyEntry]) -> list[str]:
    """Return the names of entries whose bearer keys are so short that they may be guessed."""
    return [entry.principal.name for entry in entries if entry.is_short]


def _wrong_rights(scopes: Sequence[str] | None, prefixes: Sequence[str] | None) -> str:
    """Return what is wrong with scopes and prefixes; "" if nothing."""
    if scopes is not None and not SCOPES.issuperset(scopes):
        return f"scopes must be among {', '.join(sorted(SCOPES))}"
    if prefixes is not None and (not prefixes or "" in prefixes):
        return "prefixes must not be empty: omit the field to allow every topic"
    if prefixes is not None and len(prefixes) > PREFIXES_PER_KEY_MAX:
        return f"prefixes must have at most {PREFIXES_PER_KEY_MAX} entries, got {len(prefixes)}"
    return ""


def _principal(
    name: str, scopes: Sequence[str] | None, prefixes: Sequence[str] | None, digest: str
) -> Principal:
    rights = SCOPES if scopes is None else frozenset(scopes)
    return Principal(name, rights, tuple(prefixes or ()), digest=digest)


def _require_distinct(entries: Sequence[KeyEntry], source: str) -> None:
    if len(entries) > KEYS_MAX:
        raise ConfigError("too many keys", source=source, keys=len(entries), max=KEYS_MAX)
    seen = set()
    for entry in entries:
        if (entry.kind, entry.digest) in seen:
            raise ConfigError(
                "a key is listed twice: remove one entry", source=source, name=entry.principal.name
            )
        seen.add((entry.kind, entry.digest))


def keys_of(of_file: Sequence[KeyEntry] | None, of_environment: Sequence[KeyEntry] = ()) -> Keys:
    """Return the keys of an engine. Raises ConfigError if both sources list a key.

    Args:
        of_file: Entries of the keys file; None = no file is configured, and TCP clients need no listed key.
        of_environment: Entries of RINGLOG_API_KEYS. Without them and without a file, HTTP needs no key.
    """
    entries = [*(of_file or ()), *of_environment]
    _require_distinct(entries, f"the keys file and {API_KEYS}")

    def rows(kind: KeyKind) -> list[tuple[str, Principal]]:
        return [(entry.digest, entry.principal) for entry in entries if entry.kind is kind]

    return Keys(
        KeyRing(rows(KeyKind.CURVE), admits_all=of_file is None),
        BearerKeys(rows(KeyKind.BEARER), admits_all=of_file is None and not of_environment),
    )


class KeysFile(Protocol):
    """The keys file of an engine. `ringlog.link.keys_file` reads the real one."""

    path: str

    def state(self) -> object:
        """Return a value that differs after each change of the file."""

    def read(self) -> str:
        """Return the text. Raises ConfigError if it cannot be read, or if other users can read it."""


class KeySource:
    """The current keys of a gateway, which follow the keys file.

    If a changed file is invalid, the keys stay, and `on_error` is called once for this state of the file.
    """

    def __init__(
        self, file: KeysFile | None, api_keys: str = "",
        on_error: Callable[[ConfigError], object] = lambda error: None,
        on_change: Callable[[Keys], object] = lambda keys: None,
    ) -> None:  # fmt: skip
        """Load the keys. `api_keys` is the text of RINGLOG_API_KEYS. Raises ConfigError."""
        self._file, self._on_error, self._on_change = file, on_error, on_change
        self._of_environment = parse_api_keys(api_keys)
        self._must_reload = False
        self._next_poll_ns = 0
        self._state = file.state() if file is not None else None
        self.keys: Keys = self._load()

    @property
    def short_keys(self) -> list[str]:
        """Names of the entries of RINGLOG_API_KEYS whose keys may be guessed."""
        return short_keys(self._of_environment)

    def reload(self) -> None:
        """Read the file at the next poll, even if it seems unchanged. For SIGHUP."""
        self._must_reload = True

    def poll(self, now_ns: int) -> Keys | None:
        """Return the new keys if the file has changed, else None. Examines the file every KEYS_POLL_NS.

        Connections and streams that were admitted before must look up their keys again.
        """
        if self._file is None or (now_ns < self._next_poll_ns and not self._must_reload):
            return None
        self._next_poll_ns = now_ns + KEYS_POLL_NS
        state = self._file.state()
        if state == self._state and not self._must_reload:
            return None
        self._state, self._must_reload = state, False
        try:
            self.keys = self._load()
        except ConfigError as e:
            self._on_error(e)
            return None
        self._on_change(self.keys)
        return self.keys

    def _load(self) -> Keys:
        if self._file is None:
            return keys_of(None, self._of_environment)
        return keys_of(parse_keys(self._file.read(), self._file.path), self._of_environment)
