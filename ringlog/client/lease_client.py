# Generated from ringlog/aio/lease_client.py by tools/unasync.py: do not edit, `make fmt` writes it anew.
"""Who claims, keeps and settles jobs: a worker of a queue, or a member of a consumer group."""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from functools import partial
from math import inf
from typing import TYPE_CHECKING, Any, Self

from ringlog.client.batches import Batches
from ringlog.client.behind import Behind
from ringlog.client.checks import (
    codec,
    flag,
    number,
    seconds,
    seconds_to_end,
    seqs_of,
)
from ringlog.client.claimed import Claimed, Jobs, Leases, lose, settled_together
from ringlog.client.decoding import why_unreadable
from ringlog.client.job import Job
from ringlog.client.job_facts import (
    BACKOFF_MS_MAX,
    Gone,
    OnError,
    Slots,
    backoff_ms,
    check_on_error,
    forks,
    job_of,
    jobs_of,
    reason_of,
)
from ringlog.client.leases import Keeper
from ringlog.client.pages import Record, Tombstone
from ringlog.client.queue_options import (
    GIVE_BACK_S,
    RETRY_S,
    begin_move,
    check_batches,
    check_claim,
    check_claimed_for,
    check_iteration,
    check_lease,
    is_by_number,
    leave,
    leave_over,
    lost_before,
    rest_of,
)
from ringlog.client.redrive import Redrive, RedriveReport, Where
from ringlog.client.results import ClientState, Settled
from ringlog.client.shell import NO_ANSWER
from ringlog.client.working import Rest, Wish, Working
from ringlog.errors import InvalidRequest, LeaseLost, RinglogError, TopicNotFound
from ringlog.link.pending import Steps, start
from ringlog.payload import RAW, PayloadCodec

if TYPE_CHECKING:
    from ringlog.client.operations import Operations
    from ringlog.client.session import Session
    from ringlog.client.shell import Shell

log = logging.getLogger(__name__)


