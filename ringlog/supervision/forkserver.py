"""The process that children are forked from, as its parent sees it.

To import what an actor needs takes a quarter of a second of processor time, ten times what the rest of its
start does, and after a crash clients wait for it. So one process (`ringlog.runtime.forkserver`) imports it
once and is forked for each child. It holds nothing of ours but the line that says it lives: no lock gets into
a child through it (RD-7).

Nothing depends on it: while there is none, because it died or is not ready, children are spawned as before. A
child that it forked is ours, not its (we adopt what it orphans), does nothing before we know it and told it
what to be, and ends when we never do: so no two lives of an actor come about, whoever dies when (RD-6).
"""

from __future__ import annotations

import logging
import os
import signal
import socket
import sys
from collections.abc import Mapping, Sequence

import msgspec

from ringlog import hardening
from ringlog.clock import Clock
from ringlog.envelope.boot import FORK_REQUEST_BYTES_MAX, PID_BYTES_MAX, ForkRequest
from ringlog.logs import log_event
from ringlog.runtime.forkserver import fork_forkserver
from ringlog.supervision.child_process import CHILD_OOM_SCORE, ChildProcess, source_checkout, spawn_process
from ringlog.supervision.restart import NS_PER_S

log = logging.getLogger("ringlog.supervision")

FORK_S = 2.0
"""A fork takes milliseconds. One that does not answer within this is given up, and its process with it."""
READY_S = 30.0
"""One that has not imported everything by then is given up."""
PAUSE_S, PAUSE_S_MAX = 1.0, 60.0
"""Until a dead one is replaced; twice as long each time, up to the second."""


class ForkServer:
    """At most one such process. The caller polls `fileno` and calls `look` once a turn."""

    def __init__(self, kinds: Sequence[str], *, environ: Mapping[str, str], clock: Clock) -> None:
        """For actors of these kinds, with this environment."""
        self._kinds, self._environ, self._clock = kinds, environ, clock
        self._liveness_fd, self._data_dir = -1, ""
        self._line: socket.socket | None = None
        self._child: ChildProcess | None = None
        self.is_ready = False
        self._pause_s = PAUSE_S
        self._ready_by_ns = 0
        self._start_at_ns: int | None = None
        hardening.become_subreaper()

    @property
    def is_starting(self) -> bool:
        """True while it imports."""
        return self._child is not None and not self.is_ready

    def fileno(self) -> int:
        """Descriptor that becomes readable when it is ready, or dead; -1: nothing to wait for."""
        return self._line.fileno() if self._line is not None else -1

    def pids(self) -> set[int]:
        """Its process, if there is one."""
        return set() if self._child is None else {self._child.pid}

    def fork_forkserver(self) -> None:
        """Make the first one, which imports while this process goes on. To be called before that has a lock
        or a thread, or opens anything; without it, `begin` spawns one."""
        self._ready_by_ns = self._clock.monotonic_ns() + round(READY_S * NS_PER_S)
        try:
            pid, self._line = fork_forkserver(self._kinds, self._environ, source_checkout())
        except OSError:
            return
        self._child = ChildProcess(pid)
        hardening.set_oom_score(pid, CHILD_OOM_SCORE)

    def start(self, data_dir: str, life_line: int) -> None:
        """The engine is about to start children: of this directory, born with this line."""
        self._data_dir, self._liveness_fd = data_dir, life_line
        if self._line is None:
            self._start()
        else:
            self._send_setup()

    def _send_setup(self) -> None:
        assert self._line is not None
        try:
            word = b"l" + os.fsencode(self._data_dir)
            socket.send_fds(self._line, [word], [self._liveness_fd], socket.MSG_DONTWAIT)
        except OSError as e:
            self._gone(str(e.strerror))

    def _start(self) -> None:
        self._start_at_ns = None
        self._ready_by_ns = self._clock.monotonic_ns() + round(READY_S * NS_PER_S)
        try:
            ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
            with theirs:
                self._line = ours
                number = theirs.fileno()
                command = [sys.executable, "-P", "-m", "actors", str(number), ",".join(self._kinds)]
                self._child = spawn_process(command, self._environ, self._liveness_fd, number)
            self._send_setup()
        except OSError as e:
            # No descriptor, no process or no memory: nothing that anybody depends on.
            self._gone(str(e.strerror))

    def poll(self) -> None:
        """See whether it became ready or died; start another one when that is due."""
        if self._line is not None:
            try:
                said = self._line.recv(1, socket.MSG_DONTWAIT)
            except BlockingIOError:
                if self.is_starting and self._clock.monotonic_ns() > self._ready_by_ns:
                    self._gone(f"not ready within {READY_S:g} s")
            except OSError as e:
                self._gone(str(e.strerror))
            else:
                if said:
                    self.is_ready, self._pause_s = True, PAUSE_S
                else:
                    self._gone("it ended")
        elif self._start_at_ns is not None and self._start_at_ns <= self._clock.monotonic_ns():
            self._start()

    def fork(self, order: ForkRequest) -> ChildProcess | None:
        """A new child that carries out this order; None: there is none, spawn it.

        Raises nothing: what goes wrong here is this process's end, not the child's.
        """
        if self._line is None or not self.is_ready:
            return None
        message = msgspec.msgpack.encode(order)
        if len(message) > FORK_REQUEST_BYTES_MAX:
            return None
        try:
            ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        except OSError:
            return None
        child = None
        try:
            with theirs:
                socket.send_fds(self._line, [b"f"], [theirs.fileno()], socket.MSG_DONTWAIT)
            ours.settimeout(FORK_S)
            pid = int(ours.recv(PID_BYTES_MAX))
            # It says so when its first parent is gone. From then on only we can give its number free.
            os.waitid(os.P_PID, pid, os.WEXITED | os.WNOHANG | os.WNOWAIT)
            child = ChildProcess(pid)
            ours.sendall(message)
        except (OSError, ValueError) as e:
            # Also no answer at all (TimeoutError), and the end of the line in place of one (ValueError).
            if child is not None:
                child.send_signal(signal.SIGKILL)
                child.reap()
            self._gone(f"no child: {e}")
            return None
        finally:
            ours.close()
        return child

    def stop(self) -> None:
        """End it for good: no child will be wanted any more. Idempotent."""
        self._end()
        self._start_at_ns = None

    def _gone(self, why: str) -> None:
        self._end()
        log_event(
            log, logging.WARNING, "no fork server, children are spawned", reason=why, retry_s=self._pause_s
        )
        self._start_at_ns = self._clock.monotonic_ns() + round(self._pause_s * NS_PER_S)
        self._pause_s = min(2 * self._pause_s, PAUSE_S_MAX)

    def _end(self) -> None:
        self.is_ready = False
        if self._line is not None:
            self._line.close()
            self._line = None
        if self._child is not None:
            self._child.send_signal(signal.SIGKILL)
            self._child.reap()
            self._child = None
