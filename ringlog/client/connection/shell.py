"""Shell: waiting for a synchronous client with many threads and without a thread in between.

One lock guards the session. A thread that waits becomes the *leader*. The leader sleeps on the session's
descriptors and serves received data for all threads, so a single append needs no thread switch. Other waiting
threads are *followers*. A follower sleeps until its own result exists or the leadership is free. If frames or
requests are open and no thread waits, a daemon thread leads. Lingering frames are then sent, and tickets
resolve without further calls. With nothing open, all threads sleep without a timeout.

Callbacks of the program (`Ticket.on_done`) run without the lock, in the thread that served the result.

The exception of a signal (KeyboardInterrupt) can be raised at any line of the main thread. During a sleep
this is harmless. Inside other work it may leave the session in an inconsistent state that loses or duplicates
records. The session is then never used again, and every call raises `Interrupted`.
"""

from __future__ import annotations

import logging
import threading
from array import array
from collections import deque
from collections.abc import Callable, Iterable
from contextlib import suppress
from typing import Any, NoReturn, SupportsFloat, TypeVar

from ringlog.client.connection.green_threads import are_green, patched_late_error
from ringlog.client.connection.session import Session
from ringlog.clock import Clock, SystemClock
from ringlog.descriptors import SOCKET_DESCRIPTORS, can_open_descriptors, descriptor_limit_message
from ringlog.errors import CalledInside, Interrupted, NotConnected, RequestTimeout, RinglogError, UsageError
from ringlog.link.delivery import ClientSubscription
from ringlog.link.futures import Pending, Steps
from ringlog.link.peer import FdSet, PeerReply
from ringlog.link.poll import READABLE, new_bell, new_poll
from ringlog.spin_wait import SPIN_REPLY_NS, SpinPolicy, spin_wait

T = TypeVar("T")
log = logging.getLogger("ringlog.client")
_EVENTS_PER_POLL = 64
BACKGROUND_POLL_S = 0.002
"""Longest delay, in seconds, until a ticket resolves for which no thread waits."""
BACKGROUND_IDLE_GRACE_S = 0.05
"""Time in seconds for which the daemon thread leaves open work to threads that lead repeatedly. If the daemon
slept in the epoll set beside such a thread, each event would wake both, and the thread would wait for the
daemon."""
BACKOFF_NS_MIN = 1_000_000
"""Shortest sleep of the daemon thread while another thread leads: the leader serves timers sooner."""
IDLE_GRACES_MAX = 5
"""Most graces in a row. The daemon thread then serves the session anyway, since a leader that spins for
settlements reads nothing else."""
INTERRUPTED_CLOSE_S = 1.0
"""Longest time in seconds that `close` waits for the sockets of an interrupted session."""
BACKOFFS_MAX = 8
CANCELLED: tuple[type[BaseException], ...] = ()
"""Exceptions of a call whose caller no longer waits. Empty: threads are not cancelled."""
UNKNOWN_OUTCOME: tuple[type[BaseException], ...] = (RinglogError, *CANCELLED)
"""Exceptions after which the caller does not know the result of its request."""
_AWAKE, _NEVER = 0, 1 << 63


def not_picklable_error() -> TypeError:
    """Return the error for pickling or copying a client or an object of a client."""
    return TypeError(
        "cannot pickle or copy a client or an object of a client: it belongs to its process. Call "
        "ringlog.connect() in the other process, such as in the initializer of a process pool"
    )


