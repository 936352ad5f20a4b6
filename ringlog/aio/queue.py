"""Queues for asyncio: `async for job in client.queue("emails").jobs(): async with job: …`."""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from collections.abc import AsyncIterator, Callable, Iterable, Sequence
from contextlib import suppress
from functools import partial
from math import inf
from types import TracebackType
from typing import TYPE_CHECKING, Any, TypeVar, Unpack

from ringlog.client.batches import Batches
from ringlog.client.behind import Behind
from ringlog.client.checks import at_least, codec, flag, position, seconds, seconds_to_end, text
from ringlog.client.claimed import Claimed, Jobs, Leases, lose, settled_together
from ringlog.client.decoding import encoded, why_unreadable
from ringlog.client.fields import RecordFields
from ringlog.client.job import (
    BACKOFF_MS_MAX,
    Gone,
    JobFacts,
    OnError,
    Slots,
    backoff_ms,
    check_on_error,
    forks,
    job_of,
    jobs_of,
    reason_of,
    report_failure,
    said_of,
)
from ringlog.client.leases import Keeper, Lease
from ringlog.client.pages import Record, Tombstone
from ringlog.client.queue import (
    GIVE_BACK_S,
    RETRY_S,
    check_batches,
    check_claim,
    check_claimed_for,
    check_iteration,
    check_lease,
    is_by_number,
    leave_over,
    lost_before,
    rest_of,
)
from ringlog.client.redrive import Redrive, RedriveReport, Where
from ringlog.client.results import Appended, ClientState, PendingJob, QueueStats, Settled
from ringlog.client.topic_requests import Deletion
from ringlog.client.working import Rest, Wish, Working
from ringlog.clock import SystemClock
from ringlog.errors import InvalidRequest, LeaseLost, RinglogError, TopicNotFound
from ringlog.link.pending import Pending, Steps, start
from ringlog.payload import RAW, PayloadCodec

if TYPE_CHECKING:
    from ringlog.aio.client import Client
    from ringlog.aio.shell import LoopShell

log = logging.getLogger(__name__)
_C = TypeVar("_C", bound="Claimed | None")


class Job(JobFacts):
    """One job and the right to it; see ringlog.client.queue.Job. `async with` acks it or gives it back."""

    __slots__ = ("_behind", "_lost", "_queue")

    def __init__(
        self, queue: Queue, record: Record, lease: Lease, deliveries: int, codec: PayloadCodec[Any] = RAW
    ) -> None:
        super().__init__(queue.topic, record, lease, deliveries, codec)
        self._queue = queue
        self._lost: asyncio.Event | None = None
        self._behind: Behind | None = None
        """Where its ack goes when its block ends, if nobody waits for that."""
        lease.on_lost = self._was_lost

    @property
    def lost(self) -> asyncio.Event:
        """Set when the lease is known to have ended: somebody else may be at work on the job."""
        if self._lost is None:
            # Made when somebody asks: that takes longer than all the rest of a job. In this order, since the
            # lease may be lost at any moment.
            self._lost = asyncio.Event()
            if self.lease.is_lost:
                self._lost.set()
        return self._lost

    def _was_lost(self) -> None:
        if self._lost is not None:
            self._lost.set()

    async def ack(self) -> None:
        """The job is done; raises LeaseLost."""
        if not (await self._queue.ack([self])).is_complete:
            raise self.lost_error()

    async def nack(self, *, delay_ms: int | None = None, reason: str = "") -> None:
        """Give the job back; raises LeaseLost."""
        if not (await self._queue.nack([self], delay_ms=delay_ms, reason=reason)).is_complete:
            raise self.lost_error()

    async def reject(self, reason: str = "") -> None:
        """Send the job to the dead letters; raises LeaseLost."""
        await self._queue.reject(self, reason)

    async def extend(self, lease_ms: int) -> None:
        """Hold the job up to `lease_ms` from now; raises LeaseLost."""
        if not (await self._queue.extend([self], lease_ms)).is_complete:
            raise self.lost_error()

    async def __aenter__(self) -> Job:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> bool:
        if self.is_parents:
            return False  # What a job forks is no end of it.
        on_error = self._on_error
        if error is None:
            try:
                await self._done()
            except RinglogError as e:
                if on_error is None:
                    raise
                report_failure(on_error, self, e)
            return False
        if not self.lease.is_over:
            with suppress(RinglogError):
                await self._queue.give_up(self, said_of(error))
        if on_error is None or not isinstance(error, Exception):
            return False
        report_failure(on_error, self, error)
        return True

    async def _done(self) -> None:
        if self._behind is not None and not self.lease.is_over:
            self._behind.add(self)
            self._behind = None
        elif not self.lease.is_over or self.lease.is_lost:
            await self.ack()


