"""`ringlog checkpoint` and `ringlog scrub`: start a background task of the engine now."""

from __future__ import annotations

from collections.abc import Callable
from typing import Annotated, TypeVar

from cyclopts import Parameter

from ringlog.board.processes import socket_of
from ringlog.cli.options import Options
from ringlog.cli.outcome import CliExit
from ringlog.cli.output import Format
from ringlog.clock import Clock, SystemClock
from ringlog.envelope.engine_file import EngineInfo
from ringlog.envelope.messages import CheckpointMade, CheckpointNow, Message, ScrubNow, ScrubReport
from ringlog.errors import NotConnected, NotReady, UsageError
from ringlog.link.address import parse_url, read_engine_file
from ringlog.link.shard_requests import CONNECT_S, Requester, RequesterReply

Given = Annotated[Options, Parameter(parse=False)]
COMPACTOR, RECLAIMER = "compactor", "reclaimer"
START_S = 15.0
"""Timeout for a process that is starting: the engine may be ready before its background processes."""
SERVED_S = 2 * CONNECT_S
"""A request that took longer reached its process, or a shard behind it, which then exited."""
POLL_INTERVAL_S = 0.05
PASS_S = 600.0
"""Minimum timeout of a pass over all data, which takes longer than a normal request.

A longer --timeout applies.
"""

M = TypeVar("M", bound=Message)


def checkpoint(*, options: Given) -> None:
    """Compact the log into segments now and write a snapshot.

    Prints the paths of the files that form a consistent copy.

    Examples
    --------
    ringlog checkpoint
    """
    made = request_process(options, COMPACTOR, CheckpointNow(), CheckpointMade)
    options.printer().rows([{"file": path} for path in made.files])


def scrub(*, options: Given) -> int:
    """Verify all segments and snapshots of a running engine once, now.

    Exit code 6: damage found.

    Examples
    --------
    ringlog scrub
    """
    report = request_process(options, RECLAIMER, ScrubNow(), ScrubReport)
    printer = options.printer()
    if printer.format is Format.TABLE:
        for finding in report.findings:
            printer.caption(f"damage: {finding}")
        printer.item({"files": report.files, "bytes": report.bytes, "findings": len(report.findings)})
    else:
        printer.item({"files": report.files, "bytes": report.bytes, "findings": report.findings})
    return CliExit.DAMAGE if report.findings else CliExit.DONE


def local_engine(options: Options) -> EngineInfo:
    """Return the engine file of the local engine; raise NotConnected or UsageError."""
    address = parse_url(options.url)
    if not address.is_local:
        raise UsageError("this works on the engine's own host; give its run directory", url=options.url)
    info = read_engine_file(address.run_dir)
    if info is None:
        raise NotConnected("no engine is running there", run_dir=address.run_dir)
    return info


def request_process(options: Options, actor: str, request: Message, wanted: type[M]) -> M:
    """Send a request to one of the engine's processes through its own socket; raise as Requester.ask does."""
    shm_dir = local_engine(options).shm_dir
    return request_actor(shm_dir, actor, request, wanted, timeout_s=max(options.timeout_s, PASS_S))


def request_actor(
    shm_dir: str, actor: str, request: Message, wanted: type[M], *, timeout_s: float = PASS_S
) -> M:
    """Send a request, and retry while the process is starting or being replaced.

    The request must be idempotent.
    """
    clock = SystemClock()
    requester = Requester(actor, socket_of(shm_dir, actor), clock=clock)
    try:
        return ask_until_ready(requester.ask, request, wanted, timeout_s=timeout_s, clock=clock)
    finally:
        requester.close()


def ask_until_ready(
    ask: Callable[..., RequesterReply[M]],
    request: Message,
    wanted: type[M],
    *,
    timeout_s: float,
    clock: Clock,
) -> M:
    """Call `ask`, and repeat it after NotReady: for START_S, and in total for `timeout_s` seconds.

    A process that exits during a request leaves its successor the whole START_S. Raises as Requester.ask
    does.
    """
    end_ns = clock.monotonic_ns() + round(timeout_s * 1e9)
    start_ns = clock.monotonic_ns() + round(START_S * 1e9)
    while True:
        asked_ns = clock.monotonic_ns()
        try:
            return ask(request, wanted, timeout_s=(end_ns - asked_ns) / 1e9).message
        except NotReady:
            now_ns = clock.monotonic_ns()
            if now_ns - asked_ns >= SERVED_S * 1e9:
                start_ns = now_ns + round(START_S * 1e9)
            if now_ns + POLL_INTERVAL_S * 1e9 >= min(start_ns, end_ns):
                raise
            clock.sleep(POLL_INTERVAL_S)
