"""Shell: waiting for a synchronous client, with many threads and no thread in the way.

One lock guards the session. A thread that waits for something becomes the *leader*: it sleeps on the
session's descriptors itself and serves what comes in for everybody, so that a lone append costs no switch
between threads. Others that wait meanwhile are *followers*: they sleep until their own result is there
or the leadership is free. A daemon thread leads whenever something is open and nobody waits, so that
lingering frames go out and tickets resolve by themselves (CL-2, CL-3). With nothing open everybody
sleeps without a timeout.

Functions of the user (`Ticket.on_done`) are called without the lock, by whichever thread served the result.

A signal's exception (KeyboardInterrupt) may come at any line of the main thread. While we sleep it does no
harm. In the middle of our work it may leave anything half done, and what is half done would lose or double
records: then the session is not used again, and everybody who asks is told so (`Interrupted`).
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
"""How late a ticket may resolve that nobody waits for."""
BACKGROUND_IDLE_GRACE_S = 0.05
"""How long the daemon thread leaves everything else to threads that come back again and again. Were it in the
set beside one of them, each event would wake both, and the one that it is for would wait for the other."""
REST_NS_MIN = 1_000_000
"""While another thread leads, it sees to what is due sooner."""
IDLE_GRACES_MAX = 5
"""So often in a row; then it looks all the same: who looks on for settlements sees nothing else."""
INTERRUPTED_CLOSE_S = 1.0
"""The longest that `close` waits for the sockets of an interrupted session."""
RESTS_MAX = 8
CANCELLED: tuple[type[BaseException], ...] = ()
"""What a call raises because nobody waits for it any more: no thread is cancelled."""
NO_ANSWER: tuple[type[BaseException], ...] = (RinglogError, *CANCELLED)
"""What leaves a request without an answer for who asked."""
_AWAKE, _NEVER = 0, 1 << 63


def not_picklable_error() -> TypeError:
    """Why a client, and whatever it gave out, is not pickled or copied."""
    return TypeError(
        "cannot pickle or copy a client, nor what belongs to one: it is of its process alone. Call "
        "ringlog.connect() where it is needed, such as in the initializer of a process pool"
    )


class Descriptors:
    """The descriptors a session waits for, in an epoll set; threads may sleep on it while it changes."""

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
        """Wake the sleeper when `fd` is readable."""
        if self._is_ours:
            self.epoll.register(fd, READABLE)

    def unwatch(self, fd: int) -> None:
        """Stop that."""
        if self._is_ours:
            self.epoll.unregister(fd)

    def wake(self) -> None:
        """Wake the sleeper: there is an earlier time to wake up at."""
        if self._is_ours:
            self._bell.ring()

    def sleep(self, seconds: float) -> list[int]:
        """Wait for a descriptor; returns those that are readable, our own bell excepted."""
        ready = [fd for fd, _ in self.epoll.poll(seconds, _EVENTS_PER_POLL)]
        bell = self._bell.fileno()
        if bell in ready:
            ready.remove(bell)
            if not self._is_ending:
                self._bell.drain()
        return ready

    def wake_permanently(self) -> None:
        """Wake every sleeper, for good: the bell is not taken any more."""
        self._is_ending = True
        self.wake()

    def close_in_child(self) -> None:
        """In a forked child: close our copies. The set itself is the parent's, changes would be his."""
        self._is_ours = False
        self.epoll.close()
        self._bell.close()

    def close(self) -> None:
        """Give the descriptors back."""
        if self._is_ours:
            self._is_ours = False
            self.epoll.close()
            self._bell.close()


class GuardedSession:
    """The session, for who has the lock; then somebody looks after what was begun: see `Shell.entry`."""

    def __init__(self, shell: ThreadedShell) -> None:
        self._shell = shell

    def __enter__(self) -> Session:
        self._shell.require_usable()
        return self._shell.session

    def __exit__(self, _kind: object, error: BaseException | None, _traceback: object) -> None:
        self._shell.finish_guarded(error)


