"""Let the engine's background processes run like any other: on a busy host they would get to nothing in the
time that a case has."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterable
from pathlib import Path

from ringlog.envelope.messages import ProcessStatus
from ringlog.supervision.tree import BACKGROUND


def hurry(processes: Iterable[ProcessStatus]) -> None:
    """Raise every thread of those among these that work in the background; who is gone is passed over."""
    for each in processes:
        if each.kind in BACKGROUND and each.pid:
            with contextlib.suppress(OSError):
                for thread in map(int, os.listdir(Path("/proc") / str(each.pid) / "task")):
                    os.sched_setscheduler(thread, os.SCHED_OTHER, os.sched_param(0))
                    os.setpriority(os.PRIO_PROCESS, thread, 0)
