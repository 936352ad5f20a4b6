"""Kernel settings that each process applies to itself: privileges, limits, parent-death signal, name.

Thin wrappers of prctl(2), setrlimit(2) and /proc without any decision logic.
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
"""Limit on open files that a process requests, up to the hard limit. Each process needs far fewer."""
BACKGROUND_NICE = 19
ORPHAN_LOOK_S = 0.5
"""Interval (s) at which a draining process checks that its parent is alive."""

_PR_SET_PDEATHSIG = 1
_PR_SET_DUMPABLE = 4
_PR_SET_NAME = 15
_PR_SET_CHILD_SUBREAPER = 36
_PR_SET_NO_NEW_PRIVS = 38
_COMM_BYTES_MAX = 15

_libc = ctypes.CDLL(None, use_errno=True)


def harden(*, may_profile: bool) -> None:
    """Drop privileges that a daemon does not need, disable core files, and raise the limit on open files.

    `may_profile` allows ptrace by the same user. Raises StartRefused.
    """
    os.umask(UMASK)
    _prctl(_PR_SET_NO_NEW_PRIVS, 1)
    _prctl(_PR_SET_DUMPABLE, 1 if may_profile else 0)
    # A core file would contain records and keys.
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = OPEN_FILES_WANTED if hard == resource.RLIM_INFINITY else min(OPEN_FILES_WANTED, hard)
    if soft != resource.RLIM_INFINITY and soft < wanted:
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))


def die_with_parent(parent_pid: int, number: signal.Signals = signal.SIGTERM) -> bool:
    """Request the signal `number` at the parent's death. Returns False if the parent is dead already."""
    _prctl(_PR_SET_PDEATHSIG, int(number))
    # If the parent died before the request, the kernel never sends the signal.
    return os.getppid() == parent_pid


def open_files_allowed() -> int:
    """Return the number of descriptors that this process may have open."""
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return OPEN_FILES_WANTED if soft == resource.RLIM_INFINITY else soft


def restore_sigchld() -> None:
    """Restore the default action of SIGCHLD if it is ignored. Some launchers ignore it, and it is inherited.

    While it is ignored, the kernel discards the exit statuses of children.
    """
    if signal.getsignal(signal.SIGCHLD) == signal.SIG_IGN:
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)


def become_subreaper() -> None:
    """Adopt descendants whose parent has exited, instead of leaving them to init."""
    _prctl(_PR_SET_CHILD_SUBREAPER, 1)


def exit_if_orphaned(parent_pid: int, after_s: float, status: int) -> None:
    """In `after_s` seconds, start to check twice a second for the parent, and exit with `status` without it.

    For a process that received a stop request. Its parent would kill it if the drain took too long. Without
    the parent, the processes that it waits for may be dead as well. The check is repeated because a
    parent-death signal may arrive before getppid() shows the new parent.
    """

    def look(_number: int, _frame: FrameType | None) -> None:
        if os.getppid() != parent_pid:
            os._exit(status)

    signal.signal(signal.SIGALRM, look)
    signal.setitimer(signal.ITIMER_REAL, after_s, ORPHAN_LOOK_S)


def cancel_exit_if_orphaned() -> None:
    """Cancel `exit_if_orphaned`: the process has finished its drain and exits by itself."""
    signal.setitimer(signal.ITIMER_REAL, 0.0)


def locate_process_title() -> None:
    """Let setproctitle find the memory that `ps` shows. Call it before the environment changes.

    setproctitle moves the environment variables elsewhere and uses their memory for the title.
    """
    getproctitle()


def _forget_environment() -> None:
    """Overwrite the initial environment of this process, or of the one it was forked from.

    /proc/PID/environ would otherwise show it, secrets included, even after variables were deleted.
    """
    with open("/proc/self/stat") as file:
        facts = file.read().rpartition(")")[2].split()
    start, end = int(facts[47]), int(facts[48])
    variables, at = ctypes.POINTER(ctypes.c_void_p).in_dll(_libc, "environ"), 0
    while variables and (place := variables[at]):
        if start <= place < end:
            return  # The variables still use this memory.
        at += 1
    ctypes.memset(start, 0, end - start)


def set_process_title(name: str, directory: str = "") -> None:
    """Set the name that `top` shows (15 bytes), and with a directory the title that `ps` shows.

    The title is cut to the memory of the initial command line and environment. Both are overwritten, so that
    `ps` and /proc no longer show them.
    """
    if directory:
        locate_process_title()
        _forget_environment()
        setproctitle(f"ringlog: {name} {directory}")
    _libc.prctl(_PR_SET_NAME, ctypes.c_char_p(name.encode()[:_COMM_BYTES_MAX]), 0, 0, 0)


def set_background_priority() -> None:
    """Let the calling thread and its future threads run only when no other thread wants the CPU.

    Threads that commit preempt it as soon as they wake up. An unprivileged process cannot undo this.
    """
    os.setpriority(os.PRIO_PROCESS, 0, BACKGROUND_NICE)
    # Always permitted, unless a sandbox forbids the call. Then the nice value must be enough.
    with contextlib.suppress(OSError):
        os.sched_setscheduler(0, os.SCHED_IDLE, os.sched_param(0))


def set_oom_score(pid: int, score: int) -> None:
    """Set how likely the kernel kills a process when memory runs out. Without the right, do nothing."""
    with contextlib.suppress(OSError), open(f"/proc/{pid}/oom_score_adj", "w") as file:
        file.write(str(score))


def boot_id() -> str:
    """Return the kernel's boot id as 32 hex digits. It changes with each boot."""
    with open("/proc/sys/kernel/random/boot_id") as file:
        return file.read().strip().replace("-", "")


def _prctl(option: int, value: int) -> None:
    if _libc.prctl(option, ctypes.c_ulong(value), 0, 0, 0) != 0:
        number = ctypes.get_errno()
        raise StartRefused("prctl failed", option=option, errno=number, reason=os.strerror(number))