class Queue:
    """One queue, as the worker `node` sees it; see ringlog.client.queue.Queue for what each call does."""

    def __init__(
        self, client: Client, shell: LoopShell, topic: str, node: str, payload: PayloadCodec[Any] = RAW,
        release_on_exit: bool = True,
    ) -> None:  # fmt: skip
        self._client, self._shell = client, shell
        self._codec = codec(payload)
        self._working = Working(
            text(topic, "topic"),
            text(node, "node"),
            SystemClock(),
            release_on_exit=flag(release_on_exit, "release_on_exit"),
        )
        self._closings = 0
        """How often it was closed: iterations that were begun before end with it."""
        self._waiting: set[Wish] = set()
        self._slots: set[Slots] = set()
        self._gone = Gone()
        self._keeper: Keeper | None = None
        self._unbegun: list[deque[Job]] = []
        self._behind: list[Behind] = []
        """Claims that were called off, and the engine has not confirmed it."""

    @property
    def topic(self) -> str:
        """Its name."""
        return self._working.topic

    @property
    def node(self) -> str:
        """The worker's name, which holds the leases."""
        return self._working.node

    async def put(
        self, data: Any, /, *, dedup_id: str | None = None, dedup_window_ms: int | None = None,
        **record: Unpack[RecordFields],
    ) -> Appended:  # fmt: skip
        """Add a job."""
        await self._require_queue()
        return await self._client.append(
            self.topic, self._codec.encode(data), create=False, dedup_id=dedup_id,
            dedup_window_ms=dedup_window_ms, **record,
        )  # fmt: skip

    async def put_many(self, jobs: Iterable[Any], /, *, dedup_window_ms: int | None = None) -> Appended:
        """Add jobs in one atomic write."""
        await self._require_queue()
        return await self._client.append_many(
            self.topic, encoded(jobs, self._codec), create=False, dedup_window_ms=dedup_window_ms
        )

    async def claim(
        self, max: int = 1, *, wait_ms: int = 0, lease_ms: int | None = None, auto_extend: bool = False,
        order: str = "priority", done: Iterable[Job] = (),
    ) -> Jobs[Job]:  # fmt: skip
        """Lease up to `max` jobs, behind the acks of those that are `done`."""
        max, wait_ms, lease_ms = check_claim(max, wait_ms, lease_ms)
        auto_extend, done = flag(auto_extend, "auto_extend"), jobs_of(done, "done")
        wish = Wish(by_number=is_by_number(order))
        if done:
            jobs = await self._claim_after(done, max, lease_ms, auto_extend, wish)
            if jobs or (jobs is not None and not wait_ms):
                return jobs
        return await self._claim(max, wait_ms / 1_000, lease_ms, auto_extend, wish)

    async def _claim(
        self, most: int, wait_s: float, lease_ms: int | None, auto_extend: bool, wish: Wish
    ) -> Jobs[Job]:
        steps = self._working.claim(self._shell.session, most, wait_s, lease_ms, wish)
        self._waiting.add(wish)
        try:
            return self._jobs_of(await self._claimed(steps, auto_extend, wish))
        finally:
            self._waiting.discard(wish)

    async def _claimed(
        self,
        steps: Steps[_C],
        auto_extend: bool,
        wish: Wish,
        then: Callable[[Pending[_C]], None] | None = None,
    ) -> _C:
        """`then` hears what came of it, also when nobody waits any more."""
        try:
            pending = start(steps)
            if then is not None:
                pending.when_done(then)
            claimed = await self._shell.result(pending)
        except (asyncio.CancelledError, GeneratorExit):
            # Perhaps it has its jobs already, and nobody will ever see them.
            self._call_off(wish)
            raise
        if auto_extend and claimed is not None and len(claimed):
            self._keep().keep(claimed.to_keep())
        return claimed

    def _call_off(self, wish: Wish) -> None:
        with suppress(RinglogError):
            session = self._shell.session
            session.undo(self._working.call_off(session, wish))

    async def _claim_after(
        self, done: Iterable[Job], most: int, lease_ms: int | None, auto_extend: bool, wish: Wish
    ) -> Jobs[Job] | None:
        """See ringlog.client.queue.Queue."""
        together = settled_together(done)
        jobs = [] if together is not None else list(done)
        leases: Leases = together if together is not None else [job.lease for job in jobs]
        try:
            steps = self._working.next(self._shell.session, leases, most, lease_ms, wish)
            claimed = await self._claimed(steps, auto_extend, wish) if len(leases) else None
        except (RinglogError, asyncio.CancelledError):
            lose(leases)
            raise
        finally:
            leave_over(jobs)
        if claimed is not None:
            return self._jobs_of(claimed)
        settled = await self.ack(jobs if together is None else done)
        if not settled.is_complete:
            raise lost_before(self.topic, settled)
        return None

    async def jobs(
        self, *, max_in_flight: int = 1, lease_ms: int | None = None, auto_extend: bool = True,
        ack_behind: bool = False, on_error: OnError | None = None, idle_s: float | None = None,
    ) -> AsyncIterator[Job]:  # fmt: skip
        """Jobs one after the other; `on_error` and `idle_s` as in ringlog.client.queue.Queue.jobs. Close the
        iterator (`aclosing`) to give back at once what was not begun; the client's end does it at the
        latest."""
        lease_ms, auto_extend = check_claimed_for(lease_ms), flag(auto_extend, "auto_extend")
        ack_behind = flag(ack_behind, "ack_behind")
        on_error, idle_s = check_on_error(on_error), seconds(idle_s, "idle_s")
        slots, unbegun = Slots(check_iteration(max_in_flight)), deque[Job]()
        self._unbegun.append(unbegun)
        self._slots.add(slots)
        closings, begun_in = self._closings, forks()
        behind = None
        if ack_behind:
            behind = Behind(self._working, self._shell.session, waits_for_claim=slots.most == 1)
            self._behind.append(behind)
        try:
            while not self._shell.is_closed and closings == self._closings:
                if not unbegun:
                    wait_s = inf if idle_s is None else idle_s
                    jobs = await self._fill(slots, lease_ms, auto_extend, behind, wait_s)
                    if jobs is not None and not jobs and idle_s is not None:
                        return
                    unbegun += jobs or ()
                while unbegun:
                    job = unbegun[0]  # It is among those that nobody has begun until it is handed out.
                    is_good = not job.lease.is_lost and await self._is_readable(job)
                    unbegun.popleft()
                    if is_good:
                        job._behind, job._on_error = behind, on_error
                        yield job
                        if behind is not None and (error := behind.take_error()) is not None:
                            if on_error is None:
                                raise error
                            log.error("jobs of %s were not acked, and come back: %s", self.topic, error)
        except RinglogError:
            if not self._shell.is_closed:
                raise  # Else what was asked for has failed because the client ended, and so do we.
        finally:
            self._unbegun.remove(unbegun)
            self._slots.discard(slots)
            if begun_in == forks():
                await self._give_back_unbegun(unbegun, GIVE_BACK_S)
            if behind is not None:
                self._behind.remove(behind)
                await self._catch_up(behind)

    async def batches(
        self, size: int = 100, *, max_in_flight: int | None = None, lease_ms: int | None = None,
        auto_extend: bool = True, idle_s: float | None = None,
    ) -> AsyncIterator[Jobs[Job]]:  # fmt: skip
        """Batch after batch, of claims of up to `max_in_flight` jobs, acked with the next claim. Close the
        iterator (`aclosing`) to give back at once what was not settled."""
        (size, most), lease_ms = check_batches(size, max_in_flight), check_claimed_for(lease_ms)
        wait_s = inf if (idle_s := seconds(idle_s, "idle_s")) is None else idle_s
        auto_extend = flag(auto_extend, "auto_extend")
        behind = Behind(self._working, self._shell.session)
        batches = Batches(size, behind)
        self._behind.append(behind)
        clock = self._shell.session.clock
        closings, begun_in = self._closings, forks()
        try:
            while not self._shell.is_closed and closings == self._closings:
                jobs = await self._next_claim(most, lease_ms, wait_s)
                if jobs is not None and not jobs and idle_s is not None:
                    return
                if not jobs:
                    continue
                batches.begin(jobs.claimed, self._keep() if auto_extend else None)
                part = batches.next(clock.monotonic_ns())
                while part is not None:
                    yield self._jobs_of(part)
                    batches.done()
                    part = batches.next(clock.monotonic_ns())
                    if (error := behind.take_error()) is not None:
                        raise error
        except RinglogError:
            if not self._shell.is_closed:
                raise  # Else what was asked for has failed because the client ended, and so do we.
        finally:
            self._behind.remove(behind)
            begun, unbegun = batches.leave() if begun_in == forks() else ([], [])
            for leases in begun:
                await self._give_back(self._working.nack(self._shell.session, leases, 0), leases)
            for leases in unbegun:
                await self._give_back(self._working.undo(self._shell.session, leases), leases)
            await self._catch_up(behind)

    async def _next_claim(self, most: int, lease_ms: int | None, wait_s: float) -> Jobs[Job] | None:
        """None: the engine could not answer."""
        try:
            jobs = await self._claim(most, wait_s, lease_ms, False, Wish())
            self._gone.is_there()
            return jobs
        except RinglogError as e:
            await self._pause_after(e)
            return None

    async def _pause_after(self, error: RinglogError) -> None:
        if self._client.state is ClientState.CLOSED or not self._gone.may_come_back(error):
            raise error
        await asyncio.sleep(RETRY_S)

    def _keep(self) -> Keeper:
        if self._keeper is None:
            self._keeper = Keeper(self._working.line(self._shell.session), self.topic, self.node)
        return self._keeper

    async def _catch_up(self, behind: Behind, timeout: float | None = None) -> None:
        if self._shell.is_closed:
            return
        with suppress(TimeoutError):
            await self._shell.result(behind.all_answered(), timeout)
        if (error := behind.take_error()) is not None:
            log.error("jobs of %s were not acked, and come back: %s", self.topic, error)

    async def _is_readable(self, job: Job) -> bool:
        """See ringlog.client.queue.Queue."""
        reason = None if self._codec is RAW else why_unreadable(job)
        if reason is None:
            return True
        log.error("job %d of %s: %s", job.seq, self.topic, reason)
        try:
            await self.reject(job, reason)
        except InvalidRequest:
            with suppress(RinglogError):
                await self.nack([job], delay_ms=BACKOFF_MS_MAX, reason=reason)
        except RinglogError as e:
            if not (e.retriable or isinstance(e, LeaseLost)):
                raise
        return False

    async def _fill(
        self, slots: Slots, lease_ms: int | None, auto_extend: bool, behind: Behind | None, wait_s: float
    ) -> Sequence[Job] | None:
        """Claim as many as may be in flight; None, behind a pause, when the engine cannot answer now."""
        try:
            jobs: Sequence[Job] | None = None
            if behind is not None and slots.most == 1:
                jobs = await self._go_on(behind, lease_ms, auto_extend)
            if not jobs:
                if behind is not None:
                    behind.send()  # Before the claim: the shard takes them in this order.
                    if slots.most == 1:
                        await self._shell.result(behind.all_answered())
                await self._shell.result(slots.room())
                if slots.taken >= slots.most:
                    return None  # The queue was closed.
                jobs = await self._claim(slots.most - slots.taken, wait_s, lease_ms, auto_extend, Wish())
        except RinglogError as e:
            await self._pause_after(e)
            return None
        self._gone.is_there()
        for job in jobs:
            if not job.lease.is_lost:
                slots.take(job, job._was_lost)
        return jobs

    async def _go_on(self, behind: Behind, lease_ms: int | None, auto_extend: bool) -> Jobs[Job] | None:
        """See ringlog.client.queue.Queue."""
        leases = behind.take()
        if not leases:
            return None
        wish = Wish()
        steps = self._working.next(self._shell.session, leases, 1, lease_ms, wish)
        claimed = await self._claimed(steps, auto_extend, wish, partial(behind.answered, leases))
        return None if claimed is None else self._jobs_of(claimed)

    async def _give_back_unbegun(self, unbegun: deque[Job], timeout: float) -> None:
        leases = [job.lease for job in unbegun if not job.lease.is_over]
        unbegun.clear()
        if leases and not self._shell.is_closed:
            await self._give_back(self._working.undo(self._shell.session, leases), leases, timeout)

    async def _give_back(self, steps: Steps[Settled], leases: Leases, timeout: float = GIVE_BACK_S) -> None:
        """Nobody works on these any more. If the engine is not there, their leases end by themselves."""
        if self._shell.is_closed:
            return
        with suppress(TimeoutError, RinglogError):
            await self._shell.result(start(steps), timeout)
        lose(leases)

    async def ack(self, jobs: Iterable[Job]) -> Settled:
        """These jobs are done."""
        return await self._settle(jobs, None)

    async def nack(self, jobs: Iterable[Job], *, delay_ms: int | None = None, reason: str = "") -> Settled:
        """Give these jobs back."""
        return await self._settle(jobs, rest_of(delay_ms, reason))

    def _jobs_of(self, claimed: Claimed) -> Jobs[Job]:
        return Jobs(claimed, partial(Job, self, codec=self._codec))

    async def _settle(self, jobs: Iterable[Job], rest: Rest | None) -> Settled:
        together = settled_together(jobs)
        if together is not None:
            return await self._settled_together(together, rest)
        jobs = list(jobs_of(jobs))
        session, leases = self._shell.session, [job.lease for job in jobs]
        if rest is None:
            return await self._settled(jobs, self._working.ack(session, leases))
        return await self._settled(jobs, self._working.nack(session, leases, *rest))

    async def _settled_together(self, claimed: Claimed, rest: Rest | None) -> Settled:
        session, working = self._shell.session, self._working
        try:
            if rest is None:
                return await self._shell.run(working.ack(session, claimed))
            return await self._shell.run(working.nack(session, claimed, *rest))
        except RinglogError:
            claimed.lose()
            raise

    async def give_up(self, job: Job, reason: str) -> None:
        """Its block has failed: it rests as the topic says, or for `backoff_ms`."""
        await self._settle([job], Rest(backoff_ms(job.deliveries), reason, True))

    async def reject(self, job: Job, reason: str = "") -> None:
        """Send a job to the dead letters at once."""
        steps = self._working.reject(self._shell.session, [job_of(job).lease], reason_of(reason))
        if not (await self._settled([job], steps)).is_complete:
            raise job.lost_error()

    async def _settled(self, jobs: list[Job], steps: Steps[Settled]) -> Settled:
        settling = start(steps)
        # It goes on when who waits for it is cancelled.
        settling.when_done(partial(_leave, jobs))
        return await self._shell.result(settling)

    async def extend(self, jobs: Iterable[Job], lease_ms: int) -> Settled:
        """Hold these jobs up to `lease_ms` from now."""
        lease_ms = check_lease(lease_ms)
        leases = [job.lease for job in jobs_of(jobs)]
        return await self._shell.run(self._working.extend(self._shell.session, leases, lease_ms))

    async def stats(self) -> QueueStats:
        """How many jobs are in which state."""
        return await self._shell.run(self._working.stats(self._shell.session))

    async def pending(self, limit: int = 100, *, after: int = 0) -> list[PendingJob]:
        """The first jobs behind `after` that were handed out and are not done."""
        after, limit = position(after, "after"), at_least(limit, "limit", 1)
        return await self._shell.run(self._working.known_jobs(self._shell.session, after, limit))

    async def peek(self, limit: int = 1) -> list[Record]:
        """The first jobs that are there, whoever holds them."""
        await self._require_queue()
        return (await self._client.read(self.topic, limit=limit)).records

    async def dead_letters(self) -> AsyncIterator[Record | Tombstone]:
        """This queue's jobs in its dead-letter topic, oldest first."""
        name = await self._shell.run(self._working.dead_letter(self._shell.session))
        with suppress(TopicNotFound):
            async with self._client.reader(name) as reader:
                async for item in reader:
                    if self._working.is_own(item):
                        yield item

    async def redrive(
        self, where: Where = None, *, limit: int | None = None, rate: float | None = None
    ) -> RedriveReport:
        """Put dead letters back into this queue."""
        plan, session = Redrive(self._working, where, limit, rate), self._shell.session
        name = await self._shell.run(plan.begin(session))
        if name is not None:
            async with self._client.reader(name) as reader:
                async for page in reader.pages():
                    for part in plan.parts(page.records):
                        await self._shell.run(plan.move(session, part))
                    if plan.is_done:
                        break
        return plan.report()

    async def purge(self) -> Deletion:
        """Delete every job that is there now."""
        await self._require_queue()
        head = (await self._client.topics.state(self.topic, touch=False)).head_seq
        return await self._client.topics.delete_records(self.topic, before_seq=head + 1)

    async def close(self, timeout: float = GIVE_BACK_S) -> None:
        """End its loops, also where they wait for jobs, give back what was claimed and not begun, and let go
        of files."""
        timeout = seconds_to_end(timeout)
        self._closings += 1
        for wish in list(self._waiting):
            self._call_off(wish)
        for slots in self._slots:
            slots.wake()
        for unbegun in list(self._unbegun):
            await self._give_back_unbegun(unbegun, timeout)
        for behind in list(self._behind):
            await self._catch_up(behind, timeout)
        await self._shell.wait_undone(timeout)
        self._working.close()

    def restart_in_child(self) -> None:
        """After a fork: the leases are the parent's."""
        self._keeper = None
        for unbegun in self._unbegun:
            unbegun.clear()
        for behind in self._behind:
            behind.forget()
        self._working.let_go()

    async def _require_queue(self) -> None:
        await self._shell.run(self._working.known(self._shell.session))

    async def __aenter__(self) -> Queue:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()


def _leave(jobs: Sequence[Job], settled: Pending[Settled]) -> None:
    """They are in flight no longer. After an error nobody knows what became of them: kept alive, jobs that
    nobody works on would never come back."""
    for job in jobs:
        if settled.error is not None:
            job.lease.lose()
        else:
            job.leave()
