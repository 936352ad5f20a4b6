"""A TCP proxy on the loopback that injects network faults: cut, hold, delay, split, limit bandwidth.

It has one thread and one selector. `Weather` is read again for every piece, so a test can change it while
traffic flows. Byte counts are per connection and direction, since `count_from_here` was called.
"""

from __future__ import annotations

import contextlib
import random
import selectors
import socket
import struct
import threading
import time
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass, field

PIECE_BYTES = 65_536
HELD_BYTES_MAX = 1 << 20
"""Limit for one direction of one connection. At the limit the proxy stops reading, and the sender's window
closes."""
TICK_S = 0.002
CONNECT_S = 5.0
UP, DOWN = "up", "down"
"""Client to engine; engine to client."""


@dataclass(slots=True)
class Weather:
    """State of the network. All fields can be changed at any time."""

    refuses: bool = False
    """New connections are reset at once."""
    holds: set[str] = field(default_factory=set)
    """Directions in which no data moves. Both directions simulate a peer that died silently."""
    cut_after: dict[str, int] = field(default_factory=dict)
    """Direction -> bytes that still pass before the connection is reset."""
    delay_s: float = 0.0
    piece_bytes: int = PIECE_BYTES
    bytes_per_s: float = 0.0
    """0: unlimited."""
    stall_share: float = 0.0
    """Share of the pieces that wait for `stall_s`. Above TCP, a lost segment has this effect."""
    stall_s: float = 0.2


@dataclass(slots=True, eq=False)
class _Flow:
    """One direction of one connection."""

    name: str
    source: socket.socket
    target: socket.socket
    held: deque[tuple[float, bytes]] = field(default_factory=deque)
    """(earliest time to send, bytes)."""
    held_bytes: int = 0
    passed: int = 0
    free_at: float = 0.0
    is_over: bool = False


