"""Start a child, signal it, know for certain that it is dead.

No child is forked from a supervisor that holds anything: with every descriptor closed but the standard
three and the line that says it lives, no lock of the supervisor's lives on in it (RD-7). It is watched and
signalled through a pidfd, because a pid may be somebody else's by the time it is used (RD-8).
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
from collections.abc import Mapping, Sequence

import ringlog
from ringlog import environment, hardening
from ringlog.supervision import ONE_THREAD

CHILD_OOM_SCORE = 100
SUPERVISOR_OOM_SCORE = -500
"""When memory runs out the kernel should take a child, which is replaced, and not who replaces it. To lower
one's own score needs a privilege that a daemon has not (SEC-26); to raise a child's needs none."""

_KEPT_VARIABLES = frozenset(
    {
        "PATH",
        "HOME",
        "USER",
        "LOGNAME",
        "LANG",
        "TZ",
        "TMPDIR",
        "VIRTUAL_ENV",
        "LD_LIBRARY_PATH",
        "LD_PRELOAD",
        # No setting of the engine: which code runs (ringlog/frame/kernel.py).
        environment.CORES,  # No setting of the engine: which code runs (ringlog/cores.py).
    }
)
_KEPT_PREFIXES = ("LC_", "PYTHON", "MALLOC_")
_COLD_PREFIXES = ("AWS_", "AZURE_", "GOOGLE_")


def child_environment(environ: Mapping[str, str]) -> dict[str, str]:
    """What a child may know of our environment: no settings, no secrets (SEC-28), and our own code first.

    Settings travel in the boot message; everything not known to be harmless stays behind.
    """
    kept = {
        name: value
        for name, value in environ.items()
        if name in _KEPT_VARIABLES or name.startswith(_KEPT_PREFIXES)
    }
    if root := source_checkout():
        kept["PYTHONPATH"] = os.pathsep.join(filter(None, (root, kept.get("PYTHONPATH", ""))))
    return {**ONE_THREAD, **kept}


def source_checkout() -> str:
    """Where the code is that is not installed, so that a child finds the same wherever it runs; "" = it is
    installed."""
    root = os.path.dirname(os.path.dirname(os.path.abspath(ringlog.__file__)))
    return "" if os.path.basename(root) in {"site-packages", "dist-packages"} else root


def object_store_environment(environ: Mapping[str, str]) -> dict[str, str]:
    """What a child that speaks to an object store needs besides: its credentials, and nobody else does."""
    return {name: value for name, value in environ.items() if name.startswith(_COLD_PREFIXES)}


def actor_command(kind: str, boot: str) -> list[str]:
    """Command line of an actor. `-P`: a file in the working directory must not pose as a module."""
    return [sys.executable, "-P", "-m", f"actors.{kind}", boot]


class ChildProcess:
    """One started process of which we are the parent."""

    def __init__(self, pid: int, process: subprocess.Popen[bytes] | None = None) -> None:
        """`process` for one that `spawn` made."""
        self.pid = pid
        self._process = process
        # Nobody else reaps our children, so the pid is still this child's.
        self.pidfd = os.pidfd_open(pid)

    def send_signal(self, number: signal.Signals) -> None:
        """Send a signal; no error when the child is dead already."""
        if self.pidfd >= 0:
            with contextlib.suppress(ProcessLookupError):
                signal.pidfd_send_signal(self.pidfd, number)

    def reap(self) -> int:
        """Collect the exit status of a child whose pidfd is readable; returns code or minus signal."""
        if self._process is not None:
            status = self._process.wait()
        else:
            status = os.waitstatus_to_exitcode(os.waitpid(self.pid, 0)[1])
        self.close()
        return status

    def close(self) -> None:
        """Let go of the pidfd. Idempotent."""
        if self.pidfd >= 0:
            os.close(self.pidfd)
            self.pidfd = -1


def spawn_process(command: Sequence[str], environ: Mapping[str, str], *descriptors: int) -> ChildProcess:
    """Start a program in a process group of its own, so that a terminal's Ctrl-C reaches only the supervisor,
    which stops children in order. Raises OSError when the system cannot.

    Of our descriptors it has `descriptors`, by the same numbers; the first one says that it lives, from its
    birth to its death (run_dir.open_liveness_lock).
    """
    process = subprocess.Popen(
        command,
        stdin=subprocess.DEVNULL,
        # Whatever a library prints goes with the log; standard output is the operator's.
        stdout=sys.__stderr__.fileno() if sys.__stderr__ else None,
        close_fds=True,
        pass_fds=descriptors,
        process_group=0,
        cwd="/",
        env=dict(environ),
    )
    child = ChildProcess(process.pid, process)
    hardening.set_oom_score(child.pid, CHILD_OOM_SCORE)
    return child
