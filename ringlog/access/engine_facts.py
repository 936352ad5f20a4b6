"""Checks that need facts of the engine, and filters of replies. Pure.

`keys.authorise` examines the request alone. The checks here come after it: a gateway gets the facts from the
engine and passes them. The rules are in docs/explanation/security.md.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, Literal

import msgspec

from ringlog.access.keys import Principal
from ringlog.access.permissions import ADMIN
from ringlog.envelope import messages as m
from ringlog.errors import Forbidden, RouterCycle, TopicIncompatible
from ringlog.leases.change import Mode

RefusedRouter = TopicIncompatible | RouterCycle
_ROUTER_DETAILS = ("router", "existing_source", "existing_dest", "cycle")

# -- appends ----------------------------------------------------------------------------------------------


def needs_admin_to_create(principal: Principal, message: m.Append) -> bool:
    """Return whether this append may write but not create: a configuration for a new topic needs `admin`.

    Send `without_create(message)` then. If the topic does not exist, raise `create_forbidden`.
    """
    return bool(message.create is not False and message.config and ADMIN not in principal.scopes)


def without_create(message: m.Append) -> m.Append:
    """Return the append for a topic that exists. Its configuration is then ignored, as the shard does.

    The shard creates nothing, even if the topic is deleted in the meantime.
    """
    return msgspec.structs.replace(message, create=False)


def create_forbidden(topic: str) -> Forbidden:
    """Return the error for an append that may not create its topic."""
    return Forbidden(
        f"creating a topic with a configuration needs scope {ADMIN}", topic=topic, required_scope=ADMIN
    )


# -- routers ----------------------------------------------------------------------------------------------


def covers_router(principal: Principal, router: str, source: str, dest: str) -> bool:
    """Return whether the key covers the names of a router and of both its topics.

    Lists of routers omit all others.
    """
    return principal.covers(router) and principal.covers(source) and principal.covers(dest)


def require_router(principal: Principal, router: str, source: str, dest: str) -> None:
    """Raise Forbidden unless the key covers a router and both its topics. For a show and for a delete."""
    if not covers_router(principal, router, source, dest):
        raise Forbidden("the key's prefixes do not cover this router and both its topics", router=router)


def without_hidden_names(principal: Principal, error: RefusedRouter) -> RefusedRouter:
    """Return the refusal of a new router without the names that the key does not cover.

    Its details name other routers and topics than those of the request.
    """
    for field in _ROUTER_DETAILS:
        value = error.detail.get(field, ())
        if not all(map(principal.covers, (value,) if isinstance(value, str) else value)):
            del error.detail[field]
    return error


# -- dead letters -----------------------------------------------------------------------------------------


def require_dead_letters(principal: Principal, dead_letter: str) -> None:
    """Raise Forbidden unless the key covers the dead-letter topic of a redrive, which deletes letters there.

    Args:
        principal: The key.
        dead_letter: Setting `dead_letter` of the queue, or of the group; "" = it has none.
    """
    if dead_letter:
        principal.require_covered(dead_letter)


# -- groups -----------------------------------------------------------------------------------------------


def needs_group_admin(principal: Principal, config: Mapping[str, Any], mode: int = Mode.QUEUE) -> bool:
    """Return whether the key may neither create nor move a group of this mode.

    On a topic with `retain_until_acked`, a group in mode queue determines which records caps and TTL may
    remove. To create or seek one, a key needs the scope for configuring the topic. Raise `group_forbidden`
    then. The configuration must be current, not cached.
    """
    return ADMIN not in principal.scopes and mode == Mode.QUEUE and bool(config.get("retain_until_acked"))


def group_forbidden(topic: str, what: Literal["create", "move"]) -> Forbidden:
    """Return the error for a key without `admin` that may not create or move a group of this topic."""
    return Forbidden(
        f"retain_until_acked is set: the key needs scope {ADMIN} to {what} a group in mode queue",
        topic=topic, required_scope=ADMIN, setting="retain_until_acked",
    )  # fmt: skip


# -- replies ----------------------------------------------------------------------------------------------


def covered(principal: Principal, names: Iterable[str]) -> list[str]:
    """Return the names that the key covers, in order. For the routers that a deleted topic took along."""
    return [name for name in names if principal.covers(name)]


def visible_prefixes(principal: Principal, wanted: str) -> list[str]:
    """Return the prefixes that together cover all names with the prefix `wanted` that the key may see.

    A list of topics is the merged lists of these prefixes. None of them starts with another one.

    Example:
        >>> visible_prefixes(Principal("p", SCOPES, ("a.x", "a.y.", "b")), "a.")
        ['a.x', 'a.y.']
    """
    if not principal.prefixes or wanted.startswith(principal.prefixes):
        return [wanted]
    kept: list[str] = []
    for prefix in sorted(prefix for prefix in principal.prefixes if prefix.startswith(wanted)):
        if not kept or not prefix.startswith(kept[-1]):
            kept.append(prefix)
    return kept
