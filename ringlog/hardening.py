"""What every process of ours asks of the kernel for itself: privileges, limits, parentage, name.

Thin wrappers of prctl(2), setrlimit(2) and /proc; nothing here decides anything.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import resource
import signal
from types import FrameType

from setproctitle import getproctitle, setproctitle

from ringlog.errors import StartRefused

UMASK = 0o077
OPEN_FILES_WANTED = 65_536
"""Rings, bells and log files of one process stay well below; raised only as far as the hard limit."""
BACKGROUND_NICE = 19
ORPHAN_LOOK_S = 0.5
"""How often a process that drains looks whether it still has a parent."""

_PR_SET_PDEATHSIG = 1
_PR_SET_DUMPABLE = 4
_PR_SET_NAME = 15
_PR_SET_CHILD_SUBREAPER = 36
_PR_SET_NO_NEW_PRIVS = 38
_COMM_BYTES_MAX = 15

_libc = ctypes.CDLL(None, use_errno=True)


def harden(*, may_profile: bool) -> None:
    """Drop what a daemon does not need (SEC-20, SEC-26); `may_profile` keeps ptrace by our own user."""
    os.umask(UMASK)
    _prctl(_PR_SET_NO_NEW_PRIVS, 1)
    _prctl(_PR_SET_DUMPABLE, 1 if may_profile else 0)
    # A core file would hold records and keys (SEC-29).
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = OPEN_FILES_WANTED if hard == resource.RLIM_INFINITY else min(OPEN_FILES_WANTED, hard)
    if soft != resource.RLIM_INFINITY and soft < wanted:
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))


def die_with_parent(parent_pid: int, number: signal.Signals = signal.SIGTERM) -> bool:
    """Ask for a signal when the parent dies; False when it is dead already (RD-7, PR-10)."""
    _prctl(_PR_SET_PDEATHSIG, int(number))
    # The parent may have died before the request: then nobody will ever send the signal.
    return os.getppid() == parent_pid


def open_files_allowed() -> int:
    """How many descriptors this process may have open."""
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return OPEN_FILES_WANTED if soft == resource.RLIM_INFINITY else soft


def restore_sigchld() -> None:
    """Have the kernel keep exit statuses of our children, which it does not where SIGCHLD is ignored. That is
    inherited: some launchers ignore it."""
    if signal.getsignal(signal.SIGCHLD) == signal.SIG_IGN:
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)


def become_subreaper() -> None:
    """Become the parent of what our children's children were, when those end."""
    _prctl(_PR_SET_CHILD_SUBREAPER, 1)


def exit_if_orphaned(parent_pid: int, after_s: float, status: int) -> None:
    """From `after_s` seconds from now on, end this process with `status` as soon as its parent is dead.

    For a process that was told to stop. Its parent would end it if that took too long; without one, what it
    waits for may be just as dead. Not decided now: a death is signalled before getppid() shows it.
    """

    def look(_number: int, _frame: FrameType | None) -> None:
        if os.getppid() != parent_pid:
            os._exit(status)

    signal.signal(signal.SIGALRM, look)
    signal.setitimer(signal.ITIMER_REAL, after_s, ORPHAN_LOOK_S)


def cancel_exit_if_orphaned() -> None:
    """Take back `exit_if_orphaned`: the process has done what it was told and ends by itself."""
    signal.setitimer(signal.ITIMER_REAL, 0.0)


def locate_process_title() -> None:
    """Find the room for what `ps` shows, of which it makes one word: to be called before the environment
    changes. The variables are kept elsewhere from then on."""
    getproctitle()


def _forget_environment() -> None:
    """Overwrite the variables that this process, or the one it was forked from, was started with: /proc shows
    them to whoever may look, whatever became of them."""
    with open("/proc/self/stat") as file:
        facts = file.read().rpartition(")")[2].split()
    start, end = int(facts[47]), int(facts[48])
    variables, at = ctypes.POINTER(ctypes.c_void_p).in_dll(_libc, "environ"), 0
    while variables and (place := variables[at]):
        if start <= place < end:
            return  # They are in use where they are.
        at += 1
    ctypes.memset(start, 0, end - start)


def set_process_title(name: str, directory: str = "") -> None:
    """Set the name that `top` shows, of which the kernel keeps 15 bytes, and, with a directory, what `ps`
    does: as much as what we were started with has room for. That, and our first environment, is not to be
    seen any more."""
    if directory:
        locate_process_title()
        _forget_environment()
        setproctitle(f"ringlog: {name} {directory}")
    _libc.prctl(_PR_SET_NAME, ctypes.c_char_p(name.encode()[:_COMM_BYTES_MAX]), 0, 0, 0)


def set_background_priority() -> None:
    """Let the calling thread, and what it starts, take the CPU when nobody else wants it.

    Whoever commits pushes it aside when he wakes up. There is no way back without rights.
    """
    os.setpriority(os.PRIO_PROCESS, 0, BACKGROUND_NICE)
    # Not refused to anybody, but by a sandbox that forbids the call; then niceness must do.
    with contextlib.suppress(OSError):
        os.sched_setscheduler(0, os.SCHED_IDLE, os.sched_param(0))


def set_oom_score(pid: int, score: int) -> None:
    """Tell the kernel whom to kill first when memory runs out; silently impossible without the right."""
    with contextlib.suppress(OSError), open(f"/proc/{pid}/oom_score_adj", "w") as file:
        file.write(str(score))


def boot_id() -> str:
    """The kernel's boot identity as 32 hex digits (D-19)."""
    with open("/proc/sys/kernel/random/boot_id") as file:
        return file.read().strip().replace("-", "")


def _prctl(option: int, value: int) -> None:
    if _libc.prctl(option, ctypes.c_ulong(value), 0, 0, 0) != 0:
        number = ctypes.get_errno()
        raise StartRefused("prctl failed", option=option, errno=number, reason=os.strerror(number))
