"""Tell systemd how we are: one datagram to $NOTIFY_SOCKET. Without the variable nothing happens."""

from __future__ import annotations

import contextlib
import socket
from collections.abc import Mapping


class SystemdNotifier:
    """The service manager's ear."""

    def __init__(self, environ: Mapping[str, str]) -> None:
        path = environ.get("NOTIFY_SOCKET", "")
        # A leading @ is systemd's way to write an abstract socket.
        self._address = "\0" + path[1:] if path.startswith("@") else path
        self._has_watchdog = "WATCHDOG_USEC" in environ

    def notify_ready(self) -> None:
        """Recovery is done and clients are served."""
        self._send("READY=1\nSTATUS=ready")

    def notify_status(self, text: str) -> None:
        """One line for `systemctl status`."""
        self._send(f"STATUS={text}")

    def notify_stopping(self) -> None:
        """An orderly stop has begun."""
        self._send("STOPPING=1\nSTATUS=draining")

    def ping_watchdog(self) -> None:
        """All shards get on; sent only when systemd asked to be told."""
        if self._has_watchdog:
            self._send("WATCHDOG=1")

    def _send(self, text: str) -> None:
        if not self._address:
            return
        # A service manager that does not listen is no reason to stop serving.
        with contextlib.suppress(OSError), socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as ear:
            ear.setblocking(False)
            ear.sendto(text.encode(), self._address)
