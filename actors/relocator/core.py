"""Decisions about reads of cold parts: from the cache, or by one fetch for all waiting clients. Pure.

The moving thread decides about moves (plan.py).

- A request gets one reply: bytes, a refusal, or `cold_unavailable` after its timeout.
- At most COLD_READ_THREADS fetches run and COLD_READS_QUEUED_MAX wait. Further requests are refused with
  Throttled.
- The cache never exceeds its limit in bytes. The least recently used blocks are evicted first.
- If the store lacks a part, or the part has another size, the reply is an error and never an end of data.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

from ringlog.contract import ControlReceived, Reply, Tick
from ringlog.envelope import messages as m
from ringlog.envelope.refusal import error_reply
from ringlog.errors import (
    ColdUnavailable,
    InvalidRequest,
    InvariantViolation,
    Refused,
    RinglogError,
    Throttled,
)
from ringlog.limits import COLD_BLOCK_BYTES, COLD_READ_THREADS, COLD_READS_QUEUED_MAX, FRAME_BYTES_MAX
from ringlog.segment.layout import split_part

RETRY_AFTER_MS = 100
_Key = tuple[str, int]


@dataclass(frozen=True, slots=True)
class Fetch:
    """Effect: read bytes [start, stop) of a part from the store, in a thread that may block."""

    ticket: int
    path: str
    start: int
    stop: int


@dataclass(frozen=True, slots=True)
class Fetched:
    """Event: result of a Fetch: its bytes, or None and the error."""

    ticket: int
    data: bytes | None
    error: RinglogError | None = None


@dataclass(frozen=True, slots=True)
class PartChanged:
    """Event: a part was moved, replaced or deleted."""

    path: str


Effect = Fetch | Reply


@dataclass(frozen=True, slots=True)
class _ColdReadRequest:
    client: bytes
    corr: int
    start: int
    stop: int
    deadline_ns: int


@dataclass(slots=True)
class _OpenFetch:
    fetch: Fetch
    requests: list[_ColdReadRequest] = field(default_factory=list)


class BlockCache:
    """LRU cache of blocks of COLD_BLOCK_BYTES by (path, index), limited in bytes."""

    def __init__(self, bytes_max: int) -> None:
        self.bytes: int = 0
        self._bytes_max = bytes_max
        self._blocks: OrderedDict[_Key, bytes] = OrderedDict()

    def get(self, path: str, start: int, stop: int) -> bytes | None:
        """Return bytes [start, stop), fewer only at the end of the part; None if a block is not cached."""
        pieces = []
        first, last = start // COLD_BLOCK_BYTES, (stop - 1) // COLD_BLOCK_BYTES
        for index in range(first, last + 1):
            block = self._blocks.get((path, index))
            if block is None:
                return None
            self._blocks.move_to_end((path, index))
            pieces.append(block)
            if len(block) < COLD_BLOCK_BYTES:
                break
        base = first * COLD_BLOCK_BYTES
        return b"".join(pieces)[start - base : stop - base]

    def put(self, path: str, start: int, data: bytes) -> None:
        """Cache bytes from `start`, a multiple of the block size.

        They end at the end of a block or of the part.
        """
        for offset in range(0, len(data), COLD_BLOCK_BYTES):
            key = (path, (start + offset) // COLD_BLOCK_BYTES)
            self.bytes -= len(self._blocks.pop(key, b""))
            self._blocks[key] = block = data[offset : offset + COLD_BLOCK_BYTES]
            self.bytes += len(block)
        while self.bytes > self._bytes_max:
            _, oldest = self._blocks.popitem(last=False)
            self.bytes -= len(oldest)

    def check(self) -> None:
        """Check that the cache counts its bytes correctly and is within its limit."""
        if not sum(map(len, self._blocks.values())) == self.bytes <= self._bytes_max:
            raise InvariantViolation(
                "byte count of the block cache is wrong or above its limit", bytes=self.bytes,
                max=self._bytes_max,
            )  # fmt: skip

    def evict(self, path: str) -> None:
        """Drop the blocks of a part that was changed or deleted."""
        for key in [key for key in self._blocks if key[0] == path]:
            self.bytes -= len(self._blocks.pop(key))


class ColdReads:
    """Requests of clients for cold bytes. Tick events carry the time."""

    def __init__(self, cache_bytes: int, timeout_ns: int) -> None:
        self.cache: BlockCache = BlockCache(cache_bytes)
        self.hits: int = 0
        self.requested: int = 0
        self.failed: int = 0
        self._timeout_ns = timeout_ns
        self._open: dict[int, _OpenFetch] = {}
        self._by_range: dict[tuple[str, int, int], int] = {}
        self._ticket = 0
        self._now_ns = 0

    def handle(self, events: Sequence[Any]) -> list[Effect]:
        """Process events in order and return the effects in the order to perform them."""
        effects: list[Effect] = []
        for event in events:
            match event:
                case Tick():
                    self._now_ns = event.monotonic_ns
                    effects += self._expire_requests()
                case ControlReceived(message=m.ColdRead() as message):
                    effects += self._ask(event.client, event.corr, message)
                case Fetched():
                    effects += self._fetched(event)
                case PartChanged():
                    self.cache.evict(event.path)
                case _:
                    raise InvariantViolation("not an event of the relocator", event=type(event).__name__)
        return effects

    def _ask(self, client: bytes, corr: int, message: m.ColdRead) -> list[Effect]:
        self.requested += 1
        try:
            _check(message)
            cached = self.cache.get(message.path, message.start, message.stop)
            if cached is not None:
                self.hits += 1
                return [_answer(client, corr, cached)]
            request = _ColdReadRequest(
                client, corr, message.start, message.stop, self._now_ns + self._timeout_ns
            )
            return self._wait(message.path, request)
        except Refused as e:
            return [_refuse(client, corr, e)]

    def _wait(self, path: str, request: _ColdReadRequest) -> list[Effect]:
        start = request.start // COLD_BLOCK_BYTES * COLD_BLOCK_BYTES
        stop = -(-request.stop // COLD_BLOCK_BYTES) * COLD_BLOCK_BYTES
        running = self._by_range.get((path, start, stop))
        if running is not None:
            self._open[running].requests.append(request)
            return []
        if len(self._open) >= COLD_READ_THREADS + COLD_READS_QUEUED_MAX:
            raise Throttled("too many cold reads in progress, retry later", retry_after_ms=RETRY_AFTER_MS)
        self._ticket += 1
        fetch = Fetch(self._ticket, path, start, stop)
        self._open[fetch.ticket] = _OpenFetch(fetch, [request])
        self._by_range[path, start, stop] = fetch.ticket
        return [fetch]

    def _fetched(self, done: Fetched) -> list[Reply]:
        """Return the replies to a fetch. Late bytes are cached for the next request."""
        opened = self._open.pop(done.ticket)
        fetch, data, error = opened.fetch, done.data, done.error
        self._by_range.pop((fetch.path, fetch.start, fetch.stop), None)
        if data is None:
            self.failed += 1
            refusal = error if isinstance(error, Refused) else _no_copy(fetch.path, error)
            return [_refuse(request.client, request.corr, refusal) for request in opened.requests]
        self.cache.put(fetch.path, fetch.start, data)
        return [
            _answer(
                request.client, request.corr, data[request.start - fetch.start : request.stop - fetch.start]
            )
            for request in opened.requests
        ]

    def _expire_requests(self) -> list[Reply]:
        """Return replies to the requests whose time is over.

        Their fetches continue and still occupy threads.
        """
        late: list[Reply] = []
        for opened in self._open.values():
            for request in [each for each in opened.requests if each.deadline_ns <= self._now_ns]:
                opened.requests.remove(request)
                self.failed += 1
                error = ColdUnavailable(
                    "read of the cold store timed out, retry later", file=opened.fetch.path
                )
                late.append(_refuse(request.client, request.corr, error))
        return late

    def next_deadline_ns(self) -> int | None:
        """Return when the next request times out, in ns, or None."""
        return min(_deadlines(self._open.values()), default=None)

    def check(self) -> None:
        """Check the limits of fetches and cache."""
        if len(self._open) > COLD_READ_THREADS + COLD_READS_QUEUED_MAX or len(self._by_range) > len(
            self._open
        ):
            raise InvariantViolation("more fetches than allowed", open=len(self._open))
        self.cache.check()


def _deadlines(opened: Iterable[_OpenFetch]) -> Iterable[int]:
    return (request.deadline_ns for each in opened for request in each.requests)


def _check(message: m.ColdRead) -> None:
    if split_part(message.path) is None:
        raise InvalidRequest("path must name a part of a segment", path=message.path[:256])
    length = message.stop - message.start
    if message.start < 0 or not 0 < length <= FRAME_BYTES_MAX:
        raise InvalidRequest(
            f"start to stop must be 1 to {FRAME_BYTES_MAX} bytes, got {message.start} to {message.stop}",
            start=message.start, stop=message.stop, max_bytes=FRAME_BYTES_MAX,
        )  # fmt: skip


def _no_copy(path: str, error: RinglogError | None) -> ColdUnavailable:
    return ColdUnavailable("cold data cannot be read from the store", file=path, error=str(error)[:300])


def _answer(client: bytes, corr: int, data: bytes) -> Reply:
    return Reply(client, corr, m.ColdBytes(len(data)), data)


def _refuse(client: bytes, corr: int, error: Refused) -> Reply:
    return Reply(client, corr, error_reply(error))
