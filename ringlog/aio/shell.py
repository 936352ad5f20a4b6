"""LoopShell: runs a session in an asyncio event loop.

Descriptors are readers of the loop, and deadlines are its timers. After any use of the session, the shell
runs `_serve_once` once in the next pass of the loop. It handles received data and schedules the next wake-up.
"""

from __future__ import annotations

import asyncio
import select
import weakref
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext, suppress
from functools import partial
from typing import Any, NoReturn, TypeVar

from ringlog.client.connection.descriptor_set import not_picklable_error
from ringlog.client.connection.exit_hooks import warn_unsettled
from ringlog.client.connection.finalizer import close_in_thread
from ringlog.client.connection.session import Session
from ringlog.client.write.producer_core import ProducerCore
from ringlog.clock import SystemClock
from ringlog.errors import RinglogError, UsageError, WrongLoop
from ringlog.link.futures import Pending, Steps, run_steps
from ringlog.link.peer import FdSet
from ringlog.link.subscription import ClientSubscription

T = TypeVar("T")
CANCELLED: tuple[type[BaseException], ...] = (asyncio.CancelledError,)
"""Exceptions of a call whose caller no longer waits."""
UNKNOWN_OUTCOME: tuple[type[BaseException], ...] = (RinglogError, *CANCELLED)
"""Exceptions after which the caller does not know the result of its request."""
ORPHAN_POLL_MS = 2
"""Interval in milliseconds between polls for settlements after the loop was closed."""


def running_loop() -> asyncio.AbstractEventLoop:
    """Return the running event loop of this thread. Raises WrongLoop if no loop runs."""
    try:
        return asyncio.get_running_loop()
    except RuntimeError:
        raise WrongLoop(
            "ringlog.aio needs a running asyncio event loop, and none runs in this thread; under trio, call "
            "ringlog.connect() and its client in worker threads (trio.to_thread.run_sync)"
        ) from None


class LoopDescriptors:
    """Descriptors of one shell that its loop watches.

    Only a weak reference to the shell is kept: the loop must not keep a dropped shell alive.
    """

    def __init__(self, loop: asyncio.AbstractEventLoop, shell: LoopShell) -> None:
        self._loop = loop
        self._shell = weakref.ref(shell)
        self._is_ours = True
        self.fds: set[int] = set()

    def watch(self, fd: int) -> None:
        """Call `shell.readable(fd)` when `fd` is readable."""
        self.fds.add(fd)
        if self._is_ours and not self._loop.is_closed():
            self._loop.add_reader(fd, _readable, self._shell, fd)

    def unwatch(self, fd: int) -> None:
        """Stop watching `fd`."""
        self.fds.discard(fd)
        if self._is_ours and not self._loop.is_closed():
            self._loop.remove_reader(fd)

    def leave_to_parent(self) -> None:
        """Leave the loop unchanged from now on, in a forked child: the parent uses the epoll set of this
        loop."""
        self._is_ours = False


def _readable(shell: weakref.ref[LoopShell], fd: int) -> None:
    found = shell()
    if found is not None:
        found.readable(fd)


def close_orphaned(session: Session, descriptors: LoopDescriptors, timeout: float) -> None:
    """Serve the session without its closed loop until all records are settled or `timeout` seconds pass, then
    close it."""
    cores: list[ProducerCore] = list(session.producer_cores)
    waits = [core.wait_settled() for core in cores]
    deadline_ns = session.clock.monotonic_ns() + int(timeout * 1e9)
    try:
        while not all(each.is_done for each in waits) and session.clock.monotonic_ns() < deadline_ns:
            poll = select.poll()
            for fd in descriptors.fds:
                poll.register(fd, select.POLLIN)
            session.turn([fd for fd, _ in poll.poll(ORPHAN_POLL_MS)])
    finally:  # Also after an unexpected error, records are not lost silently.
        left = [core.fail_unsettled() for core in cores]
        session.close()
        warn_unsettled(sum(unsent for unsent, _ in left), sum(unknown for _, unknown in left))