class Proxy:
    """Proxy from `port` to another port of this host. A context manager."""

    def __init__(self, target_port: int, seed: int = 0) -> None:
        self.weather = Weather()
        self.resets = 0
        self.accepted = 0
        self.refused = 0
        self.ended_by_engine = 0
        """Connections that the engine closed, not the client or the weather."""
        self._target_port = target_port
        self._dice = random.Random(seed)
        self._listener = socket.create_server(("127.0.0.1", 0), backlog=512)
        self._listener.setblocking(False)
        self.port = int(self._listener.getsockname()[1])
        self._pairs: list[tuple[_Flow, _Flow]] = []
        self._lock = threading.Lock()
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name="proxy", daemon=True)

    def __enter__(self) -> Proxy:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        self._thread.join(CONNECT_S)
        self._listener.close()
        for pair in list(self._pairs):
            self._end(pair, is_reset=False)

    @property
    def connections(self) -> int:
        """Number of open connections."""
        with self._lock:
            return len(self._pairs)

    def engine_side_ports(self) -> set[int]:
        """Return the local ports of the open connections to the engine."""
        with self._lock:
            return {int(up.target.getsockname()[1]) for up, _ in self._pairs}

    def passed(self, direction: str) -> int:
        """Return the bytes that passed in one direction over the open connections since `count_from_here`."""
        with self._lock:
            return sum(flow.passed for pair in self._pairs for flow in pair if flow.name == direction)

    def count_from_here(self) -> None:
        """Set the byte counts to 0."""
        with self._lock:
            for pair in self._pairs:
                for flow in pair:
                    flow.passed = 0

    def cut_all(self) -> None:
        """Reset every connection now."""
        with self._lock:
            for pair in list(self._pairs):
                self._end(pair, is_reset=True)

    # -- the thread -----------------------------------------------------------------------------------

    def _run(self) -> None:
        while not self._stop.is_set():
            with selectors.DefaultSelector() as selector:
                selector.register(self._listener, selectors.EVENT_READ)
                with self._lock:  # `cut_all` closes sockets in another thread.
                    for flow in (flow for pair in self._pairs for flow in pair):
                        if self._reads(flow):
                            selector.register(flow.source, selectors.EVENT_READ, flow)
                ready = selector.select(TICK_S)
            with self._lock:
                for key, _ in ready:
                    if key.data is None:
                        self._accept()
                    elif key.data.source.fileno() >= 0:  # Otherwise it was cut in the meantime.
                        self._take(key.data)
                for pair in list(self._pairs):
                    self._pass_on(pair)

    def _reads(self, flow: _Flow) -> bool:
        return flow.held_bytes < HELD_BYTES_MAX and flow.name not in self.weather.holds and not flow.is_over

    def _accept(self) -> None:
        try:
            inner, _ = self._listener.accept()
        except OSError:
            return
        if self.weather.refuses:
            self.refused += 1
            _reset(inner)
            return
        try:
            outer = socket.create_connection(("127.0.0.1", self._target_port), CONNECT_S)
        except OSError:
            _reset(inner)
            return
        for each in (inner, outer):
            each.setblocking(False)
            each.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self.accepted += 1
        self._pairs.append((_Flow(UP, inner, outer), _Flow(DOWN, outer, inner)))

    def _take(self, flow: _Flow) -> None:
        try:
            data = flow.source.recv(PIECE_BYTES)
        except BlockingIOError:
            return
        except OSError:
            data = b""
        if not data:
            flow.is_over = True
            self.ended_by_engine += flow.name == DOWN
            return
        weather, now = self.weather, time.monotonic()
        for piece in _pieces(data, weather.piece_bytes):
            due = now + weather.delay_s
            if weather.bytes_per_s:
                flow.free_at = max(flow.free_at, now) + len(piece) / weather.bytes_per_s
                due = max(due, flow.free_at)
            if weather.stall_share and self._dice.random() < weather.stall_share:
                due += weather.stall_s
            # TCP preserves order: pieces after a delayed piece are delayed too.
            due = max(due, flow.held[-1][0]) if flow.held else due
            flow.held.append((due, piece))
            flow.held_bytes += len(piece)

    def _pass_on(self, pair: tuple[_Flow, _Flow]) -> None:
        for flow in pair:
            if not self._send(pair, flow):
                return
        if any(flow.is_over and not flow.held for flow in pair):
            self._end(pair, is_reset=False)

    def _send(self, pair: tuple[_Flow, _Flow], flow: _Flow) -> bool:
        """Send the pieces that are due. Returns False if the connection has ended."""
        weather, now = self.weather, time.monotonic()
        while flow.held and flow.held[0][0] <= now and flow.name not in weather.holds:
            due, piece = flow.held.popleft()
            left = weather.cut_after.get(flow.name)
            allowed = piece if left is None else piece[: max(left - flow.passed, 0)]
            try:
                sent = flow.target.send(allowed) if allowed else 0
            except BlockingIOError:
                flow.held.appendleft((due, piece))
                return True
            except OSError:
                self._end(pair, is_reset=True)
                return False
            flow.passed += sent
            flow.held_bytes -= sent
            if left is not None and flow.passed >= left:
                del weather.cut_after[flow.name]
                self._end(pair, is_reset=True)
                return False
            if sent < len(piece):
                flow.held.appendleft((due, piece[sent:]))
        return True

    def _end(self, pair: tuple[_Flow, _Flow], *, is_reset: bool) -> None:
        if pair not in self._pairs:
            return
        self._pairs.remove(pair)
        self.resets += is_reset
        for flow in pair:
            if is_reset:
                _reset(flow.source)
            else:
                flow.source.close()


def _pieces(data: bytes, size: int) -> Iterator[bytes]:
    for at in range(0, len(data), size):
        yield data[at : at + size]


def _reset(sock: socket.socket) -> None:
    """Close with RST instead of FIN."""
    with contextlib.suppress(OSError):
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    sock.close()
