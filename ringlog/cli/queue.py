"""`ringlog queue` and `ringlog dead`: how queues stand, emptying them, and jobs that were given up."""

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
from ringlog.errors import InvalidRequest, NotAQueue, TopicNotFound, UsageError

if TYPE_CHECKING:
    from ringlog.client import Client
    from ringlog.client.pages import Record

Given = Annotated[Options, Parameter(parse=False)]
Yes = Annotated[bool, Parameter(name=["--yes", "-y"], negative=())]
PAGE_RECORDS = 1_000


def stats(*queues: str, options: Given) -> None:
    """How many jobs are in which state.

    Parameters
    ----------
    queues
        Which ones (default: all).
    """
    with options.connect() as client:
        names = queues or tuple(each.topic for each in client.topics.list() if each.type == "queue")
        rows = []
        for name in names:
            facts = facts_of(client.queue(name).stats())
            rows.append({"queue": facts.pop("topic"), **facts})
    options.printer().rows(rows)


def purge(queue: str, *, yes: Yes = False, options: Given) -> int:
    """Delete every job that is there now, whoever holds it, for good. On a terminal it asks first.

    Parameters
    ----------
    queue
        Which one.
    yes
        Do not ask.
    """
    if not yes and not is_confirmed(f"Delete all jobs of {queue} for good?"):
        return Exit.USAGE
    with options.connect() as client:
        done = client.queue(queue).purge()
    options.printer().thing(facts_of(done))
    return Exit.DONE


# -- dead letters -----------------------------------------------------------------------------------------


def dead_list(
    queue: str, *, limit: Annotated[int, Parameter(name=["--limit", "-n"])] = 100, options: Given
) -> None:
    """List a queue's dead letters, oldest first.

    Parameters
    ----------
    queue
        The queue they come from.
    limit
        How many.
    """
    if limit < 1:
        raise UsageError("--limit is at least 1", found=limit)
    rows: list[dict[str, Any]] = []
    with options.connect() as client:
        for letter in _letters(client, queue, _target(client, queue)):
            rows.append(_listed(letter))
            if len(rows) >= limit:
                break
    options.printer().rows(rows)


def dead_show(queue: str, seq: int, *, options: Given) -> None:
    """Print one dead letter.

    Parameters
    ----------
    queue
        The queue it comes from.
    seq
        Its number among the dead letters, as dead list prints it.
    """
    show = RecordPrinter(options.printer())
    with options.connect() as client:
        target = _target(client, queue)
        found = client.read(target, after=max(seq - 1, 0), limit=1).records
        if not found or found[0].seq != seq or not _is_from(found[0], queue):
            raise InvalidRequest("there is no such dead letter", queue=queue, topic=target, seq=seq)
        show.record(target, found[0])
    show.close()


def dead_redrive(
    queue: str,
    *seqs: int,
    limit: Annotated[int | None, Parameter(name=["--limit", "-n"])] = None,
    rate: float | None = None,
    options: Given,
) -> None:
    """Put dead letters back into their queue.

    Parameters
    ----------
    queue
        The queue they come from.
    seqs
        Their numbers among the dead letters, as dead list prints them (default: all).
    limit
        The oldest so many.
    rate
        At most so many a second.
    """
    with options.connect() as client:
        report = client.queue(queue).redrive(seqs or None, limit=limit, rate=rate)
    facts = facts_of(report)
    options.printer().thing({"queue": facts.pop("topic"), **facts})


def dead_purge(queue: str, *, yes: Yes = False, options: Given) -> int:
    """Delete all dead letters of a queue. There is no way back. On a terminal it asks first.

    Parameters
    ----------
    queue
        The queue they come from.
    yes
        Do not ask.
    """
    with options.connect() as client:
        target = _target(client, queue)
        letters = [letter.seq for letter in _letters(client, queue, target, others=False)]
        if (
            letters
            and not yes
            and not is_confirmed(f"Delete {len(letters)} dead letters of {queue} for good?")
        ):
            return Exit.USAGE
        if letters:
            client.topics.delete_records(target, before_seq=letters[-1] + 1)
    options.printer().thing({"queue": queue, "topic": target, "deleted": len(letters)})
    return Exit.DONE


def _target(client: Client, queue: str) -> str:
    """Where its dead letters go; raises TopicNotFound, NotAQueue, InvalidRequest."""
    state = client.topics.state(queue, touch=False)
    if state.type != "queue":
        raise NotAQueue("not a queue", topic=queue)
    target = state.config.get("dead_letter")
    if not target:
        raise InvalidRequest("the queue has no dead letters", queue=queue)
    return str(target)


def _letters(client: Client, queue: str, target: str, *, others: bool = True) -> Iterator[Record]:
    """This queue's, oldest first; a topic that was not made yet has none. With `others` those of other queues
    are passed over, else they are refused: what deletes by number would delete them, too."""
    try:
        for page in client.reader(target).pages(PAGE_RECORDS):
            for record in page.records:
                if _is_from(record, queue):
                    yield record
                elif not others:
                    raise InvalidRequest(
                        "the topic holds more than this queue's dead letters", topic=target, seq=record.seq,
                        hint="ringlog delete",
                    )  # fmt: skip
    except TopicNotFound:
        return


def _noted(record: Record, name: str) -> Any:
    """What was noted when the job was given up: in its metadata, or in headers where there was no room."""
    from ringlog.frame.columns import DEAD_LETTER_FROM

    if DEAD_LETTER_FROM in record.meta:
        return record.meta.get(name)
    value = record.headers.get(name)
    return None if value is None else value.decode(errors="replace")


def _is_from(record: Record, queue: str) -> bool:
    from ringlog.frame.columns import DEAD_LETTER_FROM

    return bool(_noted(record, DEAD_LETTER_FROM) == queue)


def _listed(record: Record) -> dict[str, Any]:
    from ringlog.frame.columns import DEAD_LETTER_DELIVERIES, DEAD_LETTER_REASON, DEAD_LETTER_SRC_SEQ

    deliveries = _noted(record, DEAD_LETTER_DELIVERIES)
    src_seq = _noted(record, DEAD_LETTER_SRC_SEQ)
    return {
        "seq": record.seq,
        "src_seq": None if src_seq is None else int(src_seq),
        "at": rfc3339(record.ts),
        "deliveries": None if deliveries is None else int(deliveries),
        "bytes": len(record.data),
        "tag": record.tag,
        "reason": _noted(record, DEAD_LETTER_REASON),
    }
