"""Processes of the harness: forked parts of a class, priorities, private tmpfs, suppressed logging."""

from __future__ import annotations

import contextlib
import functools
import logging
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path

from chaos.order import Account
from ringlog.drill.nursery import die_with
from ringlog.envelope.messages import ProcessStatus
from ringlog.supervision.tree import BACKGROUND

Collect = Callable[[Account], None]


def forked(work: Callable[[int], None]) -> tuple[int, int]:
    """Run `work(descriptor)` in a forked child that dies with this process.

    Returns the child's pid and a descriptor that reads what the child writes. If the work raises, the child
    exits with status 1 and prints nothing.
    """
    reading, writing = os.pipe()
    parent = os.getpid()
    pid = os.fork()
    if pid == 0:
        code = 1
        try:
            os.close(reading)
            die_with(parent)
            work(writing)
            code = 0
        finally:
            os._exit(code)
    os.close(writing)
    return pid, reading


def subprocess_task(work: Callable[[Account], None]) -> Collect:
    """Run a part of a class in a child process.

    The returned function waits for the child and adds its report to an account. It raises RuntimeError if the
    child fails.
    """

    def tell(writing: int) -> None:
        mine = Account()
        try:
            work(mine)
        except BaseException:
            sys.excepthook(*sys.exc_info())
            raise
        with open(writing, "wb") as out:
            out.write(mine.to_json())

    pid, reading = forked(tell)

    def collect(account: Account) -> None:
        with open(reading, "rb") as source:
            data = source.read()
        _, status = os.waitpid(pid, 0)
        if status:
            raise RuntimeError(f"a process of the class ended with wait status {status}")
        theirs = Account.from_json(data)
        account.counts.update(theirs.counts)
        account.faults.update(theirs.faults)
        account.figures.update(theirs.figures)
        for finding in theirs.findings:
            account.report_finding(finding.what, finding.case, finding.story)
        account.findings_more += theirs.findings_more

    return collect


def raise_priority(processes: Iterable[ProcessStatus]) -> None:
    """Set the background processes among `processes` to normal priority, with all threads.

    Exited processes are ignored.
    """
    for each in processes:
        if each.kind in BACKGROUND and each.pid:
            with contextlib.suppress(OSError):
                for thread in map(int, os.listdir(Path("/proc") / str(each.pid) / "task")):
                    os.sched_setscheduler(thread, os.SCHED_OTHER, os.sched_param(0))
                    os.setpriority(os.PRIO_PROCESS, thread, 0)


_MOUNT = 'mount -t tmpfs -o mode=1777 ringlog-chaos "$0" && exec "$@"'


@functools.cache
def _is_allowed() -> bool:
    with tempfile.TemporaryDirectory(prefix="ringlog-chaos-") as path:
        try:
            done = subprocess.run([*_words(path), "true"], capture_output=True, timeout=60, check=False)
        except (OSError, subprocess.TimeoutExpired):
            return False
    return done.returncode == 0


def private_tmpfs(path: str) -> tuple[str, ...]:
    """Return a command prefix that mounts a private tmpfs at `path`; empty if mounts are not allowed."""
    return _words(path) if _is_allowed() else ()


def _words(path: str) -> tuple[str, ...]:
    return "unshare", "--mount", "--propagation", "private", "sh", "-c", _MOUNT, path


@contextmanager
def suppress_logging() -> Iterator[None]:
    """Disable logging in this process within the block.

    The previous level is restored, because tests run classes within their own process.
    """
    before = logging.root.manager.disable
    logging.disable(logging.CRITICAL)
    try:
        yield
    finally:
        logging.disable(before)
