"""In which thread a pass runs, and how much of the processor it may take.

A pass is background work: it runs when nobody else wants the processor, in a thread that lowers itself.
Where the processor is never free such a thread hardly moves, and the log would grow until the disk is full.
So when much log waits the pass takes its fair share instead, and whoever writes feels it. Every pass has a
thread of its own, since one that was lowered may not raise itself again.
"""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

from ringlog import hardening
from ringlog.limits import MIB

T = TypeVar("T")

BACKLOG_BYTES = 1_024 * MIB
"""With so much log of one shard waiting its pass does not stand back any more."""


def run_pass(work: Callable[[], T], waiting_bytes: int) -> T:
    """Run one pass and wait for it; raises what it raises. `waiting_bytes`: log that no snapshot covers."""
    lower = hardening.work_in_background if waiting_bytes < BACKLOG_BYTES else None
    with ThreadPoolExecutor(1, "pass", initializer=lower) as thread:
        return thread.submit(work).result()
