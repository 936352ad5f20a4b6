"""`python -m actors <descriptor> <kinds> …`: what the supervisor forks actors from."""

from __future__ import annotations

import os
import signal
import socket
import sys

from ringlog import hardening
from ringlog.runtime.forkserver import become, serve


def run(descriptor: int, kinds: str) -> None:
    """Serve until the supervisor is gone or does not want us any more; does not return in a child."""
    supervisor = os.getppid()
    hardening.harden(may_profile=False)
    hardening.name_process("forkserver")
    if not hardening.die_with_parent(supervisor, signal.SIGKILL):
        return
    with socket.socket(fileno=descriptor) as line:
        order = serve(line, kinds.split(","))
    if order is not None:
        become(order)


if __name__ == "__main__":
    run(int(sys.argv[1]), sys.argv[2])
