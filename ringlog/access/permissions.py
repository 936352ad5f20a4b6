"""Permissions of each operation: one table by message type and by the owner of the leases. Pure.

A row lists every use that the operation makes of a name: the field with the name, and the scopes for this
use. The key must cover every name. That includes names that occur only in a setting, because the engine uses
them later on behalf of the client that set them. An operation without a row is refused for every key,
including the owner.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from enum import Enum
from typing import Any

from ringlog.envelope import messages as m

READ, WRITE, DELETE, ADMIN = "read", "write", "delete", "admin"
SCOPES = frozenset({READ, WRITE, DELETE, ADMIN})


class LeaseOwner(Enum):
    """Owner of the leases that an operation is about.

    An ack of a queue's own leases deletes jobs, an ack of a group's leases deletes nothing. Therefore the two
    never share a row.
    """

    OWN = "the queue's own"
    GROUP = "a named group's"


@dataclass(frozen=True, slots=True)
class PermissionRule:
    """One use of the names in one field. The key needs one of `scopes`, and must cover each name."""

    field: str
    """Name of the field; "" = the operation names nothing."""
    scopes: tuple[str, ...]
    names: Callable[[Any], Iterable[str]] | None = None
    """Returns the names in the field; None = the field itself is a name, or "" for none."""
    when: Callable[[Any], bool] | None = None
    """Returns whether the message makes this use; None = always."""
    is_filter: bool = False
    """The field only narrows the reply. A gateway removes names that the key does not cover."""

    def names_in(self, message: m.Message) -> Iterable[str]:
        """Return the names that the key must cover."""
        if self.is_filter or not self.field:
            return ()
        found = getattr(message, self.field)
        if self.names is not None:
            return self.names(found)
        return (found,) if found else ()


SETTINGS: Mapping[str, str] = {"dead_letter": WRITE}
"""Topic settings that name a topic, with the scope for the engine's later use of it."""


def _topics_of_feeds(feeds: list[m.Feed]) -> list[str]:
    return [feed.topic for feed in feeds]


def _topics_in_settings(config: dict[str, Any] | None) -> list[str]:
    found = [config[name] for name in SETTINGS if name in config] if config else []
    return [name for name in found if isinstance(name, str)]  # The shard refuses values that are no strings.


def _names_topics(message: m.TopicPut | m.Append) -> bool:
    return bool(_topics_in_settings(message.config))


def _is_default_create(message: m.TopicPut) -> bool:
    """Return whether this creates a topic with defaults, as a write does implicitly."""
    return message.mode == "create" and not message.config


def _is_configuring(message: m.TopicPut) -> bool:
    return not _is_default_create(message)


def _has_dead_letter(message: m.GroupOpen) -> bool:
    return bool(message.dead_letter)


_TOPIC_READ = (PermissionRule("topic", (READ,)),)
_TOPIC_WRITE = (PermissionRule("topic", (WRITE,)),)
_TOPIC_DELETE = (PermissionRule("topic", (DELETE,)),)
_TOPIC_READ_WRITE = (PermissionRule("topic", (READ,)), PermissionRule("topic", (WRITE,)))
_SETTINGS = PermissionRule("config", tuple(set(SETTINGS.values())), _topics_in_settings, _names_topics)

