"""The processes of an engine as targets: found through its status, signalled only through pidfds."""

from __future__ import annotations

import contextlib
import os
import select
import signal
from pathlib import Path
from typing import NamedTuple

from ringlog.board.processes import KINDS
from ringlog.envelope.messages import EngineStatusReply, ProcessStatus
from ringlog.errors import RinglogError
from ringlog.supervision import control_client

ROLES = (*KINDS, "supervisor", "all")
"""Possible targets. `all` is the whole tree at once."""
DEATH_S = 20.0
_PF_EXITING = 0x4
"""Flag of a task that exits (include/linux/sched.h)."""


class Target:
    """One process, held by a pidfd. Context manager."""

    def __init__(self, pid: int) -> None:
        """Open a pidfd. Raises ProcessLookupError if the process does not exist."""
        self.pid = pid
        self._fd = os.pidfd_open(pid)

    def send(self, number: signal.Signals) -> bool:
        """Send a signal. Returns False if the process is dead."""
        try:
            signal.pidfd_send_signal(self._fd, number)
        except ProcessLookupError:
            return False
        return True

    def wait_dead(self, timeout_s: float = DEATH_S) -> bool:
        """Wait for the process to die. A zombie counts as dead. Returns False on timeout."""
        poller = select.poll()
        poller.register(self._fd, select.POLLIN)
        return bool(poller.poll(timeout_s * 1000))

    def __enter__(self) -> Target:
        return self

    def __exit__(self, *_: object) -> None:
        os.close(self._fd)


def status(run_dir: str, timeout_s: float = 5.0) -> EngineStatusReply | None:
    """Return the supervisor's status, or None if it does not answer."""
    with contextlib.suppress(RinglogError, OSError):
        return control_client.fetch_status(run_dir, timeout_s)
    return None


def living(found: EngineStatusReply | None, kind: str = "") -> list[ProcessStatus]:
    """Return the actors of a kind, or all, that have a live process."""
    processes = found.processes if found is not None else []
    return [each for each in processes if each.pid and (not kind or each.kind == kind) and is_alive(each.pid)]


class ProcessFacts(NamedTuple):
    """What the kernel says of a process."""

    state: str = ""
    """"R", "T", "Z" and so on; "" if it does not exist."""
    parent: int = 0
    is_exiting: bool = False
    """It runs no code of its program any more. The kernel may still need time, to delete its files say."""


def facts_of(pid: int) -> ProcessFacts:
    """Return the facts of a process, which may not exist."""
    try:
        words = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return ProcessFacts()
    return ProcessFacts(words[0], int(words[1]), bool(int(words[6]) & _PF_EXITING))


def is_alive(pid: int) -> bool:
    """Whether the process runs. One that exits does not, nor does a zombie."""
    found = facts_of(pid)
    return found.state not in {"", "Z", "X"} and not found.is_exiting


def forkserver(supervisor: int) -> int:
    """Return the pid of the forkserver; 0 if there is none."""
    with contextlib.suppress(OSError):  # A process exited during the scan.
        children = Path(f"/proc/{supervisor}/task/{supervisor}/children").read_text().split()
        for pid in map(int, children):
            if Path(f"/proc/{pid}/comm").read_text().strip() == "forkserver":
                return pid
    return 0


def hold_child(pid: int, supervisor: int) -> Target | None:
    """Return a handle of an actor, or None if it has exited.

    The pid may belong to another process by now. The parent is therefore checked again while the handle is
    open, which prevents reuse of the pid.
    """
    target = hold(pid)
    if target is not None and facts_of(pid).parent != supervisor:
        target.__exit__()
        return None
    return target


def hold(pid: int) -> Target | None:
    """Return a handle of a process, or None if it has exited."""
    try:
        return Target(pid)
    except ProcessLookupError:
        return None


def kill_child(pid: int, supervisor: int) -> bool:
    """SIGKILL an actor and wait for its death. Returns False if it had already exited."""
    target = hold_child(pid, supervisor)
    if target is None:
        return False
    with target:
        return target.send(signal.SIGKILL) and target.wait_dead()
