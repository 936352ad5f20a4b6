"""Topics of an asyncio client."""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Any

from ringlog.aio.shell import LoopShell
from ringlog.client import topics
from ringlog.client.checks import text
from ringlog.client.group_facts import GroupSummary
from ringlog.client.grouping import list_groups
from ringlog.client.pages import TagFilter
from ringlog.client.topics import Deletion, ExistOk, TopicDescription, TopicMerge, TopicRemoval, TopicSummary
from ringlog.limits import LIST_PAGE_DEFAULT


class Topics:
    """`client.topics`; see ringlog.client.topics.Topics for what each does and raises."""

    def __init__(self, shell: LoopShell) -> None:
        self._shell = shell

    async def create(self, topic: str, *, exist_ok: ExistOk = False, **config: Any) -> TopicDescription:
        """Make a topic with these settings; one that is there has to have them (`exist_ok=True`), or gets
        them (`exist_ok="update"`)."""
        return await self._shell.run(topics.create(self._shell.session, topic, exist_ok, config))

    async def configure(self, topic: str, **config: Any) -> TopicDescription:
        """Change the named settings, keep the others."""
        return await self._shell.run(topics.configure(self._shell.session, topic, config))

    async def state(self, topic: str, *, touch: bool = True) -> TopicSummary:
        """A topic's numbers."""
        return await self._shell.run(topics.state(self._shell.session, topic, touch))

    async def list(
        self, prefix: str = "", *, page_size: int = LIST_PAGE_DEFAULT
    ) -> AsyncIterator[TopicSummary]:
        """All topics whose name begins with `prefix`, in byte order of names."""
        merge = TopicMerge(self._shell.session, prefix, page_size)
        while page := await self._shell.run(merge.next_page()):
            for summary in page:
                yield summary

    async def groups(self, topic: str) -> tuple[GroupSummary, ...]:
        """The consumer groups of a topic, in byte order of names."""
        return await self._shell.run(list_groups(self._shell.session, text(topic, "topic")))

    async def delete(self, topic: str, *, if_empty: bool = False) -> TopicRemoval:
        """Remove a topic, all it holds, and its routers; true when there was one."""
        return await self._shell.run(topics.delete(self._shell.session, topic, if_empty))

    async def delete_records(
        self, topic: str, *, before_seq: int = 0, match: TagFilter | None = None
    ) -> Deletion:
        """Delete records for good, by position or by tag."""
        return await self._shell.run(topics.delete_records(self._shell.session, topic, before_seq, match))
