"""DealerSocket: one connection to one process. It never reconnects by itself."""

from __future__ import annotations

import struct
from typing import Any, Literal, NamedTuple

import zmq

from ringlog.limits import MESSAGE_BYTES_MAX, SOCKET_COPY_BYTES_MAX

_MONITOR_EVENTS = (
    zmq.EVENT_CONNECTED | zmq.EVENT_DISCONNECTED | zmq.EVENT_CLOSED | zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL
    | zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL | zmq.EVENT_HANDSHAKE_FAILED_AUTH
)  # fmt: skip
"""Events of a connection before it is up."""
_MONITOR_EVENT = struct.Struct("=Hi")
"""First part of a monitor message: event, value. `zmq.utils.monitor` loads asyncio and OpenSSL (12 ms)."""
_NOT_ADMITTED = 400
"""ZAP status for an unknown key; 300 and 500 are errors of ZAP itself."""
Handshake = Literal["", "running", "ended", "refused"]
"""State of the handshake of a TCP connection; "" = there is none, or its end was reported."""


class Curve(NamedTuple):
    """Keys of an encrypted connection, 40 characters each."""

    server_key: str
    public_key: str
    secret_key: str


class DealerSocket:
    """A socket that is or was connected to `endpoint`."""

    def __init__(self, context: zmq.Context[Any], endpoint: str, curve: Curve | None) -> None:
        socket = self._socket = context.socket(zmq.DEALER)
        self._monitor: zmq.Socket[Any] | None = None
        self._is_connected = False
        socket.setsockopt(zmq.LINGER, 0)
        socket.setsockopt(zmq.IMMEDIATE, 1)
        socket.setsockopt(zmq.RECONNECT_IVL, -1)
        socket.setsockopt(zmq.SNDHWM, 0)
        socket.setsockopt(zmq.RCVHWM, 0)
        socket.setsockopt(zmq.MAXMSGSIZE, MESSAGE_BYTES_MAX)
        if endpoint.startswith("tcp"):
            socket.setsockopt(zmq.HEARTBEAT_IVL, 1_000)
            socket.setsockopt(zmq.HEARTBEAT_TIMEOUT, 5_000)
        if curve is not None:
            socket.setsockopt(zmq.CURVE_SERVERKEY, curve.server_key.encode())
            socket.setsockopt(zmq.CURVE_PUBLICKEY, curve.public_key.encode())
            socket.setsockopt(zmq.CURVE_SECRETKEY, curve.secret_key.encode())
        if endpoint.startswith("tcp"):
            self._monitor = socket.get_monitor_socket(_MONITOR_EVENTS)
        socket.connect(endpoint)
        self.fd: int = int(socket.getsockopt(zmq.FD))

    def events(self) -> int:
        """Return what can be done now: zmq.POLLIN, zmq.POLLOUT. Consumes the wake-up of the descriptor."""
        return int(self._socket.getsockopt(zmq.EVENTS))

    def send(self, data: bytes, attachment: Any) -> bool:
        """Send a message. Return False if the connection has just ended."""
        try:
            if attachment is None:
                self._socket.send(data, zmq.NOBLOCK)
            else:
                self._socket.send(data, zmq.NOBLOCK | zmq.SNDMORE)
                self._socket.send(attachment, zmq.NOBLOCK, copy=len(attachment) <= SOCKET_COPY_BYTES_MAX)
        except zmq.Again:
            return False
        return True

    def receive(self) -> list[zmq.Frame] | None:
        """Return the parts of the next message; None if there is none."""
        try:
            parts: list[zmq.Frame] = self._socket.recv_multipart(zmq.NOBLOCK, copy=False)
        except zmq.Again:
            return None
        return parts

    def handshake(self) -> Handshake:
        """Return the state of the handshake. Only this function reads the monitor's events."""
        if self._monitor is None:
            return ""
        while self._monitor.poll(0):
            event, value = _MONITOR_EVENT.unpack(self._monitor.recv_multipart(zmq.NOBLOCK)[0])
            if event != zmq.EVENT_CONNECTED:
                # The connection ended. This socket does not reconnect and sends no more events.
                self.stop_monitor()
                is_refused = event == zmq.EVENT_HANDSHAKE_FAILED_AUTH and value == _NOT_ADMITTED
                return "refused" if is_refused else "ended"
            self._is_connected = True
        return "running" if self._is_connected else ""

    def stop_monitor(self) -> None:
        """Stop to watch the handshake."""
        self._is_connected = False
        if self._monitor is not None:
            self._socket.disable_monitor()
            self._monitor.close(0)
            self._monitor = None

    def close(self) -> None:
        """Close the socket. Unsent messages are lost."""
        self.stop_monitor()
        self._socket.close(0)
