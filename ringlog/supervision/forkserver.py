"""The supervisor's side of the fork server: the process that children are forked from.

An actor's imports take 0.25 s of CPU time, ten times the rest of its start. After a crash clients wait for
that. The fork server (`ringlog.runtime.forkserver`) therefore imports the modules once and is forked for each
child. It holds none of the supervisor's descriptors except the liveness lock, so a child inherits no other
lock through it.

The fork server is optional. While it is not ready or dead, the supervisor spawns children from their command
lines. A forked child is the supervisor's child: the supervisor is a subreaper and adopts it. The child does
nothing before the supervisor knows its pid and has sent the fork request. It exits if the request never
comes. One actor therefore never runs twice, whichever process dies (P5).
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

log: logging.Logger = logging.getLogger("ringlog.supervision")

FORK_S = 2.0
"""A fork takes milliseconds. After this time (s) without a reply the supervisor kills the fork server."""
READY_S = 30.0
"""Longest time (s) for the imports. After it the supervisor kills the fork server."""
PAUSE_S, PAUSE_S_MAX = 1.0, 60.0
"""Pause (s) before a dead fork server is replaced. It doubles with each failure, up to the second value."""


class ForkServer:
    """At most one fork server process. The caller polls `fileno` and calls `poll` once a pass of its loop."""

    def __init__(self, kinds: Sequence[str], *, environ: Mapping[str, str], clock: Clock) -> None:
        """`kinds` are the kinds of actors to import, `environ` is the environment of the fork server."""
        self._kinds, self._environ, self._clock = kinds, environ, clock
        self._liveness_fd, self._data_dir = -1, ""
        self._socket: socket.socket | None = None
        self._child: ChildProcess | None = None
        self.is_ready: bool = False
        self._pause_s = PAUSE_S
        self._ready_by_ns = 0
        self._start_at_ns: int | None = None
        hardening.become_subreaper()

    @property
    def is_starting(self) -> bool:
        """Whether the fork server exists and still imports modules."""
        return self._child is not None and not self.is_ready

    def fileno(self) -> int:
        """Return the descriptor that becomes readable when the fork server is ready or dies; -1 = none."""
        return self._socket.fileno() if self._socket is not None else -1

    def pids(self) -> set[int]:
        """Return the pid of the fork server, as a set; empty if there is none."""
        return set() if self._child is None else {self._child.pid}

    def fork_forkserver(self) -> None:
        """Fork the first fork server. It imports modules while this process continues.

        Call it before this process takes a lock, starts a thread or opens a file. If it fails or is not
        called, `start` spawns the fork server instead.
        """
        self._ready_by_ns = self._clock.monotonic_ns() + round(READY_S * NS_PER_S)
        try:
            pid, self._socket = fork_forkserver(self._kinds, self._environ, source_checkout())
        except OSError:
            return
        self._child = ChildProcess(pid)
        hardening.set_oom_score(pid, CHILD_OOM_SCORE)

    def start(self, data_dir: str, liveness_fd: int) -> None:
        """Send the setup to the fork server, or spawn one. Call it before the first child starts.

        `data_dir` is shown in the process title. `liveness_fd` is the descriptor of the liveness lock
        (run_dir.open_liveness_lock), which every forked child inherits.
        """
        self._data_dir, self._liveness_fd = data_dir, liveness_fd
        if self._socket is None:
            self._start()
        else:
            self._send_setup()

    def _send_setup(self) -> None:
        assert self._socket is not None
        try:
            word = b"l" + os.fsencode(self._data_dir)
            socket.send_fds(self._socket, [word], [self._liveness_fd], socket.MSG_DONTWAIT)
        except OSError as e:
            self._fail(str(e.strerror))

    def _start(self) -> None:
        self._start_at_ns = None
        self._ready_by_ns = self._clock.monotonic_ns() + round(READY_S * NS_PER_S)
        try:
            ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
            with theirs:
                self._socket = ours
                number = theirs.fileno()
                command = [sys.executable, "-P", "-m", "ringlog.actors", str(number), ",".join(self._kinds)]
                self._child = spawn_process(command, self._environ, self._liveness_fd, number)
            self._send_setup()
        except OSError as e:
            # No descriptor, process or memory. Children are spawned instead.
            self._fail(str(e.strerror))

    def poll(self) -> None:
        """Detect that the fork server became ready or died, and start the next one when it is due."""
        if self._socket is not None:
            try:
                message = self._socket.recv(1, socket.MSG_DONTWAIT)
            except BlockingIOError:
                if self.is_starting and self._clock.monotonic_ns() > self._ready_by_ns:
                    self._fail(f"not ready within {READY_S:g} s")
            except OSError as e:
                self._fail(str(e.strerror))
            else:
                if message:
                    self.is_ready, self._pause_s = True, PAUSE_S
                else:
                    self._fail("the fork server exited")
        elif self._start_at_ns is not None and self._start_at_ns <= self._clock.monotonic_ns():
            self._start()

    def fork(self, request: ForkRequest) -> ChildProcess | None:
        """Fork a child for this request.

        Returns None if the fork server cannot do it: the caller spawns the child instead. Never raises: an
        error here ends the fork server, not the child.
        """
        if self._socket is None or not self.is_ready:
            return None
        message = msgspec.msgpack.encode(request)
        if len(message) > FORK_REQUEST_BYTES_MAX:
            return None
        try:
            ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        except OSError:
            return None
        child = None
        try:
            with theirs:
                socket.send_fds(self._socket, [b"f"], [theirs.fileno()], socket.MSG_DONTWAIT)
            ours.settimeout(FORK_S)
            pid = int(ours.recv(PID_BYTES_MAX))
            # The child sends its pid after its first parent has exited. From then on only the supervisor
            # can reap it, so the pid cannot be reused before that.
            os.waitid(os.P_PID, pid, os.WEXITED | os.WNOHANG | os.WNOWAIT)
            child = ChildProcess(pid)
            ours.sendall(message)
        except (OSError, ValueError) as e:
            # TimeoutError: no reply at all. ValueError: the connection was closed before a pid arrived.
            if child is not None:
                child.send_signal(signal.SIGKILL)
                child.reap()
            self._fail(f"no child: {e}")
            return None
        finally:
            ours.close()
        return child

    def stop(self) -> None:
        """Stop the fork server for good. Idempotent."""
        self._end()
        self._start_at_ns = None

    def _fail(self, why: str) -> None:
        self._end()
        log_event(
            log,
            logging.WARNING,
            "fork server failed, children are spawned",
            reason=why,
            retry_s=self._pause_s,
        )
        self._start_at_ns = self._clock.monotonic_ns() + round(self._pause_s * NS_PER_S)
        self._pause_s = min(2 * self._pause_s, PAUSE_S_MAX)

    def _end(self) -> None:
        self.is_ready = False
        if self._socket is not None:
            self._socket.close()
            self._socket = None
        if self._child is not None:
            self._child.send_signal(signal.SIGKILL)
            self._child.reap()
            self._child = None
