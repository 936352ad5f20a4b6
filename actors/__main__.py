"""`python -m ringlog.actors <descriptor> <kinds>`: the fork server, from which the supervisor forks
actors."""

from __future__ import annotations

import os
import socket
import sys

from ringlog.runtime.forkserver import run

if __name__ == "__main__":
    run(socket.socket(fileno=int(sys.argv[1])), sys.argv[2].split(","), os.getppid())
