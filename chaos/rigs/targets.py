"""The processes of an engine as targets: found by its own status, hurt through pidfds only."""

from __future__ import annotations

import contextlib
import os
import select
import signal
from pathlib import Path

from ringlog.board.processes import KINDS
from ringlog.envelope.messages import EngineStatusReply, ProcessStatus
from ringlog.errors import RinglogError
from ringlog.supervision import control_client

ROLES = (*KINDS, "supervisor", "all")
"""What can be killed; `all` is the whole tree at once."""
DEATH_S = 20.0


class Target:
    """One process, held by a pidfd. Context manager."""

    def __init__(self, pid: int) -> None:
        """Raises ProcessLookupError when there is none."""
        self.pid = pid
        self._fd = os.pidfd_open(pid)

    def send(self, number: signal.Signals) -> bool:
        """False when it is dead already."""
        try:
            signal.pidfd_send_signal(self._fd, number)
        except ProcessLookupError:
            return False
        return True

    def wait_dead(self, timeout_s: float = DEATH_S) -> bool:
        """Wait for its death (a zombie is dead)."""
        poller = select.poll()
        poller.register(self._fd, select.POLLIN)
        return bool(poller.poll(timeout_s * 1000))

    def __enter__(self) -> Target:
        return self

    def __exit__(self, *_: object) -> None:
        os.close(self._fd)


def status(run_dir: str, timeout_s: float = 5.0) -> EngineStatusReply | None:
    """What the supervisor says; None while there is nobody to ask."""
    with contextlib.suppress(RinglogError, OSError):
        return control_client.fetch_status(run_dir, timeout_s)
    return None


def living(found: EngineStatusReply | None, kind: str = "") -> list[ProcessStatus]:
    """Actors of a kind, or all, that have a process now."""
    processes = found.processes if found is not None else []
    return [each for each in processes if each.pid and (not kind or each.kind == kind) and is_alive(each.pid)]


def facts_of(pid: int) -> tuple[str, int]:
    """Its state ("R", "T", "Z", …) and its parent's pid; empty and 0 for one that is gone."""
    try:
        state, parent, *_ = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return "", 0
    return state, int(parent)


def is_alive(pid: int) -> bool:
    """Whether it runs; a zombie does not."""
    return facts_of(pid)[0] not in {"", "Z", "X"}


def forkserver(supervisor: int) -> int:
    """The pid of the process that actors are forked from; 0 while there is none."""
    try:
        children = Path(f"/proc/{supervisor}/task/{supervisor}/children").read_text().split()
        for pid in map(int, children):
            if Path(f"/proc/{pid}/comm").read_text().strip() == "forkserver":
                return pid
    except OSError:
        pass  # Somebody ended while we looked.
    return 0


def hold_child(pid: int, supervisor: int) -> Target | None:
    """A handle of an actor; None when it is gone. The number was an actor's when it was told, and may be a
    stranger's by now: looked at again with the handle open, which keeps it from changing hands."""
    target = hold(pid)
    if target is not None and facts_of(pid)[1] != supervisor:
        target.__exit__()
        return None
    return target


def hold(pid: int) -> Target | None:
    """A handle of a process; None when it is gone."""
    try:
        return Target(pid)
    except ProcessLookupError:
        return None


def kill_child(pid: int, supervisor: int) -> bool:
    """SIGKILL an actor and wait for its death; False when it was gone already."""
    target = hold_child(pid, supervisor)
    if target is None:
        return False
    with target:
        return target.send(signal.SIGKILL) and target.wait_dead()
