"""DaemonThread: serves a session for whose open work no thread of the program waits.

Lingering frames are then sent, and tickets resolve without further calls.
"""

from __future__ import annotations

import logging
import threading
from typing import TYPE_CHECKING

from ringlog.clock import Clock
from ringlog.errors import Interrupted

if TYPE_CHECKING:
    from ringlog.client.connection.leadership import Leadership
    from ringlog.client.connection.shell import ThreadedShell

log: logging.Logger = logging.getLogger("ringlog.client")
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
BACKOFFS_MAX = 8
_AWAKE, _NEVER = 0, 1 << 63


class DaemonThread:
    """The thread that leads if no other one does, started at first need. Everything here is used with the
    shell's lock held."""

    def __init__(self, shell: ThreadedShell, leadership: Leadership, clock: Clock) -> None:
        self._shell, self._leadership, self._clock = shell, leadership, clock

    def begin(self) -> None:
        """Begin without a thread, in a new shell or in a forked child."""
        self.thread: threading.Thread | None = None
        self._wakes_ns = _AWAKE
        """Time at which the daemon thread wakes up at the latest. See `wake`."""
        self._is_in_epoll = False
        self._leads_seen = 0
        """Number of times that a thread started to lead, at the daemon thread's last check."""
        self._backoff_count = 0
        """Number of checks in a row at which the daemon thread found the same leader."""
        self._idle_graces = 0
        """Number of times in a row that the daemon thread left open work to other leaders."""
        self._wakeup = threading.Condition(self._shell.lock)

    def wake(self, next_ns: int | None) -> None:
        """Have the daemon thread serve open work when the next timer is due, or after BACKGROUND_POLL_S.

        While work is open, the daemon thread polls at that interval by itself. A thread that alternates
        between send and wait therefore does not wake it up each time, which would cost more than the thread's
        own work.
        """
        if self._shell.is_over:
            return
        if self.thread is None:
            background = threading.Thread(target=self._run, name="ringlog-client", daemon=True)
            background.start()
            self.thread = background  # The new thread waits for the lock, so it sees this assignment.
        elif self._wakes_ns and (
            self._shell.callbacks.are_due or next_ns is None or self._due_ns(next_ns) < self._wakes_ns
        ):
            if self._is_in_epoll:
                # It still sleeps since before another thread took the lead. One wake-up is enough.
                self._shell.descriptors.wake()
                self._wakes_ns = _AWAKE
            else:
                self._wakeup.notify()

    def _run(self) -> None:
        me, lock = threading.current_thread(), self._shell.lock
        with lock:
            while not self._shell.is_over and self._shell.lock is lock:
                if self._leadership.leader is None and self._is_needed():
                    self._leadership.leader = me
                    self._idle_graces = 0
                    try:
                        while self._still_leads(me):
                            self._leadership.serve_once(None)
                    except Interrupted:
                        if self._shell.lock is lock:
                            raise
                    except Exception:
                        log.exception("serving the connection failed")
                        raise
                    finally:
                        if self._leadership.leader is me:
                            self._leadership.leader = None
                if self._shell.lock is not lock:
                    break
                if self._shell.callbacks.are_due:
                    self._shell.unlocked(self._shell.callbacks.run)
                elif not self._shell.is_over and (
                    self._leadership.leader is not None or not self._is_needed()
                ):
                    # After close there is no further wake-up, so do not sleep then.
                    self._back_off()
        if self._shell.lock is not lock:
            # A green thread in a forked child. It must not end: `threading` no longer knows it, and ending is
            # an error.
            threading.Event().wait()

    def _is_needed(self) -> bool:
        """Return True if work is open that no other thread is likely to serve."""
        if self._shell.callbacks.are_due:
            return True
        next_ns = self._shell.session.timers.next_ns()
        if next_ns is None:
            return False
        is_left = self._leadership.leads == self._leads_seen or self._idle_graces >= IDLE_GRACES_MAX
        return (
            is_left
            or bool(self._shell.session.links.frames_in_flight)
            or next_ns <= self._clock.monotonic_ns()
        )

    def _due_ns(self, next_ns: int) -> int:
        """Return when the daemon thread must wake up at the latest. Readable descriptors wake it up by
        themselves."""
        if next_ns < self._wakes_ns:
            return next_ns
        if self._is_in_epoll and not self._shell.session.links.frames_in_flight:
            return next_ns
        return min(next_ns, self._clock.monotonic_ns() + int(self._idle_grace_s * 1e9))

    @property
    def _idle_grace_s(self) -> float:
        """Time in seconds for which open work may be left to other threads."""
        return BACKGROUND_POLL_S if self._shell.session.links.frames_in_flight else BACKGROUND_IDLE_GRACE_S

    def _back_off(self) -> None:
        """Sleep until notified, with a limit while another thread leads, since that thread may stop soon.

        The limit doubles each time that the leader is still the same. After BACKOFFS_MAX times there is
        no limit: a leader that stops notifies this thread.
        """
        if self._leadership.leads != self._leads_seen:
            self._leads_seen, self._backoff_count = self._leadership.leads, 0
        longest, now_ns = None, self._clock.monotonic_ns()
        next_ns = self._shell.session.timers.next_ns()
        if next_ns is not None and self._backoff_count < BACKOFFS_MAX:
            # Not beyond the next timer: otherwise a thread that leads for a moment would have to wake up this
            # one each time.
            least_ns, grace_s = 0, self._idle_grace_s
            if self._leadership.leader is not None:
                # It serves frames in flight too, and notifies this thread when it stops before they are done.
                least_ns, grace_s = BACKOFF_NS_MIN, BACKGROUND_IDLE_GRACE_S
            longest = min(grace_s * (1 << self._backoff_count), max(next_ns - now_ns, least_ns) / 1e9)
            self._backoff_count += 1
            self._idle_graces += 1
        self._wakes_ns = _NEVER if longest is None else now_ns + int(longest * 1e9)
        wakeup = self._wakeup
        try:
            wakeup.wait(longest)
        finally:
            if wakeup is self._wakeup:
                self._wakes_ns = _AWAKE

    def _still_leads(self, me: threading.Thread) -> bool:
        """Return True if the daemon thread still leads and work is open. False after close."""
        is_ours = self._leadership.leader is me and not self._shell.is_over
        return is_ours and self._shell.session.has_work and not self._shell.callbacks.are_due

    def begin_sleep(self, wakes_ns: int) -> None:
        """Note that the daemon thread, which leads, sleeps on the descriptors until `wakes_ns`."""
        self._wakes_ns, self._is_in_epoll = wakes_ns, True

    def end_sleep(self) -> None:
        """Note that the daemon thread woke up."""
        self._wakes_ns, self._is_in_epoll = _AWAKE, False

    def notify(self) -> None:
        """Wake up the daemon thread, unless it sleeps on the descriptors."""
        self._wakeup.notify_all()