class ThreadedShell:
    """Locks, leads and waits. `make_session` is called anew in a forked child."""

    def __init__(self, make_session: Callable[[FdSet], Session]) -> None:
        self._make_session = make_session
        self._clock: Clock = SystemClock()
        self._begin()

    def __reduce__(self) -> NoReturn:
        raise not_picklable_error()

    def now_s(self) -> float:
        """Monotonic seconds: what deadlines are counted in."""
        return self._clock.monotonic_ns() / 1e9

    def _begin(self) -> None:
        self._get_ident: Callable[[], int] = threading.get_ident
        self.lock = threading.RLock()  # Never taken twice: it is one that knows whether it is ours.
        self.descriptors = Descriptors()
        self.session = self._make_session(self.descriptors)
        self._leader: object | None = None
        self._spin_policy = SpinPolicy()
        self._wakes_ns = 0  # When the sleeping leader will look at the time again; 0 = it is awake.
        self._followers: dict[int, threading.Lock] = {}
        self._followed = memoryview(array("Q", [0]))
        """Threads that ever followed: each has a number of its own, and a leader that looks on sees it."""
        self._is_green = are_green()
        self._calls: deque[Callable[[], None]] = deque()
        self._background: threading.Thread | None = None
        self._background_wakes_ns = _AWAKE
        """When the daemon thread will look by itself at the latest; see `_wake_background`."""
        self._is_background_in_epoll = False
        self._leads = self._leads_seen = 0
        """Times that a thread began to lead: ever, and when the daemon thread looked last."""
        self._backoff_count = 0
        """Times in a row that it looked and found the same thread still leading."""
        self._idle_graces = 0
        """Times in a row that it left what is open to threads that led meanwhile."""
        self._sleepers = 0
        self._background_turn = threading.Condition(self.lock)
        self._is_closed = False
        self.interrupted_by: str = ""
        """What hit the client in the middle of its work; see `mark_interrupted`."""
        self._error_while_asleep: BaseException | None = None

    # -- for everybody ------------------------------------------------------------------------------

    @property
    def checked_lock(self) -> threading.RLock:
        """The lock, for `with shell.entry, shell.work as session`. Raises as `require_open`.

        Two context managers, because a signal may hit between any two lines of a Python one: it would leave
        the lock taken by nobody. The lock's own is C.
        """
        self.require_open()
        return self.lock

    @property
    def guarded_session(self) -> GuardedSession:
        """The session, with the lock; see `entry`."""
        return GuardedSession(self)

    def require_open(self) -> None:
        """As `require_usable`, without the lock; raises CalledInside where this thread holds it already."""
        if self.lock._is_owned():  # type: ignore[attr-defined]
            raise CalledInside(
                "the client was used by a signal handler that interrupted it in the middle of its work"
            )
        self.require_usable()

    def require_usable(self) -> None:
        """Raise UsageError after close, Interrupted once our work was torn."""
        if self.interrupted_by:
            raise self._interrupted_error(was_sent=False)
        if self._is_closed:
            raise UsageError("the client is closed")
        if self.is_monkey_patched_late:
            raise patched_late_error()

    @property
    def is_monkey_patched_late(self) -> bool:
        """Threads are others than when our locks were made."""
        return threading.get_ident is not self._get_ident

    def finish_guarded(self, error: BaseException | None) -> None:
        """With the lock held, at the end of `work`, which raised this error or none."""
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
        """With the lock held, an exception leaves our work: if it is none of ours, and we did not sleep, that
        work is torn and nobody works with the session again."""
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
            log.exception("ending what was open when the client was interrupted")
        for key in list(self._followers):
            self._release(key)
        self.descriptors.wake_permanently()
        self._background_turn.notify_all()

    def _interrupted_error(self, *, was_sent: bool) -> Interrupted:
        return Interrupted(
            "the client was interrupted in the middle of its work and has ended; make a new one",
            outcome="unknown" if was_sent else "not_applied",
            by=self.interrupted_by,
        )

    @property
    def _is_over(self) -> bool:
        return self._is_closed or bool(self.interrupted_by)

    @property
    def is_closed(self) -> bool:
        """After close."""
        return self._is_closed

    @property
    def has_calls(self) -> bool:
        """Functions of the user are to be called; see `run_calls`."""
        return bool(self._calls)

    def poll_session(self) -> Session:
        """With the lock held: the session, after a look at all its descriptors."""
        if not self._is_closed and self._leader is None:
            self.session.turn(self.descriptors.sleep(0))
            self.ensure_progress()
        return self.session

    def wait(self, pending: Pending[Any], timeout: SupportsFloat | None) -> bool:
        """Sleep until it is done; False when the timeout, in seconds, ended first. Not with the lock held."""
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
        """As `wait`, for a caller that holds the lock; `deadline` is on `now_s`."""
        self._wait(pending, deadline)
        return pending.is_done

    def wait_all(self, pendings: Iterable[Pending[Any]], timeout: SupportsFloat) -> bool:
        """Wait for several, `timeout` seconds in all; False when that was not enough."""
        deadline = self.now_s() + float(timeout)
        left = [pending for pending in pendings if not self.wait(pending, max(0.0, deadline - self.now_s()))]
        return not left

    def run(self, steps: Steps[T]) -> T:
        """Run an operation in this thread: its own code without the lock, waiting in between.

        For operations over a LockedConnection; the session's own are for `ask`.
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
        """As `run`, and `then` is told the result or the error, with the lock held."""
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
        """Run an operation at once, for who takes its result later: see `finish`. (With asyncio it waits.)"""
        return self.run(make())

    def finish(self, begun: T) -> T:
        """What came of it."""
        return begun

    def pause(self, seconds: float) -> None:
        """Do nothing for a while; everybody else is served."""
        with self.checked_lock, self.guarded_session as session:
            pause = session.pause(seconds)
        self.wait(pause, None)

    def wait_for_news(self, subscription: ClientSubscription, timeout: float | None) -> bool:
        """Wait until it has some; False after `timeout` seconds without, at once where that is 0."""
        if timeout == 0:
            return False
        with self.checked_lock, self.guarded_session as session:
            news = session.delivery.wait_for_work(subscription)
        return self.wait(news, timeout)

    def close_subscription(self, subscription: ClientSubscription) -> None:
        """Nobody follows it any more."""
        if not self._is_over:
            with self.checked_lock, self.guarded_session as session:
                session.delivery.close_subscription(subscription)

    def wait_claims_cancelled(self, timeout: float) -> None:
        """Until claims that were called off are, or for so many seconds in all; never raises an error."""
        with suppress(RinglogError):
            with self.checked_lock, self.guarded_session as session:
                undoing = list(session.cancelling_claims)
            self.wait_all(undoing, timeout)

    def ask(self, begin: Callable[[Session], Pending[T]]) -> T:
        """Begin something with the lock held and wait for its result."""
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

    def about_jobs(self, message: Any, extra_ms: int) -> Pending[PeerReply]:
        """Send a request about jobs and wait for its answer: it is done when this returns. For operations
        that `run` performs, which would wait for it at once."""
        self.require_open()
        with self.lock:
            try:
                asked = self.session.about_jobs(message, extra_ms=extra_ms, is_awaited=True)
                self._wait(asked, None)
            except BaseException as e:
                self.mark_interrupted(e)
                raise
        return asked

    def when_done(self, pending: Pending[Any], call: Callable[[], None]) -> None:
        """Call a function of the user without the lock once this is done, in whichever thread learns it."""
        with self.lock:
            pending.when_done(lambda _: self._calls.append(call))
        self.run_calls()

    def not_settled_error(self, topic: str, timeout: float | None) -> RequestTimeout:
        """What a ticket raises whose fate is still open."""
        return RequestTimeout("not settled yet", outcome="unknown", topic=topic, timeout_s=timeout)

    def run_calls(self) -> None:
        """Call what `when_done` was given. Without the lock."""
        while self._calls:
            try:
                call = self._calls.popleft()
            except IndexError:
                return  # Another thread was faster.
            try:
                call()
            except Exception:
                log.exception("a callback of the program failed")

    def ensure_progress(self) -> None:
        """Make sure that somebody will serve what is open, in time. With the lock held."""
        if self.interrupted_by:
            return
        next_ns = self.session.timers.next_ns()
        if next_ns is None and not self._calls:
            return
        if self._leader is not None:
            if self._wakes_ns and next_ns is not None and next_ns < self._wakes_ns:
                self.descriptors.wake()
                self._wakes_ns = next_ns  # Kicked once is enough: it looks by then.
        elif self._followers:
            self._release_one()
        else:
            self._wake_background(next_ns)

    # -- leading ------------------------------------------------------------------------------------

    def _wait(self, pending: Pending[Any], deadline: float | None) -> None:
        while not pending.is_done:
            if deadline is not None and self.now_s() >= deadline:
                return
            self.require_usable()  # What close did not settle, nobody will.
            leader = self._leader
            if leader is None or leader is self._background or leader is threading.current_thread():
                # We lead already where a signal handler interrupted our sleep: it does so in our place.
                self._lead(pending, deadline)
            else:
                self._follow(pending, deadline)

    def _lead(self, pending: Pending[Any], deadline: float | None) -> None:
        """Serve everybody until our own result is there or our time is up."""
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
        """Who looks on for answers alone, again and again, sees to what is due meanwhile."""
        next_ns = self.session.timers.next_ns()
        if next_ns is not None and next_ns <= self._clock.monotonic_ns() and not self._is_over:
            self.session.turn(())

    def _spin_wait(self, pending: Pending[Any], begun_ns: int) -> None:
        """Look for the answer without the lock (ringlog/spin_wait.py); not where more than a few are on their
        way."""
        links, followed = self.session.links, self._followed
        words, seen = links.spin_words()
        if self._is_green or not words or not self._spin_policy.should_spin(begun_ns):
            return
        until_ns, left_ns = begun_ns + SPIN_REPLY_NS, SPIN_REPLY_NS
        while words and left_ns > 0:
            # Who comes meanwhile may wait for something else.
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
        """Do something without the lock, such as sleep; what hits us meanwhile tears nothing."""
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
            self._retake(lock)  # Once more, if we were hit just before we had it.
            raise

    def _serve_once(self, longest: float | None) -> None:
        """Sleep without the lock until something happens, at most `longest` seconds, and serve it."""
        session, descriptors = self.session, self.descriptors
        ready: list[int] = []
        is_background = self._leader is self._background
        # The daemon thread serves results that nobody waits for: it looks now and then, so that a busy
        # sender, who takes settlements himself, is not disturbed at each of them.
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
                        self._woke(me, is_background=is_background)
                self._require_parent(lock)
                if self._leader is not me or self._is_over:
                    return  # A thread that waits took over: what is ready is ready for it as well.
            session.links.disarm()
        session.turn(ready)

    def _woke(self, me: object, *, is_background: bool) -> None:
        """A leader has slept."""
        self._sleepers -= 1
        self._close_descriptors()
        if is_background:
            self._background_wakes_ns = _AWAKE
            self._is_background_in_epoll = False
        if self._leader is me:
            self._wakes_ns = 0

    def _require_parent(self, lock: object) -> None:
        """Raise Interrupted if we slept through a fork: green threads are copied by it, and wake up in both
        processes. What they waited for is the parent's."""
        if lock is not self.lock:
            raise Interrupted(
                "the process was forked while this call waited; it goes on in the parent alone",
                outcome="unknown", by="fork",
            )  # fmt: skip

    def _follow(self, pending: Pending[Any], deadline: float | None) -> None:
        """Sleep until our result is there, or until we may lead."""
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
        """Take the lock after sleeping, whatever hits us meanwhile: who called us will give it back."""
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
        """Have the daemon thread look after what is open when the next thing is due, or after
        BACKGROUND_POLL_S.

        While something is open it looks that often by itself, so that who sends and waits in turn does not
        wake it each time, which would cost more than his own work.
        """
        if self._is_over:
            return
        if self._background is None:
            background = threading.Thread(target=self._run_background, name="ringlog-client", daemon=True)
            background.start()
            self._background = background  # It waits for the lock, so it finds itself here.
        elif self._background_wakes_ns and (
            self._calls or next_ns is None or self._due_ns(next_ns) < self._background_wakes_ns
        ):
            if self._is_background_in_epoll:
                # It still sleeps from before a thread took the lead from it. Kicked once is enough.
                self.descriptors.wake()
                self._background_wakes_ns = _AWAKE
            else:
                self._background_turn.notify()

    def _run_background(self) -> None:
        me, lock = threading.current_thread(), self.lock
        with lock:
            while not self._is_over and self.lock is lock:
                if self._leader is None and self._is_needed():
                    self._leader = me
                    self._idle_graces = 0
                    try:
                        while self._may_go_on(me):
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
                    # Closed while we served: the call to wake up for that has been made already.
                    self._back_off()
        if self.lock is not lock:
            # A green thread in a forked child. To end is an error there: threading has forgotten it.
            threading.Event().wait()

    def _is_needed(self) -> bool:
        """Is there something to lead for that no other thread is likely to see to?"""
        if self._calls:
            return True
        next_ns = self.session.timers.next_ns()
        if next_ns is None:
            return False
        is_left = self._leads == self._leads_seen or self._idle_graces >= IDLE_GRACES_MAX
        return is_left or bool(self.session.links.frames_in_flight) or next_ns <= self._clock.monotonic_ns()

    def _due_ns(self, next_ns: int) -> int:
        """When the daemon thread has to look at the latest. What comes by a descriptor wakes it by itself."""
        if next_ns < self._background_wakes_ns:
            return next_ns
        if self._is_background_in_epoll and not self.session.links.frames_in_flight:
            return next_ns
        return min(next_ns, self._clock.monotonic_ns() + int(self._idle_grace_s * 1e9))

    @property
    def _idle_grace_s(self) -> float:
        """How long what is open may be left to other threads."""
        return BACKGROUND_POLL_S if self.session.links.frames_in_flight else BACKGROUND_IDLE_GRACE_S

    def _back_off(self) -> None:
        """Wait until somebody says that there is work; not for long while another leads, who may go soon.

        Longer each time that it is still the same one, and in the end without a limit: who stops says so.
        """
        if self._leads != self._leads_seen:
            self._leads_seen, self._backoff_count = self._leads, 0
        longest, now_ns = None, self._clock.monotonic_ns()
        next_ns = self.session.timers.next_ns()
        if next_ns is not None and self._backoff_count < RESTS_MAX:
            # Not beyond what is due next, or whoever leads for a moment would have to wake us each time.
            least_ns = 0 if self._leader is None else REST_NS_MIN
            longest = min(
                self._idle_grace_s * (1 << self._backoff_count), max(next_ns - now_ns, least_ns) / 1e9
            )
            self._backoff_count += 1
            self._idle_graces += 1
        self._background_wakes_ns = _NEVER if longest is None else now_ns + int(longest * 1e9)
        turn = self._background_turn
        try:
            turn.wait(longest)
        finally:
            if turn is self._background_turn:
                self._background_wakes_ns = _AWAKE

    def _may_go_on(self, me: threading.Thread) -> bool:
        """Does the daemon thread still lead, and is there anything to lead for? After close there is not."""
        is_ours = self._leader is me and not self._is_over
        return is_ours and self.session.has_work and not self._calls

    # -- the end ------------------------------------------------------------------------------------

    def close(self) -> None:
        """End the session and the daemon thread; waiting threads come back."""
        with self.lock:
            if self._is_closed:
                return
            self._is_closed = True
            self._end_session()
            for key in list(self._followers):
                self._release(key)
            self.descriptors.wake_permanently()
            self._background_turn.notify_all()
            background = self._background
            self._close_descriptors()
        if background is not None and background is not threading.current_thread():
            background.join(5.0)
        self.run_calls()

    def _end_session(self) -> None:
        if not self.interrupted_by:
            self.session.close()
            return
        # What is half made may stop the end half way, and a socket that was made and not noted yet makes
        # libzmq wait for it. It lets go once the interrupt's traceback is gone, so nobody waits here for it.
        ending = threading.Thread(
            target=self._close_interrupted_session, name="ringlog-client-end", daemon=True
        )
        ending.start()
        ending.join(INTERRUPTED_CLOSE_S)

    def _close_interrupted_session(self) -> None:
        try:
            self.session.close()
        except Exception as e:  # noqa: BLE001  anything may be half done, and there is nobody to tell
            log.debug("ending an interrupted session: %r", e)

    def _close_descriptors(self) -> None:
        """With the lock held: after close, but never under a thread that sleeps on them."""
        if self._is_closed and not self._sleepers:
            self.descriptors.close()

    def restart_in_child(self) -> Session:
        """Begin anew after a fork; returns the parent's session, which must neither be used nor freed."""
        parents = self.session
        self.descriptors.close_in_child()
        parents.links.close_after_fork()
        was_closed = self._is_closed
        self._begin()
        self._is_closed = was_closed
        return parents
