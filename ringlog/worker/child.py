"""One process of a worker: imports the function, then calls it for one job after another.

The process has no connection to the engine. If the function exits, crashes or hangs the process, the worker
detects it, returns the job and starts another process.
"""

from __future__ import annotations

import asyncio
import contextlib
import inspect
import logging
import os
import resource
import signal
import socket
import sys
import traceback
from collections.abc import Callable
from typing import Any

import msgspec

from ringlog import hardening, logs
from ringlog.clock import Clock, SystemClock
from ringlog.errors import RinglogError
from ringlog.payload import PayloadCodec
from ringlog.worker import wire
from ringlog.worker.job import CurrentJob, Reject, Retry, current_job_var
from ringlog.worker.target import load_codec, load_function, require_executed

ENDED_ORPHANED = 1
"""Exit status of a process whose worker had exited before the process started."""


class JobRunner:
    """Calls the function and converts the result or the error into a message to the worker."""

    def __init__(self, function: Callable[[Any], Any], codec: PayloadCodec[Any], clock: Clock) -> None:
        self._function = function
        self._codec = codec
        self._clock = clock

    def run(self, job: CurrentJob) -> wire.Outcome:
        """Run one job and return its outcome. Never raises."""
        begun_ns = self._clock.monotonic_ns()
        token = current_job_var.set(job)
        try:
            value = None if job.data is None else self._codec.decode(job.data)
        except MemoryError as e:  # The limit is the worker's. Another one may have a higher one.
            return wire.JobFailed(0.0, _words(e), _trace(), is_last=True)
        except Exception as e:  # noqa: BLE001  a codec of the program's may raise anything
            return wire.JobRejected(0.0, _words(e, "the payload cannot be decoded: "), _trace())
        else:
            return self._called(value, begun_ns)
        finally:
            current_job_var.reset(token)

    def _called(self, value: Any, begun_ns: int) -> wire.Outcome:
        try:
            result = self._function(value)
            if inspect.iscoroutine(result):
                result = asyncio.run(result)
            require_executed(result)
        except Reject as e:
            return wire.JobRejected(self._ms(begun_ns), wire.shortened(wire.text_of(e)))
        except Retry as e:
            return wire.JobFailed(self._ms(begun_ns), wire.shortened(wire.text_of(e)), delay_ms=e.delay_ms)
        except BaseException as e:  # noqa: BLE001  so may the function: also SystemExit, which is no success
            is_last = isinstance(e, MemoryError) or not isinstance(e, Exception)
            return wire.JobFailed(self._ms(begun_ns), _words(e), _trace(), is_last=is_last)
        return wire.JobDone(self._ms(begun_ns))

    def _ms(self, begun_ns: int) -> float:
        return round((self._clock.monotonic_ns() - begun_ns) / 1e6, 3)


def _words(error: BaseException, before: str = "") -> str:
    return wire.shortened(f"{before}{type(error).__name__}: {wire.text_of(error)}")


def _trace() -> str:
    return wire.shortened(traceback.format_exc())


def serve(stream: socket.socket, setup: wire.Setup, clock: Clock) -> None:
    """Import the function and the codec, then run jobs until the worker closes the stream."""
    try:
        runner = JobRunner(load_function(setup.target), load_codec(setup.payload), clock)
    except RinglogError as e:
        stream.sendall(wire.encode_message(wire.CannotStart(str(e))))
        return
    except BaseException as e:  # noqa: BLE001  a module may do anything when it is imported
        reason = _words(e, f"importing {setup.target!r} failed: ")
        stream.sendall(wire.encode_message(wire.CannotStart(reason, _trace())))
        return
    if not logging.getLogger().handlers:
        logs.configure(level=setup.log_level, format=setup.log_format, file="", actor="job")
    stream.sendall(wire.encode_message(wire.Ready()))
    pid = os.getpid()
    with stream.makefile("rb") as incoming:
        while head := incoming.read(wire.HEAD_BYTES):
            outcome = runner.run(wire.decode_run_job(incoming.read(wire.length_of(head))).job)
            # The job may have removed or closed it, or the disk may be full: its outcome is the same.
            with contextlib.suppress(AttributeError, OSError, ValueError):
                sys.stdout.flush()
            if os.getpid() != pid:
                os._exit(0)  # The job has forked, and this is its child. It must not send an outcome.
            stream.sendall(wire.encode_message(outcome))
            if isinstance(outcome, wire.JobFailed) and outcome.is_last:
                return


def _catch(_number: int, _frame: Any) -> None:
    """Do nothing: the worker decides when its processes end, so a signal must not interrupt jobs.

    Unlike an ignored signal, a handled one has its default action again in programs that a job starts.
    """


def main(arguments: list[str]) -> int:
    """Run `python -m ringlog.worker.child SETUP`, as a worker starts it. Returns the exit status."""
    setup = msgspec.json.decode(arguments[0], type=wire.Setup)
    if not hardening.die_with_parent(setup.parent_pid, signal.SIGKILL):
        return ENDED_ORPHANED
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        signal.signal(number, _catch)
    if setup.memory_bytes:
        resource.setrlimit(resource.RLIMIT_AS, (setup.memory_bytes, setup.memory_bytes))
    if os.getcwd() not in sys.path:
        sys.path.insert(0, os.getcwd())
    os.set_inheritable(setup.fd, False)
    with socket.socket(fileno=setup.fd) as stream:
        serve(stream, setup, SystemClock())
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
