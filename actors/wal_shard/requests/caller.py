"""Sender of a request through a call ring.

Not compiled, because a compiled class cannot be a subclass of bytes.
"""

from __future__ import annotations


class Caller(bytes):
    """Connection id of a client that sent a request through its call ring.

    The type distinguishes it from the sender of a socket request. The value is the id of the client's socket
    connection, so a reply can also be sent by socket."""

    __slots__ = ()
