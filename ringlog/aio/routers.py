"""Routers of an asyncio client."""

from __future__ import annotations

from collections.abc import AsyncIterator

from ringlog.aio.shell import LoopShell
from ringlog.client import routers
from ringlog.client.pages import TagFilter
from ringlog.client.routers import RouterDescription, RouterOptions, RouterPages
from ringlog.limits import LIST_PAGE_DEFAULT


class Routers:
    """`client.routers`; see ringlog.client.routers.Routers for what each does and raises."""

    def __init__(self, shell: LoopShell) -> None:
        self._shell = shell

    async def create(
        self, name: str, source: str, dest: str, *, filter: TagFilter | None = None,
        preserve_node: bool = True, preserve_tag: bool = True, create_dest: bool = True,
        allow_cycle: bool = False, guarantee: str = "at_least_once",
    ) -> RouterDescription:  # fmt: skip
        """Forward what is published to `source` from here on to `dest`."""
        options = RouterOptions(filter, preserve_node, preserve_tag, create_dest, allow_cycle, guarantee)
        return await self._shell.run(routers.create(self._shell.session, name, source, dest, options))

    async def get(self, name: str, *, settle_s: float = 0.0) -> RouterDescription:
        """A router as it stands."""
        return await self._shell.run(routers.get(self._shell.session, name, settle_s))

    async def settle(self, name: str, timeout_s: float = 10.0) -> RouterDescription:
        """Wait until everything that the source holds now was forwarded."""
        return await self._shell.run(routers.settle(self._shell.session, name, timeout_s))

    async def list(
        self, *, prefix: str = "", source: str = "", dest: str = "", page_size: int = LIST_PAGE_DEFAULT
    ) -> AsyncIterator[RouterDescription]:
        """All routers whose name begins with `prefix`, in byte order of names."""
        pages = RouterPages(self._shell.session, prefix, source, dest, page_size)
        while page := await self._shell.run(pages.next_page()):
            for router in page:
                yield router

    async def delete(self, name: str) -> bool:
        """Forward no more; False when there was none."""
        return await self._shell.run(routers.delete(self._shell.session, name))
