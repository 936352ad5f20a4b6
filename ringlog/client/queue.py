"""Queues for workers: `for job in client.queue("emails").jobs(): with job: deliver(job.json())`.

A job is leased to one worker at a time. It is done when the worker acks it; given back, or not extended in
time, it is handed out again. So every job is worked on at least once, and what it does should bear a second
time.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Iterable, Iterator
from contextlib import suppress
from math import inf
from types import TracebackType
from typing import TYPE_CHECKING, Unpack

from ringlog.client.fields import NewRecord, Payload, RecordFields
from ringlog.client.job import JobFacts, Slots, backoff_ms
from ringlog.client.leases import Keeper, Lease
from ringlog.client.pages import Record
from ringlog.client.results import Appended, ClientState, QueueStats, Settled
from ringlog.client.topics import Deletion
from ringlog.client.working import Wish, Working
from ringlog.errors import RinglogError, UsageError
from ringlog.limits import CLAIM_JOBS_MAX
from ringlog.link.pending import Steps, start

if TYPE_CHECKING:
    from ringlog.client.client import Client
    from ringlog.client.locked import LockedConnection
    from ringlog.client.shell import Shell

GIVE_BACK_S = 5.0
"""Longest that leaving waits for an engine to take back what was not begun."""
RETRY_S = 0.25
"""Pause of an iteration whose engine cannot answer for now."""


class Job(JobFacts):
    """One job and the right to it. As a context: acked when the block ends well, given back when it does not,
    to rest for a while (`backoff_ms`)."""

    __slots__ = ("_queue", "lost")

    def __init__(self, queue: Queue, record: Record, lease: Lease, deliveries: int) -> None:
        super().__init__(queue.topic, record, lease, deliveries)
        self._queue = queue
        self.lost = threading.Event()
        """Set when the lease is known to have ended: somebody else may be at work on the job."""
        lease.on_lost = self.lost.set

    def ack(self) -> None:
        """The job is done; it is gone for good when this returns. Raises LeaseLost when the lease had ended:
        the job was or will be handed out again, unless somebody finished it."""
        if not self._queue.ack([self]).is_complete:
            raise self.lost_error()

    def nack(self, *, delay_ms: int = 0) -> None:
        """Give the job back, to be claimed by anybody now or after `delay_ms`; raises LeaseLost."""
        if not self._queue.nack([self], delay_ms=delay_ms).is_complete:
            raise self.lost_error()

    def reject(self, reason: str = "") -> None:
        """Send the job to the dead letters: it would fail again. Raises LeaseLost; see Queue.reject."""
        self._queue.reject(self, reason)

    def extend(self, lease_ms: int) -> None:
        """Hold the job up to `lease_ms` from now; raises LeaseLost."""
        if not self._queue.extend([self], lease_ms).is_complete:
            raise self.lost_error()

    def __enter__(self) -> Job:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if error is None:
            if not self.lease.is_over or self.lease.is_lost:
                self.ack()
        elif not self.lease.is_over:
            # The error of the block is what its caller has to hear of: a lease that is lost besides, or an
            # engine that is gone, gives the job to somebody else by itself.
            with suppress(RinglogError):
                self._queue.nack([self], delay_ms=backoff_ms(self.deliveries))


class Queue:
    """One queue, as one worker sees it. `node` names the worker, which holds the leases."""

    def __init__(
        self, client: Client, shell: Shell, connection: LockedConnection, topic: str, node: str
    ) -> None:
        self._client, self._shell, self._connection = client, shell, connection
        self._working = Working(topic, node, shell.session.clock)
        self._claiming = threading.Lock()
        """One claim at a time: they share open files."""
        self._is_closed = False
        self._keeper: Keeper | None = None
        self._unbegun: list[deque[Job]] = []
        """Of each iteration, jobs that were claimed and not given out."""

    @property
    def topic(self) -> str:
        """Its name."""
        return self._working.topic

    @property
    def node(self) -> str:
        """The worker's name, which holds the leases."""
        return self._working.node

    # -- putting jobs in ------------------------------------------------------------------------------

    def put(self, data: Payload, /, **record: Unpack[RecordFields]) -> Appended:
        """Add a job; fields as in Client.append. Raises TopicNotFound: a queue is made with
        `client.topics.create(topic, type="queue")`; NotAQueue for a topic that is none."""
        self._require_queue()
        return self._client.append(self.topic, data, create=False, **record)

    def put_many(self, jobs: Iterable[Record | NewRecord | Payload], /) -> Appended:
        """Add jobs in one atomic write, at most 10,000."""
        self._require_queue()
        return self._client.append_many(self.topic, jobs, create=False)

    # -- taking them out ------------------------------------------------------------------------------

    def claim(
        self, max: int = 1, *, wait_ms: int = 0, lease_ms: int | None = None, auto_extend: bool = False
    ) -> list[Job]:
        """Lease up to `max` jobs (at most 1,000), those that came back first, then lowest number first.

        An empty list: there was none within `wait_ms`. The leases last `lease_ms`, or as long as the topic
        says; with `auto_extend` as long as this process lives and they are not settled.
        """
        check_claim(wait_ms, lease_ms)
        return self._claim(max, wait_ms / 1_000, lease_ms, auto_extend)

    def _claim(self, most: int, wait_s: float, lease_ms: int | None, auto_extend: bool) -> list[Job]:
        with self._claiming:
            try:
                steps = self._working.claim(self._connection, most, wait_s, lease_ms, Wish())
                jobs = [Job(self, *found) for found in self._client.run(steps)]
            finally:
                if self._is_closed:
                    self._working.close()  # Meanwhile, and by another thread.
        if auto_extend and jobs:
            with self._shell.locked() as session:
                if self._keeper is None:
                    self._keeper = Keeper(self._working.line(session), self.topic, self.node)
                self._keeper.keep(job.lease for job in jobs)
        return jobs

    def jobs(
        self, *, max_in_flight: int = 1, lease_ms: int | None = None, auto_extend: bool = True
    ) -> Iterator[Job]:
        """Jobs one after the other, for ever: waits when there is none.

        Up to `max_in_flight` are claimed and not settled; more are claimed as these are acked, given back or
        lost. Whoever asks for the next one before that waits. Leaving the loop gives back at once what was
        not begun (CL-10).
        """
        check_iteration(max_in_flight)
        return self._iterate(Slots(max_in_flight), lease_ms, auto_extend)

    def _iterate(self, slots: Slots, lease_ms: int | None, auto_extend: bool) -> Iterator[Job]:
        unbegun: deque[Job] = deque()
        self._unbegun.append(unbegun)
        try:
            while not self._shell.is_closed:
                if not unbegun:
                    self._fill_again(slots, unbegun, lease_ms, auto_extend)
                while unbegun:
                    job = unbegun.popleft()
                    if not job.lease.is_lost:
                        yield job
        except RinglogError:
            if not self._shell.is_closed:
                raise  # Else what was asked for has failed because the client ended, and so do we.
        finally:
            self._unbegun.remove(unbegun)
            self._give_back(unbegun, GIVE_BACK_S)

    def _fill_again(self, slots: Slots, unbegun: deque[Job], lease_ms: int | None, auto_extend: bool) -> None:
        """As `_fill`, and again as long as the engine cannot answer for now (CL-7)."""
        try:
            self._fill(slots, unbegun, lease_ms, auto_extend)
        except RinglogError as e:
            if not e.retriable or self._client.state is ClientState.CLOSED:
                raise
            with self._shell.locked() as session:
                pause = session.pause(RETRY_S)
            self._shell.wait(pause, None)

    def _fill(self, slots: Slots, unbegun: deque[Job], lease_ms: int | None, auto_extend: bool) -> None:
        """Claim as many as may be in flight; waits for room, and for jobs."""
        with self._shell.locked():
            room = slots.room()
        self._shell.wait(room, None)
        jobs = self._claim(slots.most - slots.taken, inf, lease_ms, auto_extend)
        with self._shell.locked():
            for job in jobs:
                if not job.lease.is_lost:
                    slots.take(job, job.lost.set)
        unbegun += jobs

    def _give_back(self, unbegun: deque[Job], timeout: float) -> None:
        """Nobody begins these any more. If the engine is not there, their leases end by themselves."""
        left: list[Job] = []
        while unbegun:
            left.append(unbegun.popleft())
        leases = [job.lease for job in left if not job.lease.is_over]
        if not leases or self._shell.is_closed:
            return
        with self._shell.locked() as session:
            giving = start(self._working.nack(session, leases, 0))
        self._shell.wait(giving, timeout)
        with self._shell.locked():
            for job in left:
                job.lease.lose()

    # -- what becomes of them -------------------------------------------------------------------------

    def ack(self, jobs: Iterable[Job]) -> Settled:
        """These jobs are done, all at once as far as their leases hold; `skipped` are those that do not. A
        thousand in one request are one record of the log.

        When the engine does not answer, the leases are not extended any more; trying again does no harm."""
        return self._settle(list(jobs), None)

    def nack(self, jobs: Iterable[Job], *, delay_ms: int = 0) -> Settled:
        """Give these jobs back, ready now or after `delay_ms` (at most a day)."""
        check_delay(delay_ms)
        return self._settle(list(jobs), delay_ms)

    def reject(self, job: Job, reason: str = "") -> None:
        """Send a job to the dead letters at once, whatever its deliveries; the first line of `reason` goes
        with it. Raises InvalidRequest where the queue has none, and LeaseLost."""
        steps = self._working.reject(self._connection, [job.lease], reason)
        if not self._settled([job], steps).is_complete:
            raise job.lost_error()

    def _settle(self, jobs: list[Job], delay_ms: int | None) -> Settled:
        connection, working = self._connection, self._working
        leases = [job.lease for job in jobs]
        if delay_ms is None:
            return self._settled(jobs, working.ack(connection, leases))
        return self._settled(jobs, working.nack(connection, leases, delay_ms))

    def _settled(self, jobs: list[Job], steps: Steps[Settled]) -> Settled:
        try:
            settled = self._client.run(steps)
        except RinglogError:
            # Nobody knows what became of it. Kept alive, a job that nobody works on would never come back.
            with self._shell.lock:
                for job in jobs:
                    job.lease.lose()
            raise
        with self._shell.locked():
            for job in jobs:
                job.leave()
        return settled

    def extend(self, jobs: Iterable[Job], lease_ms: int) -> Settled:
        """Hold these jobs up to `lease_ms` from now, which may be earlier than before."""
        check_lease(lease_ms)
        leases = [job.lease for job in jobs]
        return self._client.run(self._working.extend(self._connection, leases, lease_ms))

    # -- looking --------------------------------------------------------------------------------------

    def stats(self) -> QueueStats:
        """How many jobs are in which state; raises NotAQueue, TopicNotFound."""
        return self._client.run(self._working.stats(self._connection))

    def peek(self, limit: int = 1) -> list[Record]:
        """The first jobs that are there, whoever holds them, without claiming any."""
        self._require_queue()
        return self._client.read(self.topic, limit=limit).records

    def purge(self) -> Deletion:
        """Delete every job that is there now: ready, leased and delayed ones. They do not come back."""
        self._require_queue()
        head = self._client.topics.state(self.topic, touch=False).head_seq
        return self._client.topics.delete_records(self.topic, before_seq=head + 1)

    def close(self, timeout: float = GIVE_BACK_S) -> None:
        """Give back what was claimed and not begun, and let go of files. The client calls it, too."""
        for unbegun in list(self._unbegun):
            self._give_back(unbegun, timeout)
        self._is_closed = True
        # Who claims at this moment, perhaps waiting for the end of the client, lets go of files himself.
        if self._claiming.acquire(blocking=False):
            try:
                self._working.close()
            finally:
                self._claiming.release()

    def restart_in_child(self) -> None:
        """After a fork: the leases are the parent's, and nobody here extends them or gives them back."""
        self._claiming = threading.Lock()
        self._keeper = None
        for unbegun in self._unbegun:
            unbegun.clear()
        self._working.close()

    def _require_queue(self) -> None:
        self._client.run(self._working.known(self._connection))

    def __enter__(self) -> Queue:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def check_claim(wait_ms: int, lease_ms: int | None) -> None:
    """Raise UsageError for times that make no sense; so do the others."""
    if wait_ms < 0 or (lease_ms is not None and lease_ms < 0):
        raise UsageError("a time is not negative", wait_ms=wait_ms, lease_ms=lease_ms)


def check_iteration(max_in_flight: int) -> None:
    """How many jobs may be out at once."""
    if not 1 <= max_in_flight <= CLAIM_JOBS_MAX:
        raise UsageError("max_in_flight out of range", found=max_in_flight, max=CLAIM_JOBS_MAX)


def check_delay(delay_ms: int) -> None:
    """How long a job rests."""
    if delay_ms < 0:
        raise UsageError("a time is not negative", delay_ms=delay_ms)


def check_lease(lease_ms: int) -> None:
    """How long a job is held."""
    if lease_ms <= 0:
        raise UsageError("lease_ms is positive", found=lease_ms)
