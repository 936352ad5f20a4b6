"""`ringlog group`: show the progress and pending records of consumer groups, move and delete them."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING, Annotated, Any, Literal, cast

from cyclopts import Parameter

from ringlog.cli.confirm import counted, needs_confirmation, require_confirmation
from ringlog.cli.option_parsing import Limit, parse_milliseconds, parse_start, rfc3339
from ringlog.cli.options import Options
from ringlog.cli.outcome import CliExit
from ringlog.cli.topic import facts_of
from ringlog.errors import GroupNotFound, TopicNotFound

if TYPE_CHECKING:
    from ringlog.client import Client
    from ringlog.client.group import Group
    from ringlog.client.leases.group_facts import GroupSummary, PendingEntry

Given = Annotated[Options, Parameter(parse=False)]
Yes = Annotated[bool, Parameter(name=["--yes", "-y"], negative=())]


def list_groups(*topics: str, options: Given) -> None:
    """List consumer groups with their cursor, floor and pending count.

    Parameters
    ----------
    topics
        Topic names (default: all topics).

    Examples
    --------
    ringlog group list
    ringlog group list orders
    """
    with options.connect() as client:
        rows = [_listed(each) for each in _summaries(client, topics)]
    options.printer().rows(rows)


def show(topic: str, group: str, *, options: Given) -> None:
    """Show the counts and the members of a consumer group.

    Parameters
    ----------
    topic
        Topic name.
    group
        Group name; for a group with a tag filter, the name that `ringlog group list` prints.

    Examples
    --------
    ringlog group show orders billing
    """
    with options.connect() as client:
        found = opened(client, topic, group).stats()
    facts = facts_of(found)
    facts["lag"] = found.lag
    facts["members"] = [
        {"name": each.name, "last_seen": rfc3339(round(each.last_seen * 1e6)), "in_flight": each.in_flight}
        for each in found.members
    ]
    options.printer().item(facts)


def lag(*topics: str, options: Given) -> None:
    """Show the lag of consumer groups: undelivered and pending records.

    Parameters
    ----------
    topics
        Topic names (default: all topics).

    Examples
    --------
    ringlog group lag orders
    """
    rows = []
    with options.connect() as client:
        for each in _summaries(client, topics):
            try:
                found = _opened(client, each).stats()
            except (GroupNotFound, TopicNotFound):
                continue  # Deleted meanwhile.
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
    limit: Limit = 100,
    options: Given,
) -> None:
    """List delivered records of a group that are not done.

    Parameters
    ----------
    topic
        Topic name.
    group
        Group name; for a group with a tag filter, the name that `ringlog group list` prints.
    node
        List only records that this member holds.
    idle
        List only records with no activity for this long: 30s, 5m.
    deliveries
        List only records delivered at least this often.
    limit
        Maximum number of entries; records delivered together are one entry.

    Examples
    --------
    ringlog group pending orders billing --idle 5m
    """
    idle_ms = parse_milliseconds(idle, "--idle")
    with options.connect() as client:
        found = opened(client, topic, group).pending(
            node=node, idle_ms=idle_ms, min_deliveries=deliveries, limit=limit
        )
    options.printer().rows([_entry(each) for each in found])


# -- positions --------------------------------------------------------------------------------------------


def seek(
    topic: str,
    group: str,
    place: Annotated[str, Parameter(allow_leading_hyphen=True)],
    *,
    yes: Yes = False,
    options: Given,
) -> int:
    """Move a consumer group to another position. All pending entries are dropped.

    Leases of the group end.

    Parameters
    ----------
    topic
        Topic name.
    group
        Group name; for a group with a tag filter, the name that `ringlog group list` prints.
    place
        First record to deliver: a number (inclusive), a cursor epoch:seq (exclusive), a time
        (2026-03-01T12:00:00Z, -15m), start or end.
    yes
        Do not ask for confirmation. Required without a terminal.

    Examples
    --------
    ringlog group seek orders billing 100 --yes
    ringlog group seek orders billing -2h --yes
    """
    start = parse_start(place, options.clock, "PLACE")
    asks = needs_confirmation(yes=yes)
    with options.connect() as client:
        found = opened(client, topic, group)
        if asks:
            entries = counted(found.stats().pending, "pending record")
            require_confirmation(f"Move group {group} of topic {topic} to {place} and drop its {entries}?")
        first = found.seek(start)
    options.printer().item({"topic": topic, "group": group, "first_seq": first})
    return CliExit.DONE


def reset(topic: str, group: str, *, yes: Yes = False, options: Given) -> int:
    """Move a consumer group to the first record. All pending entries are dropped.

    Parameters
    ----------
    topic
        Topic name.
    group
        Group name; for a group with a tag filter, the name that `ringlog group list` prints.
    yes
        Do not ask for confirmation. Required without a terminal.

    Examples
    --------
    ringlog group reset orders billing --yes
    """
    return seek(topic, group, "start", yes=yes, options=options)


def delete(topic: str, group: str, *, yes: Yes = False, options: Given) -> int:
    """Delete a consumer group; records stay. This cannot be undone.

    Parameters
    ----------
    topic
        Topic name.
    group
        Group name; for a group with a tag filter, the name that `ringlog group list` prints.
    yes
        Do not ask for confirmation. Required without a terminal.

    Examples
    --------
    ringlog group delete orders billing --yes
    """
    asks = needs_confirmation(yes=yes)
    with options.connect() as client:
        found = [each for each in client.topics.groups(topic) if each.group == group]
        if found and asks:
            entries = counted(found[0].pending, "pending record")
            require_confirmation(f"Delete group {group} of topic {topic} and its {entries}?")
        deleted = bool(found) and _opened(client, found[0]).delete()
    options.printer().item({"topic": topic, "group": group, "deleted": deleted})
    return CliExit.DONE if deleted else CliExit.NOT_FOUND


# -- lookup -----------------------------------------------------------------------------------------------


def _summaries(client: Client, topics: tuple[str, ...]) -> Iterable[GroupSummary]:
    """Yield the groups of these topics, or of all topics. Topics that are deleted meanwhile are skipped."""
    for name in topics or tuple(each.topic for each in client.topics.list()):
        try:
            yield from client.topics.groups(name)
        except TopicNotFound:
            if topics:
                raise


def opened(client: Client, topic: str, key: str) -> Group:
    """Return the group with this listed name (with its tag filter after an `@`).

    Raises GroupNotFound and TopicNotFound.
    """
    for each in client.topics.groups(topic):
        if each.group == key:
            return _opened(client, each)
    raise GroupNotFound("no such group", topic=topic, group=key)


def _opened(client: Client, each: GroupSummary) -> Group:
    """Return an existing group; it is not created if it is deleted meanwhile."""
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
