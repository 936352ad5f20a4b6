"""Where the peers' programs are. A peer that is missing is an error: a row without it would look measured."""

from __future__ import annotations

import importlib
import shutil
from pathlib import Path

from bench.host import BUILD

DIRECTORY = BUILD / "peers"
"""What `make peers` installs: `bin` has one script for each program."""


class PeerMissing(Exception):
    """A peer cannot be measured because its server or its client is not installed."""


def program(name: str, directory: Path | None = None) -> str:
    """Return the path of a peer's program: of `make peers`, else of the machine. Raises PeerMissing."""
    installed = (directory or DIRECTORY) / "bin" / name
    found = str(installed) if installed.exists() else shutil.which(name)
    if found is None:
        raise PeerMissing(f"{name} is not installed: run `make peers{more(name)}`")
    return found


def module(name: str) -> None:
    """Import a peer's client; raises PeerMissing."""
    try:
        importlib.import_module(name)
    except ImportError:
        raise PeerMissing(f"the Python module {name} is not installed: run `make peers`") from None


def more(name: str) -> str:
    """What `make peers` needs besides to install this program."""
    return " MORE=1" if name == "kafka-server" else ""
