# Generated from ringlog/aio/group.py by tools/unasync.py: do not edit; `make fmt` regenerates it.
"""Consumer groups: several programs share the records of a topic, and the engine stores the group's position.

    billing = client.group("orders", "billing", mode="queue")
    for job in billing.jobs(max_in_flight=8):
        with job:
            charge(job.json())

    for order in client.group("orders", "report", mode="stream"):
        add(order)

Records stay in the topic for other readers. In mode `queue` the engine leases each record to one member at a
time until a member acks it. In mode `stream` one member reads all records in order and commits its position.
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
    check_close_timeout,
    check_seq,
    check_start,
    pending_options,
)
from ringlog.clock import SystemClock
from ringlog.errors import RinglogError, UsageError
from ringlog.limits import AUTO_COMMIT_MS_DEFAULT
from ringlog.link.futures import Steps, run_steps
from ringlog.payload import RAW, PayloadCodec, V

if TYPE_CHECKING:
    from ringlog.client.connection.shell import ThreadedShell
    from ringlog.client.operations import Operations


class Group(LeaseClient[V]):
    """View of one member on one consumer group. The first use creates the group.

    The engine records leases under the member's name, `node`.

    Example:
        group = client.group("orders", "report")
        for record in group.records():
            add(record)
    """

    def __init__(
        self, client: Operations, shell: ThreadedShell, operations: GroupLeaseOperations,
        payload: PayloadCodec[Any] = RAW,
    ) -> None:  # fmt: skip
        super().__init__(client, shell, operations, payload)
        self._operations: GroupLeaseOperations = operations
        self._stream_reader: GroupStreamReader | None = None

    @property
    def name(self) -> str:
        """Name of the group, followed by `@` and its tag filter if it has one."""
        return self._operations.group

    # -- mode queue -----------------------------------------------------------------------------------

    def pending(
        self, *, node: str = "", idle_ms: int = 0, min_deliveries: int = 0, after: int = 0, limit: int = 100
    ) -> list[PendingEntry]:
        """Return delivered records that are not acked, in order of their seqs. The call changes no state.

        Args:
            node: Only records of this member; "" = of all members.
            idle_ms: Only records whose last delivery or lease extension is at least this old, in
                milliseconds.
            min_deliveries: Only records that were delivered at least this often.
            after: Only records above this seq.
            limit: Most entries to return. An entry may cover several consecutive records.

        Returns:
            One entry for each record, or for consecutive records with equal values.
        """
        options = pending_options(node, idle_ms, min_deliveries, after, limit)
        steps = self._operations.pending(self._client.connection, *options)
        return self._shell.run(steps)

    def leave(self) -> int:
        """Leave the group: records that are leased to this member become ready for other members at once.

        Returns:
            Number of records that were released.
        """
        return self._shell.run(self._operations.leave(self._client.connection))

    # -- mode stream ----------------------------------------------------------------------------------

    def __iter__(self) -> Iterator[Record[V] | Tombstone]:
        return self.records()

    def records(
        self, *, auto_commit_ms: int | None = AUTO_COMMIT_MS_DEFAULT
    ) -> Iterator[Record[V] | Tombstone]:
        """Iterate in order over all records after the committed position. The iteration does not end by
        itself.

        Tombstones between the records report lost records. Starting an iteration fences the previous reader
        of the group: its next commit raises LeaseLost. A record counts as processed when the program requests
        the next one.

        Args:
            auto_commit_ms: Interval in milliseconds between commits of processed records; 0 commits after
                each record. The iteration also commits before it waits for new records and when it ends, by
                itself or by `close` of the group or the client. With None only `commit` commits.

        Returns:
            Iterator over Record and Tombstone items.
        """
        streaming = GroupStreamReader(self._operations, check_auto_commit_ms(auto_commit_ms), SystemClock())
        return self._in_order(streaming, self._shell.begin(lambda: self._begin(streaming)))

    def _begin(self, streaming: GroupStreamReader) -> Steps[None]:
        yield from streaming.take_over(self._client.connection)
        self._stream_reader = streaming

    def _in_order(self, streaming: GroupStreamReader, begun: Any) -> Iterator[Record[V] | Tombstone]:
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
                # The request failed because the client was closed; the iteration then ends without an error.
                raise
        finally:
            if streaming.is_auto and not self._shell.is_closed and streaming is self._stream_reader:
                with suppress(RinglogError):
                    self._shell.run(streaming.commit(self._client.connection, streaming.processed))
            streaming.close()

    def _page(self, streaming: GroupStreamReader) -> Page[V] | None:
        """Return the next records; None, after a pause, if the engine cannot answer at present."""
        try:
            page = self._shell.run(streaming.page(self._client.connection))
            return page.with_payload(self._codec)
        except RinglogError as e:
            if not e.retriable or self._client.state is ClientState.CLOSED:
                raise
            self._shell.pause(RETRY_S)
            return None

    def commit(self, seq: int | None = None) -> None:
        """Mark every record up to `seq` as processed.

        When the call returns, the position is as durable as the topic's class requires.

        Args:
            seq: Last processed seq. None commits every record that the iteration has returned so far.

        Raises:
            LeaseLost: Another member reads the group now.
            UsageError: No iteration is active, or `seq` is above the last returned record.
        """
        if seq is not None:
            seq = check_seq(seq, "seq")
        streaming = self._stream_reader
        if streaming is None:
            raise UsageError(
                "no iteration over this group is active: iterate records() before commit()", group=self.name
            )
        wanted = streaming.delivered if seq is None else seq
        self._shell.run(streaming.commit(self._client.connection, wanted))

    # -- position -------------------------------------------------------------------------------------

    def seek(self, start: Start) -> int:
        """Move the group to another position, forward or back. All leases end and no record stays pending.

        Args:
            start: EARLIEST, LATEST, the first seq to deliver, a cursor, or a time.

        Returns:
            First seq that the group delivers from now on.
        """
        start = check_start(start)
        self._stream_reader = None
        return self._shell.run(self._operations.seek(self._client.connection, start))

    def lag(self) -> tuple[int, int]:
        """Return the number of records that were never delivered, and the number of pending records."""
        found = self.stats()
        return found.undelivered, found.pending

    def stats(self) -> GroupStats:
        """Return the state of the group: position, counts and members."""
        found: GroupStats = self._shell.run(self._operations.stats(self._client.connection))
        return found

    def members(self) -> tuple[GroupMember, ...]:
        """Return the members that hold leases or sent a request within the last two minutes."""
        found = self.stats()
        return found.members

    def delete(self) -> bool:
        """Delete the group with its position and its pending records.

        Returns:
            False if the group did not exist.
        """
        self._stream_reader = None
        return self._shell.run(self._operations.delete(self._client.connection))

    def close(self, timeout: float = GIVE_BACK_S) -> None:
        """Return unstarted records, commit the processed records of an iteration with automatic commits, then
        release the files. Closing the client also closes the group.

        Args:
            timeout: Longest time to wait for each step, in seconds.
        """
        timeout = check_close_timeout(timeout)
        streaming, self._stream_reader = self._stream_reader, None
        if streaming is not None and streaming.is_auto:
            with suppress(RinglogError):  # The group then delivers these records again.
                with self._shell.checked_lock, self._shell.guarded_session as session:
                    committing = run_steps(streaming.commit(session, streaming.processed))
                self._shell.wait(committing, timeout)
        super().close(timeout)

    def restart_in_child(self) -> None:
        """Reset after a fork: the parent reads the group, and commits its position."""
        self._stream_reader = None
        super().restart_in_child()
