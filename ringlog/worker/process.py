"""The worker's side of one of its processes: start it, give it jobs, watch it, kill it.

The process leads its own session and process group. A terminal's Ctrl-C does not reach it, and a kill also
ends the programs that a job started. The worker detects its end through a pidfd, because another process may
still have its socket open.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import socket
import subprocess
import sys
from asyncio import StreamReader, StreamWriter
from typing import Any

import msgspec

from ringlog.errors import FrameInvalid
from ringlog.limits import WORKER_EXIT_S
from ringlog.worker import wire
from ringlog.worker.job import CurrentJob
from ringlog.worker.process_exit import KillReason, ProcessExited
from ringlog.worker.target import CannotImport

_EXIT_DRAIN_S = 0.5
"""Time (s) to read the last message of a process that ended. A program of a job may keep the socket open."""
_MODULE = "ringlog.worker.child"


class WorkerProcess:
    """A process and the stream to it. Create it with `start`, on an event loop."""

    def __init__(
        self, process: subprocess.Popen[bytes], pidfd: int, reader: StreamReader, writer: StreamWriter
    ) -> None:
        self._process = process
        self._pidfd = pidfd
        self._reader, self._writer = reader, writer
        self._loop = asyncio.get_running_loop()
        self._ended: asyncio.Future[int] = self._loop.create_future()
        self._cause: KillReason | None = None
        self._has_announced_exit = False
        self.jobs: int = 0
        """Number of jobs that were given to the process."""
        self._loop.add_reader(pidfd, self._on_end)

    @classmethod
    async def start(cls, setup: wire.Setup) -> WorkerProcess:
        """Start a process. `setup.fd` and `setup.parent_pid` are set here. Raises OSError."""
        ours, theirs = socket.socketpair()
        with theirs:
            child_setup = msgspec.structs.replace(setup, fd=theirs.fileno(), parent_pid=os.getpid())
            try:
                process = subprocess.Popen(
                    [sys.executable, "-m", _MODULE, msgspec.json.encode(child_setup).decode()],
                    stdin=subprocess.DEVNULL, pass_fds=(theirs.fileno(),), start_new_session=True,
                )  # fmt: skip
            except BaseException:
                ours.close()
                raise
        try:
            pidfd = os.pidfd_open(process.pid)
            reader, writer = await asyncio.open_unix_connection(sock=ours)
        except BaseException:
            process.kill()
            process.wait()
            ours.close()
            raise
        return cls(process, pidfd, reader, writer)

    @property
    def pid(self) -> int:
        """Process id."""
        return self._process.pid

    @property
    def is_alive(self) -> bool:
        """Whether the process accepts a job. False if it ended, was killed, or announced its end."""
        return not (self._ended.done() or self._has_announced_exit or self._cause)

    def _on_end(self) -> None:
        self._loop.remove_reader(self._pidfd)
        os.close(self._pidfd)
        self._kill_group()  # Kill leftovers of a job. The group's number is not reused before wait().
        self._ended.set_result(self._process.wait())

    def _kill_group(self) -> None:
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self._process.pid, signal.SIGKILL)

    # -- messages -------------------------------------------------------------------------------------

    async def wait_ready(self) -> None:
        """Wait until the process has imported the function.

        Raises CannotImport with the reason, and ProcessExited if the process ends.
        """
        match await self._receive():
            case wire.Ready():
                return
            case wire.CannotStart(reason, trace):
                error = CannotImport(reason)
                if trace:
                    error.add_note(trace)
                raise error
            case other:
                raise FrameInvalid(
                    "unexpected message from a worker process that is starting", said=str(other)
                )

    async def run(self, job: CurrentJob, time_limit_s: float | None) -> wire.Outcome:
        """Run one job and return its outcome. Raises ProcessExited if the process ends before that."""
        self.jobs += 1
        self._writer.write(wire.encode_message(wire.RunJob(job)))
        limit = None
        if time_limit_s is not None:
            limit = self._loop.call_later(time_limit_s, self.kill, KillReason.TIME_LIMIT)
        try:
            message = await self._receive()
        finally:
            if limit is not None:
                limit.cancel()
        if not isinstance(message, wire.JobDone | wire.JobFailed | wire.JobRejected):
            raise FrameInvalid("unexpected message from a worker process that runs a job", said=str(message))
        self._has_announced_exit = isinstance(message, wire.JobFailed) and message.is_last
        return message

    async def _receive(self) -> wire.ProcessMessage:
        reading = asyncio.create_task(self._read())
        try:
            both: tuple[asyncio.Future[Any], ...] = (reading, self._ended)
            await asyncio.wait(both, return_when=asyncio.FIRST_COMPLETED)
            if not reading.done():
                await asyncio.wait((reading,), timeout=_EXIT_DRAIN_S)
            message = reading.result() if reading.done() else None
        finally:
            reading.cancel()
        if message is not None:
            return message
        # The stream has ended. The process is about to exit, or it can no longer be reached and is killed.
        await asyncio.wait((self._ended,), timeout=_EXIT_DRAIN_S)
        if not self._ended.done():
            self._kill_group()
        raise ProcessExited(await self._ended, self._cause)

    async def _read(self) -> wire.ProcessMessage | None:
        """Read the next message. Returns None at the end of the stream, or if the message is invalid."""
        try:
            head = await self._reader.readexactly(wire.HEAD_BYTES)
            return wire.decode_process_message(await self._reader.readexactly(wire.length_of(head)))
        except (asyncio.IncompleteReadError, OSError, FrameInvalid):
            return None

    # -- end ------------------------------------------------------------------------------------------

    def kill(self, cause: KillReason) -> None:
        """Kill the process and all programs that its job started."""
        if not self._ended.done():
            self._cause = self._cause or cause
            self._kill_group()

    async def close(self) -> int:
        """Close the stream, which ends the process. Kill it after WORKER_EXIT_S. Returns its exit status."""
        self._writer.close()
        with contextlib.suppress(OSError):
            await self._writer.wait_closed()
        await asyncio.wait((self._ended,), timeout=WORKER_EXIT_S)
        self.kill(KillReason.STOPPED)
        return await self._ended
