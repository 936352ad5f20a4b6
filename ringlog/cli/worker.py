"""`ringlog worker`: run a function for each job of a queue."""

from __future__ import annotations

import asyncio
import os
import signal
import sys
from typing import Annotated, Any

from cyclopts import Parameter

from ringlog import logs
from ringlog.cli.options import Options
from ringlog.cli.outcome import Exit
from ringlog.cli.places import parse_milliseconds, parse_timeout
from ringlog.clock import Clock
from ringlog.config import parse_size
from ringlog.errors import UsageError
from ringlog.hardening import expect_children
from ringlog.limits import SECOND_SIGNAL_S
from ringlog.worker.fate import Backoff
from ringlog.worker.options import WorkerOptions
from ringlog.worker.target import CannotImport

Given = Annotated[Options, Parameter(parse=False)]


def worker(
    target: str,
    *,
    queue: str,
    concurrency: Annotated[int | None, Parameter(name=["--concurrency", "-c"])] = None,
    payload: str = "raw",
    time_limit: str | None = None,
    stop_timeout: str = "25s",
    lease: str | None = None,
    node: str | None = None,
    backoff: str = "1s",
    backoff_max: str = "60s",
    max_jobs_per_process: int = 0,
    memory_limit: str | None = None,
    until_empty: Annotated[bool, Parameter(negative=())] = False,
    log_level: str = "info",
    log_format: str = "auto",
    options: Given,
) -> int:
    """Run a function for each job of a queue, in processes of their own, until told to stop.

    Exit codes: 0 stopped, 1 stopped and gave jobs back in the middle, 2 the function cannot be imported,
    130 a second signal.

    Parameters
    ----------
    target
        The function, as package.module:function; it is called with the payload.
    queue
        Whose jobs.
    concurrency
        Processes, each with one job at a time (default: one for each processor).
    payload
        What the function is called with: raw (bytes), text, json, or package.module:codec.
    time_limit
        A job that runs longer loses its process and is given back.
    stop_timeout
        How long jobs at work may go on after the first SIGTERM or Ctrl-C; the second ends them at once.
    lease
        How long the engine waits for a worker that is silent (default: as the queue says).
    node
        This worker's name.
    backoff
        How long a job rests after its first failure; twice as long after each further one.
    backoff_max
        The longest that becomes.
    max_jobs_per_process
        Replace a process that has done so many jobs; 0 = never.
    memory_limit
        Address space of each process, such as 512MiB; what asks for more fails.
    until_empty
        End when no job is ready, in place of waiting.
    log_level
        debug, info, warning or error; job's tracebacks are logged at debug.
    log_format
        json, console, or auto: console on a terminal.
    """
    wanted = WorkerOptions(
        target=target,
        queue=queue,
        concurrency=(os.cpu_count() or 1) if concurrency is None else concurrency,
        payload=payload,
        time_limit_s=None if time_limit is None else parse_timeout(time_limit),
        stop_timeout_s=parse_timeout(stop_timeout),
        lease_ms=None if lease is None else parse_milliseconds(lease),
        node=node,
        backoff=Backoff(parse_milliseconds(backoff), parse_milliseconds(backoff_max)),
        max_jobs_per_process=max_jobs_per_process,
        memory_bytes=0 if memory_limit is None else _size(memory_limit),
        until_empty=until_empty,
    )
    logs.configure(level=log_level, format=log_format, file="", actor="worker")
    expect_children()
    try:
        return asyncio.run(_work(wanted, log_level, log_format, options))
    except CannotImport as e:
        for trace in getattr(e, "__notes__", ()):
            print(trace, file=sys.stderr)
        raise


def _size(text: str) -> int:
    try:
        return parse_size(text)
    except ValueError as e:
        raise UsageError(str(e)) from None


async def _work(wanted: WorkerOptions, level: str, format: str, options: Options) -> int:
    from ringlog.aio import connect
    from ringlog.worker.pool import Worker
    from ringlog.worker.wire import Setup

    setup = Setup(
        fd=-1, parent_pid=0, target=wanted.target, payload=wanted.payload,
        memory_bytes=wanted.memory_bytes, log_level=level, log_format=format,
    )  # fmt: skip
    options.require_engine()
    timeout_ms = round(options.timeout_s * 1000)
    async with connect(
        options.url, key=options.key(), timeout_ms=timeout_ms, wait=options.timeout_s
    ) as client:
        queue = client.queue(wanted.queue, node=wanted.node)
        await queue.stats()  # There is one, and we may use it: said before anything is started.
        running = Worker(queue, wanted, setup, options.clock)
        signals = _obey_signals(running, options.clock)
        is_whole = await running.run()
    ended: dict[str, Any] = {event.replace(" ", "_"): count for event, count in sorted(running.ended.items())}
    options.printer().thing({"queue": wanted.queue, "target": wanted.target, **ended})
    if len(signals) > 1:
        return Exit.INTERRUPTED
    return Exit.DONE if is_whole else Exit.FAILED


def _obey_signals(running: Any, clock: Clock) -> list[signal.Signals]:
    """The first SIGTERM, SIGINT or SIGHUP is a wish to end, the second an order. What is returned grows with
    them.

    One that comes within SECOND_SIGNAL_S of the first is not a second one.
    """
    came: list[signal.Signals] = []
    orders_from_ns = 0

    def note(number: signal.Signals) -> None:
        nonlocal orders_from_ns
        now_ns = clock.monotonic_ns()
        if came and now_ns < orders_from_ns:
            return
        orders_from_ns = orders_from_ns or now_ns + round(SECOND_SIGNAL_S * 1e9)
        came.append(number)
        if len(came) == 1:
            running.stop()
        else:
            running.stop_now()

    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        if number == signal.SIGHUP and signal.getsignal(number) == signal.SIG_IGN:
            continue  # As under nohup: the terminal's end is not ours.
        loop.add_signal_handler(number, note, number)
    # Who started us may have blocked them, and a mask is inherited: they would never come.
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGTERM, signal.SIGINT, signal.SIGHUP})
    return came
