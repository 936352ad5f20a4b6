# Generated from ringlog/aio/routers.py by tools/unasync.py: do not edit; `make fmt` regenerates it.
"""Routers of a client."""

from __future__ import annotations

from collections.abc import Iterator

from ringlog.client.connection.shell import ThreadedShell
from ringlog.client.read.pages import TagFilter
from ringlog.client.requests.router_requests import (
    RouterDescription,
    RouterOptions,
    RouterPages,
    create,
    delete,
    get,
    settle,
)
from ringlog.limits import LIST_PAGE_DEFAULT
from ringlog.link.futures import run_steps


class Routers:
    """`client.routers`."""

    def __init__(self, shell: ThreadedShell, client: object) -> None:
        self._shell = shell
        self._client = client
        """Lasts as long as it is of use."""

    def create(
        self, name: str, source: str, dest: str, *, filter: TagFilter | None = None,
        preserve_node: bool = True, preserve_tag: bool = True, create_dest: bool = True,
        allow_cycle: bool = False, guarantee: str = "at_least_once",
    ) -> RouterDescription:  # fmt: skip
        """Forward what is published to `source` from here on to `dest`, in order, each record once.

        Without a backlog: what `source` holds already stays there. A copy is a record of `dest`, with a
        number and a time of its own. `filter` is a tag, or a prefix ending in `*`; records it does not
        select are passed over. `guarantee="exactly_once"` stamps each copy's metadata with where it came
        from. The same name again changes the other fields and nothing else. `source` is made if it is
        absent, and so is `dest` unless told not to. Raises InvalidRequest, TopicIncompatible (another
        source or destination under this name; a destination that another source feeds), RouterCycle,
        TopicNotFound, Throttled (max_routers).
        """
        options = RouterOptions(filter, preserve_node, preserve_tag, create_dest, allow_cycle, guarantee)
        return self._shell.ask(lambda session: run_steps(create(session, name, source, dest, options)))

    def get(self, name: str, *, settle_s: float = 0.0) -> RouterDescription:
        """A router as it stands; raises RouterNotFound. With `settle_s` it waits so long at most until all
        that the source held at the call was forwarded."""
        return self._shell.ask(lambda session: run_steps(get(session, name, settle_s)))

    def settle(self, name: str, timeout_s: float = 10.0) -> RouterDescription:
        """Wait until everything that the source holds now was forwarded: who has read the source's ack
        finds the copy behind this. Raises NotReady after `timeout_s`, RouterNotFound."""
        return self._shell.ask(lambda session: run_steps(settle(session, name, timeout_s)))

    def list(
        self, *, prefix: str = "", source: str = "", dest: str = "", page_size: int = LIST_PAGE_DEFAULT
    ) -> Iterator[RouterDescription]:
        """All routers whose name begins with `prefix`, in byte order of names, fetched page by page; of one
        source, or to one destination, if named."""
        self._shell.require_open()
        return self._paged(RouterPages(prefix, source, dest, page_size))

    def _paged(self, pages: RouterPages) -> Iterator[RouterDescription]:
        while page := self._shell.ask(lambda session: run_steps(pages.next_page(session))):
            yield from page

    def delete(self, name: str) -> bool:
        """Forward no more: when it returns no further copy appears. Copies stay. False when there was
        none."""
        return self._shell.ask(lambda session: run_steps(delete(session, name)))
