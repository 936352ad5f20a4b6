"""`ringlog read` and `ringlog tail`: print records and lost ranges in order."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Literal

from cyclopts import Parameter

from ringlog.cli.option_parsing import Limit, parse_moment, parse_start, tags_of
from ringlog.cli.options import Options
from ringlog.cli.output import RecordPrinter
from ringlog.errors import UsageError

if TYPE_CHECKING:
    from ringlog.client.read.pages import Page
    from ringlog.client.watches.events import WatchEvent

Given = Annotated[Options, Parameter(parse=False)]
From = Annotated[str, Parameter(name="--from", allow_leading_hyphen=True)]
PAGE_RECORDS = 1000
TOPICS_MAX = 256


def read(
    topic: str,
    *,
    start: From = "start",
    since: Annotated[str | None, Parameter(allow_leading_hyphen=True)] = None,
    limit: Limit | None = None,
    tag: str | None = None,
    levels: str | None = None,
    options: Given,
) -> None:
    """Print the records of a topic up to its current end.

    Lost records are printed at their position, never skipped silently.

    Parameters
    ----------
    topic
        Topic name.
    start
        First record to print: a number (inclusive), a cursor epoch:seq (exclusive), a time
        (2026-03-01T12:00:00Z, -15m), start or end.
    since
        Print only records committed at this time or later: 2026-03-01T12:00:00Z, or 15m for 15 minutes ago.
    limit
        Maximum number of records to print.
    tag
        Print only records with this tag; a final * matches any ending.
    levels
        Print only records whose tag matches by levels: + is one level, a final # all that follow
        (eu/+/orders).

    Examples
    --------
    ringlog read orders --from 100 --limit 10
    ringlog read orders --since 15m --output json
    """
    left, tags = -1 if limit is None else limit, tags_of(tag, levels)
    if since is not None and start != "start":
        raise UsageError("give --since or --from: they exclude one another")
    where = (
        parse_start(start, options.clock, "--from")
        if since is None
        else parse_moment(since, options.clock, "--since")
    )
    with options.connect() as client, RecordPrinter(options.printer()) as show:
        for page in client.reader(topic, where, tags=tags).pages(PAGE_RECORDS):
            left = print_page(show, page, left)
            if left == 0:
                break


def tail(
    *topics: str,
    start: From = "end",
    limit: Limit | None = None,
    tag: str | None = None,
    levels: str | None = None,
    strong: Annotated[bool, Parameter(negative="")] = False,
    options: Given,
) -> None:
    """Print records of topics as they are committed.

    Ends when it is interrupted, or when all named topics are deleted.

    Parameters
    ----------
    topics
        Topic names. A * matches any characters, including the names of topics that are created later.
    start
        First record to print: a number (inclusive), a cursor epoch:seq (exclusive), a time
        (2026-03-01T12:00:00Z, -15m), start or end.
    limit
        Exit after this many records.
    tag
        Print only records with this tag; a final * matches any ending.
    levels
        Print only records whose tag matches by levels: + is one level, a final # all that follow
        (eu/+/orders).
    strong
        Print only records that survive a power loss, as soon as they do.

    Examples
    --------
    ringlog tail orders
    ringlog tail 'rooms.*' --from start --limit 3
    """
    if not 1 <= len(topics) <= TOPICS_MAX:
        raise UsageError(f"give from 1 to {TOPICS_MAX} topics, got {len(topics)}")
    left, tags = -1 if limit is None else limit, tags_of(tag, levels)
    where = parse_start(start, options.clock, "--from")
    names_topic = len(topics) > 1 or any("*" in topic for topic in topics)
    consistency: Literal["eventual", "strong"] = "strong" if strong else "eventual"
    printer = RecordPrinter(options.printer(), names_topic=names_topic)
    with options.connect() as client, printer as show:
        watch = client.watch(topics, start=where, tags=tags, consistency=consistency, limit=PAGE_RECORDS)
        while left != 0 and (event := watch.next()) is not None:
            left = print_event(show, event, left)
            if not watch.has_news:
                show.flush()


def print_page(show: RecordPrinter, page: Page, left: int) -> int:
    """Print a page, at most `left` records (-1: all); return the number of records left to print."""
    if page.tombstone is not None:
        show.tombstone(page.tombstone)
    for record in page.records if left < 0 else page.records[:left]:
        show.record(page.topic, record)
    return left if left < 0 else max(left - len(page.records), 0)


def print_event(show: RecordPrinter, event: WatchEvent, left: int) -> int:
    """Print an event of a watch, at most `left` records (-1: all); return the number left to print."""
    from ringlog.client.read.pages import Page, Tombstone
    from ringlog.client.watches.events import CaughtUp, Lagged, TopicDeleted

    match event:
        case Page():
            return print_page(show, event, left)
        case Tombstone():
            show.tombstone(event)
        case TopicDeleted():
            show.print_event(f"{event.topic} was deleted behind {event.head_seq}: {event.reason}", event)
        case Lagged():
            show.print_event(f"{event.topic} is {event.behind} positions behind", event)
        case CaughtUp():
            return left
    return left
