# Generated from ringlog/aio/group.py by tools/unasync.py: do not edit, `make fmt` writes it anew.
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

from collections.abc import Iterable, Iterator
from contextlib import suppress
from typing import TYPE_CHECKING, Any

from ringlog.client.checks import (
    commit_every,
    pending_options,
    position,
    seconds_to_end,
    start_at,
)
from ringlog.client.claimed import Jobs
from ringlog.client.group_facts import GroupMember, GroupStats, PendingEntry
from ringlog.client.grouping import GroupWorking, Streaming
from ringlog.client.job import OnError
from ringlog.client.pages import Page, Record, Start, Tombstone
from ringlog.client.queue import Job, Queue
from ringlog.client.queue_options import GIVE_BACK_S, RETRY_S
from ringlog.client.redrive import RedriveReport, Where
from ringlog.client.results import ClientState, Settled
from ringlog.clock import SystemClock
from ringlog.errors import RinglogError, UsageError
from ringlog.limits import AUTO_COMMIT_MS_DEFAULT
from ringlog.link.pending import Steps

if TYPE_CHECKING:
    from ringlog.client.operations import Operations
    from ringlog.client.shell import Shell


class Leases(Queue):
    """The queue's way to claim, keep and settle, over a group's records."""

    def __init__(self, client: Operations, shell: Shell, working: GroupWorking) -> None:
        super().__init__(client, shell, working.topic, working.node)
        self._working: GroupWorking = working


