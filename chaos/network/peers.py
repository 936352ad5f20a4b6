"""Bad peers: silently dead, not reading, all reconnecting at once, far away."""

from __future__ import annotations

import contextlib
import random
import threading
import time
from typing import Any

import psutil
import zmq

from chaos.attack.arena import Arena, data_of, hello
from chaos.network.cuts import RESULT_S, History, _topic, stored_in
from chaos.network.proxy import DOWN, UP, Proxy
from ringlog.drill.checks import require
from ringlog.envelope import messages as m
from ringlog.envelope.wire import decode, encode
from ringlog.errors import RinglogError
from ringlog.testing.real_engine import wait_until

HALF_OPEN = 20
NOTICE_S = 25.0
"""Time (s) until dead peers are disconnected. The gateway sends a heartbeat every 2 s and waits 10 s for the
reply. Twice that time allows for a busy machine."""
PAGE_BYTES = 500_000
PAGES_ASKED = 600
SLOW_PAGES = 200
ANSWER_S = 10.0
"""Timeout (s) for the next reply when replies may flow."""
SLOW_PAGE_BYTES = 100_000
"""SLOW_PAGES replies of this size are more than pipes and sockets can buffer, and less than an outbox."""
UNREAD_BYTES_MAX = 160 << 20
"""Outbox, pipe and the reply in preparation. The requested data is about twice as much."""
CLIENTS = 30
BACK_S = 20.0
FAR_RECORDS = 200


class HalfOpen:
    """Silently dead peers (RF-92), in two steps, so that other rows run while the gateway waits."""

    def __init__(self, arena: Arena) -> None:
        self._arena = arena
        self._stack = contextlib.ExitStack()
        self.proxy = self._stack.enter_context(Proxy(arena.port))
        self._peers = [
            self._stack.enter_context(
                arena.peer(f"tcp://127.0.0.1:{self.proxy.port}", arena.owner, RECONNECT_IVL=-1)
            )
            for _ in range(HALF_OPEN)
        ]
        for peer in self._peers:
            require(hello(peer), "a client behind the proxy is not served")
            # A pending request for each peer.
            peer.send(encode(m.Read("canary.log", 1 << 40, wait_ms=30_000), 2))
        self._ports = self.proxy.engine_side_ports()
        require(len(_held(arena, self._ports)) == HALF_OPEN, "not all silent peers are connected")
        self.proxy.weather.holds = {UP, DOWN}

    def judge(self) -> int:
        """Wait until the gateway has disconnected all of them. Raises GuaranteeBroken."""
        try:
            wait_until(
                lambda: not _held(self._arena, self._ports), NOTICE_S,
                "the gateway to notice that its peers are gone",
            )  # fmt: skip
        except RinglogError:
            held = len(_held(self._arena, self._ports))
            require(False, f"{held} of {HALF_OPEN} silent connections are still held after {NOTICE_S:.0f} s")
        finally:
            self._stack.close()
        return HALF_OPEN


def _held(arena: Arena, ports: set[int]) -> set[int]:
    """Return those of the peers' ports to which the gateway has a connection."""
    found = psutil.Process(arena.running.pid_of("gateway")).net_connections("tcp")
    return {each.raddr.port for each in found if each.raddr and each.raddr.port in ports}


def _through(arena: Arena, proxy: Proxy) -> contextlib.AbstractContextManager[zmq.Socket[Any]]:
    return arena.peer(f"tcp://127.0.0.1:{proxy.port}", arena.limited, RECONNECT_IVL=-1, SNDHWM=0)


def deaf(arena: Arena, dice: random.Random) -> int:
    """Request much and read nothing (RF-93). The gateway's memory for this reader stays bounded."""
    topic = _topic(arena, f"mine.deaf.{dice.getrandbits(32):x}")
    with arena.connect() as client:
        for _ in range(4):
            client.append(topic, dice.randbytes(PAGE_BYTES))
    process = psutil.Process(arena.running.pid_of("gateway"))
    before = process.memory_info().rss
    worst = 0
    with Proxy(arena.port) as proxy, _through(arena, proxy) as peer:
        require(hello(peer), "the deaf reader could not connect")
        proxy.weather.holds = {DOWN}
        for asked in range(PAGES_ASKED):
            peer.send(encode(m.Read(topic, asked % 4, max_bytes=PAGE_BYTES, limit=1), asked))
            if asked % 50 == 0:
                arena.check_canary()
                worst = max(worst, process.memory_info().rss - before)
        for _ in range(5):
            arena.check_canary()
            worst = max(worst, process.memory_info().rss - before)
    require(
        worst < UNREAD_BYTES_MAX, f"a reader that takes nothing made the gateway grow by {worst >> 20} MiB"
    )
    return PAGES_ASKED


