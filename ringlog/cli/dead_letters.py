"""`ringlog dead-letter`: dead letters of a queue or of a consumer group."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Annotated, Any

from cyclopts import Parameter

from ringlog.cli.confirm import counted, needs_confirmation, require_confirmation
from ringlog.cli.option_parsing import Limit, Rate, rfc3339
from ringlog.cli.options import Options
from ringlog.cli.outcome import CliExit
from ringlog.cli.output import RecordPrinter
from ringlog.cli.topic import facts_of
from ringlog.errors import GroupNotFound, InvalidRequest, NotAQueue, TopicNotFound

if TYPE_CHECKING:
    from ringlog.client import Client
    from ringlog.client.group import Group
    from ringlog.client.queue import Queue
    from ringlog.client.read.pages import Record

Given = Annotated[Options, Parameter(parse=False)]
Yes = Annotated[bool, Parameter(name=["--yes", "-y"], negative=())]
OfGroup = Annotated[str, Parameter(name=["--group", "-g"])]
PAGE_RECORDS = 1_000


def list_dead_letters(topic: str, *, group: OfGroup = "", limit: Limit = 100, options: Given) -> None:
    """List dead letters, oldest first.

    Parameters
    ----------
    topic
        Source of the dead letters: a queue, or the topic of the group.
    group
        Consumer group that rejected or exhausted the records, as `ringlog group list` prints it.
    limit
        Maximum number of dead letters.

    Examples
    --------
    ringlog dead-letter list emails
    ringlog dead-letter list orders --group billing
    """
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
        Source of the dead letters: a queue, or the topic of the group.
    seq
        Number of the dead letter, as `ringlog dead-letter list` prints it.
    group
        Consumer group that rejected or exhausted the records, as `ringlog group list` prints it.

    Examples
    --------
    ringlog dead-letter show emails 3
    """
    from ringlog.client.leases.dead_letters import is_dead_letter_of

    with options.connect() as client, RecordPrinter(options.printer()) as printer:
        target = _target(client, topic, group)
        found = client.read(target, after=max(seq - 1, 0), limit=1).records
        if not found or found[0].seq != seq or not is_dead_letter_of(topic, found[0], group):
            raise InvalidRequest("there is no such dead letter", topic=target, seq=seq, source=topic)
        printer.record(target, found[0])


def redrive(
    topic: str,
    *seqs: int,
    group: OfGroup = "",
    limit: Limit | None = None,
    rate: Rate | None = None,
    options: Given,
) -> None:
    """Return dead letters to their queue, or to their group for redelivery.

    Parameters
    ----------
    topic
        Source of the dead letters: a queue, or the topic of the group.
    seqs
        Numbers of the dead letters, as `ringlog dead-letter list` prints them (default: all).
    group
        Consumer group that rejected or exhausted the records, as `ringlog group list` prints it.
    limit
        Maximum number of dead letters, oldest first.
    rate
        Maximum number of dead letters per second.

    Examples
    --------
    ringlog dead-letter redrive emails
    ringlog dead-letter redrive emails 3 4 --rate 50
    """
    with options.connect() as client:
        report = _of(client, topic, group).redrive(seqs or None, limit=limit, rate=rate)
    facts = facts_of(report)
    for name in ("topic",) if group else ("topic", "gone"):
        facts.pop(name)
    options.printer().item({**_source(topic, group), **facts})


def purge(topic: str, *, group: OfGroup = "", yes: Yes = False, options: Given) -> int:
    """Delete all dead letters. This cannot be undone.

    Refused if the dead-letter topic contains other records.

    Parameters
    ----------
    topic
        Source of the dead letters: a queue, or the topic of the group.
    group
        Consumer group that rejected or exhausted the records, as `ringlog group list` prints it.
    yes
        Do not ask for confirmation. Required without a terminal.

    Examples
    --------
    ringlog dead-letter purge emails --yes
    """
    asks = needs_confirmation(yes=yes)
    with options.connect() as client:
        target = _target(client, topic, group)
        letters = [letter.seq for letter in _letters(client, topic, group, target, others=False)]
        if letters and asks:
            source = f"group {group} of topic {topic}" if group else f"queue {topic}"
            require_confirmation(f"Delete {counted(len(letters), 'dead letter')} of {source}?")
        if letters:
            client.topics.delete_records(target, before_seq=letters[-1] + 1)
    options.printer().item({**_source(topic, group), "dead_letter": target, "deleted": len(letters)})
    return CliExit.DONE


def _of(client: Client, topic: str, group: str) -> Queue | Group:
    from ringlog.cli.group import opened

    return opened(client, topic, group) if group else client.queue(topic)


def _target(client: Client, topic: str, group: str) -> str:
    """Return the dead-letter topic; raise TopicNotFound, GroupNotFound or NotAQueue.

    Raises InvalidRequest if no dead-letter topic is set."""
    if group:
        found = [each.dead_letter for each in client.topics.groups(topic) if each.group == group]
        if not found:
            raise GroupNotFound("no such group", topic=topic, group=group)
        target = found[0]
    else:
        state = client.topics.state(topic, touch=False)
        if state.type != "queue":
            raise NotAQueue(
                "the topic is not a queue: use a queue, or name a consumer group", topic=topic, hint="--group"
            )
        target = state.config.get("dead_letter")
    if not target:
        raise InvalidRequest("no dead-letter topic is set", topic=topic, group=group, field="dead_letter")
    return str(target)


def _letters(client: Client, topic: str, group: str, target: str, *, others: bool = True) -> Iterator[Record]:
    """Yield the dead letters of this source, oldest first; none if the topic does not exist yet.

    With `others`, records of other sources are skipped. Without it they raise InvalidRequest, because a purge
    by seq would delete them too."""
    from ringlog.client.leases.dead_letters import is_dead_letter_of

    try:
        for page in client.reader(target).pages(PAGE_RECORDS):
            for record in page.records:
                if is_dead_letter_of(topic, record, group):
                    yield record
                elif not others:
                    raise InvalidRequest(
                        "the topic contains other records than these dead letters",
                        topic=target,
                        seq=record.seq,
                        hint="ringlog delete",
                    )
    except TopicNotFound:
        return


def _source(topic: str, group: str) -> dict[str, str]:
    return {"topic": topic, "group": group} if group else {"queue": topic}


def _listed(record: Record) -> dict[str, Any]:
    from ringlog.client.leases.dead_letters import dead_letter_field
    from ringlog.frame.columns import (
        DEAD_LETTER_DELIVERIES,
        DEAD_LETTER_LAST_FAILURE,
        DEAD_LETTER_REASON,
        DEAD_LETTER_SRC_SEQ,
    )

    failed = dead_letter_field(record, DEAD_LETTER_LAST_FAILURE)
    deliveries, src_seq = (
        dead_letter_field(record, DEAD_LETTER_DELIVERIES),
        dead_letter_field(record, DEAD_LETTER_SRC_SEQ),
    )
    return {
        "seq": record.seq,
        "src_seq": None if src_seq is None else int(src_seq),
        "at": rfc3339(record.ts),
        "deliveries": None if deliveries is None else int(deliveries),
        "bytes": len(record.data or b""),
        "tag": record.tag,
        "failed": rfc3339(int(failed) * 1_000) if failed and failed.isdecimal() else None,
        "reason": dead_letter_field(record, DEAD_LETTER_REASON),
    }
