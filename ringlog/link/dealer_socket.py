"""DealerSocket: one connection to one process. It never reconnects by itself."""

from __future__ import annotations

import struct
from typing import Any, Literal, NamedTuple

import zmq

from ringlog.limits import MESSAGE_BYTES_MAX, SOCKET_COPY_BYTES_MAX

_MONITOR_EVENTS = (
    zmq.EVENT_CONNECTED | zmq.EVENT_HANDSHAKE_SUCCEEDED | zmq.EVENT_DISCONNECTED | zmq.EVENT_CLOSED
    | zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL | zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL
    | zmq.EVENT_HANDSHAKE_FAILED_AUTH
)  # fmt: skip
_MONITOR_EVENT = struct.Struct("=Hi")
"""First part of a monitor message: event, value. `zmq.utils.monitor` loads asyncio and OpenSSL (12 ms)."""
_NOT_ADMITTED = 400
"""ZAP status for an unknown key; 300 and 500 are errors of ZAP itself."""
_NEVER_MS = 2**31 - 1
ConnectionState = Literal["connecting", "handshake", "up", "ended", "refused"]


class Curve(NamedTuple):
    """Keys of an encrypted connection, 40 characters each."""

    server_key: str
    public_key: str
    secret_key: str


class DealerSocket:
    """A socket that is or was connected to `endpoint`.

    The state of the connection comes from the socket's monitor. With ZMQ_IMMEDIATE the socket's own events
    would show it, but when the connection ends, such a socket drops messages that arrived and were not read.
    """

    def __init__(self, context: zmq.Context[Any], endpoint: str, curve: Curve | None) -> None:
        socket = self._socket = context.socket(zmq.DEALER)
        socket.setsockopt(zmq.LINGER, 0)
        # With -1 libzmq would disconnect the endpoint and drop unread messages, as with ZMQ_IMMEDIATE.
        socket.setsockopt(zmq.RECONNECT_IVL, _NEVER_MS)
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
        self._monitor: zmq.Socket[Any] = socket.get_monitor_socket(_MONITOR_EVENTS)
        self._state: ConnectionState = "connecting"
        socket.connect(endpoint)
        self.fds: tuple[int, ...] = tuple(int(each.getsockopt(zmq.FD)) for each in (socket, self._monitor))
        """One of them is readable when a message may have arrived, or the state may have changed."""

    def state(self) -> ConnectionState:
        """Return the state of the connection.

        Messages that arrived before its end can be received afterwards. So ask for the state first.
        """
        # All events are read, also later ones: an unread one would keep a descriptor readable.
        while int(self._monitor.getsockopt(zmq.EVENTS)) & zmq.POLLIN:
            event, value = _MONITOR_EVENT.unpack(self._monitor.recv_multipart(zmq.NOBLOCK)[0])
            if self._state in {"ended", "refused"}:
                continue
            if event == zmq.EVENT_CONNECTED:
                self._state = "handshake"
            elif event == zmq.EVENT_HANDSHAKE_SUCCEEDED:
                self._state = "up"
            else:
                is_refused = event == zmq.EVENT_HANDSHAKE_FAILED_AUTH and value == _NOT_ADMITTED
                self._state = "refused" if is_refused else "ended"
        return self._state

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

    def receive(self) -> tuple[bytes, memoryview | None] | None:
        """Return the next message and its attachment; None if there is none.

        The message is copied: when a zmq.Frame is freed, pyzmq runs the handlers of pending signals, and an
        exception that one raises, such as KeyboardInterrupt, is lost.
        """
        try:
            data: bytes = self._socket.recv(zmq.NOBLOCK)
        except zmq.Again:
            return None
        if not self._socket.getsockopt(zmq.RCVMORE):
            return data, None
        attachment: zmq.Frame = self._socket.recv_multipart(zmq.NOBLOCK, copy=False)[0]
        return data, attachment.buffer

    def close(self) -> None:
        """Close the socket. Unsent messages are lost."""
        self._socket.disable_monitor()
        self._monitor.close(0)
        self._socket.close(0)
