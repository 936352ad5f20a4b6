"""The HTTP gateway finds the sockets of its streams by the addresses of their clients."""

from __future__ import annotations

import contextlib
import socket
from collections.abc import Callable, Iterator

import pytest

from ringlog.actors.http_gateway.streams import client_socket
from ringlog.actors.http_gateway.streams.client_socket import ClientSocket

Connect = Callable[[], tuple[socket.socket, socket.socket, str]]


@pytest.fixture
def connect() -> Iterator[Connect]:
    """`connect()` returns the ends of a new connection, and the address of its client."""
    with contextlib.ExitStack() as opened:
        listener = opened.enter_context(socket.create_server(("127.0.0.1", 0)))

        def new() -> tuple[socket.socket, socket.socket, str]:
            client = opened.enter_context(socket.create_connection(listener.getsockname()))
            server = opened.enter_context(listener.accept()[0])
            host, port = client.getsockname()
            return client, server, f"{host}:{port}"

        yield new


@pytest.fixture
def probes(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The descriptors that are examined."""
    found: list[int] = []
    real = client_socket._is_of

    def counted(fd: int, peer: client_socket.Peer) -> bool:
        found.append(fd)
        return real(fd, peer)

    monkeypatch.setattr(client_socket, "_is_of", counted)
    monkeypatch.setattr(client_socket, "_descriptors", client_socket._Descriptors())
    return found


def test_finding_a_new_stream_does_not_examine_the_others(connect: Connect, probes: list[int]) -> None:
    count, kept = 200, []
    for _ in range(count):
        client, server, address = connect()
        kept.append(ClientSocket(address))
        server.sendall(b"data")
        assert client.recv(4) == b"data"
        assert kept[-1].acked_bytes() is not None
    assert len(probes) < count * 2 * client_socket._NEAR
    assert all(each.acked_bytes() is not None for each in kept)


def test_a_descriptor_that_another_connection_got_is_found_again(connect: Connect, probes: list[int]) -> None:
    """The first stream may have ended with or without `forget`."""
    for forgets in (True, False):
        _, server, address = connect()
        first, fd = ClientSocket(address), server.fileno()
        others = [ClientSocket(connect()[2]) for _ in range(3)]
        server.close()
        assert first.acked_bytes() is None
        if forgets:
            first.forget()
        listener = socket.create_server(("127.0.0.1", 0))
        with listener, socket.create_connection(listener.getsockname()) as client:
            taken = listener.accept()[0]
            with taken:
                assert fd in {listener.fileno(), client.fileno(), taken.fileno()}
                assert ClientSocket("{}:{}".format(*client.getsockname())).acked_bytes() is not None
        assert first.acked_bytes() is None
        assert all(each.acked_bytes() is not None for each in others)


def test_an_unknown_address_has_no_socket(connect: Connect, probes: list[int]) -> None:
    connect()
    for address in ("127.0.0.1:1", "", "nonsense", "[::1]:80"):
        assert ClientSocket(address).acked_bytes() is None


def test_an_aborted_connection_ends_at_both_sides(connect: Connect, probes: list[int]) -> None:
    client, server, address = connect()
    ClientSocket(address).abort()
    assert (client.recv(1), server.recv(1)) == (b"", b"")
