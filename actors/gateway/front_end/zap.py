"""ZAP handler: libzmq queries it about every new connection and admits only those that it accepts.

CURVE alone admits every client that knows the server's public key. Every bound socket therefore has a ZAP
domain and ZMQ_ZAP_ENFORCE_DOMAIN: without a running handler all connections are refused. The handler runs in
the gateway's own loop, so it ends only with the process. `answer` is pure.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, cast

import zmq
from zmq.utils import z85

from ringlog.access.key_ring import LOCAL_ID, KeyRing, key_id

ZAP_ENDPOINT = "inproc://zeromq.zap.01"
TCP_DOMAIN = "ringlog.tcp"
IPC_DOMAIN = "ringlog.ipc"
_VERSION = b"1.0"
_CURVE_PARTS = 7
_NULL_PARTS = 6


def answer(parts: Sequence[bytes], keys: KeyRing) -> list[bytes] | None:
    """Return the reply to one ZAP request, or None if it is not a ZAP request.

    The request is [version, id, domain, address, identity, mechanism, credentials…].
    """
    if len(parts) < _NULL_PARTS or parts[0] != _VERSION:
        return None
    request_id, domain, mechanism = parts[1], parts[2], parts[5]
    user_id = ""
    if domain == IPC_DOMAIN.encode() and mechanism == b"NULL" and len(parts) == _NULL_PARTS:
        user_id = LOCAL_ID
    elif domain == TCP_DOMAIN.encode() and mechanism == b"CURVE" and len(parts) == _CURVE_PARTS:
        user_id = _admitted(parts[6], keys)
    if not user_id:
        return [_VERSION, request_id, b"400", b"not admitted", b"", b""]
    return [_VERSION, request_id, b"200", b"OK", user_id.encode(), b""]


def _admitted(raw_key: bytes, keys: KeyRing) -> str:
    """Return the user id of an admitted 32-byte CURVE key, else the empty string."""
    if len(raw_key) != 32:
        return ""
    user_id = key_id(z85.encode(raw_key).decode())
    return user_id if keys.find(user_id) is not None else ""


class ZapHandler:
    """Replies to ZAP requests on its socket. The gateway's loop polls `socket`."""

    def __init__(self, context: zmq.Context[Any], keys: Callable[[], KeyRing]) -> None:
        self.socket: Any = context.socket(zmq.ROUTER)
        self.socket.setsockopt(zmq.LINGER, 0)
        self.socket.bind(ZAP_ENDPOINT)
        self._keys = keys
        self.refused: int = 0

    def serve(self) -> None:
        """Reply to all waiting requests."""
        while True:
            try:
                parts = self.socket.recv_multipart(zmq.NOBLOCK)
            except zmq.Again:
                return
            # [libzmq's routing id, empty delimiter, request…]
            reply = answer(parts[2:], self._keys())
            if reply is None:
                continue
            self.refused += reply[2] != b"200"
            self.socket.send_multipart([*parts[:2], *reply], zmq.NOBLOCK)

    def fileno(self) -> int:
        """Return the descriptor that becomes readable when the state changes (edge-triggered)."""
        return cast(int, self.socket.getsockopt(zmq.FD))

    def close(self) -> None:
        """Close the socket. From now on no connection is admitted."""
        self.socket.close()
