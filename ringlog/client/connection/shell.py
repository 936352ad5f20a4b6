"""Shell: runs the operations of a synchronous client in the threads of the program.

One lock guards the session. Threads that wait serve the session for each other (leadership.py).

The exception of a signal (KeyboardInterrupt) can be raised at any line of the main thread. During a sleep
this is harmless. Inside other work it may leave the session in an inconsistent state that loses or duplicates
records. The session is then never used again, and every call raises `Interrupted`.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Iterable
from contextlib import suppress
from typing import Any, NoReturn, SupportsFloat, TypeVar

from ringlog.client.connection.callbacks import Callbacks
from ringlog.client.connection.descriptor_set import Descriptors, not_picklable_error
from ringlog.client.connection.green_threads import patched_late_error
from ringlog.client.connection.leadership import Leadership
from ringlog.client.connection.session import Session
from ringlog.clock import Clock, SystemClock
from ringlog.errors import CalledInside, Interrupted, RequestTimeout, RinglogError, UsageError
from ringlog.link.futures import Pending, Steps
from ringlog.link.peer import FdSet
from ringlog.link.peer_request import PeerReply
from ringlog.link.subscription import ClientSubscription

T = TypeVar("T")
log: logging.Logger = logging.getLogger("ringlog.client")
INTERRUPTED_CLOSE_S = 1.0
"""Longest time in seconds that `close` waits for the sockets of an interrupted session."""
CANCELLED: tuple[type[BaseException], ...] = ()
"""Exceptions of a call whose caller no longer waits. Empty: threads are not cancelled."""
UNKNOWN_OUTCOME: tuple[type[BaseException], ...] = (RinglogError, *CANCELLED)
"""Exceptions after which the caller does not know the result of its request."""


class GuardedSession:
    """Context that yields the session to a caller that holds the lock, and ensures progress at its end.

    See `ThreadedShell.checked_lock`.
    """

    def __init__(self, shell: ThreadedShell) -> None:
        self._shell = shell

    def __enter__(self) -> Session:
        self._shell.require_usable()
        return self._shell.session

    def __exit__(self, _kind: object, error: BaseException | None, _traceback: object) -> None:
        self._shell.finish_guarded(error)


class ThreadedShell:
    """Session of a synchronous client, its lock, and what ends its use. A forked child calls `make_session`
    again."""

    def __init__(self, make_session: Callable[[FdSet], Session]) -> None:
        self._make_session = make_session
        self._clock: Clock = SystemClock()
        self.leadership: Leadership = Leadership(self, self._clock)
        self._begin()

    def __reduce__(self) -> NoReturn:
        raise not_picklable_error()

    def now_s(self) -> float:
        """Return the monotonic time in seconds, on which deadlines are based."""
        return self._clock.monotonic_ns() / 1e9

    def _begin(self) -> None:
        self._get_ident: Callable[[], int] = threading.get_ident
        # Never taken twice. An RLock reports whether this thread owns it.
        self.lock: threading.RLock = threading.RLock()
        self.descriptors: Descriptors = Descriptors()
        self.session: Session = self._make_session(self.descriptors)
        self.callbacks: Callbacks = Callbacks()
        self._is_closed = False
        self.interrupted_by: str = ""
        """Name of the exception that interrupted the session; "" = none. See `mark_interrupted`."""
        self._error_while_asleep: BaseException | None = None
        self.leadership.begin()

    # -- for callers --------------------------------------------------------------------------------

    @property
    def checked_lock(self) -> threading.RLock:
        """Lock, for `with shell.checked_lock, shell.guarded_session as session`. Raises as `require_open`
        does.

        Two context managers are necessary: a signal may interrupt a Python context manager between any two
        lines, and would leave the lock locked. The lock itself is implemented in C.
        """
        self.require_open()
        return self.lock

    @property
    def guarded_session(self) -> GuardedSession:
        """Context that yields the session to a caller that holds the lock. See `checked_lock`."""
        return GuardedSession(self)

    def require_open(self) -> None:
        """Check as `require_usable`, without the lock. Raises CalledInside if this thread already holds the
        lock."""
        if self.lock._is_owned():  # type: ignore[attr-defined]
            raise CalledInside(
                "a signal handler used a client whose call it had interrupted: use another client there"
            )
        self.require_usable()

    def require_usable(self) -> None:
        """Raise UsageError after close, Interrupted after an exception interrupted the session."""
        if self.interrupted_by:
            raise self._interrupted_error(was_sent=False)
        if self._is_closed:
            raise UsageError("the client is closed")
        if self.is_monkey_patched_late:
            raise patched_late_error()

    @property
    def is_monkey_patched_late(self) -> bool:
        """True if green threads replaced threads after this shell created its locks."""
        return threading.get_ident is not self._get_ident

    def finish_guarded(self, error: BaseException | None) -> None:
        """End a guarded session, with the lock held. `error` is the exception that left it, or None."""
        try:
            self.leadership.ensure_progress()
        except BaseException as e:
            self.mark_interrupted(e)
            raise
        finally:
            if error is not None:
                self.mark_interrupted(error)
        if error is None and self.callbacks.are_due:
            self.unlocked(self.callbacks.run)

    def mark_interrupted(self, error: BaseException) -> None:
        """Handle an exception that leaves work under the lock. Call with the lock held.

        An Exception is harmless, and so is any exception during a sleep. Any other one may have left the
        session inconsistent: it is never used again, and all open work fails with Interrupted.
        """
        if isinstance(error, Exception):
            return
        hit_asleep, self._error_while_asleep = self._error_while_asleep, None
        if error is hit_asleep or self.interrupted_by:
            return
        self.interrupted_by = type(error).__name__
        try:
            for stream in list(self.session.streams):
                stream.fail_all(lambda was_sent: self._interrupted_error(was_sent=was_sent))
        except Exception:
            log.exception("open work could not be failed after an interruption")
        self.leadership.wake_all()

    def _interrupted_error(self, *, was_sent: bool) -> Interrupted:
        return Interrupted(
            "an exception interrupted the client inside a call, and the client is closed: create a new one",
            outcome="unknown" if was_sent else "not_applied",
            by=self.interrupted_by,
        )

    @property
    def is_over(self) -> bool:
        """True after `close` or an interruption."""
        return self._is_closed or bool(self.interrupted_by)

    @property
    def is_closed(self) -> bool:
        """True after `close`."""
        return self._is_closed

    def poll_session(self) -> Session:
        """Return the session after handling all readable descriptors. Call with the lock held."""
        if not self._is_closed and self.leadership.leader is None:
            self.session.turn(self.descriptors.sleep(0))
            self.leadership.ensure_progress()
        return self.session

    def wait(self, pending: Pending[Any], timeout: SupportsFloat | None) -> bool:
        """Sleep until `pending` is done. Returns False if `timeout` seconds passed first. Call without the
        lock."""
        if not pending.is_done:
            deadline = None if timeout is None else self.now_s() + float(timeout)
            self.require_open()
            with self.lock:
                try:
                    self.leadership.wait(pending, deadline)
                except BaseException as e:
                    self.mark_interrupted(e)
                    raise
        self.callbacks.run()
        return pending.is_done

    def wait_locked(self, pending: Pending[Any], deadline: float | None) -> bool:
        """Wait as `wait` does, with the lock held. `deadline` is a time of `now_s`."""
        self.leadership.wait(pending, deadline)
        return pending.is_done

    def wait_all(self, pendings: Iterable[Pending[Any]], timeout: SupportsFloat) -> bool:
        """Wait for several Pendings, `timeout` seconds in total. Returns False if one is not done by then."""
        deadline = self.now_s() + float(timeout)
        left = [pending for pending in pendings if not self.wait(pending, max(0.0, deadline - self.now_s()))]
        return not left

    def run(self, steps: Steps[T]) -> T:
        """Run an operation in this thread. Its own code runs without the lock.

        For operations over a LockedConnection. Use `ask` for operations over the session.
        """
        self.require_open()
        try:
            waits_for = next(steps)
            while True:
                if not waits_for.is_done or self.callbacks.are_due:
                    self.wait(waits_for, None)
                try:
                    value = waits_for.result()
                except Exception as e:  # noqa: BLE001  the operation decides what its steps' errors mean
                    waits_for = steps.throw(e)
                else:
                    waits_for = steps.send(value)
        except StopIteration as end:
            result: T = end.value
            return result

    def run_then(self, steps: Steps[T], then: Callable[[T | None, BaseException | None], None]) -> T:
        """Run an operation as `run` does, and pass its result or error to `then`, with the lock held."""
        try:
            result = self.run(steps)
        except BaseException as e:
            with self.lock:
                then(None, e)
            raise
        with self.lock:
            try:
                then(result, None)
                self.leadership.ensure_progress()
            except BaseException as e:
                self.mark_interrupted(e)
                raise
        self.callbacks.run()
        return result

    def begin(self, make: Callable[[], Steps[T]]) -> T:
        """Run an operation now; `finish` returns its result. (The asyncio shell runs it in `finish`.)"""
        return self.run(make())

    def finish(self, begun: T) -> T:
        """Return the result of `begin`."""
        return begun

    def pause(self, seconds: float) -> None:
        """Sleep for `seconds`. Other threads are served meanwhile."""
        with self.checked_lock, self.guarded_session as session:
            pause = session.pause(seconds)
        self.wait(pause, None)

    def wait_for_news(self, subscription: ClientSubscription, timeout: float | None) -> bool:
        """Wait until the subscription has work. Returns False after `timeout` seconds, or at once if
        `timeout` is 0."""
        if timeout == 0:
            return False
        with self.checked_lock, self.guarded_session as session:
            news = session.delivery.wait_for_work(subscription)
        return self.wait(news, timeout)

    def close_subscription(self, subscription: ClientSubscription) -> None:
        """End a subscription."""
        if not self.is_over:
            with self.checked_lock, self.guarded_session as session:
                session.delivery.close_subscription(subscription)

    def end_left_loops(self) -> None:
        """Do nothing: a loop that the program has left has ended. (The asyncio shell waits for it.)"""

    def wait_claims_cancelled(self, timeout: float) -> None:
        """Wait until cancelled claims are undone, at most `timeout` seconds in total. Raises no
        RinglogError."""
        with suppress(RinglogError):
            with self.checked_lock, self.guarded_session as session:
                undoing = list(session.cancelling_claims)
            self.wait_all(undoing, timeout)

    def ask(self, begin: Callable[[Session], Pending[T]]) -> T:
        """Start an operation with the lock held and wait for its result."""
        self.require_open()
        with self.lock:
            try:
                pending = begin(self.session)
                self.leadership.wait(pending, None)
                self.leadership.ensure_progress()
            except BaseException as e:
                self.mark_interrupted(e)
                raise
        self.callbacks.run()
        return pending.result()

    def request_jobs(self, message: Any, extra_ms: int) -> Pending[PeerReply]:
        """Send a request about jobs and wait for its reply. The returned Pending is done.

        For operations that `run` performs, which would wait for it at once.
        """
        self.require_open()
        with self.lock:
            try:
                pending = self.session.request_jobs(message, extra_ms=extra_ms, is_awaited=True)
                self.leadership.wait(pending, None)
            except BaseException as e:
                self.mark_interrupted(e)
                raise
        return pending

    def when_done(self, pending: Pending[Any], call: Callable[[], None]) -> None:
        """Call a function of the program without the lock once `pending` is done, in the thread that serves
        the result."""
        with self.lock:
            pending.when_done(lambda _: self.callbacks.add(call))
        self.callbacks.run()

    def not_settled_error(self, topic: str, timeout: float | None) -> RequestTimeout:
        """Return the error of a ticket that is still open after its timeout."""
        return RequestTimeout(
            "the records are not settled yet", outcome="unknown", topic=topic, timeout_s=timeout
        )

    # -- sleeping without the lock --------------------------------------------------------------------

    def unlocked(self, call: Callable[[], T]) -> T:
        """Call a function without the lock, such as a sleep. An exception during the call does not mark the
        session as interrupted."""
        lock = self.lock
        try:
            try:
                lock.release()
                return call()
            except BaseException as e:
                self._error_while_asleep = e
                raise
            finally:
                self._retake(lock)
        except BaseException:
            self._retake(lock)  # Again, if an exception was raised just before the lock was taken.
            raise

    def _retake(self, lock: threading.RLock) -> None:
        """Take the lock after a sleep, despite any exception: the caller will release it."""
        hit: BaseException | None = None
        while not lock._is_owned():  # type: ignore[attr-defined]
            try:
                lock.acquire()
            except BaseException as e:  # noqa: BLE001  it is raised below, with the lock
                hit = e
        if hit is not None:
            self._error_while_asleep = hit
            raise hit

    def require_parent(self, lock: object) -> None:
        """Raise Interrupted in a forked child if the call slept during the fork.

        A fork copies green threads, and they wake up in both processes. The awaited result belongs to the
        parent.
        """
        if lock is not self.lock:
            raise Interrupted(
                "the process was forked during this call, which continues only in the parent",
                outcome="unknown", by="fork",
            )  # fmt: skip

    # -- closing ------------------------------------------------------------------------------------

    def close(self) -> None:
        """Close the session and end the daemon thread. Waiting threads return."""
        with self.lock:
            if self._is_closed:
                return
            self._is_closed = True
            self._end_session()
            self.leadership.wake_all()
            daemon = self.leadership.daemon.thread
            self.close_unused_descriptors()
        if daemon is not None and daemon is not threading.current_thread():
            daemon.join(5.0)
        self.callbacks.run()

    def _end_session(self) -> None:
        if not self.interrupted_by:
            self.session.close()
            return
        # Inconsistent state may block the close. A socket that was created and not yet registered blocks
        # libzmq until the traceback of the interrupt is freed. Therefore a separate thread closes the
        # session, and this one waits only for a limited time.
        ending = threading.Thread(
            target=self._close_interrupted_session, name="ringlog-client-end", daemon=True
        )
        ending.start()
        ending.join(INTERRUPTED_CLOSE_S)

    def _close_interrupted_session(self) -> None:
        try:
            self.session.close()
        except Exception as e:  # noqa: BLE001  no caller can receive the error
            log.debug("closing an interrupted session failed: %r", e)

    def close_unused_descriptors(self) -> None:
        """Close the descriptors after close, but never while a thread sleeps on them. Call with the lock
        held."""
        if self._is_closed and not self.leadership.sleepers:
            self.descriptors.close()

    def restart_in_child(self) -> Session:
        """Reset the shell after a fork. Returns the parent's session, which must be neither used nor
        freed."""
        parents = self.session
        self.descriptors.close_in_child()
        parents.links.close_after_fork()
        was_closed = self._is_closed
        self._begin()
        self._is_closed = was_closed
        return parents
