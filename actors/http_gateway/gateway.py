"""What all handlers of the HTTP gateway share: the client of the engine, settings, keys and counters."""

from __future__ import annotations

import asyncio
import contextlib
from collections import Counter
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from ringlog.access.key_ring import BearerKeys
from ringlog.access.keys import Principal
from ringlog.actors.http_gateway.admin.engine_status import EngineStatusReader
from ringlog.actors.http_gateway.admin.request_counts import Counted, RequestCounts, sum_counts
from ringlog.actors.http_gateway.admin.topic_metrics import TopicMetricsReader
from ringlog.actors.http_gateway.api.error_replies import HttpError
from ringlog.actors.http_gateway.siblings import Siblings
from ringlog.aio import Client
from ringlog.board.board import Board, ProcessSlot
from ringlog.board.layout import HttpGatewayField, ProcessField, ProcessState
from ringlog.board.processes import SUPERVISOR_SLOT, http_gateway_counts, shard_slot
from ringlog.clock import Clock, SystemClock
from ringlog.config import Config
from ringlog.errors import NotReady, RinglogError, ShuttingDown, Throttled, Unauthorized
from ringlog.types import Durability

if TYPE_CHECKING:
    from ringlog.actors.http_gateway.leases.workers import Workers
    from ringlog.actors.http_gateway.records.writes import WriteLanes
    from ringlog.actors.http_gateway.streams.session_moves import SessionMoves
    from ringlog.actors.http_gateway.streams.watches import WatchSessions

RETRY_AFTER_MS = 1_000
_PER_MILLE = 1_000
NOTHING_WRITTEN = {"wal_append_ms": 0.0, "fsync_ms": 0.0}


