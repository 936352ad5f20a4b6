"""What each operation needs of a key: one table, keyed by the message and by whose leases it is about. Pure.

A row lists every use that the operation makes of a name: which field holds the name, and which scope the key
needs to use it so (A-8). The key must reach every name (A-9), also names that only a setting mentions: the
engine uses them later on behalf of whoever set them (A-10). An operation without a row is refused to
everybody, the owner included.
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
    """Whose leases an operation is about. An ack of a queue's own leases deletes jobs, an ack of a group's
    deletes nothing, so the two never share a row."""

    OWN = "the queue's own"
    GROUP = "a named group's"


@dataclass(frozen=True, slots=True)
class PermissionRule:
    """One use of the names in one field. The key needs one of `scopes`, and must reach each name."""

    field: str
    """Name of the field; "" = the operation names nothing."""
    scopes: tuple[str, ...]
    names: Callable[[Any], Iterable[str]] | None = None
    """Finds the names in the field; None = the field is a name, and "" names nothing."""
    when: Callable[[Any], bool] | None = None
    """Does the message make this use? None = always."""
    is_filter: bool = False
    """The field only narrows the answer, from which the gateway removes what the key does not reach
    (A-11)."""

    def names_in(self, message: m.Message) -> Iterable[str]:
        """Names that the key must reach."""
        if self.is_filter or not self.field:
            return ()
        found = getattr(message, self.field)
        if self.names is not None:
            return self.names(found)
        return (found,) if found else ()


SETTINGS: Mapping[str, str] = {"dead_letter": WRITE}
"""Settings of topics that name a topic, and the scope that the engine's later use of it needs."""


def _topics_of_feeds(feeds: list[m.Feed]) -> list[str]:
    return [feed.topic for feed in feeds]


def _topics_in_settings(config: dict[str, Any] | None) -> list[str]:
    found = [config[name] for name in SETTINGS if name in config] if config else []
    return [name for name in found if isinstance(name, str)]  # Anything else is no name, and refused as such.


def _names_topics(message: m.TopicPut | m.Append) -> bool:
    return bool(_topics_in_settings(message.config))


def _is_default_create(message: m.TopicPut) -> bool:
    """Is it the creation that a write makes by itself, which configures nothing? (W-6)"""
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
    # A creation with settings also needs `admin`, if the topic is absent: appends.py looks (W-6).
    (m.Append, None): (*_TOPIC_WRITE, _SETTINGS),
    (m.ProducerState, None): _TOPIC_WRITE,
    (m.Read, None): _TOPIC_READ,
    (m.SeekTime, None): _TOPIC_READ,
    (m.RecordsDelete, None): _TOPIC_DELETE,
    (m.Subscribe, None): (PermissionRule("feeds", (READ,), _topics_of_feeds),),
    (m.Unsubscribe, None): (PermissionRule("", (READ,)),),
    (m.Taken, None): (PermissionRule("", (READ,)),),
    (m.RouterCreate, None): (PermissionRule("router", (ADMIN,)), PermissionRule("source", (READ,)),
    PermissionRule("dest", (WRITE,))),
    # The ends of these two are not in the request: routing.py looks at them.
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
    # The topic of the letters is not in the request: routing.py looks at it, for both.
    (m.LettersRedrive, LeaseOwner.OWN): _TOPIC_WRITE,
    (m.LettersRedrive, LeaseOwner.GROUP): _TOPIC_READ_WRITE,
    # Where retention waits for groups, making or moving one also needs `admin`: group_rights.py looks.
    (m.GroupOpen, LeaseOwner.GROUP): (*_TOPIC_READ, PermissionRule("dead_letter", (WRITE,),
    when=_has_dead_letter)),
    (m.GroupSeek, LeaseOwner.GROUP): _TOPIC_READ,
    (m.Claim, LeaseOwner.GROUP): _TOPIC_READ,
    (m.Steal, LeaseOwner.GROUP): _TOPIC_READ,
    (m.Ack, LeaseOwner.GROUP): _TOPIC_READ,
    (m.Nack, LeaseOwner.GROUP): _TOPIC_READ,
    # Writes a dead letter at once; where it goes was checked when the group was made.
    (m.Reject, LeaseOwner.GROUP): _TOPIC_READ_WRITE,
    (m.Extend, LeaseOwner.GROUP): _TOPIC_READ,
    (m.GroupLeave, LeaseOwner.GROUP): _TOPIC_READ,
    (m.ListPending, LeaseOwner.GROUP): _TOPIC_READ,
    (m.LeaseStats, LeaseOwner.GROUP): _TOPIC_READ,
    (m.GroupList, LeaseOwner.GROUP): _TOPIC_READ,
    (m.GroupTake, LeaseOwner.GROUP): _TOPIC_READ,
    (m.GroupCommit, LeaseOwner.GROUP): _TOPIC_READ,
    (m.GroupDelete, LeaseOwner.GROUP): _TOPIC_DELETE,
}  # fmt: skip
"""Operations without a row are refused for every key."""
OPEN_TO_ALL = frozenset({m.Hello, m.Ping})
OWNER_ONLY = frozenset({m.Locate})
"""Names files and the salts of their seals: of use only to processes that may read the files."""

_OF_BOTH = {
    kind
    for kind, leases in PERMISSIONS
    if leases is LeaseOwner.OWN and (kind, LeaseOwner.GROUP) in PERMISSIONS
}
"""Operations whose `group` says whose leases they are about; "" is the queue's own."""
_LEASES_OF = {kind: leases for kind, leases in PERMISSIONS if kind not in _OF_BOTH}


def rules_of(message: m.Message) -> PermissionRules | None:
    """The uses that this message may make; None = it is no operation of the gateway."""
    kind: type[Any] = type(message)
    if kind in _OF_BOTH:
        leases: LeaseOwner | None = LeaseOwner.GROUP if getattr(message, "group", "") else LeaseOwner.OWN
    elif kind in _LEASES_OF:
        leases = _LEASES_OF[kind]
    else:
        return None
    return tuple(use for use in PERMISSIONS[kind, leases] if use.when is None or use.when(message))
