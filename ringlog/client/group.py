# Generated from ringlog/aio/group.py by tools/unasync.py: do not edit; `make fmt` regenerates it.
"""Consumer groups: several programs share the records of a topic, and the engine keeps how far they are.

    billing = client.group("orders", "billing")
    for job in billing.jobs(max_in_flight=8):
        with job:
            charge(job.json())

    for order in client.group("orders", "report", mode="stream"):
        add(order)

Records stay in the topic for everybody else. In mode `queue` each is leased to one member at a time until it
is acked; in mode `stream` one member reads all of them in order, and what it is done with is committed.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import suppress
from typing import TYPE_CHECKING, Any

from ringlog.client.lease_client import LeaseClient
from ringlog.client.leases.group_facts import GroupMember, GroupStats, PendingEntry
from ringlog.client.leases.group_lease_operations import GroupLeaseOperations, GroupStreamReader
from ringlog.client.leases.queue_options import GIVE_BACK_S, RETRY_S
from ringlog.client.read.pages import Page, Record, Start, Tombstone
from ringlog.client.requests.results import ClientState
from ringlog.client.requests.validation import (
    check_auto_commit_ms,
    check_seq,
    check_start,
    pending_options,
)
from ringlog.clock import SystemClock
from ringlog.errors import RinglogError, UsageError
from ringlog.limits import AUTO_COMMIT_MS_DEFAULT
from ringlog.link.futures import Steps

if TYPE_CHECKING:
    from ringlog.client.connection.shell import ThreadedShell
    from ringlog.client.operations import Operations


class Group(LeaseClient):
    """One consumer group, as one member sees it. It is made when it is first used. `node` is the member's
    name, which holds the leases."""

    def __init__(self, client: Operations, shell: ThreadedShell, working: GroupLeaseOperations) -> None:
        super().__init__(client, shell, working)
        self._operations: GroupLeaseOperations = working
        self._stream_reader: GroupStreamReader | None = None

    @property
    def name(self) -> str:
        """Its name, and behind an `@` its filter of tags, if it has one."""
        return self._operations.group

    # -- mode queue -----------------------------------------------------------------------------------

    def pending(
        self, *, node: str = "", idle_ms: int = 0, min_deliveries: int = 0, after: int = 0, limit: int = 100
    ) -> list[PendingEntry]:
        """What was given out and is not done, by number: of one member, untouched for so long, given out so
        often. Looking changes nothing."""
        asked = pending_options(node, idle_ms, min_deliveries, after, limit)
        steps = self._operations.pending(self._client.connection, *asked)
        return self._shell.run(steps)

    def leave(self) -> int:
        """This member leaves: what it holds is ready for others at once; how many records."""
        return self._shell.run(self._operations.leave(self._client.connection))

    # -- mode stream ----------------------------------------------------------------------------------

    def __iter__(self) -> Iterator[Record | Tombstone]:
        return self.records()

    def records(self, *, auto_commit_ms: int | None = AUTO_COMMIT_MS_DEFAULT) -> Iterator[Record | Tombstone]:
        """Every record behind what is committed, in order, for ever; tombstones between them say what is
        gone.

        Whoever begins this reads the group alone: a member that read it before is told with LeaseLost when it
        commits. A record is done when the next one is asked for. What is done is committed every
        `auto_commit_ms` (0 = with each record), before waiting for more, and at the end; with None only
        `commit` does.
        """
        streaming = GroupStreamReader(self._operations, check_auto_commit_ms(auto_commit_ms), SystemClock())
        return self._in_order(streaming, self._shell.begin(lambda: self._begin(streaming)))

    def _begin(self, streaming: GroupStreamReader) -> Steps[None]:
        yield from streaming.take_over(self._client.connection)
        self._stream_reader = streaming

    def _in_order(self, streaming: GroupStreamReader, begun: Any) -> Iterator[Record | Tombstone]:
        self._shell.finish(begun)
        try:
            while not self._shell.is_closed and streaming is self._stream_reader:
                for item in streaming.items(self._page(streaming)):
                    if streaming.is_due:
                        self._shell.run(streaming.try_commit(self._client.connection))
                    yield item
                    if streaming is not self._stream_reader:
                        return
        except RinglogError:
            if not self._shell.is_closed:
                raise  # Else what was asked for has failed because the client ended, and so do we.
        finally:
            if streaming.is_auto and not self._shell.is_closed and streaming is self._stream_reader:
                with suppress(RinglogError):
                    self._shell.run(streaming.commit(self._client.connection, streaming.processed))
            streaming.close()

    def _page(self, streaming: GroupStreamReader) -> Page | None:
        """The next records; None, behind a pause, when the engine cannot answer for now (CL-7)."""
        try:
            return self._shell.run(streaming.page(self._client.connection))
        except RinglogError as e:
            if not e.retriable or self._client.state is ClientState.CLOSED:
                raise
            self._shell.pause(RETRY_S)
            return None

    def commit(self, seq: int | None = None) -> None:
        """Everything up to `seq` is done, or everything that was given out so far; durable as the topic's
        class asks when this returns. Raises LeaseLost when somebody else reads the group now."""
        if seq is not None:
            seq = check_seq(seq, "seq")
        streaming = self._stream_reader
        if streaming is None:
            raise UsageError("nothing is read from this group", group=self.name)
        wanted = streaming.delivered if seq is None else seq
        self._shell.run(streaming.commit(self._client.connection, wanted))

    # -- where it is ----------------------------------------------------------------------------------

    def seek(self, start: Start) -> int:
        """Have the group go on from there, back or forth: EARLIEST, LATEST, the first number to deliver, or a
        time. Nothing is pending then, and every lease has ended. Returns the first number that is given
        out."""
        start = check_start(start)
        self._stream_reader = None
        return self._shell.run(self._operations.seek(self._client.connection, start))

    def lag(self) -> tuple[int, int]:
        """Records that nobody was given yet, and records that were given out and are not done."""
        found = self.stats()
        return found.undelivered, found.pending

    def stats(self) -> GroupStats:
        """How the group is."""
        found: GroupStats = self._shell.run(self._operations.stats(self._client.connection))
        return found

    def members(self) -> tuple[GroupMember, ...]:
        """Who works for it: who holds something, or asked in the last two minutes."""
        found = self.stats()
        return found.members

    def delete(self) -> bool:
        """Remove the group: its place and its pending list are forgotten. Was it there?"""
        self._stream_reader = None
        return self._shell.run(self._operations.delete(self._client.connection))

    def close(self, timeout: float = GIVE_BACK_S) -> None:
        """Give back what was claimed and not begun, and let go of files. The client calls it, too."""
        self._stream_reader = None
        super().close(timeout)