PermissionRules = tuple[PermissionRule, ...]
PERMISSIONS: dict[tuple[type[m.Message], LeaseOwner | None], PermissionRules] = {
    (m.TopicResolve, None): (PermissionRule("topic", (READ, WRITE)),),
    (m.TopicState, None): _TOPIC_READ,
    (m.TopicList, None): (PermissionRule("prefix", (READ,), is_filter=True), PermissionRule("after", (READ,
    ), is_filter=True)),
    (m.TopicPut, None): (
        PermissionRule("topic", (WRITE, ADMIN), when=_is_default_create), PermissionRule("topic", (ADMIN,),
        when=_is_configuring), _SETTINGS,
    ),
    (m.TopicDelete, None): _TOPIC_DELETE,
    # Settings in an append also need `admin` if the topic does not exist: engine_facts.py checks that.
    (m.Append, None): (*_TOPIC_WRITE, _SETTINGS),
    (m.ProducerState, None): _TOPIC_WRITE,
    (m.Read, None): _TOPIC_READ,
    (m.SeekTime, None): _TOPIC_READ,
    (m.RecordsDelete, None): _TOPIC_DELETE,
    (m.Subscribe, None): (PermissionRule("feeds", (READ,), _topics_of_feeds),),
    (m.Unsubscribe, None): (PermissionRule("", (READ,)),),
    (m.GrantsReturned, None): (PermissionRule("", (READ,)),),
    (m.RouterCreate, None): (PermissionRule("router", (ADMIN,)), PermissionRule("source", (READ,)),
    PermissionRule("dest", (WRITE,))),
    # The two topics of the router are not in the request: engine_facts.py checks them.
    (m.RouterGet, None): (PermissionRule("router", (READ,)),),
    (m.RouterDelete, None): (PermissionRule("router", (DELETE,)),),
    (m.RouterList, None): tuple(
        PermissionRule(field, (READ,), is_filter=True) for field in ("prefix", "source", "dest", "after")
    ),
    (m.RoutesSettle, None): _TOPIC_READ,
    (m.LeaseStats, LeaseOwner.OWN): _TOPIC_READ,
    (m.Claim, LeaseOwner.OWN): _TOPIC_READ_WRITE,
    (m.Steal, LeaseOwner.OWN): _TOPIC_READ_WRITE,
    (m.Ack, LeaseOwner.OWN): _TOPIC_WRITE,
    (m.Nack, LeaseOwner.OWN): _TOPIC_WRITE,
    (m.Reject, LeaseOwner.OWN): _TOPIC_WRITE,
    (m.Extend, LeaseOwner.OWN): _TOPIC_WRITE,
    (m.ListPending, LeaseOwner.OWN): _TOPIC_READ,
    # The dead-letter topic is not in the request: engine_facts.py checks it for both rows.
    (m.RedriveDeadLetters, LeaseOwner.OWN): _TOPIC_WRITE,
    (m.RedriveDeadLetters, LeaseOwner.GROUP): _TOPIC_READ_WRITE,
    # If retention waits for groups, this and a seek also need `admin`: engine_facts.py checks that.
    (m.GroupOpen, LeaseOwner.GROUP): (*_TOPIC_READ, PermissionRule("dead_letter", (WRITE,),
    when=_has_dead_letter)),
    (m.GroupSeek, LeaseOwner.GROUP): _TOPIC_READ,
    (m.Claim, LeaseOwner.GROUP): _TOPIC_READ,
    (m.Steal, LeaseOwner.GROUP): _TOPIC_READ,
    (m.Ack, LeaseOwner.GROUP): _TOPIC_READ,
    (m.Nack, LeaseOwner.GROUP): _TOPIC_READ,
    # Writes a dead letter. Its topic was checked when the group was created.
    (m.Reject, LeaseOwner.GROUP): _TOPIC_READ_WRITE,
    (m.Extend, LeaseOwner.GROUP): _TOPIC_READ,
    (m.GroupLeave, LeaseOwner.GROUP): _TOPIC_READ,
    (m.ListPending, LeaseOwner.GROUP): _TOPIC_READ,
    (m.LeaseStats, LeaseOwner.GROUP): _TOPIC_READ,
    (m.GroupList, LeaseOwner.GROUP): _TOPIC_READ,
    (m.GroupTakeOver, LeaseOwner.GROUP): _TOPIC_READ,
    (m.GroupCommit, LeaseOwner.GROUP): _TOPIC_READ,
    (m.GroupDelete, LeaseOwner.GROUP): _TOPIC_DELETE,
}  # fmt: skip
"""Operations without a row are refused for every key."""
SERVED = frozenset(kind for kind, _ in PERMISSIONS)
"""The operations with a row."""
OPEN_TO_ALL = frozenset({m.Hello, m.Ping})
OWNER_ONLY = frozenset({m.Locate})
"""The reply names files and the salts of their seals. Only processes that may read the files need it."""

_OF_BOTH = {
    kind
    for kind, leases in PERMISSIONS
    if leases is LeaseOwner.OWN and (kind, LeaseOwner.GROUP) in PERMISSIONS
}
"""Operations whose `group` field names the owner of the leases; "" = the queue's own leases."""
_LEASES_OF = {kind: leases for kind, leases in PERMISSIONS if kind not in _OF_BOTH}


def rules_of(message: m.Message) -> PermissionRules | None:
    """Return the uses that this message makes; None = the gateway does not serve this operation."""
    kind: type[Any] = type(message)
    if kind in _OF_BOTH:
        leases: LeaseOwner | None = LeaseOwner.GROUP if getattr(message, "group", "") else LeaseOwner.OWN
    elif kind in _LEASES_OF:
        leases = _LEASES_OF[kind]
    else:
        return None
    return tuple(use for use in PERMISSIONS[kind, leases] if use.when is None or use.when(message))