class Descriptors:
    """Descriptors of a session in an epoll set. Threads may sleep on the set while it changes."""

    def __init__(self) -> None:
        if not can_open_descriptors(SOCKET_DESCRIPTORS):
            raise NotConnected(descriptor_limit_message())
        self.epoll = new_poll()
        self._bell = new_bell()
        self._is_ours = True
        self._is_ending = False
        self.epoll.register(self._bell.fileno(), READABLE)

    def __reduce__(self) -> NoReturn:
        raise not_picklable_error()

    def watch(self, fd: int) -> None:
        """Wake up the sleeping thread when `fd` is readable."""
        if self._is_ours:
            self.epoll.register(fd, READABLE)

    def unwatch(self, fd: int) -> None:
        """Stop watching `fd`."""
        if self._is_ours:
            self.epoll.unregister(fd)

    def wake(self) -> None:
        """Wake up the sleeping thread, because an earlier deadline exists."""
        if self._is_ours:
            self._bell.ring()

    def sleep(self, seconds: float) -> list[int]:
        """Sleep until a descriptor is readable. Returns the readable descriptors, without this set's own
        bell."""
        ready = [fd for fd, _ in self.epoll.poll(seconds, _EVENTS_PER_POLL)]
        bell = self._bell.fileno()
        if bell in ready:
            ready.remove(bell)
            if not self._is_ending:
                self._bell.drain()
        return ready

    def wake_permanently(self) -> None:
        """Wake up every current and later sleeper: the bell is not drained any more."""
        self._is_ending = True
        self.wake()

    def close_in_child(self) -> None:
        """Close the copies of a forked child. The child must not change the epoll set itself, which the
        parent uses."""
        self._is_ours = False
        self.epoll.close()
        self._bell.close()

    def close(self) -> None:
        """Close the descriptors."""
        if self._is_ours:
            self._is_ours = False
            self.epoll.close()
            self._bell.close()


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
    """Locks, leads and waits for a synchronous client. A forked child calls `make_session` again."""

    def __init__(self, make_session: Callable[[FdSet], Session]) -> None:
        self._make_session = make_session
        self._clock: Clock = SystemClock()
        self._begin()

    def __reduce__(self) -> NoReturn:
        raise not_picklable_error()

    def now_s(self) -> float:
        """Return the monotonic time in seconds, on which deadlines are based."""
        return self._clock.monotonic_ns() / 1e9

    def _begin(self) -> None:
        self._get_ident: Callable[[], int] = threading.get_ident
        self.lock = threading.RLock()  # Never taken twice. An RLock reports whether this thread owns it.
        self.descriptors = Descriptors()
        self.session = self._make_session(self.descriptors)
        self._leader: object | None = None
        self._spin_policy = SpinPolicy()
        self._wakes_ns = 0  # Time at which the sleeping leader wakes up; 0 = it is awake.
        self._followers: dict[int, threading.Lock] = {}
        self._followed = memoryview(array("Q", [0]))
        """Counter of followers. Each follower has its own number. A spinning leader polls the counter to
        notice a new follower."""
        self._is_green = are_green()
        self._calls: deque[Callable[[], None]] = deque()
        self._background: threading.Thread | None = None
        self._background_wakes_ns = _AWAKE
        """Time at which the daemon thread wakes up at the latest. See `_wake_background`."""
        self._is_background_in_epoll = False
        self._leads = self._leads_seen = 0
        """Number of times that a thread started to lead, in total and at the daemon thread's last check."""
        self._backoff_count = 0
        """Number of checks in a row at which the daemon thread found the same leader."""
        self._idle_graces = 0
        """Number of times in a row that the daemon thread left open work to other leaders."""
        self._sleepers = 0
        self._background_wakeup = threading.Condition(self.lock)
        self._is_closed = False
        self.interrupted_by: str = ""
        """Name of the exception that interrupted the session; "" = none. See `mark_interrupted`."""
        self._error_while_asleep: BaseException | None = None

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
            self.ensure_progress()
        except BaseException as e:
            self.mark_interrupted(e)
            raise
        finally:
            if error is not None:
                self.mark_interrupted(error)
        if error is None and self._calls:
            self._unlocked(self.run_calls)

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
        for key in list(self._followers):
            self._release(key)
        self.descriptors.wake_permanently()
        self._background_wakeup.notify_all()

    def _interrupted_error(self, *, was_sent: bool) -> Interrupted:
        return Interrupted(
            "an exception interrupted the client inside a call, and the client is closed: create a new one",
            outcome="unknown" if was_sent else "not_applied",
            by=self.interrupted_by,
        )

    @property
    def _is_over(self) -> bool:
        return self._is_closed or bool(self.interrupted_by)

    @property
    def is_closed(self) -> bool:
        """True after `close`."""
        return self._is_closed

    @property
    def has_calls(self) -> bool:
        """True if callbacks of the program are due. See `run_calls`."""
        return bool(self._calls)

    def poll_session(self) -> Session:
        """Return the session after handling all readable descriptors. Call with the lock held."""
        if not self._is_closed and self._leader is None:
            self.session.turn(self.descriptors.sleep(0))
            self.ensure_progress()
        return self.session

    def wait(self, pending: Pending[Any], timeout: SupportsFloat | None) -> bool:
        """Sleep until `pending` is done. Returns False if `timeout` seconds passed first. Call without the
        lock."""
        if not pending.is_done:
            deadline = None if timeout is None else self.now_s() + float(timeout)
            self.require_open()
            with self.lock:
                try:
                    self._wait(pending, deadline)
                except BaseException as e:
                    self.mark_interrupted(e)
                    raise
        self.run_calls()
        return pending.is_done

    def wait_locked(self, pending: Pending[Any], deadline: float | None) -> bool:
        """Wait as `wait` does, with the lock held. `deadline` is a time of `now_s`."""
        self._wait(pending, deadline)
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
                if not waits_for.is_done or self._calls:
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
                self.ensure_progress()
            except BaseException as e:
                self.mark_interrupted(e)
                raise
        self.run_calls()
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
        if not self._is_over:
            with self.checked_lock, self.guarded_session as session:
                session.delivery.close_subscription(subscription)

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
                self._wait(pending, None)
                self.ensure_progress()
            except BaseException as e:
                self.mark_interrupted(e)
                raise
        self.run_calls()
        return pending.result()

    def request_jobs(self, message: Any, extra_ms: int) -> Pending[PeerReply]:
        """Send a request about jobs and wait for its reply. The returned Pending is done.

        For operations that `run` performs, which would wait for it at once.
        """
        self.require_open()
        with self.lock:
            try:
                pending = self.session.request_jobs(message, extra_ms=extra_ms, is_awaited=True)
                self._wait(pending, None)
            except BaseException as e:
                self.mark_interrupted(e)
                raise
        return pending

    def when_done(self, pending: Pending[Any], call: Callable[[], None]) -> None:
        """Call a function of the program without the lock once `pending` is done, in the thread that serves
        the result."""
        with self.lock:
            pending.when_done(lambda _: self._calls.append(call))
        self.run_calls()

    def not_settled_error(self, topic: str, timeout: float | None) -> RequestTimeout:
        """Return the error of a ticket that is still open after its timeout."""
        return RequestTimeout(
            "the records are not settled yet", outcome="unknown", topic=topic, timeout_s=timeout
        )

    def run_calls(self) -> None:
        """Call the callbacks that are due. Call without the lock."""
        while self._calls:
            try:
                call = self._calls.popleft()
            except IndexError:
                return  # Another thread took the last callback.
            try:
                call()
            except Exception:
                log.exception("a callback of the program failed")

    def ensure_progress(self) -> None:
        """Make sure that a thread serves open work in time. Call with the lock held."""
        if self.interrupted_by:
            return
        next_ns = self.session.timers.next_ns()
        if next_ns is None and not self._calls:
            return
        if self._leader is not None:
            if self._wakes_ns and next_ns is not None and next_ns < self._wakes_ns:
                self.descriptors.wake()
                self._wakes_ns = next_ns  # One wake-up is enough.
        elif self._followers:
            self._release_one()
        else:
            self._wake_background(next_ns)

    # -- leading ------------------------------------------------------------------------------------

    def _wait(self, pending: Pending[Any], deadline: float | None) -> None:
        while not pending.is_done:
            if deadline is not None and self.now_s() >= deadline:
                return
            self.require_usable()  # After close no thread settles the rest.
            leader = self._leader
            if leader is None or leader is self._background or leader is threading.current_thread():
                # A signal handler that interrupted the sleep of its own thread, the leader, leads in its
                # place.
                self._lead(pending, deadline)
            else:
                self._follow(pending, deadline)

    def _lead(self, pending: Pending[Any], deadline: float | None) -> None:
        """Serve all threads until the own result exists or the deadline passes."""
        me, before = threading.current_thread(), self._leader
        self._leader = me
        self._leads += 1
        begun_ns = self._clock.monotonic_ns()
        try:
            self._spin_wait(pending, begun_ns)
            if pending.is_done:
                self._fire_due()
            else:
                pending.start_timer()
            while not pending.is_done and not self._is_over:
                left = None if deadline is None else deadline - self.now_s()
                if left is not None and left <= 0:
                    return
                self._serve_once(left)
        finally:
            if self._leader is me:
                self._leader = me if before is me else None
            self.ensure_progress()

    def _fire_due(self) -> None:
        """Fire due timers. A thread that only spins for replies, again and again, would otherwise never do
        so."""
        next_ns = self.session.timers.next_ns()
        if next_ns is not None and next_ns <= self._clock.monotonic_ns() and not self._is_over:
            self.session.turn(())

    def _spin_wait(self, pending: Pending[Any], begun_ns: int) -> None:
        """Spin for the reply without the lock (ringlog/spin_wait.py), unless many requests are open."""
        links, followed = self.session.links, self._followed
        words, seen = links.spin_words()
        if self._is_green or not words or not self._spin_policy.should_spin(begun_ns):
            return
        until_ns, left_ns = begun_ns + SPIN_REPLY_NS, SPIN_REPLY_NS
        while words and left_ns > 0:
            # A new follower may wait for something that this thread must serve from the descriptors.
            words.append(followed)
            seen.append(followed[0])
            lock = self.lock
            self._unlocked(lambda: spin_wait(words, seen, left_ns))  # noqa: B023  called at once
            self._require_parent(lock)
            if self._is_over or self._leader is not threading.current_thread():
                return
            links.pump()
            if pending.is_done:
                return
            words, seen = links.spin_words()
            left_ns = until_ns - self._clock.monotonic_ns()

    def _unlocked(self, call: Callable[[], T]) -> T:
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

    def _serve_once(self, longest: float | None) -> None:
        """Sleep without the lock until an event occurs, at most `longest` seconds, and handle it."""
        session, descriptors = self.session, self.descriptors
        ready: list[int] = []
        is_background = self._leader is self._background
        # The daemon thread serves results for which no thread waits. It polls at intervals instead of waking
        # up at each settlement, since that would disturb a busy sender that handles settlements itself.
        if session.links.arm(for_settlements=not is_background):
            seconds = session.sleep_s()
            if is_background and session.links.frames_in_flight:
                seconds = min(seconds, BACKGROUND_POLL_S)
            if longest is not None and longest < seconds:
                seconds = longest
            if seconds > 0:
                me = self._leader
                self._wakes_ns = self._clock.monotonic_ns() + int(seconds * 1e9)
                if is_background:
                    self._background_wakes_ns = self._wakes_ns
                    self._is_background_in_epoll = True
                self._sleepers += 1
                lock = self.lock
                try:
                    ready = self._unlocked(lambda: descriptors.sleep(seconds))
                except BaseException:
                    self._require_parent(lock)
                    raise
                finally:
                    if lock is self.lock:
                        self._after_sleep(me, is_background=is_background)
                self._require_parent(lock)
                if self._leader is not me or self._is_over:
                    return  # A waiting thread took over the lead and handles what is readable.
            session.links.disarm()
        session.turn(ready)

    def _after_sleep(self, me: object, *, is_background: bool) -> None:
        """Update the state after a leader's sleep."""
        self._sleepers -= 1
        self._close_descriptors()
        if is_background:
            self._background_wakes_ns = _AWAKE
            self._is_background_in_epoll = False
        if self._leader is me:
            self._wakes_ns = 0

    def _require_parent(self, lock: object) -> None:
        """Raise Interrupted in a forked child if the call slept during the fork.

        A fork copies green threads, and they wake up in both processes. The awaited result belongs to the
        parent.
        """
        if lock is not self.lock:
            raise Interrupted(
                "the process was forked during this call, which continues only in the parent",
                outcome="unknown", by="fork",
            )  # fmt: skip

    def _follow(self, pending: Pending[Any], deadline: float | None) -> None:
        """Sleep until the own result exists or the leadership is free."""
        pending.start_timer()
        baton = threading.Lock()
        baton.acquire()
        key = self._followed[0] = self._followed[0] + 1
        self._followers[key] = baton
        pending.when_done(lambda _: self._release(key))
        lock = self.lock
        left_s = -1 if deadline is None else max(0.0, deadline - self.now_s())
        try:
            self._unlocked(lambda: baton.acquire(timeout=left_s))
        finally:
            self._followers.pop(key, None)
        self._require_parent(lock)

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

    def _release(self, key: int) -> None:
        baton = self._followers.pop(key, None)
        if baton is not None:
            baton.release()

    def _release_one(self) -> None:
        self._release(next(iter(self._followers)))

    # -- the daemon thread ----------------------------------------------------------------------------

    def _wake_background(self, next_ns: int | None) -> None:
        """Have the daemon thread serve open work when the next timer is due, or after BACKGROUND_POLL_S.

        While work is open, the daemon thread polls at that interval by itself. A thread that alternates
        between send and wait therefore does not wake it up each time, which would cost more than the thread's
        own work.
        """
        if self._is_over:
            return
        if self._background is None:
            background = threading.Thread(target=self._run_background, name="ringlog-client", daemon=True)
            background.start()
            self._background = background  # The new thread waits for the lock, so it sees this assignment.
        elif self._background_wakes_ns and (
            self._calls or next_ns is None or self._due_ns(next_ns) < self._background_wakes_ns
        ):
            if self._is_background_in_epoll:
                # It still sleeps since before another thread took the lead. One wake-up is enough.
                self.descriptors.wake()
                self._background_wakes_ns = _AWAKE
            else:
                self._background_wakeup.notify()

    def _run_background(self) -> None:
        me, lock = threading.current_thread(), self.lock
        with lock:
            while not self._is_over and self.lock is lock:
                if self._leader is None and self._is_needed():
                    self._leader = me
                    self._idle_graces = 0
                    try:
                        while self._still_leads(me):
                            self._serve_once(None)
                    except Interrupted:
                        if self.lock is lock:
                            raise
                    except Exception:
                        log.exception("serving the connection failed")
                        raise
                    finally:
                        if self._leader is me:
                            self._leader = None
                if self.lock is not lock:
                    break
                if self._calls:
                    self._unlocked(self.run_calls)
                elif not self._is_over and (self._leader is not None or not self._is_needed()):
                    # After close there is no further wake-up, so do not sleep then.
                    self._back_off()
        if self.lock is not lock:
            # A green thread in a forked child. It must not end: `threading` no longer knows it, and ending is
            # an error.
            threading.Event().wait()

    def _is_needed(self) -> bool:
        """Return True if work is open that no other thread is likely to serve."""
        if self._calls:
            return True
        next_ns = self.session.timers.next_ns()
        if next_ns is None:
            return False
        is_left = self._leads == self._leads_seen or self._idle_graces >= IDLE_GRACES_MAX
        return is_left or bool(self.session.links.frames_in_flight) or next_ns <= self._clock.monotonic_ns()

    def _due_ns(self, next_ns: int) -> int:
        """Return when the daemon thread must wake up at the latest. Readable descriptors wake it up by
        themselves."""
        if next_ns < self._background_wakes_ns:
            return next_ns
        if self._is_background_in_epoll and not self.session.links.frames_in_flight:
            return next_ns
        return min(next_ns, self._clock.monotonic_ns() + int(self._idle_grace_s * 1e9))

    @property
    def _idle_grace_s(self) -> float:
        """Time in seconds for which open work may be left to other threads."""
        return BACKGROUND_POLL_S if self.session.links.frames_in_flight else BACKGROUND_IDLE_GRACE_S

    def _back_off(self) -> None:
        """Sleep until notified, with a limit while another thread leads, since that thread may stop soon.

        The limit doubles each time that the leader is still the same. After BACKOFFS_MAX times there is
        no limit: a leader that stops notifies this thread.
        """
        if self._leads != self._leads_seen:
            self._leads_seen, self._backoff_count = self._leads, 0
        longest, now_ns = None, self._clock.monotonic_ns()
        next_ns = self.session.timers.next_ns()
        if next_ns is not None and self._backoff_count < BACKOFFS_MAX:
            # Not beyond the next timer: otherwise a thread that leads for a moment would have to wake up this
            # one each time.
            least_ns = 0 if self._leader is None else BACKOFF_NS_MIN
            longest = min(
                self._idle_grace_s * (1 << self._backoff_count), max(next_ns - now_ns, least_ns) / 1e9
            )
            self._backoff_count += 1
            self._idle_graces += 1
        self._background_wakes_ns = _NEVER if longest is None else now_ns + int(longest * 1e9)
        wakeup = self._background_wakeup
        try:
            wakeup.wait(longest)
        finally:
            if wakeup is self._background_wakeup:
                self._background_wakes_ns = _AWAKE

    def _still_leads(self, me: threading.Thread) -> bool:
        """Return True if the daemon thread still leads and work is open. False after close."""
        is_ours = self._leader is me and not self._is_over
        return is_ours and self.session.has_work and not self._calls

    # -- closing ------------------------------------------------------------------------------------

    def close(self) -> None:
        """Close the session and end the daemon thread. Waiting threads return."""
        with self.lock:
            if self._is_closed:
                return
            self._is_closed = True
            self._end_session()
            for key in list(self._followers):
                self._release(key)
            self.descriptors.wake_permanently()
            self._background_wakeup.notify_all()
            background = self._background
            self._close_descriptors()
        if background is not None and background is not threading.current_thread():
            background.join(5.0)
        self.run_calls()

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

    def _close_descriptors(self) -> None:
        """Close the descriptors after close, but never while a thread sleeps on them. Call with the lock
        held."""
        if self._is_closed and not self._sleepers:
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
