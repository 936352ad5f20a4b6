"""`ringlog read` and `ringlog tail`: records and tombstones, printed in order."""

from __future__ import annotations

import contextlib
import queue
import threading
from typing import TYPE_CHECKING, Annotated

from cyclopts import Parameter

from ringlog.cli.options import Options
from ringlog.cli.output import RecordPrinter
from ringlog.cli.places import parse_moment, parse_start
from ringlog.errors import RinglogError, UsageError

if TYPE_CHECKING:
    from ringlog.client import Client
    from ringlog.client.pages import Page, Start

Given = Annotated[Options, Parameter(parse=False)]
From = Annotated[str, Parameter(name="--from", allow_leading_hyphen=True)]
PAGE_RECORDS = 1000
CLOSE_S = 0.5
"""How long the command waits at its end for threads that follow topics."""
PAGES_AHEAD = 8
TOPICS_MAX = 256


def read(
    topic: str,
    *,
    start: From = "start",
    since: Annotated[str | None, Parameter(allow_leading_hyphen=True)] = None,
    limit: Annotated[int | None, Parameter(name=["--limit", "-n"])] = None,
    tag: str | None = None,
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
    """
    left = _limit(limit)
    if since is not None and start != "start":
        raise UsageError("--since and --from exclude one another")
    where = parse_start(start, options.clock) if since is None else parse_moment(since, options.clock)
    show = RecordPrinter(options.printer())
    with options.connect() as client:
        for page in client.reader(topic, where, tags=tag).pages(PAGE_RECORDS):
            left = print_page(show, page, left)
            if left == 0:
                break
    show.close()


def tail(
    *topics: str,
    start: From = "end",
    limit: Annotated[int | None, Parameter(name=["--limit", "-n"])] = None,
    tag: str | None = None,
    options: Given,
) -> None:
    """Print records of topics as they are committed, until interrupted.

    Parameters
    ----------
    topics
        Which ones.
    start
        Where to begin, as for read (default: only what comes from now on).
    limit
        Stop after this many records.
    tag
        Only records with this tag; a final * matches any ending.
    """
    if not 1 <= len(topics) <= TOPICS_MAX:
        raise UsageError("name the topics to follow", found=len(topics), min=1, max=TOPICS_MAX)
    left = _limit(limit)
    where = parse_start(start, options.clock)
    show = RecordPrinter(options.printer(), names_topic=len(topics) > 1)
    with options.connect() as client:
        pages = Followers(client, topics, where, tag)
        try:
            while left != 0:
                left = print_page(show, pages.next(), left)
                show.flush()
        finally:
            pages.close()
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


class Followers:
    """Follows topics, a thread each, and gives their pages as they come."""

    def __init__(self, client: Client, topics: tuple[str, ...], start: Start, tag: str | None) -> None:
        self._pages: queue.Queue[Page | RinglogError | OSError] = queue.Queue(PAGES_AHEAD)
        self._readers = [client.reader(topic, start, follow=True, tags=tag) for topic in topics]
        self._is_closed = False
        self._threads = [
            threading.Thread(target=self._follow, args=(reader,), daemon=True) for reader in self._readers
        ]
        for thread in self._threads:
            thread.start()

    def next(self) -> Page:
        """The next page of any topic; raises what ended one of them."""
        found = self._pages.get()
        if isinstance(found, RinglogError | OSError):
            raise found
        return found

    def close(self) -> None:
        """Stop following. Threads that still have something to say must not say it while Python ends."""
        self._is_closed = True
        for reader in self._readers:
            reader.close()
        with contextlib.suppress(queue.Empty):
            while True:
                self._pages.get_nowait()  # Room for who waits with a page.
        for thread in self._threads:
            thread.join(CLOSE_S / len(self._threads))

    def _follow(self, reader: object) -> None:
        try:
            for page in reader.pages(PAGE_RECORDS):  # type: ignore[attr-defined]
                self._pages.put(page)
        except (RinglogError, OSError) as e:
            if not self._is_closed:
                self._pages.put(e)
