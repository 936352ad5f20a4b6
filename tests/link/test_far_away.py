"""Connections with a long round-trip time or a low bandwidth.

The handshake takes several round trips, and the client waits for it.
"""

from __future__ import annotations

import threading
import time

import pytest
import zmq

from chaos.network.proxy import Proxy
from ringlog.client.connection.descriptor_set import Descriptors
from ringlog.clock import SystemClock
from ringlog.envelope.messages import Ping, Pong
from ringlog.envelope.wire import decode, encode
from ringlog.link.curve import new_key
from ringlog.link.dealer_socket import Curve
from ringlog.link.peer import CONNECT_NS_MAX, Peer
from ringlog.link.timers import Timers

SERVER, CLIENT = new_key(), new_key()
LONG_S = 20.0


class Echo:
    """A CURVE server that answers every request with a Pong."""

    def __init__(self) -> None:
        self.context = zmq.Context()
        self.socket = self.context.socket(zmq.ROUTER)
        self.socket.setsockopt(zmq.LINGER, 0)
        self.socket.setsockopt(zmq.CURVE_SERVER, 1)
        self.socket.setsockopt(zmq.CURVE_SECRETKEY, SERVER.secret)
        self.port = self.socket.bind_to_random_port("tcp://127.0.0.1")
        self.stop = threading.Event()
        self.thread = threading.Thread(target=self.run)
        self.thread.start()

    def run(self) -> None:
        while not self.stop.is_set():
            if self.socket.poll(20):
                client, data, *_ = self.socket.recv_multipart()
                self.socket.send_multipart([client, encode(Pong(1, 1), decode(data).corr)])

    def close(self) -> None:
        self.stop.set()
        self.thread.join()
        self.socket.close(0)
        self.context.term()


@pytest.fixture
def echo():
    made = Echo()
    yield made
    made.close()


class Far:
    """A Peer with CURVE keys and its environment."""

    def __init__(self, port: int) -> None:
        self.context = zmq.Context()
        self.timers, self.clock, self.fds = Timers(), SystemClock(), Descriptors()
        keys = Curve(SERVER.public.decode(), CLIENT.public.decode(), CLIENT.secret.decode())
        self.peer = Peer(
            "far", context=self.context, timers=self.timers, clock=self.clock, fds=self.fds, curve=keys
        )
        self.peer.set_endpoint(f"tcp://127.0.0.1:{port}")

    def until(self, condition) -> None:
        end = time.monotonic() + LONG_S
        while not condition():
            assert time.monotonic() < end, "waited in vain"
            self.fds.sleep(0.005)
            self.peer.pump()
            self.timers.fire(self.clock.monotonic_ns())

    def ask(self, attachment=None):
        return self.peer.request(Ping(), self.clock.monotonic_ns() + int(LONG_S * 1e9), attachment)

    def close(self) -> None:
        self.peer.close()
        self.context.term()
        self.fds.close()


def test_a_peer_waits_for_a_slow_handshake(echo):
    """With a round trip of 250 ms the handshake takes longer than one connection attempt (RF-90)."""
    with Proxy(echo.port) as proxy:
        proxy.weather.delay_s = CONNECT_NS_MAX / 1e9 / 4
        far = Far(proxy.port)
        try:
            pending = far.ask()
            far.until(lambda: pending.is_done)
            assert pending.result().message == Pong(1, 1)
            assert far.peer.connections == 1
        finally:
            far.close()


def test_a_refused_connection_is_retried_at_once(echo):
    """If no process listens, the client does not wait for the timeout of a handshake."""
    with Proxy(echo.port) as proxy:
        proxy.weather.refuses = True
        far = Far(proxy.port)
        try:
            pending = far.ask()
            far.until(lambda: proxy.refused >= 5)
            proxy.weather.refuses = False
            far.until(lambda: pending.is_done)
            assert pending.result().message == Pong(1, 1)
        finally:
            far.close()


def test_a_large_request_has_time_for_a_narrow_line(echo, monkeypatch):
    """The request is not sent again while its transfer is in progress (RF-90)."""
    monkeypatch.setattr("ringlog.link.peer.SILENCE_NS", 500_000_000)
    with Proxy(echo.port) as proxy:
        far = Far(proxy.port)
        try:
            first = far.ask()
            far.until(lambda: first.is_done)
            proxy.weather.bytes_per_s = 200_000.0
            large = far.ask(bytes(300_000))
            far.until(lambda: large.is_done)
            assert large.result().message == Pong(1, 1)
            assert far.peer.connections == 1
        finally:
            far.close()
