"""Leadership: the threads of a client that wait, of which one serves the session for all.

A thread that waits becomes the *leader*. The leader sleeps on the session's descriptors and serves received
data for all threads, so a single append needs no thread switch. Other waiting threads are *followers*. A
follower sleeps until its own result exists or the leadership is free. If frames or requests are open and no
thread waits, a daemon thread leads (daemon_thread.py). With nothing open, all threads sleep without a
timeout.
"""

from __future__ import annotations

import threading
from array import array
from typing import TYPE_CHECKING, Any

from ringlog.client.connection.daemon_thread import BACKGROUND_POLL_S, DaemonThread
from ringlog.client.connection.green_threads import are_green
from ringlog.clock import Clock
from ringlog.link.futures import Pending
from ringlog.spin_wait import SPIN_REPLY_NS, SpinPolicy, spin_wait

if TYPE_CHECKING:
    from ringlog.client.connection.shell import ThreadedShell


class Leadership:
    """The leader and the followers of one shell. Everything here is used with the shell's lock held."""

    def __init__(self, shell: ThreadedShell, clock: Clock) -> None:
        self._shell, self._clock = shell, clock
        self.daemon: DaemonThread = DaemonThread(shell, self, clock)

    def begin(self) -> None:
        """Begin without threads, in a new shell or in a forked child."""
        self.leader: object | None = None
        self._spin_policy = SpinPolicy()
        self.wakes_ns: int = 0
        """Time at which the sleeping leader wakes up; 0 = it is awake."""
        self.followers: dict[int, threading.Lock] = {}
        self._followed = memoryview(array("Q", [0]))
        """Counter of followers. Each follower has its own number. A spinning leader polls the counter to
        notice a new follower."""
        self._is_green = are_green()
        self.leads: int = 0
        """Number of times that a thread started to lead."""
        self.sleepers: int = 0
        """Number of threads that sleep on the descriptors."""
        self.daemon.begin()

    def ensure_progress(self) -> None:
        """Make sure that a thread serves open work in time. Call with the lock held."""
        if self._shell.interrupted_by:
            return
        next_ns = self._shell.session.timers.next_ns()
        if next_ns is None and not self._shell.callbacks.are_due:
            return
        if self.leader is not None:
            if self.wakes_ns and next_ns is not None and next_ns < self.wakes_ns:
                self._shell.descriptors.wake()
                self.wakes_ns = next_ns  # One wake-up is enough.
        elif self.followers:
            self._release_one()
        else:
            self.daemon.wake(next_ns)

    def wait(self, pending: Pending[Any], deadline: float | None) -> None:
        """Sleep until `pending` is done or the deadline, a time of `now_s`, passes."""
        while not pending.is_done:
            if deadline is not None and self._shell.now_s() >= deadline:
                return
            self._shell.require_usable()  # After close no thread settles the rest.
            leader = self.leader
            if leader is None or leader is self.daemon.thread or leader is threading.current_thread():
                # A signal handler that interrupted the sleep of its own thread, the leader, leads in its
                # place.
                self._lead(pending, deadline)
            else:
                self._follow(pending, deadline)

    def _lead(self, pending: Pending[Any], deadline: float | None) -> None:
        """Serve all threads until the own result exists or the deadline passes."""
        me, before = threading.current_thread(), self.leader
        self.leader = me
        self.leads += 1
        begun_ns = self._clock.monotonic_ns()
        try:
            self._spin_wait(pending, begun_ns)
            if pending.is_done:
                self._fire_due()
            else:
                pending.start_timer()
            while not pending.is_done and not self._shell.is_over:
                left = None if deadline is None else deadline - self._shell.now_s()
                if left is not None and left <= 0:
                    return
                self.serve_once(left)
        finally:
            if self.leader is me:
                self.leader = me if before is me else None
            self.ensure_progress()

    def _fire_due(self) -> None:
        """Fire due timers. A thread that only spins for replies, again and again, would otherwise never do
        so."""
        next_ns = self._shell.session.timers.next_ns()
        if next_ns is not None and next_ns <= self._clock.monotonic_ns() and not self._shell.is_over:
            self._shell.session.turn(())

    def _spin_wait(self, pending: Pending[Any], begun_ns: int) -> None:
        """Spin for the reply without the lock (ringlog/spin_wait.py), unless many requests are open."""
        if self._is_green or not self._spin_policy.should_spin(begun_ns):
            return
        links, followed = self._shell.session.links, self._followed
        words, seen = links.spin_words()
        until_ns, left_ns = begun_ns + SPIN_REPLY_NS, SPIN_REPLY_NS
        while words and left_ns > 0:
            # A new follower may wait for something that this thread must serve from the descriptors.
            words.append(followed)
            seen.append(followed[0])
            lock = self._shell.lock
            self._shell.unlocked(lambda: spin_wait(words, seen, left_ns))  # noqa: B023  called at once
            self._shell.require_parent(lock)
            if self._shell.is_over or self.leader is not threading.current_thread():
                return
            links.pump()
            if pending.is_done:
                return
            words, seen = links.spin_words()
            left_ns = until_ns - self._clock.monotonic_ns()

    def serve_once(self, longest: float | None) -> None:
        """Sleep without the lock until an event occurs, at most `longest` seconds, and handle it."""
        session, descriptors = self._shell.session, self._shell.descriptors
        ready: list[int] = []
        is_background = self.leader is self.daemon.thread
        # The daemon thread serves results for which no thread waits. It polls at intervals instead of waking
        # up at each settlement, since that would disturb a busy sender that handles settlements itself.
        if session.links.arm(for_settlements=not is_background):
            seconds = session.sleep_s()
            if is_background and session.links.frames_in_flight:
                seconds = min(seconds, BACKGROUND_POLL_S)
            if longest is not None and longest < seconds:
                seconds = longest
            if seconds > 0:
                me = self.leader
                self.wakes_ns = self._clock.monotonic_ns() + int(seconds * 1e9)
                if is_background:
                    self.daemon.begin_sleep(self.wakes_ns)
                self.sleepers += 1
                lock = self._shell.lock
                try:
                    ready = self._shell.unlocked(lambda: descriptors.sleep(seconds))
                except BaseException:
                    self._shell.require_parent(lock)
                    raise
                finally:
                    if lock is self._shell.lock:
                        self._after_sleep(me, is_background=is_background)
                self._shell.require_parent(lock)
                if self.leader is not me or self._shell.is_over:
                    return  # A waiting thread took over the lead and handles what is readable.
            session.links.disarm()
        session.turn(ready)

    def _after_sleep(self, me: object, *, is_background: bool) -> None:
        """Update the state after a leader's sleep."""
        self.sleepers -= 1
        self._shell.close_unused_descriptors()
        if is_background:
            self.daemon.end_sleep()
        if self.leader is me:
            self.wakes_ns = 0

    def _follow(self, pending: Pending[Any], deadline: float | None) -> None:
        """Sleep until the own result exists or the leadership is free."""
        pending.start_timer()
        baton = threading.Lock()
        baton.acquire()
        key = self._followed[0] = self._followed[0] + 1
        self.followers[key] = baton
        pending.when_done(lambda _: self._release(key))
        lock = self._shell.lock
        left_s = -1 if deadline is None else max(0.0, deadline - self._shell.now_s())
        try:
            self._shell.unlocked(lambda: baton.acquire(timeout=left_s))
        finally:
            self.followers.pop(key, None)
        self._shell.require_parent(lock)

    def _release(self, key: int) -> None:
        baton = self.followers.pop(key, None)
        if baton is not None:
            baton.release()

    def _release_one(self) -> None:
        self._release(next(iter(self.followers)))

    def wake_all(self) -> None:
        """Wake up every current and later waiting thread: the session has ended."""
        for key in list(self.followers):
            self._release(key)
        self._shell.descriptors.wake_permanently()
        self.daemon.notify()
