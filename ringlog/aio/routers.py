"""Routers of a client."""

from __future__ import annotations

from collections.abc import AsyncIterator

from ringlog.aio.shell import LoopShell
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
    """Create, inspect and delete routers. Available as `client.routers`.

    Example:
        await client.routers.create("paid", "orders", "invoices", filter="paid.*")
        await client.routers.settle("paid")
    """

    def __init__(self, shell: LoopShell, client: object) -> None:
        self._shell = shell
        self._client = client
        """Reference that keeps the client alive while its routers are in use."""

    async def create(
        self, name: str, source: str, dest: str, *, filter: TagFilter | None = None,
        preserve_node: bool = True, preserve_tag: bool = True, create_dest: bool = True,
        allow_cycle: bool = False, guarantee: str = "at_least_once",
    ) -> RouterDescription:  # fmt: skip
        """Create a router that copies records published to `source` from now on to `dest`, in order.

        The router does not copy records that `source` already contains. A copy is a record of `dest` with its
        own seq and commit time. If a router `name` exists, the call changes its other options and keeps its
        position.

        Args:
            name: Name of the router.
            source: Topic to copy from. It is created if it does not exist.
            dest: Topic to copy to. It is created if it does not exist and `create_dest` is true.
            filter: A tag, or a prefix that ends in `*`. The router skips records that do not match. None
                copies every record.
            preserve_node: Keep the node of each record.
            preserve_tag: Keep the tag of each record.
            create_dest: Create `dest` if it does not exist.
            allow_cycle: Accept a router that closes a cycle of routers.
            guarantee: `at_least_once`, or `exactly_once`. The latter stamps the origin of each copy into its
                metadata.

        Returns:
            The router, with `created` = true if this call created it.

        Raises:
            InvalidRequest: A name or option is invalid.
            TopicIncompatible: The router exists with another source or destination, or another source feeds
                `dest`.
            RouterCycle: The router would close a cycle, and `allow_cycle` is false.
            TopicNotFound: `dest` does not exist, and `create_dest` is false.
            Throttled: The engine has `max_routers` routers.
        """
        options = RouterOptions(filter, preserve_node, preserve_tag, create_dest, allow_cycle, guarantee)
        return await self._shell.ask(lambda session: run_steps(create(session, name, source, dest, options)))

    async def get(self, name: str, *, settle_s: float = 0.0) -> RouterDescription:
        """Return a router with its position and counters.

        Args:
            name: Name of the router.
            settle_s: Longest time to wait, in seconds, until the router has forwarded every record that
                `source` contained at the time of the call. 0 returns at once.

        Returns:
            The router.

        Raises:
            RouterNotFound: No router has this name.
        """
        return await self._shell.ask(lambda session: run_steps(get(session, name, settle_s)))

    async def settle(self, name: str, timeout_s: float = 10.0) -> RouterDescription:
        """Wait until the router has forwarded every record that its source contains now.

        When the call returns, the copy of every record that was acked before the call can be read.

        Args:
            name: Name of the router.
            timeout_s: Longest time to wait, in seconds.

        Returns:
            The router, with its new position.

        Raises:
            NotReady: The router did not reach this position within `timeout_s`.
            RouterNotFound: No router has this name.
        """
        return await self._shell.ask(lambda session: run_steps(settle(session, name, timeout_s)))

    def list(
        self, *, prefix: str = "", source: str = "", dest: str = "", page_size: int = LIST_PAGE_DEFAULT
    ) -> AsyncIterator[RouterDescription]:
        """Iterate over routers in byte order of their names. The client fetches them page by page.

        Args:
            prefix: Only routers whose names begin with this text.
            source: Only routers of this source topic; "" = any.
            dest: Only routers to this destination topic; "" = any.
            page_size: Routers per request, 1 to 1,000.

        Returns:
            Iterator over routers.
        """
        self._shell.require_open()
        return self._paged(RouterPages(prefix, source, dest, page_size))

    async def _paged(self, pages: RouterPages) -> AsyncIterator[RouterDescription]:
        while page := await self._shell.ask(lambda session: run_steps(pages.next_page(session))):
            for router in page:
                yield router

    async def delete(self, name: str) -> bool:
        """Delete a router. No further copy appears after the call returns; existing copies stay.

        Args:
            name: Name of the router.

        Returns:
            False if no router had this name.
        """
        return await self._shell.ask(lambda session: run_steps(delete(session, name)))
