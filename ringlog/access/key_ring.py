"""Admitted keys by digest: CURVE keys of the socket gateway, bearer keys of the HTTP gateway. Pure.

Keys are stored as SHA-256 digests. A lookup compares with every entry in constant time. The two kinds are
never mixed: a public CURVE key is no secret, and must not be accepted as a bearer key.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from enum import Enum

from ringlog.access.keys import ANYONE, Principal

LOCAL_ID = "local"
"""User id of connections over the ipc socket."""
BEARER = "Bearer "
"""How an `authorization` header begins, exactly."""
BEARER_CHARS_MAX = 512
"""A longer bearer key is refused before it is hashed."""


class KeyKind(Enum):
    """How a client proves that it has a key."""

    CURVE = "curve"
    """By the encryption of its TCP connection. The entry has the public key."""
    BEARER = "bearer"
    """By sending it over HTTP. The entry has the SHA-256 of the key."""


@dataclass(frozen=True, slots=True)
class KeyEntry:
    """One admitted key: its kind, its digest and its rights."""

    kind: KeyKind
    digest: str
    principal: Principal
    is_short: bool = False
    """The bearer key has fewer than BEARER_CHARS_SHORT characters and may be guessed."""


def key_id(key: str) -> str:
    """Return the user id for a CURVE public key (Z85), or for a bearer key: its SHA-256 in hexadecimal."""
    from hashlib import sha256  # Loads OpenSSL: only for engines with keys.

    return sha256(key.encode()).hexdigest()


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


class BearerKeys:
    """Admitted bearer keys. With `admits_all`, when no keys are configured, no request needs a key.

    Example:
        >>> keys = BearerKeys([(key_id("rl_secret"), Principal("billing", frozenset({"read"})))])
        >>> keys.find("Bearer rl_secret").name
        'billing'
    """

    def __init__(self, principals: Iterable[tuple[str, Principal]] = (), *, admits_all: bool = False) -> None:
        rows = tuple(principals)
        self._ring = KeyRing(rows)
        self._rows = frozenset(rows)
        self.admits_all = admits_all
        self._admitted: dict[str, Principal] = {}
        """Entries that were found before, by digest: at most one for each entry. No oracle, because it is
        searched by the digest of what the client sent, which the client cannot choose."""

    def __len__(self) -> int:
        return len(self._ring)

    def still_admits(self, principal: Principal) -> bool:
        """Return whether a principal that was found earlier has the same key and the same rights now."""
        return self.admits_all or (principal.digest, principal) in self._rows

    def find(self, authorization: str | None) -> Principal | None:
        """Return the principal of an `authorization` header; None if there is no header or no such key.

        The header must be `Bearer KEY` with exactly this case and one space. None means 401.
        """
        if self.admits_all:
            return ANYONE
        if (
            authorization is None
            or not authorization.startswith(BEARER)
            or not len(BEARER) < len(authorization) <= len(BEARER) + BEARER_CHARS_MAX
            or not authorization.isascii()
        ):
            return None
        digest = key_id(authorization[len(BEARER) :])
        found = self._admitted.get(digest)
        if found is None and (found := self._ring.find(digest)) is not None:
            self._admitted[digest] = found
        return found


@dataclass(frozen=True, slots=True)
class Keys:
    """All keys of an engine at one time."""

    curve: KeyRing
    bearer: BearerKeys

    def __len__(self) -> int:
        return len(self.curve) + len(self.bearer)
