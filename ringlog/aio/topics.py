"""Topics of a client."""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Unpack

from ringlog.aio.shell import LoopShell
from ringlog.client.leases.group_facts import GroupSummary
from ringlog.client.read.pages import TagFilter
from ringlog.client.requests.topic_requests import (
    Deletion,
    ExistOk,
    TopicDescription,
    TopicMerge,
    TopicRemoval,
    TopicSummary,
    configure,
    create,
    delete,
    delete_records,
    state,
)
from ringlog.client.requests.topic_settings import TopicSettings
from ringlog.client.requests.validation import check_str
from ringlog.limits import LIST_PAGE_DEFAULT
from ringlog.link.futures import run_steps


class Topics:
    """Create, configure, inspect and delete topics. Available as `client.topics`.

    Example:
        await client.topics.create("orders", durability="fsync", cap_records=1_000_000)
        async for summary in client.topics.list("ord"):
            print(summary.topic, summary.count)
    """

    def __init__(self, shell: LoopShell, client: object) -> None:
        self._shell = shell
        self._client = client
        """Reference that keeps the client alive while its topics are in use."""

    async def create(
        self, topic: str, *, exist_ok: ExistOk = False, **config: Unpack[TopicSettings]
    ) -> TopicDescription:
        """Create a topic with the given settings.

        Args:
            topic: Name of the topic.
            exist_ok: What to do if the topic exists. False refuses. True returns its description if its type
                and the settings named in this call are equal (no `type` means "log"). "update" changes the
                named settings as `configure` does.
            **config: Settings of the topic (TopicSettings), such as durability="fsync" or cap_records.

        Returns:
            The topic, with `created` = true if this call created it.

        Raises:
            TopicIncompatible: The topic exists and `exist_ok` is false, or settings differ. The error names
                each difference with both values.
            InvalidRequest: A setting does not exist (the error names the nearest one), or its value is
                invalid.
        """
        return await self._shell.ask(lambda session: run_steps(create(session, topic, exist_ok, config)))

    async def configure(self, topic: str, **config: Unpack[TopicSettings]) -> TopicDescription:
        """Change the named settings of a topic and keep all others.

        Args:
            topic: Name of the topic.
            **config: Settings to change, as in `create`.

        Returns:
            The topic, with all its settings.

        Raises:
            TopicNotFound: The topic does not exist.
            InvalidRequest: A setting does not exist, or its value is invalid.
        """
        return await self._shell.ask(lambda session: run_steps(configure(session, topic, config)))

    async def state(self, topic: str, *, touch: bool = True) -> TopicSummary:
        """Return the counters, positions and settings of a topic. Never creates the topic.

        Args:
            topic: Name of the topic.
            touch: Count this call as use of the topic, which delays `expire_unused_ms`.

        Returns:
            The state. Times are in microseconds since the epoch.

        Raises:
            TopicNotFound: The topic does not exist.
        """
        return await self._shell.ask(lambda session: run_steps(state(session, topic, touch)))

    def list(self, prefix: str = "", *, page_size: int = LIST_PAGE_DEFAULT) -> AsyncIterator[TopicSummary]:
        """Iterate over topics in byte order of their names. The client fetches them page by page.

        Args:
            prefix: Only topics whose names begin with this text.
            page_size: Topics per request, 1 to 1,000.

        Returns:
            Iterator over the states of topics.
        """
        self._shell.require_open()
        return self._merged(TopicMerge(prefix, page_size))

    async def _merged(self, merge: TopicMerge) -> AsyncIterator[TopicSummary]:
        while page := await self._shell.ask(lambda session: run_steps(merge.next_page(session))):
            for summary in page:
                yield summary

    async def groups(self, topic: str) -> tuple[GroupSummary, ...]:
        """Return the consumer groups of a topic, in byte order of their names. Raises TopicNotFound."""
        from ringlog.client.leases.group_lease_operations import list_groups

        return await self._shell.ask(
            lambda session: run_steps(list_groups(session, check_str(topic, "topic")))
        )

    async def delete(self, topic: str, *, if_empty: bool = False) -> TopicRemoval:
        """Delete a topic, all its records, and the routers from and to it.

        Args:
            topic: Name of the topic.
            if_empty: Refuse to delete a topic that contains records.

        Returns:
            True in a boolean context if the topic existed. It names the deleted routers, as far as a
                scheduler could be queried.

        Raises:
            TopicNotEmpty: The topic contains records, and `if_empty` is true.
        """
        return await self._shell.ask(lambda session: run_steps(delete(session, topic, if_empty)))

    async def delete_records(
        self, topic: str, *, before_seq: int = 0, match: TagFilter | None = None
    ) -> Deletion:
        """Delete records permanently: below a seq, by tag, or both.

        When the call returns, no reader returns these records any more. Records that are appended later are
        not affected.

        Args:
            topic: Name of the topic.
            before_seq: Delete records below this seq. 0 sets no bound.
            match: Delete records whose tag equals this text, or begins with it if it ends in `*`.

        Returns:
            Number of deleted records, and the state of the topic afterwards.

        Raises:
            InvalidRequest: Neither argument was given, or `match` is not a filter.
            TopicNotFound: The topic does not exist.
        """
        return await self._shell.ask(
            lambda session: run_steps(delete_records(session, topic, before_seq, match))
        )
