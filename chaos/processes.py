"""Processes of the harness: parts of a class beside the others, priorities, private memory, silence."""

from __future__ import annotations

import contextlib
import functools
import logging
import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path

from chaos.order import Account
from ringlog.envelope.messages import ProcessStatus
from ringlog.hardening import die_with_parent
from ringlog.supervision.tree import BACKGROUND

Collect = Callable[[Account], None]


def die_with(parent: int) -> None:
    """Ask to be killed when the parent ends; ends at once when that is past already."""
    if not die_with_parent(parent, signal.SIGKILL):
        os._exit(1)


def forked(work: Callable[[int], None]) -> tuple[int, int]:
    """Do `work(descriptor)` in a child that ends with us; its pid, and where what it wrote is read. It ends
    with status 1, and without a word, when the work raises."""
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
    """Do a part in a child; the returned call waits for it and adds what it did to an account."""

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
            account.found(finding.what, finding.case, finding.story)
        account.findings_more += theirs.findings_more

    return collect


def raise_priority(processes: Iterable[ProcessStatus]) -> None:
    """Raise every thread of those among these that work in the background; who is gone is passed over."""
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
    """Words before a command that put what it has below `path` in memory; none where that is not allowed."""
    return _words(path) if _is_allowed() else ()


def _words(path: str) -> tuple[str, ...]:
    return "unshare", "--mount", "--propagation", "private", "sh", "-c", _MOUNT, path


@contextmanager
def suppress_logging() -> Iterator[None]:
    """No log line of this process inside; afterwards as before, since tests call a class within theirs."""
    before = logging.root.manager.disable
    logging.disable(logging.CRITICAL)
    try:
        yield
    finally:
        logging.disable(before)
