"""Report the engine's state to systemd: one datagram to $NOTIFY_SOCKET. Without that variable, do nothing."""

from __future__ import annotations

import contextlib
import socket
from collections.abc import Mapping


class SystemdNotifier:
    """Sends sd_notify messages to the service manager. Errors are ignored."""

    def __init__(self, environ: Mapping[str, str]) -> None:
        path = environ.get("NOTIFY_SOCKET", "")
        # A leading @ is systemd's way to write an abstract socket.
        self._address = "\0" + path[1:] if path.startswith("@") else path
        self._has_watchdog = "WATCHDOG_USEC" in environ

    def notify_ready(self) -> None:
        """Report that recovery is done and the engine serves clients."""
        self._send("READY=1\nSTATUS=ready")

    def notify_status(self, text: str) -> None:
        """Set the one-line status that `systemctl status` shows."""
        self._send(f"STATUS={text}")

    def notify_stopping(self) -> None:
        """Report that an orderly stop has begun."""
        self._send("STOPPING=1\nSTATUS=draining")

    def ping_watchdog(self) -> None:
        """Send the watchdog ping, if the unit has a watchdog. The caller checks that all shards are ready."""
        if self._has_watchdog:
            self._send("WATCHDOG=1")

    def _send(self, text: str) -> None:
        if not self._address:
            return
        # An unreachable service manager must not stop the engine.
        with contextlib.suppress(OSError), socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as ear:
            ear.setblocking(False)
            ear.sendto(text.encode(), self._address)
