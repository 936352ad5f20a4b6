"""Authorisation: keys, scopes and prefixes. Access is denied by default. Pure.

A principal is the proven identity of a connection; a client cannot choose it. On the ipc socket the file
permissions of the shared-memory directory prove it: a process that can open the socket is the owner of the
engine. On TCP it is a CURVE key that is listed in the keys file:

    [[keys]]
    name = "billing"
    public_key = "…40 characters…"
    scopes = ["read", "write"]          # read, write, delete, admin; absent = all four
    prefixes = ["billing.", "audit."]   # byte prefixes of topic names; absent = every topic

Keys are stored as digests. A lookup compares with every entry in constant time.
"""

from __future__ import annotations

import tomllib
from collections.abc import Iterable
from dataclasses import dataclass

import msgspec

from ringlog.actors.gateway.permissions import ADMIN, OPEN_TO_ALL, OWNER_ONLY, SCOPES, rules_of
from ringlog.envelope import messages as m
from ringlog.errors import ConfigError, Forbidden, Unauthorized

KEYS_MAX = 10_000
PREFIXES_PER_KEY_MAX = 256
LOCAL_ID = "local"
"""User id of connections over the ipc socket."""


@dataclass(frozen=True, slots=True)
class Principal:
    """Proven identity of a connection, with its scopes and prefixes."""

    name: str
    scopes: frozenset[str]
    prefixes: tuple[str, ...] = ()
    is_owner: bool = False

    def covers(self, topic: str) -> bool:
        """Return whether a name starts with one of the prefixes. A key without prefixes covers every name."""
        return not self.prefixes or topic.startswith(self.prefixes)

    def require(self, scopes: tuple[str, ...]) -> None:
        """Raise Forbidden unless the key has one of these scopes."""
        if self.scopes.isdisjoint(scopes):
            raise Forbidden("the key lacks a scope", required_scope=" or ".join(scopes))

    def require_covered(self, topic: str) -> None:
        """Raise Forbidden unless the key's prefixes cover this name."""
        if not self.covers(topic):
            raise Forbidden("the key's prefixes do not cover this topic", topic=topic)


OWNER = Principal("owner", SCOPES, is_owner=True)
ANYONE = Principal("anyone", SCOPES)


class _KeyEntry(msgspec.Struct, forbid_unknown_fields=True):
    name: str
    public_key: str
    scopes: list[str] | None = None
    prefixes: list[str] | None = None


class _KeyFile(msgspec.Struct, forbid_unknown_fields=True):
    keys: list[_KeyEntry] = []


def key_id(public_key: str) -> str:
    """Return the user id for a CURVE key (Z85): its SHA-256 digest, so that the key itself is not stored."""
    from hashlib import sha256  # Loads OpenSSL: only for engines with keys.

    return sha256(public_key.encode()).hexdigest()


class KeyRing:
    """Admitted keys by digest. With `admits_all`, when no keys are configured, every key is admitted."""

    def __init__(self, principals: Iterable[tuple[str, Principal]] = (), *, admits_all: bool = False) -> None:
        self._entries = tuple((digest.encode(), principal) for digest, principal in principals)
        self._default_principal = ANYONE if admits_all else None

    def __len__(self) -> int:
        return len(self._entries)

    def find(self, user_id: str) -> Principal | None:
        """Return the principal of this user id, or None. Always compares with every entry."""
        if not self._entries:
            return self._default_principal if user_id else None
        from hmac import compare_digest

        wanted, found = user_id.encode(), self._default_principal if user_id else None
        for digest, principal in self._entries:
            if compare_digest(digest, wanted):
                found = principal
        return found


def parse_keys(text: str, file: str) -> KeyRing:
    """Parse a keys file. Raises ConfigError with file, key name and field, but never with a key."""
    try:
        entries = msgspec.convert(tomllib.loads(text), _KeyFile).keys
    except tomllib.TOMLDecodeError:
        raise ConfigError("keys file is not TOML", file=file) from None
    except msgspec.ValidationError as e:
        raise ConfigError("keys file has an invalid entry", file=file, reason=str(e)) from None
    if len(entries) > KEYS_MAX:
        raise ConfigError("too many keys", file=file, keys=len(entries), max=KEYS_MAX)
    found = {}
    for entry in entries:
        digest = key_id(entry.public_key)
        if digest in found:
            raise ConfigError("a public key is listed twice: remove one entry", file=file, name=entry.name)
        found[digest] = _principal(entry, file)
    return KeyRing(found.items())


def _principal(entry: _KeyEntry, file: str) -> Principal:
    scopes = SCOPES if entry.scopes is None else frozenset(entry.scopes)
    prefixes = tuple(entry.prefixes or ())
    reason = ""
    if len(entry.public_key) != 40:
        reason = "public_key must be 40 characters of Z85"
    elif not entry.name:
        reason = "name must not be empty"
    elif not scopes <= SCOPES:
        reason = f"scopes must be among {', '.join(sorted(SCOPES))}"
    elif entry.prefixes is not None and (not prefixes or "" in prefixes):
        reason = "prefixes must not be empty: omit the field to allow every topic"
    elif len(prefixes) > PREFIXES_PER_KEY_MAX:
        reason = f"prefixes must have at most {PREFIXES_PER_KEY_MAX} entries, got {len(prefixes)}"
    if reason:
        raise ConfigError("keys file has an invalid entry", file=file, name=entry.name, reason=reason)
    return Principal(entry.name, scopes, prefixes)


def authorise(principal: Principal | None, message: m.Message) -> None:
    """Raise Unauthorized or Forbidden unless the operation is allowed.

    Only the arguments are examined, so a refusal does not reveal which topics exist.
    """
    if principal is None:
        raise Unauthorized("unknown key: add its public key to the keys file")
    kind = type(message)
    if kind in OPEN_TO_ALL:
        return
    if kind in OWNER_ONLY:
        if not principal.is_owner:
            raise Forbidden("this request is allowed only on the engine's host")
        return
    uses = rules_of(message)
    if uses is None:
        raise Forbidden("the gateway does not handle this kind of request", kind=kind.__name__)
    for use in uses:
        principal.require(use.scopes)
    for use in uses:
        for name in use.names_in(message):
            principal.require_covered(name)


def router_names(found: m.RouterInfo) -> list[str]:
    """Return the names for which a reply about a router needs permission: the router and both topics."""
    return [found.router, found.source, found.dest]


def needs_admin_to_create(principal: Principal, message: m.Append) -> bool:
    """Return whether this append may write but not create: a configuration for a new topic needs `admin`."""
    return bool(message.create is not False and message.config and ADMIN not in principal.scopes)
