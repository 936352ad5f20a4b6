"""`ringlog worker`: run a function for each job of a queue."""

from __future__ import annotations

import asyncio
import os
import signal
import sys
from typing import Annotated, Any, Literal

from cyclopts import Parameter

from ringlog import logs
from ringlog.cli.option_parsing import parse_bytes, parse_milliseconds, parse_timeout
from ringlog.cli.options import Options
from ringlog.cli.outcome import CliExit
from ringlog.clock import Clock
from ringlog.hardening import restore_sigchld
from ringlog.limits import SECOND_SIGNAL_S, WORKER_CLOSE_S
from ringlog.worker.options import WorkerOptions
from ringlog.worker.settlement import WorkerBackoff
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
    log_format: Literal["auto", "console", "json"] = "auto",
    options: Given,
) -> int:
    """Run a function for each job of a queue, in separate processes.

    Runs until it is stopped. Exit codes: 0 = stopped, 1 = stopped with unfinished jobs returned to the queue,
    2 = the function cannot be imported, 130 = stopped by a second signal.

    Parameters
    ----------
    target
        Function to call with the payload, as package.module:function.
    queue
        Queue name.
    concurrency
        Number of processes, each with one job at a time (default: one per CPU).
    payload
        Type of the function's argument: raw (bytes), text, json, or package.module:codec.
    time_limit
        Maximum run time of a job. After it, the job's process is killed and the job returns to the queue.
    stop_timeout
        Time for running jobs to finish after the first SIGTERM or Ctrl-C; a second signal ends them
        immediately.
    lease
        Lease duration (default: that of the queue). The worker extends leases; if it dies, its jobs return to
        the queue after this time.
    node
        Node name of this worker.
    backoff
        Delay before the retry of a failed job. It doubles after each further failure.
    backoff_max
        Maximum delay before a retry.
    max_jobs_per_process
        Replace a process after this many jobs; 0 = never.
    memory_limit
        Maximum address space of each process, such as 512MiB.
    until_empty
        Exit when no job is ready, instead of waiting.
    log_level
        Log level: debug, info, warning or error. Tracebacks of jobs are logged at debug.
    log_format
        Log format: json, console, or auto (console on a terminal).

    Examples
    --------
    ringlog worker shop.mail:deliver --queue emails --payload json --concurrency 8
    """
    wanted = WorkerOptions(
        target=target,
        queue=queue,
        concurrency=(os.cpu_count() or 1) if concurrency is None else concurrency,
        payload=payload,
        time_limit_s=None if time_limit is None else parse_timeout(time_limit, "--time-limit"),
        stop_timeout_s=parse_timeout(stop_timeout, "--stop-timeout"),
        lease_ms=None if lease is None else parse_milliseconds(lease, "--lease"),
        node=node,
        backoff=WorkerBackoff(
            parse_milliseconds(backoff, "--backoff"), parse_milliseconds(backoff_max, "--backoff-max")
        ),
        max_jobs_per_process=max_jobs_per_process,
        memory_bytes=0 if memory_limit is None else parse_bytes(memory_limit, "--memory-limit"),
        until_empty=until_empty,
    )
    return _run(wanted, log_level, log_format, options)


def _run(wanted: WorkerOptions, level: str, format: str, options: Options) -> int:
    logs.configure(level=level, format=format, file="", actor="worker")
    restore_sigchld()
    try:
        return asyncio.run(_work(wanted, level, format, options))
    except CannotImport as e:
        for trace in getattr(e, "__notes__", ()):
            print(trace, file=sys.stderr)
        raise


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
        await queue.stats()  # Check that the queue exists and is accessible before processes start.
        running = Worker(queue, wanted, setup, options.clock)
        signals = _obey_signals(running, options.clock)
        try:
            is_complete = await running.run()
        finally:
            # The engine may be away, and then the undoing of the last claim would take the client's timeout.
            await client.close(0 if len(signals) > 1 else WORKER_CLOSE_S)
    ended: dict[str, Any] = {
        event.replace(" ", "_"): count for event, count in sorted(running.job_counts.items())
    }
    options.printer().item({"queue": wanted.queue, "target": wanted.target, **ended})
    if len(signals) > 1:
        return CliExit.INTERRUPTED
    return CliExit.DONE if is_complete else CliExit.FAILED


def _obey_signals(running: Any, clock: Clock) -> list[signal.Signals]:
    """Handle SIGTERM, SIGINT and SIGHUP: the first one stops the worker, the second one ends it immediately.

    A signal within SECOND_SIGNAL_S seconds of the first one is ignored. Returns the list of counted signals,
    which grows.
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
            continue  # As under nohup: the end of the terminal must not stop the worker.
        loop.add_signal_handler(number, note, number)
    # The parent process may have blocked these signals, and children inherit the mask.
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGTERM, signal.SIGINT, signal.SIGHUP})
    return came
