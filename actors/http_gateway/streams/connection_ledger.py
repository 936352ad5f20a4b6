"""What the event streams of one connection have sent, and its client has not acknowledged.

The HTTP server queues every write without a bound. Therefore streams count what they write, and ask the
kernel (TCP_INFO) how much of it the client has acknowledged. The kernel counts for the whole TCP connection.
Over HTTP/2 a connection carries several streams, and other responses between their frames. The ledger adds up
all of them, since nothing tells whose bytes were acknowledged. While more than STREAM_BUFFER_BYTES_MAX are
not acknowledged, all streams of the connection wait: one that is not read holds up the others. If the client
then acknowledges next to nothing for STREAM_STALL_S_MAX, the connection ends.

What the server drops is never acknowledged: the rest of a stream or of a response that the client has reset.
So a stream that leaves takes its bytes with it, and those of responses count for STREAM_STALL_S_MAX. Some of
them may have been acknowledged. Then as many bytes of others are not counted, at most
STREAM_FORGIVEN_BYTES_MAX.
"""

from __future__ import annotations

from collections import Counter

from ringlog.actors.http_gateway.streams.client_socket import ClientSocket
from ringlog.clock import Clock, SystemClock
from ringlog.limits import STREAM_BUFFER_BYTES_MAX, STREAM_FORGIVEN_BYTES_MAX, STREAM_STALL_S_MAX

_STALL_NS = round(STREAM_STALL_S_MAX * 1e9)
_FRAME_HEAD_BYTES = 9
"""Of a frame of HTTP/2."""
_PROGRESS_BYTES = 4_096
"""Acknowledged bytes that are progress of a full connection. Answers to pings are fewer."""


class StreamEnded(Exception):
    """The client has gone, or reads no more."""


