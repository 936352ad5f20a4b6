"""LoopShell: a session served by an asyncio loop.

Descriptors are readers of the loop, times are its timers. Whatever is done with the session in one pass
of the loop is followed by one look after it: take what came, arrange the next wake-up.
"""

from __future__ import annotations

import asyncio
import select
import weakref
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext, suppress
from functools import partial
from typing import Any, NoReturn, TypeVar

from ringlog.client.connection.exit_hooks import warn_unsettled
from ringlog.client.connection.finalizer import close_in_thread
from ringlog.client.connection.session import Session
from ringlog.client.connection.shell import not_picklable_error
from ringlog.client.write.producer_core import ProducerCore
from ringlog.clock import SystemClock
from ringlog.errors import RinglogError, UsageError, WrongLoop
from ringlog.link.delivery import ClientSubscription
from ringlog.link.futures import Pending, Steps, run_steps
from ringlog.link.peer import FdSet

T = TypeVar("T")
CANCELLED: tuple[type[BaseException], ...] = (asyncio.CancelledError,)
"""What a call raises because nobody waits for it any more."""
NO_ANSWER: tuple[type[BaseException], ...] = (RinglogError, *CANCELLED)
"""What leaves a request without an answer for who asked."""
_LOOK_MS = 2
"""How often is looked for settlements where no loop waits for them."""


def running_loop() -> asyncio.AbstractEventLoop:
    """The loop of this thread; raises WrongLoop where none runs."""
    try:
        return asyncio.get_running_loop()
    except RuntimeError:
        raise WrongLoop(
            "ringlog.aio needs a running asyncio event loop, and none runs in this thread; under trio, call "
            "ringlog.connect() and its client in worker threads (trio.to_thread.run_sync)"
        ) from None


class LoopDescriptors:
    """Descriptors watched by a loop, for a shell that lasts as long as somebody has it: not the loop."""

    def __init__(self, loop: asyncio.AbstractEventLoop, shell: LoopShell) -> None:
        self._loop = loop
        self._shell = weakref.ref(shell)
        self.fds: set[int] = set()

    def watch(self, fd: int) -> None:
        """Call back when `fd` is readable."""
        self.fds.add(fd)
        if not self._loop.is_closed():
            self._loop.add_reader(fd, _readable, self._shell, fd)

    def unwatch(self, fd: int) -> None:
        """Stop that."""
        self.fds.discard(fd)
        if not self._loop.is_closed():
            self._loop.remove_reader(fd)


def _readable(shell: weakref.ref[LoopShell], fd: int) -> None:
    found = shell()
    if found is not None:
        found.readable(fd)


def close_orphaned(session: Session, descriptors: LoopDescriptors, timeout: float) -> None:
    """Go on without the loop, which is over, until what was sent is settled, `timeout` seconds at most."""
    cores: list[ProducerCore] = list(session.producer_cores)
    waits = [core.wait_settled() for core in cores]
    deadline_ns = session.clock.monotonic_ns() + int(timeout * 1e9)
    while not all(each.is_done for each in waits) and session.clock.monotonic_ns() < deadline_ns:
        poll = select.poll()
        for fd in descriptors.fds:
            poll.register(fd, select.POLLIN)
        session.turn([fd for fd, _ in poll.poll(_LOOK_MS)])
    left = [core.fail_unsettled() for core in cores]
    session.close()
    warn_unsettled(sum(unsent for unsent, _ in left), sum(unknown for _, unknown in left))


def _end_dropped(session: Session, descriptors: LoopDescriptors, loop: asyncio.AbstractEventLoop) -> None:
    """Nobody has the shell any more: its sockets are closed before they are freed, which would wait for one
    another."""
    if not (loop.is_closed() or not loop.is_running()):
        # We may be anywhere, in any thread: the loop is perhaps just looking at what we are to take away.
        loop.call_soon_threadsafe(session.close)
    elif any(stream.pending_records for stream in session.streams) or session.producer_cores:
        close_in_thread(partial(close_orphaned, session, descriptors))
    else:
        session.close()


