"""`ringlog group`: how far consumer groups are, who holds what, and moving them."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING, Annotated, Any, Literal, cast

from cyclopts import Parameter

from ringlog.cli.asking import is_confirmed
from ringlog.cli.options import Options
from ringlog.cli.outcome import Exit
from ringlog.cli.places import parse_milliseconds, parse_start, rfc3339
from ringlog.cli.topic import facts_of
from ringlog.errors import GroupNotFound, TopicNotFound, UsageError

if TYPE_CHECKING:
    from ringlog.client import Client
    from ringlog.client.group import Group
    from ringlog.client.group_facts import GroupSummary, PendingEntry

Given = Annotated[Options, Parameter(parse=False)]
Yes = Annotated[bool, Parameter(name=["--yes", "-y"], negative=())]


def list_groups(*topics: str, options: Given) -> None:
    """List consumer groups: where they are, and what is pending.

    Parameters
    ----------
    topics
        Of which topics (default: all).
    """
    with options.connect() as client:
        rows = [_listed(each) for each in _summaries(client, topics)]
    options.printer().rows(rows)


def show(topic: str, group: str, *, options: Given) -> None:
    """Show how a group is, and who works for it.

    Parameters
    ----------
    topic
        Its topic.
    group
        Its name; with a filter of tags as list prints it.
    """
    with options.connect() as client:
        found = opened(client, topic, group).stats()
    facts = facts_of(found)
    facts["lag"] = found.lag
    facts["members"] = [
        {"name": each.name, "last_seen": rfc3339(round(each.last_seen * 1e6)), "in_flight": each.in_flight}
        for each in found.members
    ]
    options.printer().thing(facts)


def lag(*topics: str, options: Given) -> None:
    """How far groups are behind: records that nobody was given, and records that are given and not done.

    Parameters
    ----------
    topics
        Groups of which topics (default: all).
    """
    rows = []
    with options.connect() as client:
        for each in _summaries(client, topics):
            try:
                found = _opened(client, each).stats()
            except (GroupNotFound, TopicNotFound):
                continue  # It went meanwhile.
            rows.append(
                {
                    "topic": found.topic, "group": found.group, "mode": found.mode, "floor": found.floor,
                    "head_seq": found.head_seq, "undelivered": found.undelivered, "pending": found.pending,
                    "lag": found.lag,
                }
            )  # fmt: skip
    options.printer().rows(rows)


def pending(
    topic: str,
    group: str,
    *,
    node: str = "",
    idle: str = "0",
    deliveries: int = 0,
    limit: Annotated[int, Parameter(name=["--limit", "-n"])] = 100,
    options: Given,
) -> None:
    """List what was given out and is not done, by number. Looking changes nothing.

    Parameters
    ----------
    topic
        Its topic.
    group
        Its name; with a filter of tags as list prints it.
    node
        Only what this member holds.
    idle
        Only what nothing was done about for so long: 30s, 5m.
    deliveries
        Only what was given out so often.
    limit
        How many entries; records that were given out together are one.
    """
    if limit < 1:
        raise UsageError("--limit is at least 1", found=limit)
    idle_ms = parse_milliseconds(idle)
    with options.connect() as client:
        found = opened(client, topic, group).pending(
            node=node, idle_ms=idle_ms, min_deliveries=deliveries, limit=limit
        )
    options.printer().rows([_entry(each) for each in found])


# -- moving -----------------------------------------------------------------------------------------------


def seek(
    topic: str,
    group: str,
    place: Annotated[str, Parameter(allow_leading_hyphen=True)],
    *,
    yes: Yes = False,
    options: Given,
) -> int:
    """Have a group go on from another place, back or forth. Nothing is pending then, leases have ended.
    On a terminal it asks first.

    Parameters
    ----------
    topic
        Its topic.
    group
        Its name; with a filter of tags as list prints it.
    place
        The first record it gives out: a number, a time (2026-03-01T12:00:00Z, -15m), epoch:seq, start or end.
    yes
        Do not ask.
    """
    start = parse_start(place, options.clock)
    if not yes and not is_confirmed(f"Move group {group} of {topic} to {place}?"):
        return Exit.USAGE
    with options.connect() as client:
        first = opened(client, topic, group).seek(start)
    options.printer().thing({"topic": topic, "group": group, "first_seq": first})
    return Exit.DONE


def reset(topic: str, group: str, *, yes: Yes = False, options: Given) -> int:
    """Have a group begin anew, at the first record there is. On a terminal it asks first.

    Parameters
    ----------
    topic
        Its topic.
    group
        Its name; with a filter of tags as list prints it.
    yes
        Do not ask.
    """
    return seek(topic, group, "start", yes=yes, options=options)


def delete(topic: str, group: str, *, yes: Yes = False, options: Given) -> int:
    """Forget a group: its place, and what is pending. Records stay. On a terminal it asks first.

    Parameters
    ----------
    topic
        Its topic.
    group
        Its name; with a filter of tags as list prints it.
    yes
        Do not ask.
    """
    if not yes and not is_confirmed(f"Forget group {group} of {topic} for good?"):
        return Exit.USAGE
    with options.connect() as client:
        deleted = any(each.group == group for each in client.topics.groups(topic))
        if deleted:
            deleted = opened(client, topic, group).delete()
    options.printer().thing({"topic": topic, "group": group, "deleted": deleted})
    return Exit.DONE if deleted else Exit.NOT_FOUND


# -- which group ------------------------------------------------------------------------------------------


def _summaries(client: Client, topics: tuple[str, ...]) -> Iterable[GroupSummary]:
    """Groups of these topics, or of all; topics that go meanwhile have none."""
    for name in topics or tuple(each.topic for each in client.topics.list()):
        try:
            yield from client.topics.groups(name)
        except TopicNotFound:
            if topics:
                raise


def opened(client: Client, topic: str, key: str) -> Group:
    """The group of this name, and behind an `@` its filter; raises GroupNotFound, TopicNotFound."""
    for each in client.topics.groups(topic):
        if each.group == key:
            return _opened(client, each)
    raise GroupNotFound("no such group", topic=topic, group=key)


def _opened(client: Client, each: GroupSummary) -> Group:
    """A group that is there; it is not made should it go meanwhile."""
    mode = cast(Literal["queue", "stream"], each.mode)
    return client.group(each.topic, each.name, mode=mode, tags=each.tags, create=False)


def _listed(each: GroupSummary) -> dict[str, Any]:
    return {
        "topic": each.topic, "group": each.group, "mode": each.mode, "cursor": each.cursor,
        "floor": each.floor, "pending": each.pending,
    }  # fmt: skip


def _entry(each: PendingEntry) -> dict[str, Any]:
    return {
        "first_seq": each.first_seq, "last_seq": each.last_seq, "state": each.state, "node": each.node,
        "deliveries": each.deliveries, "first_given": rfc3339(round(each.first_given * 1e6)),
        "last_given": rfc3339(round(each.last_given * 1e6)),
        "until": rfc3339(round(each.until * 1e6)) if each.until else None, "idle_ms": each.idle_ms,
    }  # fmt: skip
