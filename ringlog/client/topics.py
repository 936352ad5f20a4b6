# Generated from ringlog/aio/topics.py by tools/unasync.py: do not edit; `make fmt` regenerates it.
"""Topics of a client."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from ringlog.client.connection.shell import ThreadedShell
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
from ringlog.client.requests.validation import check_str
from ringlog.limits import LIST_PAGE_DEFAULT
from ringlog.link.futures import run_steps


class Topics:
    """`client.topics`."""

    def __init__(self, shell: ThreadedShell, client: object) -> None:
        self._shell = shell
        self._client = client
        """Lasts as long as it is of use."""

    def create(self, topic: str, *, exist_ok: ExistOk = False, **config: Any) -> TopicDescription:
        """Make a topic with these settings (durability="fsync", ttl_ms=…, cap_records=…, discard=…, …).

        An existing topic is refused. With `exist_ok=True` it is described, if its type and the settings that
        this call names are as asked for (no `type` = "log"). With `exist_ok="update"` the named settings are
        changed as by `configure`. Raises TopicIncompatible naming each difference with both values, and
        InvalidRequest naming a setting that does not exist, with the nearest name, or has a wrong value.
        """
        return self._shell.ask(lambda session: run_steps(create(session, topic, exist_ok, config)))

    def configure(self, topic: str, **config: Any) -> TopicDescription:
        """Change the named settings, keep the others; raises TopicNotFound, InvalidRequest."""
        return self._shell.ask(lambda session: run_steps(configure(session, topic, config)))

    def state(self, topic: str, *, touch: bool = True) -> TopicSummary:
        """A topic's numbers; `touch` counts as use of the topic. Raises TopicNotFound; never creates."""
        return self._shell.ask(lambda session: run_steps(state(session, topic, touch)))

    def list(self, prefix: str = "", *, page_size: int = LIST_PAGE_DEFAULT) -> Iterator[TopicSummary]:
        """All topics whose name begins with `prefix`, in byte order of names, fetched page by page."""
        self._shell.require_open()
        return self._merged(TopicMerge(prefix, page_size))

    def _merged(self, merge: TopicMerge) -> Iterator[TopicSummary]:
        while page := self._shell.ask(lambda session: run_steps(merge.next_page(session))):
            yield from page

    def groups(self, topic: str) -> tuple[GroupSummary, ...]:
        """The consumer groups of a topic, in byte order of names; raises TopicNotFound."""
        from ringlog.client.leases.group_lease_operations import list_groups

        return self._shell.ask(lambda session: run_steps(list_groups(session, check_str(topic, "topic"))))

    def delete(self, topic: str, *, if_empty: bool = False) -> TopicRemoval:
        """Remove a topic, all it holds, and its routers. The result is true when there was one, and names the
        routers, as far as a scheduler could be asked. `if_empty` may raise TopicNotEmpty."""
        return self._shell.ask(lambda session: run_steps(delete(session, topic, if_empty)))

    def delete_records(self, topic: str, *, before_seq: int = 0, match: TagFilter | None = None) -> Deletion:
        """Delete records for good: those below `before_seq`, those whose tag matches, or both at once.

        When it returns, no reader anywhere sees them any more; records that come later are not touched.
        `match` is a tag, or a prefix ending in `*`. Raises InvalidRequest for neither or for what is no
        filter, TopicNotFound.
        """
        return self._shell.ask(lambda session: run_steps(delete_records(session, topic, before_seq, match)))