class LoopShell:
    """Owns a session once there is a loop. Not for threads; see WrongLoop."""

    def __init__(self, make_session: Callable[[FdSet], Session]) -> None:
        self._make_session = make_session
        self._clock = SystemClock()
        self._loop: asyncio.AbstractEventLoop | None = None
        self._session: Session | None = None
        self._descriptors: LoopDescriptors | None = None
        self._timer: asyncio.TimerHandle | None = None
        self._is_scheduled = False
        self._end: weakref.finalize[..., LoopShell] | None = None
        self.is_closed = False
        self.checked_lock = self.lock = nullcontext()
        """Nobody else is in the loop."""

    def __reduce__(self) -> NoReturn:
        raise not_picklable_error()

    @property
    def session(self) -> Session:
        """The session, made at first use; raises WrongLoop outside the loop it belongs to."""
        running = running_loop()
        if self._loop is None:
            self._loop = running
        elif self._loop is not running:
            raise WrongLoop("this client belongs to another loop")
        self.require_open()
        if self._session is None:
            self._descriptors = LoopDescriptors(running, self)
            self._session = self._make_session(self._descriptors)
            self._end = weakref.finalize(self, _end_dropped, self._session, self._descriptors, running)
            self._end.atexit = False
        self._ensure_progress()
        return self._session

    @property
    def session_or_none(self) -> Session | None:
        """The session if there is one, from anywhere."""
        return self._session

    def require_open(self) -> None:
        """Raise UsageError after close."""
        if self.is_closed:
            raise UsageError("the client is closed")

    @property
    def guarded_session(self) -> AbstractContextManager[Session]:
        """The session. (With threads somebody looks at its end after what was begun.)"""
        return nullcontext(self.session)

    async def wait(self, pending: Pending[Any], timeout: float | None = None) -> bool:
        """Wait until it is done; False when the timeout, in seconds, ended first."""
        if not pending.is_done:
            assert self._loop is not None
            future = self._loop.create_future()
            # Done before: cancelled by who waited; the work itself goes on.
            pending.when_done(lambda _: None if future.done() else future.set_result(None))
            self._ensure_progress()
            if timeout is None:
                await future
            else:
                await asyncio.wait((future,), timeout=timeout)
        return pending.is_done

    async def wait_locked(self, pending: Pending[Any], deadline: None) -> bool:
        """As `wait`. (For a caller that holds the lock, in the other face.)"""
        return await self.wait(pending, deadline)

    async def result(self, pending: Pending[T], timeout: float | None = None) -> T:
        """Wait for the result; raises TimeoutError when `timeout` seconds ended first."""
        if not await self.wait(pending, timeout):
            raise TimeoutError
        return pending.result()

    async def ask(self, begin: Callable[[Session], Pending[T]]) -> T:
        """Begin something and wait for its result."""
        pending = begin(self.session)
        await self.wait(pending)
        return pending.result()

    def not_settled_error(self, topic: str, timeout: float | None) -> TimeoutError:
        """What a ticket raises whose fate is still open."""
        return TimeoutError(f"records of {topic} are not settled after {timeout} s")

    @property
    def is_orphaned(self) -> bool:
        """The loop is closed, and the client was not."""
        return (
            self._session is not None
            and not self.is_closed
            and self._loop is not None
            and self._loop.is_closed()
        )

    def close_orphaned(self, timeout: float) -> None:
        """See `close_orphaned`."""
        if self._session is not None and self._descriptors is not None:
            close_orphaned(self._session, self._descriptors, timeout)
        self.close()

    def now_s(self) -> float:
        """Monotonic seconds: what deadlines are counted in."""
        return self._clock.monotonic_ns() / 1e9

    async def wait_for_news(self, subscription: ClientSubscription, timeout: float | None) -> bool:
        """Wait until it has some; False after `timeout` seconds without. The loop has a pass at least."""
        return await self.wait(self.session.delivery.wait_for_work(subscription), timeout)

    def close_subscription(self, subscription: ClientSubscription) -> None:
        """Nobody follows it any more."""
        if self._session is not None and not self.is_closed:
            self._session.delivery.close_subscription(subscription)

    async def wait_claims_cancelled(self, timeout: float) -> None:
        """Until claims that were called off are, or for so many seconds in all; never raises an error."""
        undoing = set() if self._session is None else self._session.cancelling_claims
        with suppress(TimeoutError):
            async with asyncio.timeout(timeout):
                for each in list(undoing):
                    await self.wait(each)

    async def run(self, steps: Steps[T]) -> T:
        """Run an operation to its end, also when nobody waits any more."""
        return await self.result(run_steps(steps))

    async def run_then(self, steps: Steps[T], then: Callable[[T | None, BaseException | None], None]) -> T:
        """As `run`, and `then` is told the result or the error."""
        pending = run_steps(steps)
        pending.when_done(lambda done: then(None if done.error else done.result(), done.error))
        return await self.result(pending)

    def begin(self, make: Callable[[], Steps[T]]) -> Callable[[], Steps[T]]:
        """An operation that `finish` runs. (The other face runs it here.)"""
        return make

    async def finish(self, begun: Callable[[], Steps[T]]) -> T:
        """Run what was begun."""
        return await self.run(begun())

    async def pause(self, seconds: float) -> None:
        """Do nothing for a while."""
        await asyncio.sleep(seconds)

    async def run_reading(self, steps: Steps[T]) -> T:
        """Run an operation that changes nothing in the engine: it ends with who waits for it, and lets go of
        its files then."""
        try:
            return await self.result(run_steps(steps))
        except (asyncio.CancelledError, GeneratorExit):
            steps.close()
            raise

    def when_done(self, pending: Pending[Any], call: Callable[[], Any]) -> None:
        """Call a function of the user in a later pass of the loop, once this is done."""
        assert self._loop is not None
        soon = self._loop.call_soon

        def done(_: Pending[Any]) -> None:
            soon(call)

        pending.when_done(done)

    def close(self) -> None:
        """End the session."""
        self.is_closed = True
        if self._timer is not None:
            self._timer.cancel()
        if self._session is not None:
            self._session.close()
        if self._end is not None:
            self._end.detach()

    def restart_in_child(self, make_session: Callable[[FdSet], Session] | None = None) -> Session | None:
        """After a fork: a new loop will get a new session; the parent's must neither be used nor freed."""
        self._make_session = make_session or self._make_session
        if self._end is not None:
            self._end.detach()
        parents, self._session = self._session, None
        self._loop, self._timer, self._is_scheduled = None, None, False
        if parents is not None:
            parents.links.close_after_fork()
        return parents

    def _ensure_progress(self) -> None:
        if not self._is_scheduled and self._loop is not None and not self._loop.is_closed():
            self._is_scheduled = True
            self._loop.call_soon(self._serve_once)

    def readable(self, fd: int) -> None:
        """One of the session's descriptors is readable."""
        if self._session is not None and not self.is_closed:
            self._session.turn((fd,))
            self._ensure_progress()

    def _serve_once(self) -> None:
        """Serve what is there and arrange the next wake-up."""
        self._is_scheduled = False
        session, loop = self._session, self._loop
        if session is None or loop is None or self.is_closed:
            return
        session.turn()
        if not session.links.arm():
            self._ensure_progress()
            return
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        if session.has_work:
            self._timer = loop.call_later(session.sleep_s(), self._serve_once)
