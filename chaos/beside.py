"""Processes of the harness: a part of a class done beside the others; none outlives who started it."""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Callable

from chaos.order import Account
from ringlog.hardening import die_with_parent

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


def beside(work: Callable[[Account], None]) -> Collect:
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