class ConnectionLedger:
    """The bytes of one connection, whose streams share it."""

    def __init__(self, socket: ClientSocket, clock: Clock, http_version: str) -> None:
        self._socket, self._clock, self._http_version = socket, clock, http_version
        self._acked: int = socket.acked_bytes() or 0
        """Bytes that the client had acknowledged at the last look."""
        self._uncounted = self._acked
        """Those of them that were not counted here: earlier responses, heads, framing, TLS."""
        self._written = 0
        self._checked_at = 0
        """From so many written bytes on, STREAM_BUFFER_BYTES_MAX / 2 need no look."""
        self._is_full = False
        self._progress = (self._acked, clock.monotonic_ns())
        self._by_stream: Counter[object] = Counter()
        """What each stream has written since everything was last acknowledged."""
        self._response_bytes = 0
        """The same of responses."""
        self._responses_since = 0
        """When the first of them was sent."""
        self._forgiven = 0
        """Bytes that may be unread although they are not counted."""
        self.streams: int = 0
        """Number of streams that share it."""

    @property
    def is_valid(self) -> bool:
        """Whether the connection is open, and not a later one from the same address."""
        acked = self._socket.acked_bytes()
        return acked is not None and acked >= self._acked

    @property
    def has_room(self) -> bool:
        """Whether a stream may write. Looks once in STREAM_BUFFER_BYTES_MAX / 2. Raises StreamEnded."""
        return (
            self._written - self._checked_at < STREAM_BUFFER_BYTES_MAX // 2
            or self.outstanding() < STREAM_BUFFER_BYTES_MAX
        )

    def note_written(self, count: int, stream: object) -> None:
        """Count a frame of a stream of so many bytes."""
        count += _framing_bytes(count, self._http_version)
        self._written += count
        self._by_stream[stream] += count

    def note_response(self, count: int) -> None:
        """Count a response of so many bytes that is no stream."""
        if not self._response_bytes:
            self._responses_since = self._clock.monotonic_ns()
        self._response_bytes += count
        self._written += count

    def note_left(self, stream: object) -> None:
        """Forget what the server may have dropped of a stream that has ended."""
        count = self._by_stream.pop(stream, 0)
        acked = self._socket.acked_bytes()
        if acked is not None:
            self._forgive(count, acked)

    def outstanding(self) -> int:
        """Return an estimate of the bytes that are not acknowledged. Raises StreamEnded."""
        acked = self._socket.acked_bytes()
        if acked is None:
            raise StreamEnded
        if self._response_bytes and self._clock.monotonic_ns() - self._responses_since >= _STALL_NS:
            self._forgive(self._response_bytes, acked)
            self._response_bytes = 0
        found = self._found(acked)
        if not found:
            self._by_stream.clear()
            self._response_bytes = 0
        self._checked_at = self._written if found < STREAM_BUFFER_BYTES_MAX // 2 else 0
        was_full, self._is_full = self._is_full, found >= STREAM_BUFFER_BYTES_MAX
        has_filled = self._is_full and not was_full
        if has_filled or acked - self._progress[0] >= (_PROGRESS_BYTES if was_full else 1):
            self._progress = (acked, self._clock.monotonic_ns())
        return found

    def _found(self, acked: int) -> int:
        """Return how much is not acknowledged of what was written."""
        self._acked = acked
        more = acked - self._written - self._uncounted
        if more > 0:  # Not counted, or not any more: then they were not dropped.
            self._uncounted += more
            self._forgiven = max(self._forgiven - more, 0)
        return self._written - (acked - self._uncounted)

    def _forgive(self, count: int, acked: int) -> None:
        """Count up to so many bytes no more: the server may have dropped them."""
        count = min(count, self._found(acked))
        if not count or self._forgiven >= STREAM_FORGIVEN_BYTES_MAX:
            return
        self._forgiven += min(count, STREAM_BUFFER_BYTES_MAX)  # The streams had no more that can be unread.
        self._written -= count
        self._checked_at = 0
        self._is_full = False
        self._progress = (acked, self._clock.monotonic_ns())

    def require_progress(self) -> None:
        """Raise StreamEnded, and end the connection, if its client has acknowledged nothing for too long."""
        if self._clock.monotonic_ns() - self._progress[1] > _STALL_NS:
            self._socket.abort()
            raise StreamEnded

    def forget(self) -> None:
        """State that the connection has no stream any more: another one may get the descriptor."""
        self._socket.forget()


class ConnectionLedgers:
    """The ledgers of the connections with event streams, by the address of the client."""

    def __init__(self) -> None:
        self._open: dict[str, ConnectionLedger] = {}

    def join(self, address: str, http_version: str) -> ConnectionLedger:
        """Return the ledger of a connection for one more stream, which calls `leave` at its end.

        `http_version` is "1" (HTTP/1.0), "1.1" or "2", as in Scope.
        """
        found = self._open.get(address)
        if found is None or not found.is_valid:
            found = self._open[address] = ConnectionLedger(ClientSocket(address), SystemClock(), http_version)
        found.streams += 1
        return found

    def leave(self, address: str, ledger: ConnectionLedger, stream: object) -> None:
        """End what `join` began. `stream` is what it has named itself to `note_written`."""
        ledger.streams -= 1
        ledger.note_left(stream)
        if not ledger.streams and self._open.get(address) is ledger:
            del self._open[address]
            ledger.forget()

    def note_response(self, address: str, count: int) -> None:
        """Count a response of so many bytes that is no stream. Its connection may have streams."""
        found = self._open.get(address)
        if found is not None:
            found.note_response(count)


LEDGERS = ConnectionLedgers()
"""Those of this process."""


def _framing_bytes(count: int, http_version: str) -> int:
    """Return the least number of bytes that HTTP adds to a write.

    HTTP/1.0 adds none, HTTP/1.1 the length of a chunk and two line ends, HTTP/2 the head of a frame. More
    would add up, and one day a stream whose client has read everything would have no room.
    """
    if http_version == "1.1":
        return (count.bit_length() + 3) // 4 + 4
    return _FRAME_HEAD_BYTES if http_version == "2" else 0
