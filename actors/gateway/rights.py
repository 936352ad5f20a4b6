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


class Leases(Enum):
    """Whose leases an operation is about. An ack of a queue's own leases deletes jobs, an ack of a group's
    deletes nothing, so the two never share a row."""

    OWN = "the queue's own"
    GROUP = "a named group's"


@dataclass(frozen=True, slots=True)
class Use:
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


def _is_plain(message: m.TopicPut) -> bool:
    """Is it the creation that a write makes by itself, which configures nothing? (W-6)"""
    return message.mode == "create" and not message.config


def _is_configuring(message: m.TopicPut) -> bool:
    return not _is_plain(message)


def _has_dead_letter(message: m.GroupOpen) -> bool:
    return bool(message.dead_letter)


_TOPIC_READ = (Use("topic", (READ,)),)
_TOPIC_WRITE = (Use("topic", (WRITE,)),)
_TOPIC_DELETE = (Use("topic", (DELETE,)),)
_TOPIC_READ_WRITE = (Use("topic", (READ,)), Use("topic", (WRITE,)))
_SETTINGS = Use("config", tuple(set(SETTINGS.values())), _topics_in_settings, _names_topics)

Row = tuple[Use, ...]
RIGHTS: dict[tuple[type[m.Message], Leases | None], Row] = {
    (m.TopicResolve, None): (Use("topic", (READ, WRITE)),),
    (m.TopicState, None): _TOPIC_READ,
    (m.TopicList, None): (Use("prefix", (READ,), is_filter=True), Use("after", (READ,), is_filter=True)),
    (m.TopicPut, None): (
        Use("topic", (WRITE, ADMIN), when=_is_plain), Use("topic", (ADMIN,), when=_is_configuring), _SETTINGS,
    ),
    (m.TopicDelete, None): _TOPIC_DELETE,
    # A creation with settings also needs `admin`, if the topic is absent: appends.py looks (W-6).
    (m.Append, None): (*_TOPIC_WRITE, _SETTINGS),
    (m.ProducerState, None): _TOPIC_WRITE,
    (m.Read, None): _TOPIC_READ,
    (m.SeekTime, None): _TOPIC_READ,
    (m.RecordsDelete, None): _TOPIC_DELETE,
    (m.Subscribe, None): (Use("feeds", (READ,), _topics_of_feeds),),
    (m.Unsubscribe, None): (Use("", (READ,)),),
    (m.Taken, None): (Use("", (READ,)),),
    (m.RouterCreate, None): (Use("router", (ADMIN,)), Use("source", (READ,)), Use("dest", (WRITE,))),
    # The ends of these two are not in the request: routing.py looks at them.
    (m.RouterGet, None): (Use("router", (READ,)),),
    (m.RouterDelete, None): (Use("router", (DELETE,)),),
    (m.RouterList, None): tuple(
        Use(field, (READ,), is_filter=True) for field in ("prefix", "source", "dest", "after")
    ),
    (m.RoutesSettle, None): _TOPIC_READ,
    (m.LeaseStats, Leases.OWN): _TOPIC_READ,
    (m.Claim, Leases.OWN): _TOPIC_READ_WRITE,
    (m.Steal, Leases.OWN): _TOPIC_READ_WRITE,
    (m.Ack, Leases.OWN): _TOPIC_WRITE,
    (m.Nack, Leases.OWN): _TOPIC_WRITE,
    (m.Reject, Leases.OWN): _TOPIC_WRITE,
    (m.Extend, Leases.OWN): _TOPIC_WRITE,
    (m.ListPending, Leases.OWN): _TOPIC_READ,
    # The topic of the letters is not in the request: routing.py looks at it, for both.
    (m.LettersRedrive, Leases.OWN): _TOPIC_WRITE,
    (m.LettersRedrive, Leases.GROUP): _TOPIC_READ_WRITE,
    # Where retention waits for groups, making or moving one also needs `admin`: group_rights.py looks.
    (m.GroupOpen, Leases.GROUP): (*_TOPIC_READ, Use("dead_letter", (WRITE,), when=_has_dead_letter)),
    (m.GroupSeek, Leases.GROUP): _TOPIC_READ,
    (m.Claim, Leases.GROUP): _TOPIC_READ,
    (m.Steal, Leases.GROUP): _TOPIC_READ,
    (m.Ack, Leases.GROUP): _TOPIC_READ,
    (m.Nack, Leases.GROUP): _TOPIC_READ,
    # Writes a dead letter at once; where it goes was checked when the group was made.
    (m.Reject, Leases.GROUP): _TOPIC_READ_WRITE,
    (m.Extend, Leases.GROUP): _TOPIC_READ,
    (m.GroupLeave, Leases.GROUP): _TOPIC_READ,
    (m.ListPending, Leases.GROUP): _TOPIC_READ,
    (m.LeaseStats, Leases.GROUP): _TOPIC_READ,
    (m.GroupList, Leases.GROUP): _TOPIC_READ,
    (m.GroupTake, Leases.GROUP): _TOPIC_READ,
    (m.GroupCommit, Leases.GROUP): _TOPIC_READ,
    (m.GroupDelete, Leases.GROUP): _TOPIC_DELETE,
}  # fmt: skip
"""Operations without a row are refused for every key."""
OPEN_TO_ALL = frozenset({m.Hello, m.Ping})
OWNER_ONLY = frozenset({m.Locate})
"""Names files and the salts of their seals: of use only to processes that may read the files."""

_OF_BOTH = {kind for kind, leases in RIGHTS if leases is Leases.OWN and (kind, Leases.GROUP) in RIGHTS}
"""Operations whose `group` says whose leases they are about; "" is the queue's own."""
_LEASES_OF = {kind: leases for kind, leases in RIGHTS if kind not in _OF_BOTH}


def row_of(message: m.Message) -> Row | None:
    """The uses that this message may make; None = it is no operation of the gateway."""
    kind: type[Any] = type(message)
    if kind in _OF_BOTH:
        leases: Leases | None = Leases.GROUP if getattr(message, "group", "") else Leases.OWN
    elif kind in _LEASES_OF:
        leases = _LEASES_OF[kind]
    else:
        return None
    return tuple(use for use in RIGHTS[kind, leases] if use.when is None or use.when(message))
