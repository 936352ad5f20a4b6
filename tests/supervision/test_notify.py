"""The sd_notify protocol of the service manager, tested with a local socket."""

from __future__ import annotations

import socket
from collections.abc import Iterator
from pathlib import Path

import pytest

from ringlog.supervision.systemd_notifier import SystemdNotifier


@pytest.fixture
def ear(tmp_path: Path) -> Iterator[socket.socket]:
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as ear:
        ear.bind(str(tmp_path / "n"))
        ear.settimeout(5)
        yield ear


def test_the_manager_receives_status_readiness_watchdog_and_stop(ear: socket.socket) -> None:
    notifier = SystemdNotifier({"NOTIFY_SOCKET": ear.getsockname(), "WATCHDOG_USEC": "30000000"})
    notifier.notify_status("recovering")
    notifier.notify_ready()
    notifier.ping_watchdog()
    notifier.notify_stopping()
    said = [ear.recv(1024).decode() for _ in range(4)]
    assert said == ["STATUS=recovering", "READY=1\nSTATUS=ready", "WATCHDOG=1", "STOPPING=1\nSTATUS=draining"]


def test_without_a_watchdog_no_ping_is_sent(ear: socket.socket) -> None:
    notifier = SystemdNotifier({"NOTIFY_SOCKET": ear.getsockname()})
    notifier.ping_watchdog()
    notifier.notify_ready()
    assert ear.recv(1024).startswith(b"READY")


def test_an_abstract_socket_is_reached() -> None:
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as ear:
        ear.bind("")
        name = ear.getsockname()
        ear.settimeout(5)
        SystemdNotifier({"NOTIFY_SOCKET": "@" + name[1:].decode()}).notify_ready()
        assert ear.recv(1024).startswith(b"READY=1")


def test_a_missing_socket_is_no_error(tmp_path: Path) -> None:
    """The next message is sent if the socket exists by then."""
    SystemdNotifier({}).notify_ready()
    path = str(tmp_path / "late")
    notifier = SystemdNotifier({"NOTIFY_SOCKET": path})
    notifier.notify_ready()
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as ear:
        ear.bind(path)
        ear.settimeout(5)
        notifier.notify_stopping()
        assert ear.recv(1024).startswith(b"STOPPING=1")
