"""Start a child process, send it signals, and observe its death with certainty.

A supervisor that holds locks never forks a child directly. A spawned child gets only the standard three
descriptors and the liveness lock, so it inherits no other lock of the supervisor. The supervisor watches and
signals a child through a pidfd, because the kernel may have reused a pid before it is used.
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
from collections.abc import Mapping, Sequence

import ringlog
from ringlog import hardening
from ringlog.environment import API_KEYS
from ringlog.supervision import ONE_THREAD

CHILD_OOM_SCORE = 100
SUPERVISOR_OOM_SCORE = -500
"""When memory runs out, the kernel should kill a child, which is replaced, and not the supervisor. Lowering
one's own OOM score needs a privilege that a daemon does not have. Raising a child's score needs none."""

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
    }
)
_KEPT_PREFIXES = ("LC_", "PYTHON", "MALLOC_")
_COLD_PREFIXES = ("AWS_", "AZURE_", "GOOGLE_")


def child_environment(environ: Mapping[str, str]) -> dict[str, str]:
    """Return the environment of a child: no settings and no secrets, and this installation's code first.

    Settings travel in the boot message. A variable that is not known to be harmless is not passed on.
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
    """Return the directory of the source checkout, for PYTHONPATH of a child. "" = installed package."""
    root = os.path.dirname(os.path.dirname(os.path.abspath(ringlog.__file__)))
    return "" if os.path.basename(root) in {"site-packages", "dist-packages"} else root


def object_store_environment(environ: Mapping[str, str]) -> dict[str, str]:
    """Return the credentials that a child needs for an object store. No other child gets them."""
    return {name: value for name, value in environ.items() if name.startswith(_COLD_PREFIXES)}


def api_keys_environment(environ: Mapping[str, str]) -> dict[str, str]:
    """Return the bearer keys, which only the HTTP gateway gets."""
    return {API_KEYS: environ[API_KEYS]} if API_KEYS in environ else {}


def actor_command(kind: str, boot: str) -> list[str]:
    """Return the command line of an actor. `-P`: a file in the working directory must not shadow a module."""
    return [sys.executable, "-P", "-m", f"ringlog.actors.{kind}", boot]


class ChildProcess:
    """One child process of this supervisor."""

    def __init__(self, pid: int, process: subprocess.Popen[bytes] | None = None) -> None:
        """`process` is the Popen object of a child that `spawn_process` started."""
        self.pid = pid
        self._process = process
        # Only the supervisor reaps its children, so the pid still belongs to this child.
        self.pidfd: int = os.pidfd_open(pid)

    def send_signal(self, number: signal.Signals) -> None:
        """Send a signal. Does nothing if the child is dead already."""
        if self.pidfd >= 0:
            with contextlib.suppress(ProcessLookupError):
                signal.pidfd_send_signal(self.pidfd, number)

    def reap(self) -> int:
        """Collect the exit status and close the pidfd. Returns the exit code, or minus the signal number.

        Blocks unless the pidfd is readable.
        """
        if self._process is not None:
            status = self._process.wait()
        else:
            status = os.waitstatus_to_exitcode(os.waitpid(self.pid, 0)[1])
        self.close()
        return status

    def close(self) -> None:
        """Close the pidfd. Idempotent."""
        if self.pidfd >= 0:
            os.close(self.pidfd)
            self.pidfd = -1


def spawn_process(command: Sequence[str], environ: Mapping[str, str], *descriptors: int) -> ChildProcess:
    """Start a program in its own process group, so that a terminal's Ctrl-C reaches only the supervisor.

    The supervisor then stops the children in order. The child inherits `descriptors` under the same numbers;
    the first one is the liveness lock (run_dir.open_liveness_lock). Raises OSError if the system cannot start
    a process.
    """
    process = subprocess.Popen(
        command,
        stdin=subprocess.DEVNULL,
        # The output of libraries belongs to the log. Standard output belongs to the operator.
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