class LeaseClient:
    """What a worker of a queue and a member of a consumer group do alike. A group's jobs are records of its
    topic, whose ack deletes nothing."""

    def __init__(
        self, client: Operations, shell: Shell, working: Working, payload: PayloadCodec[Any] = RAW
    ) -> None:
        self._client, self._shell = client, shell
        self._codec, self._working = codec(payload), working
        self._closings = 0
        """How often it was closed: iterations that were begun before end with it."""
        self._waiting: set[Wish] = set()
        self._slots: set[Slots] = set()
        self._gone = Gone()
        self._keeper: Keeper | None = None
        self._unbegun: list[deque[Job]] = []
        """Of each iteration, jobs that were claimed and not given out."""
        self._behind: list[Behind] = []
        """Of each iteration that asked for it, acks that nobody waits for."""

    @property
    def topic(self) -> str:
        """Its name."""
        return self._working.topic

    @property
    def node(self) -> str:
        """The worker's name, which holds the leases."""
        return self._working.node

    # -- taking them out ------------------------------------------------------------------------------

    def claim(
        self, max: int = 1, *, wait_ms: int = 0, lease_ms: int | None = None, auto_extend: bool = False,
        order: str = "priority", done: Iterable[Job] = (),
    ) -> Jobs[Job]:  # fmt: skip
        """Lease up to `max` jobs (at most 1,000), those that came back first, then lowest number first.

        Where the topic has `record_priority` the more urgent of these go first; with `order="seq"` the lowest
        number does all the same. An empty list: there was none within `wait_ms`. The leases last `lease_ms`,
        or as long as the topic says; with `auto_extend` as long as this process lives and they are not
        settled.

        Jobs that are `done` are acked before, and are gone for good when this returns: in the same request,
        where the engine is on this host and the queue has no priorities and no durable leases, or this is a
        group without a filter. That takes half the time of an ack and a claim. Raises LeaseLost, and claims
        nothing, when one of their leases had ended.
        """
        max, wait_ms, lease_ms = check_claim(max, wait_ms, lease_ms)
        auto_extend, done = flag(auto_extend, "auto_extend"), jobs_of(done, "done")
        wish = Wish(by_number=is_by_number(order))
        if done:
            jobs = self._claim_after(done, max, lease_ms, auto_extend, wish)
            if jobs or (jobs is not None and not wait_ms):
                return jobs
        return self._claim(max, wait_ms / 1_000, lease_ms, auto_extend, wish)

    def _claim(
        self, most: int, wait_s: float, lease_ms: int | None, auto_extend: bool, wish: Wish,
        slots: Slots | None = None,
    ) -> Jobs[Job]:  # fmt: skip
        steps = self._working.claim(self._client.connection, most, wait_s, lease_ms, wish)
        self._waiting.add(wish)
        try:
            jobs = self._claimed(steps, auto_extend, wish, slots)
        finally:
            self._waiting.discard(wish)
        assert jobs is not None
        return jobs

    def _claimed(
        self, steps: Steps[Claimed | None], auto_extend: bool, wish: Wish,
        slots: Slots | None = None, then: Callable[[Any, BaseException | None], None] | None = None,
    ) -> Jobs[Job] | None:  # fmt: skip
        """Wait for a claim. What it is given is extended, and counted as in flight; `then` is told of it,
        also when nobody waits any more."""
        try:
            claimed = self._shell.run(steps) if then is None else self._shell.run_then(steps, then)
            if claimed is None:
                return None
            jobs = self._jobs_of(claimed)
            if len(jobs) and (auto_extend or slots is not None):
                with self._shell.entry, self._shell.work as session:
                    if auto_extend:
                        self._keep(session).keep(claimed.to_keep())
                    if slots is not None:
                        slots.take_all(jobs)
        except Exception:
            raise
        except BaseException:
            self._call_off(wish)
            raise
        return jobs

    def _call_off(self, wish: Wish) -> None:
        """Who waited for this claim was interrupted, and whatever it is given goes back."""
        with suppress(RinglogError), self._shell.entry, self._shell.work as session:
            session.undo(self._working.call_off(session, wish))

    def _claim_after(
        self, done: Iterable[Job], most: int, lease_ms: int | None, auto_extend: bool, wish: Wish
    ) -> Jobs[Job] | None:
        """Ack these, and claim others in the same request; None: that was not possible, and they are acked
        alone. Raises LeaseLost."""
        together = settled_together(done)
        jobs = [] if together is not None else list(done)
        leases: Leases = together if together is not None else [job.lease for job in jobs]
        try:
            steps = self._working.next(self._client.connection, leases, most, lease_ms, wish)
            claimed = self._claimed(steps, auto_extend, wish) if len(leases) else None
        except NO_ANSWER:
            with self._shell.lock:
                lose(leases)
            raise
        finally:
            # Also where what was claimed cannot be read: by then they are done.
            if jobs:
                with self._shell.lock:
                    leave_over(jobs)
        if claimed is not None:
            return claimed
        settled = self.ack(jobs if together is None else done)
        if not settled.is_complete:
            raise lost_before(self.topic, settled)
        return None

    def jobs(
        self, *, max_in_flight: int = 1, lease_ms: int | None = None, auto_extend: bool = True,
        ack_behind: bool = False, on_error: OnError | None = None, idle_s: float | None = None,
    ) -> Iterator[Job]:  # fmt: skip
        """Jobs one after the other: waits when there is none, and ends when the queue or the client is closed
        or, with `idle_s`, when no job came for so many seconds.

        An exception in a `with job:` block gives the job back and ends the loop. With `on_error`, a function
        of (job, error) or "log", the loop goes on with the next job instead; the function is also told of
        acks that fail. KeyboardInterrupt and its like end the loop all the same.

        Up to `max_in_flight` are claimed and not settled; more are claimed as these are acked, given back or
        lost. Whoever asks for the next one before that waits. Leaving the loop gives back at once what was
        not begun (CL-10).

        With `ack_behind` the end of a `with job:` block does not wait for its ack. With one job in flight the
        ack travels with the claim of the next one, which is given when the first is gone for good: twice as
        fast. With many in flight acks are sent as blocks end, and jobs wait here meanwhile: many times as
        fast, where jobs are small. Leaving the loop waits for all acks. That a lease had ended before is
        logged then, and sets `job.lost`, where it raises LeaseLost otherwise; an error that meets an ack
        comes out of the loop with the next job.
        """
        slots = Slots(check_iteration(max_in_flight))
        return self._iterate(
            slots, check_claimed_for(lease_ms), flag(auto_extend, "auto_extend"),
            flag(ack_behind, "ack_behind"), check_on_error(on_error),
            seconds(idle_s, "idle_s"),
        )  # fmt: skip

    def _iterate(
        self, slots: Slots, lease_ms: int | None, auto_extend: bool, ack_behind: bool,
        on_error: OnError | None, idle_s: float | None,
    ) -> Iterator[Job]:  # fmt: skip
        unbegun: deque[Job] = deque()
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
                    is_idle = self._fill_again(slots, unbegun, lease_ms, auto_extend, behind, wait_s)
                    if is_idle and idle_s is not None:
                        return
                while unbegun:
                    job = unbegun[0]  # It is among those that nobody has begun until it is handed out.
                    is_good = not job.lease.is_lost and self._is_readable(job)
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
                self._give_back(unbegun, GIVE_BACK_S)
            if behind is not None:
                self._behind.remove(behind)
                self._catch_up(behind, None)

    def batches(
        self, size: int = 100, *, max_in_flight: int | None = None, lease_ms: int | None = None,
        auto_extend: bool = True, idle_s: float | None = None,
    ) -> Iterator[Jobs[Job]]:  # fmt: skip
        """Batch after batch of up to `size` jobs: waits when there is none, and ends as `jobs` does.

        Up to `max_in_flight` jobs (as many as a batch has, if nothing is said; at most 1,000) are claimed at
        once, and the next ones when these are done: of small jobs several batches at a time are faster. The
        next claim acks those before it, as far as they were not settled one by one: both travel together, and
        nobody waits for the ack. Of a claim of several batches those that are done are acked after 10 ms,
        should the others take longer. `batch.payloads()` looks at all jobs at once.

        Leaving the loop in the middle of a batch, by `break` or an error, gives back what was not settled of
        it and of those behind it, and waits for the acks of the others. Lost leases and errors are told as
        for `jobs(ack_behind=True)`.
        """
        size, most = check_batches(size, max_in_flight)
        return self._in_batches(
            size, most, check_claimed_for(lease_ms), flag(auto_extend, "auto_extend"),
            seconds(idle_s, "idle_s"),
        )  # fmt: skip

    def _in_batches(
        self, size: int, most: int, lease_ms: int | None, auto_extend: bool, idle_s: float | None
    ) -> Iterator[Jobs[Job]]:
        behind = Behind(self._working, self._shell.session)
        batches = Batches(size, behind)
        self._behind.append(behind)
        clock = self._shell.session.clock
        closings, begun_in = self._closings, forks()
        try:
            while not self._shell.is_closed and closings == self._closings:
                jobs = self._next_claim(most, lease_ms, inf if idle_s is None else idle_s)
                if jobs is not None and not jobs and idle_s is not None:
                    return
                if not jobs:
                    continue
                with self._shell.entry, self._shell.work as session:
                    batches.begin(jobs.claimed, self._keep(session) if auto_extend else None)
                    part = batches.next(clock.monotonic_ns())
                while part is not None:
                    yield self._jobs_of(part)
                    with self._shell.entry, self._shell.work:
                        batches.done()
                        part = batches.next(clock.monotonic_ns())
                    if (error := behind.take_error()) is not None:
                        raise error
        except RinglogError:
            if not self._shell.is_closed:
                raise  # Else what was asked for has failed because the client ended, and so do we.
        finally:
            self._behind.remove(behind)
            if begun_in == forks():
                self._give_back_batches(batches)
            self._catch_up(behind, None)

    def _next_claim(self, most: int, lease_ms: int | None, wait_s: float) -> Jobs[Job] | None:
        """None: the engine could not answer."""
        try:
            jobs = self._claim(most, wait_s, lease_ms, False, Wish())
            self._gone.is_there()
            return jobs
        except RinglogError as e:
            self._pause_after(e)
            return None

    def _keep(self, session: Session) -> Keeper:
        if self._keeper is None:
            self._keeper = Keeper(session, self.topic, self.node, self._working.group)
        return self._keeper

    def _give_back_batches(self, batches: Batches) -> None:
        if self._shell.is_closed:
            return
        with self._shell.entry, self._shell.work as session:
            begun, unbegun = batches.leave()
            giving = [start(self._working.nack(session, leases, 0)) for leases in begun]
            giving += [start(self._working.undo(session, leases)) for leases in unbegun]
        for each in giving:
            self._shell.wait(each, GIVE_BACK_S)
        for leases in begun + unbegun:
            lose(leases)

    def ack_behind(self, job: Job, behind: Behind) -> None:
        """The block of a job of this iteration has ended."""
        with self._shell.entry, self._shell.work:
            behind.add(job)

    def _catch_up(self, behind: Behind, timeout: float | None) -> None:
        """Wait until every ack has its answer, which each has or is refused in its time."""
        if self._shell.is_closed:
            return
        with self._shell.entry, self._shell.work:
            all_answered = behind.all_answered()
        self._shell.wait(all_answered, timeout)
        if (error := behind.take_error()) is not None:
            log.error("jobs of %s were not acked, and come back: %s", self.topic, error)

    def _is_readable(self, job: Job) -> bool:
        """What cannot be decoded never will be: it is rejected with the reason, or rests long where there are
        no dead letters."""
        reason = None if self._codec is RAW else why_unreadable(job)
        if reason is None:
            return True
        log.error("job %d of %s: %s", job.seq, self.topic, reason)
        try:
            self.reject(job, reason)
        except InvalidRequest:
            with suppress(RinglogError):
                self.nack([job], delay_ms=BACKOFF_MS_MAX, reason=reason)
        except RinglogError as e:
            if not (e.retriable or isinstance(e, LeaseLost)):
                raise
        return False

    def _fill_again(
        self, slots: Slots, unbegun: deque[Job], lease_ms: int | None, auto_extend: bool,
        behind: Behind | None, wait_s: float,
    ) -> bool:  # fmt: skip
        """As `_fill`, and again as long as the engine cannot answer for now (CL-7)."""
        try:
            is_idle = self._fill(slots, unbegun, lease_ms, auto_extend, behind, wait_s)
            self._gone.is_there()
            return is_idle
        except RinglogError as e:
            self._pause_after(e)
            return False

    def _pause_after(self, error: RinglogError) -> None:
        """Wait a moment before asking again; raises the error when that is of no use."""
        if self._client.state is ClientState.CLOSED or not self._gone.may_come_back(error):
            raise error
        self._shell.pause(RETRY_S)

    def _fill(
        self, slots: Slots, unbegun: deque[Job], lease_ms: int | None, auto_extend: bool,
        behind: Behind | None, wait_s: float,
    ) -> bool:  # fmt: skip
        """Claim as many as may be in flight; waits for room, and for jobs. Was there none in `wait_s`?"""
        jobs = None
        if behind is not None and slots.most == 1:
            jobs = self._go_on(behind, slots, lease_ms, auto_extend)
        if not jobs:
            with self._shell.entry, self._shell.work:
                waits = [slots.room()]
                if behind is not None:
                    behind.send()  # Before the claim: the shard takes them in this order.
                    if slots.most == 1:
                        waits.append(behind.all_answered())
            for each in waits:
                self._shell.wait(each, None)
            if slots.taken >= slots.most:
                return False  # The queue was closed.
            jobs = self._claim(slots.most - slots.taken, wait_s, lease_ms, auto_extend, Wish(), slots)
        unbegun += jobs
        return not jobs

    def _go_on(
        self, behind: Behind, slots: Slots, lease_ms: int | None, auto_extend: bool
    ) -> Jobs[Job] | None:
        """Ack what is done, and claim the next one in the same request, as far as both are possible."""
        with self._shell.entry, self._shell.work:
            leases = behind.take()
        if not leases:
            return None
        wish = Wish()
        steps = self._working.next(self._client.connection, leases, 1, lease_ms, wish)
        return self._claimed(steps, auto_extend, wish, slots, partial(behind.answered, leases))

    def _give_back(self, unbegun: deque[Job], timeout: float) -> None:
        """Nobody begins these any more. If the engine is not there, their leases end by themselves."""
        left: list[Job] = []
        while unbegun:
            left.append(unbegun.popleft())
        leases = [job.lease for job in left if not job.lease.is_over]
        if not leases or self._shell.is_closed:
            return
        with self._shell.entry, self._shell.work as session:
            giving = start(self._working.undo(session, leases))
        self._shell.wait(giving, timeout)
        with self._shell.entry, self._shell.work:
            for job in left:
                job.lease.lose()

    # -- what becomes of them -------------------------------------------------------------------------

    def ack(self, jobs: Iterable[Job]) -> Settled:
        """These jobs are done, all at once as far as their leases hold; `skipped` are those that do not. A
        thousand in one request are one record of the log.

        When the engine does not answer, the leases are not extended any more; trying again does no harm."""
        return self._settle(jobs, None)

    def nack(self, jobs: Iterable[Job], *, delay_ms: int | None = None, reason: str = "") -> Settled:
        """Give these jobs back, ready after `delay_ms` (at most a day), or when that is not said after the
        back-off of the topic or group (`backoff_ms`), which is none by default. A `reason` says that they
        failed: should they become dead letters, its first line, the time, and how often that was go with
        them."""
        return self._settle(jobs, rest_of(delay_ms, reason))

    def give_up(self, job: Job, reason: str) -> None:
        """Its block has failed: it rests as the topic says, or for `backoff_ms`."""
        self._settle([job], Rest(backoff_ms(job.deliveries), reason, True))

    def reject(self, job: Job, reason: str = "") -> None:
        """Send a job to the dead letters at once, whatever its deliveries; the first line of `reason` goes
        with it. Raises InvalidRequest where there are none, and LeaseLost."""
        steps = self._working.reject(self._client.connection, [job_of(job).lease], reason_of(reason))
        settled = self._shell.run_then(steps, partial(leave, [job]))
        if not settled.is_complete:
            raise job.lost_error()

    def _jobs_of(self, claimed: Claimed) -> Jobs[Job]:
        return Jobs(claimed, partial(Job, self, codec=self._codec))

    def _settle(self, jobs: Iterable[Job], rest: Rest | None) -> Settled:
        connection, working = self._client.connection, self._working
        together = settled_together(jobs)
        if together is not None:
            return self._settled_together(together, rest)
        jobs = list(jobs_of(jobs))
        leases = [job.lease for job in jobs]
        if rest is None:
            return self._shell.run_then(working.ack(connection, leases), partial(leave, jobs))
        return self._shell.run_then(working.nack(connection, leases, *rest), partial(leave, jobs))

    def _settled_together(self, claimed: Claimed, rest: Rest | None) -> Settled:
        connection, working = self._client.connection, self._working
        try:
            if rest is None:
                return self._shell.run(working.ack(connection, claimed))
            return self._shell.run(working.nack(connection, claimed, *rest))
        except RinglogError:
            claimed.lose()
            raise

    def extend(self, jobs: Iterable[Job], lease_ms: int) -> Settled:
        """Hold these jobs up to `lease_ms` from now, which may be earlier than before."""
        lease_ms = check_lease(lease_ms)
        leases = [job.lease for job in jobs_of(jobs)]
        return self._shell.run(self._working.extend(self._client.connection, leases, lease_ms))

    def steal(
        self, seqs: Iterable[int], *, min_idle_ms: int = 0, lease_ms: int | None = None,
        auto_extend: bool = False,
    ) -> Jobs[Job]:  # fmt: skip
        """Lease those of these jobs that were handed out, whoever holds them, if nothing was done about them
        for `min_idle_ms`. Who held them finds his lease lost."""
        seqs, lease_ms = seqs_of(seqs), check_claimed_for(lease_ms)
        min_idle_ms, auto_extend = number(min_idle_ms, "min_idle_ms"), flag(auto_extend, "auto_extend")
        wish = Wish()
        steps = self._working.steal(self._client.connection, seqs, min_idle_ms, lease_ms, wish)
        jobs = self._claimed(steps, auto_extend, wish)
        assert jobs is not None
        return jobs

    # -- dead letters ---------------------------------------------------------------------------------

    def dead_letters(self) -> Iterator[Record | Tombstone]:
        """This queue's jobs, or this group's records, in the topic of its dead letters, oldest first, up to
        the last one there is now. A tombstone says that some were lost there. Raises InvalidRequest where
        there is no such topic."""
        return self._letters(self._shell.begin(lambda: self._working.dead_letter(self._client.connection)))

    def _letters(self, begun: Any) -> Iterator[Record | Tombstone]:
        name: str = self._shell.finish(begun)
        with suppress(TopicNotFound), self._client.reader(name) as reader:
            for item in reader:
                if self._working.is_own(item):
                    yield item

    def redrive(
        self, where: Where = None, *, limit: int | None = None, rate: float | None = None
    ) -> RedriveReport:
        """Put dead letters back into this queue, with all they have, or have the group give out their records
        once more, as if it never had; and delete the letters: all, those with these numbers there, or those
        for which `where(record)` is true; the oldest `limit`, at most `rate` a second.

        Safe to repeat after an error or a crash: nothing is lost, and nothing comes back twice as long as the
        shard remembers who wrote. Raises what an append raises; what was moved before stays so. Letters of a
        group whose records have left the topic stay, and are counted as `gone`."""
        plan = Redrive(self._working, where, limit, rate)
        name = self._shell.ask(lambda session: start(plan.begin(session)))
        if name is not None:
            with self._client.reader(name) as reader:
                for page in reader.pages():
                    for part in plan.parts(page.records):
                        self._shell.ask(partial(begin_move, plan, part))
                    if plan.is_done:
                        break
        return plan.report()

    def close(self, timeout: float = GIVE_BACK_S) -> None:
        """End its loops, also where they wait for jobs, give back what was claimed and not begun, and let go
        of files. The client calls it, too."""
        timeout = seconds_to_end(timeout)
        self._closings += 1
        for wish in list(self._waiting):
            self._call_off(wish)
        with suppress(RinglogError), self._shell.entry, self._shell.work:
            for slots in self._slots:
                slots.wake()
        for unbegun in list(self._unbegun):
            self._give_back(unbegun, timeout)
        for behind in list(self._behind):
            self._catch_up(behind, timeout)
        self._shell.wait_undone(timeout)
        self._working.close()

    def restart_in_child(self) -> None:
        """After a fork: the leases are the parent's, and nobody here extends them or gives them back."""
        self._keeper = None
        for unbegun in self._unbegun:
            unbegun.clear()
        for behind in self._behind:
            behind.forget()
        self._working.let_go()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
