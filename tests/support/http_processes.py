"""Clients of one chosen gateway process among several that share a port."""

from __future__ import annotations

import ssl
from collections.abc import Iterator, Mapping
from contextlib import contextmanager

from ringlog.board.board import Board
from ringlog.board.layout import ProcessField
from ringlog.board.processes import http_gateway_slot
from ringlog.testing.real_engine import TestEngine
from tests.support.http_client import EventStream, HttpClient

CONNECTIONS_MAX = 400
"""Connections that are tried. The kernel chooses the process of each by a hash of its ports."""


def requests_of(engine: TestEngine, processes: int) -> list[int]:
    """Return the number of requests that each gateway process has got."""
    board = Board.open(engine.info.shm_dir, writable=False)
    try:
        return [board.process(http_gateway_slot(n)).get(ProcessField.REQUESTS) for n in range(processes)]
    finally:
        board.close()


def client_at(
    engine: TestEngine, number: int, processes: int, key: str = "", tls: ssl.SSLContext | None = None
) -> HttpClient:
    """Return a client with a connection to one gateway process.

    The process is known by its number of requests, so no other client may send requests at this time.
    """
    for _ in range(CONNECTIONS_MAX):
        client = HttpClient(engine.http_url, key, tls=tls)
        before = requests_of(engine, processes)
        assert client("GET", "/v0/health").status == 200
        after = requests_of(engine, processes)
        if after[number] > before[number]:
            assert sum(after) == sum(before) + 1
            return client
        client.close()
    raise AssertionError(f"none of {CONNECTIONS_MAX} connections reached http_gateway-{number:02d}")


@contextmanager
def clients_of(engine: TestEngine, processes: int) -> Iterator[list[HttpClient]]:
    """Have a client of each gateway process."""
    engine.wait_ready("http_gateway")
    found = [client_at(engine, number, processes) for number in range(processes)]
    try:
        yield found
    finally:
        for client in found:
            client.close()


def stream_at(
    engine: TestEngine, number: int, processes: int, path: str, *, key: str = "",
    headers: Mapping[str, str] | None = None,
) -> EventStream:  # fmt: skip
    """Open an event stream at one gateway process."""
    return client_at(engine, number, processes, key).into_stream(path, headers)
