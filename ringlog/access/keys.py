"""The principal behind a key, and the decision whether it may make a request. Denies by default. Pure.

A principal is the proven identity of a connection; a client cannot choose it. On the ipc socket the file
permissions of the shared-memory directory prove it: a process that can open the socket is the owner of the
engine. On TCP it is a CURVE key, over HTTP a bearer key (key_ring.py, bearer.py).

A gateway asks `authorise` about each message before it does anything else. An HTTP request counts as the
messages that equal its operation. Checks that need facts of the engine are in engine_facts.py.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from ringlog.access.permissions import OPEN_TO_ALL, OWNER_ONLY, SCOPES, SERVED, rules_of
from ringlog.envelope import messages as m
from ringlog.errors import Forbidden, Unauthorized


@dataclass(frozen=True, slots=True)
class Principal:
    """Proven identity of a connection, with its scopes and prefixes."""

    name: str
    scopes: frozenset[str]
    prefixes: tuple[str, ...] = ()
    is_owner: bool = False
    is_anyone: bool = False
    """No keys are configured, and every client has this principal."""
    digest: str = field(default="", compare=False)
    """Digest of the key that proves it. Entries of one name are one client with several keys."""
    is_unrestricted: bool = field(init=False, compare=False)
    """All scopes and every name: of the messages with a row in the table, none is refused."""

    def __post_init__(self) -> None:
        """Compute `is_unrestricted` once, because it is read for every request."""
        object.__setattr__(self, "is_unrestricted", self.scopes >= SCOPES and not self.prefixes)

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
ANYONE = Principal("anyone", SCOPES, is_anyone=True)


def authorise(principal: Principal | None, message: m.Message) -> None:
    """Raise Unauthorized or Forbidden unless the operation is allowed.

    Only the arguments are examined, so a refusal does not reveal which topics exist.
    """
    if principal is None:
        raise Unauthorized("unknown key: add its public key to the keys file")
    kind = type(message)
    if kind in OPEN_TO_ALL or (principal.is_unrestricted and kind in SERVED):
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
