"""`ringlog read` and `ringlog tail`: records and what became of others, printed in order."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Literal

from cyclopts import Parameter

from ringlog.cli.options import Options
from ringlog.cli.output import RecordPrinter
from ringlog.cli.places import parse_moment, parse_start, tags_of
from ringlog.errors import UsageError

if TYPE_CHECKING:
    from ringlog.client.events import WatchEvent
    from ringlog.client.pages import Page

Given = Annotated[Options, Parameter(parse=False)]
From = Annotated[str, Parameter(name="--from", allow_leading_hyphen=True)]
PAGE_RECORDS = 1000
TOPICS_MAX = 256


def read(
    topic: str,
    *,
    start: From = "start",
    since: Annotated[str | None, Parameter(allow_leading_hyphen=True)] = None,
    limit: Annotated[int | None, Parameter(name=["--limit", "-n"])] = None,
    tag: str | None = None,
    levels: str | None = None,
    options: Given,
) -> None:
    """Print a topic's records up to the end it has now; announced losses are printed in their place.

    Parameters
    ----------
    topic
        Which one.
    start
        First record wanted: a number, a time (2026-03-01T12:00:00Z, -15m), epoch:seq, start or end.
    since
        Only records committed at this time or later: 2026-03-01T12:00:00Z, or 15m for a while ago.
    limit
        Most records to print.
    tag
        Only records with this tag; a final * matches any ending.
    levels
        Only records whose tag matches by levels: + is any one, a final # all that follow (eu/+/orders).
    """
    left, tags = _limit(limit), tags_of(tag, levels)
    if since is not None and start != "start":
        raise UsageError("--since and --from exclude one another")
    where = parse_start(start, options.clock) if since is None else parse_moment(since, options.clock)
    show = RecordPrinter(options.printer())
    with options.connect() as client:
        for page in client.reader(topic, where, tags=tags).pages(PAGE_RECORDS):
            left = print_page(show, page, left)
            if left == 0:
                break
    show.close()


def tail(
    *topics: str,
    start: From = "end",
    limit: Annotated[int | None, Parameter(name=["--limit", "-n"])] = None,
    tag: str | None = None,
    levels: str | None = None,
    strong: Annotated[bool, Parameter(negative="")] = False,
    options: Given,
) -> None:
    """Print records of topics as they are committed, until interrupted, or until no topic is left.

    Parameters
    ----------
    topics
        Which ones; a * stands for any characters, and topics made later that match are followed, too.
    start
        Where to begin, as for read (default: only what comes from now on).
    limit
        Stop after this many records.
    tag
        Only records with this tag; a final * matches any ending.
    levels
        Only records whose tag matches by levels: + is any one, a final # all that follow (eu/+/orders).
    strong
        Only what survives power loss, as soon as it does.
    """
    if not 1 <= len(topics) <= TOPICS_MAX:
        raise UsageError("name the topics to follow", found=len(topics), min=1, max=TOPICS_MAX)
    left, tags = _limit(limit), tags_of(tag, levels)
    where = parse_start(start, options.clock)
    names_topic = len(topics) > 1 or any("*" in topic for topic in topics)
    show = RecordPrinter(options.printer(), names_topic=names_topic)
    consistency: Literal["eventual", "strong"] = "strong" if strong else "eventual"
    with options.connect() as client:
        watch = client.watch(topics, start=where, tags=tags, consistency=consistency, limit=PAGE_RECORDS)
        while left != 0 and (event := watch.next()) is not None:
            left = print_event(show, event, left)
            if not watch.has_news:
                show.flush()
    show.close()


def _limit(limit: int | None) -> int:
    """Records still wanted; -1 = all."""
    if limit is None:
        return -1
    if limit < 1:
        raise UsageError("--limit is at least 1", found=limit)
    return limit


def print_page(show: RecordPrinter, page: Page, left: int) -> int:
    """Print a page as far as records are wanted; returns how many still are (-1 = all)."""
    if page.tombstone is not None:
        show.tombstone(page.tombstone)
    for record in page.records if left < 0 else page.records[:left]:
        show.record(page.topic, record)
    return left if left < 0 else max(left - len(page.records), 0)


def print_event(show: RecordPrinter, event: WatchEvent, left: int) -> int:
    """Print what a watch gave, as far as records are wanted; returns how many still are (-1 = all)."""
    from ringlog.client.events import CaughtUp, Lagged, TopicDeleted
    from ringlog.client.pages import Page, Tombstone

    match event:
        case Page():
            return print_page(show, event, left)
        case Tombstone():
            show.tombstone(event)
        case TopicDeleted():
            show.note(f"{event.topic} was deleted behind {event.head_seq}: {event.reason}", event)
        case Lagged():
            show.note(f"{event.topic} is {event.behind} positions behind", event)
        case CaughtUp():
            return left
    return left
