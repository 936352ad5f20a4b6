"""Who asked through a call ring. Apart from the rest, which is compiled: a compiled class is no bytes."""

from __future__ import annotations


class Caller(bytes):
    """Who sent a request through a ring: its connection, which such an answer can take as well. Known by its
    type from one that sent through the socket."""

    __slots__ = ()
