"""One process of a worker, as the worker sees it: started, given jobs, watched, killed, replaced.

It is the leader of a group of its own: a terminal's Ctrl-C does not reach it, and what a job started ends
with it when it is killed. Its end is seen through a pidfd, whoever else holds its socket.
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
"""What a process said just before it ended is read for so long; a job's child may hold the socket open."""
_MODULE = "ringlog.worker.child"


class WorkerProcess:
    """A process and the stream to it. Made by `start`, within a loop."""

    def __init__(
        self, process: subprocess.Popen[bytes], pidfd: int, reader: StreamReader, writer: StreamWriter
    ) -> None:
        self._process = process
        self._pidfd = pidfd
        self._reader, self._writer = reader, writer
        self._loop = asyncio.get_running_loop()
        self._ended: asyncio.Future[int] = self._loop.create_future()
        self._cause: KillReason | None = None
        self._is_ending = False
        self.jobs = 0
        """Jobs it was given."""
        self._loop.add_reader(pidfd, self._on_end)

    @classmethod
    async def start(cls, setup: wire.Setup) -> WorkerProcess:
        """Start one; `setup.fd` and `setup.parent_pid` are filled in here. Raises OSError."""
        ours, theirs = socket.socketpair()
        with theirs:
            told = msgspec.structs.replace(setup, fd=theirs.fileno(), parent_pid=os.getpid())
            try:
                process = subprocess.Popen(
                    [sys.executable, "-m", _MODULE, msgspec.json.encode(told).decode()],
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
        """Its process id."""
        return self._process.pid

    @property
    def is_alive(self) -> bool:
        """Can it be given a job? Not when it has ended, was killed, or said that it ends."""
        return not (self._ended.done() or self._is_ending or self._cause)

    def _on_end(self) -> None:
        self._loop.remove_reader(self._pidfd)
        os.close(self._pidfd)
        self._kill_group()  # What a job started and left; the number cannot be anybody else's before wait().
        self._ended.set_result(self._process.wait())

    def _kill_group(self) -> None:
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self._process.pid, signal.SIGKILL)

    # -- talking --------------------------------------------------------------------------------------

    async def wait_ready(self) -> None:
        """Wait until it has imported the function. Raises CannotImport with what it said, and Died."""
        match await self._receive():
            case wire.Ready():
                return
            case wire.CannotStart(reason, trace):
                error = CannotImport(reason)
                if trace:
                    error.add_note(trace)
                raise error
            case other:
                raise FrameInvalid("a process that is not ready says something else", said=str(other))

    async def run(self, job: CurrentJob, time_limit_s: float | None) -> wire.Outcome:
        """Have it work on a job. Raises Died when it ends before it has said what became of it."""
        self.jobs += 1
        self._writer.write(wire.encode_message(wire.RunJob(job)))
        limit = None
        if time_limit_s is not None:
            limit = self._loop.call_later(time_limit_s, self.kill, KillReason.TIME_LIMIT)
        try:
            said = await self._receive()
        finally:
            if limit is not None:
                limit.cancel()
        if not isinstance(said, wire.JobDone | wire.JobFailed | wire.JobRejected):
            raise FrameInvalid("a process at work says something else", said=str(said))
        self._is_ending = isinstance(said, wire.JobFailed) and said.is_last
        return said

    async def _receive(self) -> wire.ProcessMessage:
        reading = asyncio.create_task(self._read())
        try:
            both: tuple[asyncio.Future[Any], ...] = (reading, self._ended)
            await asyncio.wait(both, return_when=asyncio.FIRST_COMPLETED)
            if not reading.done():
                await asyncio.wait((reading,), timeout=_EXIT_DRAIN_S)
            said = reading.result() if reading.done() else None
        finally:
            reading.cancel()
        if said is not None:
            return said
        # The stream has ended, and so does the process, of itself or because nobody hears it any more.
        await asyncio.wait((self._ended,), timeout=_EXIT_DRAIN_S)
        if not self._ended.done():
            self._kill_group()
        raise ProcessExited(await self._ended, self._cause)

    async def _read(self) -> wire.ProcessMessage | None:
        """The next message; None when there is no more, or when it is not one of ours."""
        try:
            head = await self._reader.readexactly(wire.HEAD_BYTES)
            return wire.decode_process_message(await self._reader.readexactly(wire.length_of(head)))
        except (asyncio.IncompleteReadError, OSError, FrameInvalid):
            return None

    # -- the end --------------------------------------------------------------------------------------

    def kill(self, cause: KillReason) -> None:
        """End it now, with what its job started."""
        if not self._ended.done():
            self._cause = self._cause or cause
            self._kill_group()

    async def close(self) -> int:
        """Let it end in good order; kills it when it takes too long. Returns its exit status."""
        self._writer.close()
        with contextlib.suppress(OSError):
            await self._writer.wait_closed()
        await asyncio.wait((self._ended,), timeout=WORKER_EXIT_S)
        self.kill(KillReason.STOPPED)
        return await self._ended
