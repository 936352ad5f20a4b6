"""The TCP sockets of clients with streams. The HTTP server owns them, and does not tell their descriptors."""

from __future__ import annotations

import ipaddress
import os
import socket
import struct
from collections.abc import Callable, Iterable
from functools import lru_cache
from typing import TypeVar

T = TypeVar("T")
Peer = tuple[str, int]
_TCP_INFO_BYTES = 256
_BYTES_ACKED_AT = 120
"""Offset of tcpi_bytes_acked in struct tcp_info (linux/tcp.h)."""
_NEAR = 32
"""Descriptors below and above the highest known one that are tried first. The kernel gives a new connection
the lowest free descriptor, which is there while connections only open."""


class ClientSocket:
    """The TCP socket of a client. It is found by the address of the client."""

    def __init__(self, address: str) -> None:
        host, _, port = address.rpartition(":")
        self._peer = (_plain(host), int(port) if port.isdecimal() else 0)
        self._fd = _descriptors.find(self._peer)

    def acked_bytes(self) -> int | None:
        """Return the number of bytes that the client has acknowledged. None if the socket is closed."""
        return self._call(_acked)

    def abort(self) -> None:
        """Close the connection in both directions. The HTTP server then frees what it has queued."""
        self._call(_shut_down)

    def forget(self) -> None:
        """State that the stream has ended: another connection may get the descriptor."""
        _descriptors.forget(self._peer)

    def _call(self, use: Callable[[socket.socket], int]) -> int | None:
        if self._fd < 0:
            return None
        return _on_socket(self._fd, lambda s: use(s) if _peer_of(s) == self._peer else None)


class _Descriptors:
    """Descriptors of the connections that have streams, by peer."""

    def __init__(self) -> None:
        self._fds: dict[Peer, int] = {}
        self._known: set[int] = set()

    def find(self, peer: Peer) -> int:
        """Return the descriptor of a peer; -1 if there is none."""
        fd = self._fds.get(peer, -1)
        if fd < 0 or not _is_of(fd, peer):
            fd = next((fd for fd in self._candidates() if _is_of(fd, peer)), -1)
        if fd >= 0:
            self._fds[peer] = fd
            self._known.add(fd)
        return fd

    def forget(self, peer: Peer) -> None:
        """Drop a peer."""
        self._known.discard(self._fds.pop(peer, -1))

    def _candidates(self) -> Iterable[int]:
        top = max(self._known, default=2)
        yield from (fd for fd in range(top + _NEAR, max(top - _NEAR, 2), -1) if fd not in self._known)
        opened = [int(name) for name in os.listdir("/proc/self/fd")]
        yield from (fd for fd in opened if fd not in self._known)
        yield from (fd for fd in opened if fd in self._known)


_descriptors = _Descriptors()


def _is_of(fd: int, peer: Peer) -> bool:
    return _on_socket(fd, _peer_of) == peer


def _on_socket(fd: int, use: Callable[[socket.socket], T | None]) -> T | None:
    """Call `use` with the socket of a descriptor, which stays open. Returns None if it is no open socket."""
    try:
        borrowed = socket.socket(socket.AF_INET, socket.SOCK_STREAM, 0, fileno=fd)
    except OSError:
        return None
    try:
        return use(borrowed)
    except OSError:
        return None
    finally:
        borrowed.detach()


def _peer_of(client: socket.socket) -> Peer | None:
    peer = client.getpeername()
    return (_plain(peer[0]), int(peer[1])) if isinstance(peer, tuple) and len(peer) >= 2 else None


def _acked(client: socket.socket) -> int:
    info = client.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, _TCP_INFO_BYTES)
    return int(struct.unpack_from("=Q", info, _BYTES_ACKED_AT)[0])


def _shut_down(client: socket.socket) -> int:
    client.shutdown(socket.SHUT_RDWR)
    return 0


@lru_cache(4_096)
def _plain(host: str) -> str:
    """Return an address in its shortest form, IPv4 in IPv6 as IPv4."""
    try:
        found = ipaddress.ip_address(host.strip("[]").split("%", 1)[0])
    except ValueError:
        return host
    mapped = getattr(found, "ipv4_mapped", None)
    return str(mapped or found)