def slow(arena: Arena, dice: random.Random) -> int:
    """Stop reading for a while, then continue (RF-93).

    The reader gets every reply once and in order; none is dropped because its pipe was full.
    """
    topic = _topic(arena, f"mine.slow.{dice.getrandbits(32):x}")
    with arena.connect() as client:
        client.append(topic, dice.randbytes(SLOW_PAGE_BYTES))
    with Proxy(arena.port) as proxy, _through(arena, proxy) as peer:
        require(hello(peer), "the slow reader could not connect")
        proxy.weather.holds = {DOWN}
        for asked in range(SLOW_PAGES):
            peer.send(encode(m.Read(topic, 0, max_bytes=PAGE_BYTES, limit=1), asked + 1))
        arena.check_canary()
        proxy.weather.holds = set()
        got: list[int] = []
        while len(got) < SLOW_PAGES and peer.poll(round(ANSWER_S * 1_000)):
            got.append(decode(peer.recv_multipart()[0]).corr)
    require(got == list(range(1, SLOW_PAGES + 1)), f"of {SLOW_PAGES} answers a slow reader got {len(got)}")
    return SLOW_PAGES


def comeback(arena: Arena, dice: random.Random, *, clients: int = CLIENTS) -> int:
    """Kill the gateway with all clients connected (RF-98). All are served again and no record is lost."""
    topic = _topic(arena, f"net.storm.{dice.getrandbits(32):x}")
    histories = [History() for _ in range(clients)]
    ready, gone = threading.Barrier(clients + 1), threading.Event()

    def work(number: int) -> None:
        with arena.connect() as client, client.producer(topic, linger_ms=0) as out:
            tickets = [(payload, out.send(payload)) for payload in _numbered(number, "before")]
            ready.wait(RESULT_S)
            gone.wait(RESULT_S)
            tickets += [(payload, out.send(payload)) for payload in _numbered(number, "after")]
            for payload, ticket in tickets:
                histories[number].note(payload, ticket)

    threads = [threading.Thread(target=work, args=(number,), daemon=True) for number in range(clients)]
    for thread in threads:
        thread.start()
    ready.wait(RESULT_S)
    arena.running.kill("gateway")
    gone.set()
    begun = time.monotonic()
    for thread in threads:
        thread.join(BACK_S + RESULT_S)
    took = time.monotonic() - begun
    require(not any(thread.is_alive() for thread in threads), "some clients never got an answer")
    require(took < BACK_S, f"{clients} clients were served again after {took:.1f} s")
    stored = stored_in(arena, topic)
    for number, history in enumerate(histories):
        require(len(history.acked) > 10, f"client {number} got {len(history.acked)} acks")
        history.judge([payload for payload in stored if payload.startswith(b"%d-" % number)])
    return clients


def _numbered(number: int, when: str) -> list[bytes]:
    return [f"{number}-{when}-{i}".encode() for i in range(10)]


def far_away(arena: Arena, dice: random.Random) -> int:
    """Delay 200 ms, 1 Mbit/s, tiny segments, one in ten late (RF-90). Everything is slow and correct."""
    topic = _topic(arena, f"net.far.{dice.getrandbits(32):x}")
    history = History()
    with Proxy(arena.port, dice.getrandbits(32)) as proxy:
        weather = proxy.weather
        weather.delay_s, weather.bytes_per_s, weather.piece_bytes = 0.1, 125_000.0, 48
        weather.stall_share, weather.stall_s = 0.1, 0.02
        with arena.connect(port=proxy.port, timeout_ms=60_000) as client:
            with client.producer(topic, linger_ms=5) as out:
                payloads = [b"%d " % n + dice.randbytes(100) for n in range(FAR_RECORDS)]
                tickets = [(payload, out.send(payload)) for payload in payloads]
                for payload, ticket in tickets:
                    history.note(payload, ticket)
            read = [data_of(record) for record in client.reader(topic)]
    require(read == payloads, "what was read over a slow line is not what was written")
    require(len(history.acked) == FAR_RECORDS, f"{len(history.acked)} of {FAR_RECORDS} were acked")
    history.judge(stored_in(arena, topic))
    return FAR_RECORDS