class Gateway:
    """State of one HTTP gateway. Belongs to its event loop."""

    def __init__(
        self, settings: Config, client: Client, board: Board, slot: ProcessSlot, siblings: Siblings,
        shm_dir: str,
    ) -> None:  # fmt: skip
        self.settings = settings
        self.number: int = siblings.number
        """Number of this gateway, from 0."""
        self.siblings = siblings
        self.client = client
        """Client of this engine, over rings. Its timeout is HTTP_REQUEST_MS_MAX."""
        self.board = board
        self.slot = slot
        self.clock: Clock = SystemClock()
        self.loop: asyncio.AbstractEventLoop = asyncio.get_event_loop_policy().get_event_loop()
        self.is_draining = False
        self.streams: set[asyncio.Task[Any]] = set()
        """Tasks of open streams and of waits. At a stop each is cancelled, and sends its final frame."""
        self.reading: dict[asyncio.Task[Any], int] = {}
        """Tasks that read the body of a request, with their deadlines in ns."""
        self.discarding: dict[asyncio.Task[Any], int] = {}
        """Tasks that take an unread body off its connection after the answer, with their deadlines in ns.
        A stop does not wait for them."""
        self._count_files = [http_gateway_counts(shm_dir, number) for number in range(siblings.processes)]
        self.requests: RequestCounts = RequestCounts(self._count_files[self.number])
        """Requests that this gateway has answered, by route template and status."""
        for field in HttpGatewayField:
            slot.set(field, 0)  # A predecessor may have left its numbers.
        self._in_flight: Counter[str] = Counter()
        self._streaming: Counter[str] = Counter()
        self._principals: dict[asyncio.Task[Any], Principal] = {}
        self._revoked: set[asyncio.Task[Any]] = set()
        self._supervisor = board.process(SUPERVISOR_SLOT)
        self._shards = [board.process(shard_slot(shard)) for shard in range(settings.wal.shards)]
        self._is_serving = False
        self.engine_status: EngineStatusReader = EngineStatusReader(self.clock)
        self.topic_metrics: TopicMetricsReader = TopicMetricsReader(self.clock)
        self.keys: BearerKeys
        """Keys that are admitted now."""
        self.lanes: WriteLanes
        self.watches: WatchSessions
        self.moves: SessionMoves
        self.workers: Workers

    # -- readiness ------------------------------------------------------------------------------------

    @property
    def is_serving(self) -> bool:
        """Whether the engine has announced that it serves requests. It stays true."""
        if not self._is_serving:
            self._is_serving = self._supervisor.get(ProcessField.STATE) == ProcessState.READY
        return self._is_serving

    @property
    def recovery_progress(self) -> float:
        """Part of the logs that is replayed, 0 to 1: the shard that is furthest behind."""
        return min(
            (
                1.0 if shard.get(ProcessField.STATE) == ProcessState.READY
                else min(shard.get(ProcessField.PROGRESS) / _PER_MILLE, 1.0)
                for shard in self._shards
            ),
            default=1.0,
        )  # fmt: skip

    def commit_times(self, shard: int, durability: Durability) -> dict[str, float]:
        """Return how long the shard's latest commit took: the one just settled, or one after it."""
        is_known = shard < len(self._shards) and durability is not Durability.EPHEMERAL
        return commit_times(self._shards[shard], durability) if is_known else dict(NOTHING_WRITTEN)

    def require_serving(self) -> None:
        """Raise ShuttingDown while the gateway stops, NotReady before the engine serves requests."""
        self._require_running()
        if not self.is_serving:
            raise NotReady(
                "the engine replays its logs", replay_progress=round(self.recovery_progress, 3),
                retry_after_ms=RETRY_AFTER_MS,
            )  # fmt: skip

    def _require_running(self) -> None:
        if self.is_draining:
            raise ShuttingDown("the engine is stopping", retry_after_ms=RETRY_AFTER_MS)

    @contextlib.contextmanager
    def ended_at_stop(self, task: asyncio.Task[Any]) -> Iterator[None]:
        """Have a task cancelled when the gateway stops, until the end of the block.

        Raises ShuttingDown if it stops already: those that come later are not cancelled any more.
        """
        self._require_running()
        self.streams.add(task)
        try:
            yield
        finally:
            self.streams.discard(task)

    # -- limits ---------------------------------------------------------------------------------------

    def acquire_request(self, principal: Principal) -> None:
        """Count a request of a key. Raises Throttled beyond `http.max_inflight_per_key`."""
        most = self.settings.http.max_inflight_per_key
        if self._in_flight[principal.name] >= most and not principal.is_anyone:
            raise _beyond("max_inflight_per_key", most)
        self._in_flight[principal.name] += 1
        self.slot.add(HttpGatewayField.IN_FLIGHT, 1)

    def release_request(self, principal: Principal) -> None:
        """Give back what `acquire_request` took."""
        _decrement(self._in_flight, principal.name)
        self.slot.add(HttpGatewayField.IN_FLIGHT, -1)

    @contextlib.contextmanager
    def stream(self, principal: Principal) -> Iterator[None]:
        """Count an event stream, work stream or WebSocket of a key, which runs in the current task.

        Raises Throttled beyond the limits, Unauthorized if the key was changed since the request came, and
        ShuttingDown while the gateway stops.
        """
        if not self.keys.still_admits(principal):
            raise Unauthorized("the key of this request was revoked or changed")
        http = self.settings.http
        if sum(self._streaming.values()) >= http.max_sse_connections:
            raise _beyond("max_sse_connections", http.max_sse_connections)
        of_key = self._streaming[principal.name]
        if of_key >= http.max_sse_connections_per_key and not principal.is_anyone:
            raise _beyond("max_sse_connections_per_key", http.max_sse_connections_per_key)
        task = asyncio.current_task()
        assert task is not None
        with self.ended_at_stop(task):
            self._streaming[principal.name] += 1
            self.slot.add(HttpGatewayField.STREAMS, 1)
            self._principals[task] = principal
            try:
                yield
            finally:
                self._principals.pop(task, None)
                self._revoked.discard(task)
                _decrement(self._streaming, principal.name)
                self.slot.add(HttpGatewayField.STREAMS, -1)

    def change_keys(self, keys: BearerKeys) -> None:
        """Admit these keys from now on, and end the streams of keys that were removed or changed."""
        self.keys = keys
        for task, principal in tuple(self._principals.items()):
            if not keys.still_admits(principal):
                self._revoked.add(task)
                task.cancel()

    def ending_error(self) -> RinglogError | None:
        """Return why the current task was cancelled, for its final frame. None: its client has gone."""
        if self.is_draining:
            return ShuttingDown("the engine is stopping")
        if asyncio.current_task() in self._revoked:
            return HttpError(410, "gone", "the key of this stream was revoked or changed")
        return None

    def end_late_bodies(self, now_ns: int) -> None:
        """Cancel the requests whose bodies did not arrive in time: they are answered with 408, if they are
        not answered yet."""
        for table in (self.reading, self.discarding):
            for task in [task for task, deadline_ns in table.items() if deadline_ns <= now_ns]:
                del table[task]
                task.cancel()

    def end_discards(self) -> None:
        """Await no body any more that has been answered. Its connection ends."""
        for task in tuple(self.discarding):
            del self.discarding[task]
            task.cancel()

    @property
    def requests_in_flight(self) -> int:
        """Number of requests without a reply, streams not counted."""
        return sum(self._in_flight.values())

    # -- numbers of all gateways ----------------------------------------------------------------------

    def answered(self) -> Counter[Counted]:
        """Return the requests that all gateways of the engine have answered, by route template and status."""
        return sum_counts(self._count_files)

    def total(self, field: HttpGatewayField) -> int:
        """Return the sum of a number over all gateways of the engine that run."""
        pages = self.siblings.pages
        running = [
            page for page in pages.values() if page.state in {ProcessState.READY, ProcessState.DRAINING}
        ]
        return sum(page.get(field) for page in (self.slot, *running))


def commit_times(page: ProcessSlot, durability: Durability) -> dict[str, float]:
    """Return the times of a shard's latest commit in ms.

    What the durability class does not wait for is 0. `throttle_wait_ms` is there if pressure delayed it.
    """
    append_ns = page.get(ProcessField.LAST_APPEND_NS)
    sync_ns = page.get(ProcessField.LAST_SYNC_NS) if durability is Durability.FSYNC else 0
    times = {"wal_append_ms": round(append_ns / 1e6, 3), "fsync_ms": round(sync_ns / 1e6, 3)}
    if wait_ns := page.get(ProcessField.LAST_WAIT_NS):
        times["throttle_wait_ms"] = round(wait_ns / 1e6, 3)
    return times


def _decrement(counter: Counter[str], name: str) -> None:
    counter[name] -= 1
    if not counter[name]:
        del counter[name]


def _beyond(limit: str, most: int) -> Throttled:
    return Throttled(
        f"{limit} is reached: retry later, or raise http.{limit}", limit=limit, max=most,
        retry_after_ms=RETRY_AFTER_MS,
    )  # fmt: skip