class Group:
    """One consumer group, as one member sees it. It is made when it is first used."""

    def __init__(self, client: Operations, shell: Shell, working: GroupWorking) -> None:
        self._client, self._shell = client, shell
        self._working = working
        self._leases = Leases(client, shell, working)
        self._streaming: Streaming | None = None

    @property
    def topic(self) -> str:
        """Its topic."""
        return self._working.topic

    @property
    def name(self) -> str:
        """Its name, and behind an `@` its filter of tags, if it has one."""
        return self._working.group

    @property
    def node(self) -> str:
        """The member's name, which holds the leases."""
        return self._working.node

    @property
    def leases(self) -> Leases:
        """What the client closes with itself."""
        return self._leases

    # -- mode queue -----------------------------------------------------------------------------------

    def claim(
        self, max: int = 1, *, wait_ms: int = 0, lease_ms: int | None = None, auto_extend: bool = False,
        done: Iterable[Job] = (),
    ) -> Jobs[Job]:  # fmt: skip
        """Lease up to `max` records (at most 1,000): those that came back, then new ones, each the lowest
        number first. Those that are `done` are acked before. As Queue.claim."""
        return self._leases.claim(max, wait_ms=wait_ms, lease_ms=lease_ms, auto_extend=auto_extend, done=done)

    def jobs(
        self, *, max_in_flight: int = 1, lease_ms: int | None = None, auto_extend: bool = True,
        ack_behind: bool = False, on_error: OnError | None = None, idle_s: float | None = None,
    ) -> Iterator[Job]:  # fmt: skip
        """Record after record, each leased to this member; ends as Queue.jobs does. As Queue.jobs."""
        return self._leases.jobs(
            max_in_flight=max_in_flight, lease_ms=lease_ms, auto_extend=auto_extend, ack_behind=ack_behind,
            on_error=on_error, idle_s=idle_s,
        )  # fmt: skip

    def batches(
        self, size: int = 100, *, max_in_flight: int | None = None, lease_ms: int | None = None,
        auto_extend: bool = True, idle_s: float | None = None,
    ) -> Iterator[Jobs[Job]]:  # fmt: skip
        """Batch after batch, acked with the next claim. As Queue.batches."""
        return self._leases.batches(
            size, max_in_flight=max_in_flight, lease_ms=lease_ms, auto_extend=auto_extend, idle_s=idle_s
        )

    def ack(self, jobs: Iterable[Job]) -> Settled:
        """These are done for the group. As Queue.ack, but that the records stay."""
        return self._leases.ack(jobs)

    def nack(self, jobs: Iterable[Job], *, delay_ms: int | None = None, reason: str = "") -> Settled:
        """Give these back, ready after `delay_ms`, or when that is not said after the group's back-off."""
        return self._leases.nack(jobs, delay_ms=delay_ms, reason=reason)

    def reject(self, job: Job, reason: str = "") -> None:
        """Send a record to the group's dead letters, whatever its deliveries; the first line of `reason` goes
        with it. Raises InvalidRequest where the group has none, and LeaseLost."""
        self._leases.reject(job, reason)

    def dead_letters(self) -> Iterator[Record | Tombstone]:
        """This group's records in its dead-letter topic, oldest first, up to the last one there is now.
        Raises InvalidRequest where the group has none."""
        return self._leases.dead_letters()

    def redrive(
        self, where: Where = None, *, limit: int | None = None, rate: float | None = None
    ) -> RedriveReport:
        """Have the records of dead letters given out to this group once more, as if they never had been, and
        delete the letters: all, those with these numbers there, or those for which `where(record)` is true;
        the oldest `limit`, at most `rate` a second. Nobody else who reads the topic notices.

        Safe to repeat after an error or a crash. Letters whose records have left the topic stay, and are
        counted as `gone`: what is in them can be appended again."""
        return self._leases.redrive(where, limit=limit, rate=rate)

    def extend(self, jobs: Iterable[Job], lease_ms: int) -> Settled:
        """Hold these up to `lease_ms` from now."""
        return self._leases.extend(jobs, lease_ms)

    def steal(
        self, seqs: Iterable[int], *, min_idle_ms: int = 0, lease_ms: int | None = None,
        auto_extend: bool = False,
    ) -> Jobs[Job]:  # fmt: skip
        """Lease those of these records that are pending, whoever holds them, if nothing was done about them
        for `min_idle_ms`. Who held them finds his lease lost."""
        return self._leases.steal(seqs, min_idle_ms=min_idle_ms, lease_ms=lease_ms, auto_extend=auto_extend)

    def pending(
        self, *, node: str = "", idle_ms: int = 0, min_deliveries: int = 0, after: int = 0, limit: int = 100
    ) -> list[PendingEntry]:
        """What was given out and is not done, by number: of one member, untouched for so long, given out so
        often. Looking changes nothing."""
        asked = pending_options(node, idle_ms, min_deliveries, after, limit)
        steps = self._working.pending(self._client.connection, *asked)
        return self._shell.run(steps)

    def leave(self) -> int:
        """This member leaves: what it holds is ready for others at once; how many records."""
        return self._shell.run(self._working.leave(self._client.connection))

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
        streaming = Streaming(self._working, commit_every(auto_commit_ms), SystemClock())
        return self._iterate(streaming, self._shell.begin(lambda: self._begin(streaming)))

    def _begin(self, streaming: Streaming) -> Steps[None]:
        yield from streaming.begin(self._client.connection)
        self._streaming = streaming

    def _iterate(self, streaming: Streaming, begun: Any) -> Iterator[Record | Tombstone]:
        self._shell.finish(begun)
        try:
            while not self._shell.is_closed and streaming is self._streaming:
                for item in streaming.items(self._page(streaming)):
                    if streaming.is_due:
                        self._shell.run(streaming.commit_if_possible(self._client.connection))
                    yield item
                    if streaming is not self._streaming:
                        return
        except RinglogError:
            if not self._shell.is_closed:
                raise  # Else what was asked for has failed because the client ended, and so do we.
        finally:
            if streaming.is_auto and not self._shell.is_closed and streaming is self._streaming:
                with suppress(RinglogError):
                    self._shell.run(streaming.commit(self._client.connection, streaming.done))
            streaming.close()

    def _page(self, streaming: Streaming) -> Page | None:
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
            seq = position(seq, "seq")
        streaming = self._streaming
        if streaming is None:
            raise UsageError("nothing is read from this group", group=self.name)
        wanted = streaming.delivered if seq is None else seq
        self._shell.run(streaming.commit(self._client.connection, wanted))

    # -- where it is ----------------------------------------------------------------------------------

    def seek(self, start: Start) -> int:
        """Have the group go on from there, back or forth: EARLIEST, LATEST, the number to go on after, or a
        time. Nothing is pending then, and every lease has ended. Returns the first number that is given
        out."""
        start = start_at(start)
        self._streaming = None
        return self._shell.run(self._working.seek(self._client.connection, start))

    def lag(self) -> tuple[int, int]:
        """Records that nobody was given yet, and records that were given out and are not done."""
        found = self.stats()
        return found.undelivered, found.pending

    def stats(self) -> GroupStats:
        """How the group is."""
        found: GroupStats = self._shell.run(self._working.stats(self._client.connection))
        return found

    def members(self) -> tuple[GroupMember, ...]:
        """Who works for it: who holds something, or asked in the last two minutes."""
        found = self.stats()
        return found.members

    def delete(self) -> bool:
        """Remove the group: its place and its pending list are forgotten. Was it there?"""
        self._streaming = None
        return self._shell.run(self._working.delete(self._client.connection))

    def close(self, timeout: float = GIVE_BACK_S) -> None:
        """Give back what was claimed and not begun, and let go of files. The client calls it, too."""
        timeout = seconds_to_end(timeout)
        self._streaming = None
        self._leases.close(timeout)

    def __enter__(self) -> Group:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
