"""`ringlog dead`: records that were given up, of a queue or of a consumer group."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Annotated, Any

from cyclopts import Parameter

from ringlog.cli.asking import is_confirmed
from ringlog.cli.options import Options
from ringlog.cli.outcome import Exit
from ringlog.cli.output import RecordPrinter
from ringlog.cli.places import rfc3339
from ringlog.cli.topic import facts_of
from ringlog.errors import GroupNotFound, InvalidRequest, NotAQueue, TopicNotFound, UsageError

if TYPE_CHECKING:
    from ringlog.client import Client
    from ringlog.client.group import Group
    from ringlog.client.pages import Record
    from ringlog.client.queue import Queue

Given = Annotated[Options, Parameter(parse=False)]
Yes = Annotated[bool, Parameter(name=["--yes", "-y"], negative=())]
Most = Annotated[int, Parameter(name=["--limit", "-n"])]
OfGroup = Annotated[str, Parameter(name=["--group", "-g"])]
PAGE_RECORDS = 1_000


def list_letters(topic: str, *, group: OfGroup = "", limit: Most = 100, options: Given) -> None:
    """List dead letters, oldest first.

    Parameters
    ----------
    topic
        The queue they come from, or the topic of the group.
    group
        The consumer group that gave them up, as group list prints it.
    limit
        How many.
    """
    if limit < 1:
        raise UsageError("--limit is at least 1", found=limit)
    rows: list[dict[str, Any]] = []
    with options.connect() as client:
        for letter in _letters(client, topic, group, _target(client, topic, group)):
            rows.append(_listed(letter))
            if len(rows) >= limit:
                break
    options.printer().rows(rows)


def show(topic: str, seq: int, *, group: OfGroup = "", options: Given) -> None:
    """Print one dead letter.

    Parameters
    ----------
    topic
        The queue it comes from, or the topic of the group.
    seq
        Its number among the dead letters, as dead list prints it.
    group
        The consumer group that gave it up.
    """
    from ringlog.client.letters import is_letter_of

    printer = RecordPrinter(options.printer())
    with options.connect() as client:
        target = _target(client, topic, group)
        found = client.read(target, after=max(seq - 1, 0), limit=1).records
        if not found or found[0].seq != seq or not is_letter_of(topic, found[0], group):
            raise InvalidRequest("there is no such dead letter", topic=target, seq=seq, source=topic)
        printer.record(target, found[0])
    printer.close()


def redrive(
    topic: str,
    *seqs: int,
    group: OfGroup = "",
    limit: Annotated[int | None, Parameter(name=["--limit", "-n"])] = None,
    rate: float | None = None,
    options: Given,
) -> None:
    """Put dead letters back into their queue, or have their group give them out once more.

    Parameters
    ----------
    topic
        The queue they come from, or the topic of the group.
    seqs
        Their numbers among the dead letters, as dead list prints them (default: all).
    group
        The consumer group that gave them up.
    limit
        The oldest so many.
    rate
        At most so many a second.
    """
    with options.connect() as client:
        report = _of(client, topic, group).redrive(seqs or None, limit=limit, rate=rate)
    facts = facts_of(report)
    for name in ("topic",) if group else ("topic", "gone"):
        facts.pop(name)
    options.printer().thing({**_source(topic, group), **facts})


def purge(topic: str, *, group: OfGroup = "", yes: Yes = False, options: Given) -> int:
    """Delete all dead letters. There is no way back. On a terminal it asks first.

    Parameters
    ----------
    topic
        The queue they come from, or the topic of the group.
    group
        The consumer group that gave them up.
    yes
        Do not ask.
    """
    with options.connect() as client:
        target = _target(client, topic, group)
        letters = [letter.seq for letter in _letters(client, topic, group, target, others=False)]
        what = f"Delete {len(letters)} dead letters of {topic} {group}".rstrip() + " for good?"
        if letters and not yes and not is_confirmed(what):
            return Exit.USAGE
        if letters:
            client.topics.delete_records(target, before_seq=letters[-1] + 1)
    options.printer().thing({**_source(topic, group), "dead_letter": target, "deleted": len(letters)})
    return Exit.DONE


def _of(client: Client, topic: str, group: str) -> Queue | Group:
    from ringlog.cli.group import opened

    return opened(client, topic, group) if group else client.queue(topic)


def _target(client: Client, topic: str, group: str) -> str:
    """Where dead letters go; raises TopicNotFound, GroupNotFound, NotAQueue, and InvalidRequest where they go
    nowhere."""
    if group:
        found = [each.dead_letter for each in client.topics.groups(topic) if each.group == group]
        if not found:
            raise GroupNotFound("no such group", topic=topic, group=group)
        target = found[0]
    else:
        state = client.topics.state(topic, touch=False)
        if state.type != "queue":
            raise NotAQueue("not a queue", topic=topic, hint="--group")
        target = state.config.get("dead_letter")
    if not target:
        raise InvalidRequest("there are no dead letters", topic=topic, group=group, field="dead_letter")
    return str(target)


def _letters(client: Client, topic: str, group: str, target: str, *, others: bool = True) -> Iterator[Record]:
    """Its own, oldest first; a topic that was not made yet has none. With `others` those that came from
    elsewhere are passed over, else they are refused: what deletes by number would delete them, too."""
    from ringlog.client.letters import is_letter_of

    try:
        for page in client.reader(target).pages(PAGE_RECORDS):
            for record in page.records:
                if is_letter_of(topic, record, group):
                    yield record
                elif not others:
                    raise InvalidRequest(
                        "the topic holds more than these dead letters", topic=target, seq=record.seq,
                        hint="ringlog delete",
                    )  # fmt: skip
    except TopicNotFound:
        return


def _source(topic: str, group: str) -> dict[str, str]:
    return {"topic": topic, "group": group} if group else {"queue": topic}


def _listed(record: Record) -> dict[str, Any]:
    from ringlog.client.letters import noted
    from ringlog.frame.columns import (
        DEAD_LETTER_DELIVERIES,
        DEAD_LETTER_LAST_FAILURE,
        DEAD_LETTER_REASON,
        DEAD_LETTER_SRC_SEQ,
    )

    failed = noted(record, DEAD_LETTER_LAST_FAILURE)
    deliveries, src_seq = noted(record, DEAD_LETTER_DELIVERIES), noted(record, DEAD_LETTER_SRC_SEQ)
    return {
        "seq": record.seq,
        "src_seq": None if src_seq is None else int(src_seq),
        "at": rfc3339(record.ts),
        "deliveries": None if deliveries is None else int(deliveries),
        "bytes": len(record.data or b""),
        "tag": record.tag,
        "failed": rfc3339(int(failed) * 1_000) if failed and failed.isdecimal() else None,
        "reason": noted(record, DEAD_LETTER_REASON),
    }