def _close_dropped(session: Session, descriptors: LoopDescriptors, loop: asyncio.AbstractEventLoop) -> None:
    """Close the session of a shell that was garbage collected.

    Its sockets must be closed before they are freed, since freeing open sockets could deadlock.
    """
    if not (loop.is_closed() or not loop.is_running()):
        # A finalizer may run in any thread. The loop may be using the session at this moment.
        loop.call_soon_threadsafe(session.close)
    elif any(stream.pending_records for stream in session.streams) or session.producer_cores:
        close_in_thread(partial(close_orphaned, session, descriptors))
    else:
        session.close()


class LoopShell:
    """Owns a session and the loop that serves it. Not thread-safe: calls from another loop raise
    WrongLoop."""

    def __init__(self, make_session: Callable[[FdSet], Session]) -> None:
        self._make_session = make_session
        self._clock = SystemClock()
        self._loop: asyncio.AbstractEventLoop | None = None
        self._session: Session | None = None
        self._descriptors: LoopDescriptors | None = None
        self._timer: asyncio.TimerHandle | None = None
        self._is_scheduled = False
        self._finalizer: weakref.finalize[..., LoopShell] | None = None
        self.is_closed: bool = False
        self.lock: nullcontext[None] = nullcontext()
        self.checked_lock: nullcontext[None] = self.lock
        """Null contexts: a loop has no concurrent callers. (The threaded shell has a lock here.)"""

    def __reduce__(self) -> NoReturn:
        raise not_picklable_error()

    @property
    def session(self) -> Session:
        """Session of this client, created at first use. Raises WrongLoop outside its loop, UsageError after
        close."""
        running = running_loop()
        if self._loop is None:
            self._loop = running
        elif self._loop is not running:
            raise WrongLoop("this client belongs to another event loop: create a client in each loop")
        self.require_open()
        if self._session is None:
            self._descriptors = LoopDescriptors(running, self)
            self._session = self._make_session(self._descriptors)
            self._finalizer = weakref.finalize(
                self, _close_dropped, self._session, self._descriptors, running
            )
            self._finalizer.atexit = False
        self._ensure_progress()
        return self._session

    @property
    def session_or_none(self) -> Session | None:
        """Session if one exists. May be called from any thread."""
        return self._session

    def require_open(self) -> None:
        """Raise UsageError if the client is closed."""
        if self.is_closed:
            raise UsageError("the client is closed")

    @property
    def guarded_session(self) -> AbstractContextManager[Session]:
        """Context that yields the session. (The threaded shell ensures progress at its end.)"""
        return nullcontext(self.session)

    async def wait(self, pending: Pending[Any], timeout: float | None = None) -> bool:
        """Wait until `pending` is done. Returns False if `timeout` seconds passed first."""
        if not pending.is_done:
            assert self._loop is not None
            future, is_closed = self._loop.create_future(), self._loop.is_closed
            # The future is already done if its waiter was cancelled. The operation itself continues, and may
            # end after the loop was closed.
            pending.when_done(lambda _: None if future.done() or is_closed() else future.set_result(None))
            self._ensure_progress()
            if timeout is None:
                await future
            else:
                await asyncio.wait((future,), timeout=timeout)
        return pending.is_done

    async def wait_locked(self, pending: Pending[Any], deadline: None) -> bool:
        """Wait as `wait` does. (In the threaded shell the caller holds the lock.)"""
        return await self.wait(pending, deadline)

    async def result(self, pending: Pending[T], timeout: float | None = None) -> T:
        """Return the result of `pending`. Raises TimeoutError if `timeout` seconds passed first."""
        if not await self.wait(pending, timeout):
            raise TimeoutError
        return pending.result()

    async def ask(self, begin: Callable[[Session], Pending[T]]) -> T:
        """Start an operation and wait for its result."""
        pending = begin(self.session)
        await self.wait(pending)
        return pending.result()

    def not_settled_error(self, topic: str, timeout: float | None) -> TimeoutError:
        """Return the error of a ticket that is still open after its timeout."""
        return TimeoutError(f"records of {topic} are not settled after {timeout} s")

    @property
    def is_orphaned(self) -> bool:
        """True if the loop was closed before the client."""
        return (
            self._session is not None
            and not self.is_closed
            and self._loop is not None
            and self._loop.is_closed()
        )

    def close_orphaned(self, timeout: float) -> None:
        """Serve the session without its loop for at most `timeout` seconds, then close it."""
        if self._session is not None and self._descriptors is not None:
            close_orphaned(self._session, self._descriptors, timeout)
        self.close()

    def now_s(self) -> float:
        """Return the monotonic time in seconds, on which deadlines are based."""
        return self._clock.monotonic_ns() / 1e9

    async def wait_for_news(self, subscription: ClientSubscription, timeout: float | None) -> bool:
        """Wait until the subscription has work. Returns False after `timeout` seconds. The loop runs at least
        one pass."""
        return await self.wait(self.session.delivery.wait_for_work(subscription), timeout)

    def close_subscription(self, subscription: ClientSubscription) -> None:
        """End a subscription."""
        if self._session is not None and not self.is_closed:
            self._session.delivery.close_subscription(subscription)

    async def end_left_loops(self) -> None:
        """Let generators whose `async for` the program has left begin to end. The event loop makes a task of
        `aclose` in its next pass, and starts it in the pass after that."""
        for _ in range(2):
            await asyncio.sleep(0)

    async def wait_claims_cancelled(self, timeout: float) -> None:
        """Wait until cancelled claims are undone, at most `timeout` seconds in total. Raises no error."""
        undoing = set() if self._session is None else self._session.cancelling_claims
        with suppress(TimeoutError):
            async with asyncio.timeout(timeout):
                for each in list(undoing):
                    await self.wait(each)

    async def run(self, steps: Steps[T]) -> T:
        """Run an operation and return its result. The operation continues if the caller is cancelled."""
        return await self.result(run_steps(steps))

    async def run_then(self, steps: Steps[T], then: Callable[[T | None, BaseException | None], None]) -> T:
        """Run an operation as `run` does, and pass its result or error to `then`."""
        pending = run_steps(steps)
        pending.when_done(lambda done: then(None if done.error else done.result(), done.error))
        return await self.result(pending)

    def begin(self, make: Callable[[], Steps[T]]) -> Callable[[], Steps[T]]:
        """Return an operation that `finish` runs. (The threaded shell runs it here.)"""
        return make

    async def finish(self, begun: Callable[[], Steps[T]]) -> T:
        """Run the operation that `begin` returned."""
        return await self.run(begun())

    async def pause(self, seconds: float) -> None:
        """Sleep for `seconds`."""
        await asyncio.sleep(seconds)

    async def run_reading(self, steps: Steps[T]) -> T:
        """Run an operation that changes no state in the engine. Cancelling the caller ends the operation and
        releases its files."""
        try:
            return await self.result(run_steps(steps))
        except (asyncio.CancelledError, GeneratorExit):
            steps.close()
            raise

    def when_done(self, pending: Pending[Any], call: Callable[[], Any]) -> None:
        """Call a function of the program in a later pass of the loop, once `pending` is done. After the loop
        was closed, the function is not called."""
        assert self._loop is not None
        soon, is_closed = self._loop.call_soon, self._loop.is_closed

        def done(_: Pending[Any]) -> None:
            if not is_closed():
                soon(call)

        pending.when_done(done)

    def close(self) -> None:
        """Close the session."""
        self.is_closed = True
        if self._timer is not None:
            self._timer.cancel()
        if self._session is not None:
            self._session.close()
        if self._finalizer is not None:
            self._finalizer.detach()

    def restart_in_child(self, make_session: Callable[[FdSet], Session] | None = None) -> Session | None:
        """Reset the shell after a fork; the next loop creates a new session.

        Returns the parent's session, which must be neither used nor freed in the child.
        """
        self._make_session = make_session or self._make_session
        if self._finalizer is not None:
            self._finalizer.detach()
        parents, self._session = self._session, None
        descriptors, self._descriptors = self._descriptors, None
        self._loop, self._timer, self._is_scheduled = None, None, False
        if descriptors is not None:
            descriptors.leave_to_parent()
        if parents is not None:
            parents.links.close_after_fork()
        return parents

    def _ensure_progress(self) -> None:
        if not self._is_scheduled and self._loop is not None and not self._loop.is_closed():
            self._is_scheduled = True
            self._loop.call_soon(self._serve_once)

    def readable(self, fd: int) -> None:
        """Handle a session descriptor that is readable."""
        if self._session is not None and not self.is_closed:
            self._session.turn((fd,))
            self._ensure_progress()

    def _serve_once(self) -> None:
        """Handle received data and schedule the next wake-up."""
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
