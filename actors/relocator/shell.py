"""The relocator's shell: a socket for cold reads, threads that fetch, and one thread that moves segments.

Three kinds of threads ensure that only requests for cold bytes wait for the store. The main thread replies to
requests and sends heartbeats, a few threads fetch, and one moves segments.
"""

from __future__ import annotations

import functools
import logging
import random
import threading
from typing import Any

from ringlog.actors.relocator.core import ColdReads, Fetch, Fetched, PartChanged
from ringlog.actors.relocator.mover import M, Mover
from ringlog.board.board import Board
from ringlog.board.layout import ProcessField
from ringlog.board.processes import socket_of
from ringlog.clock import Clock, SystemClock
from ringlog.config import Config
from ringlog.contract import ControlReceived, Tick
from ringlog.envelope import messages as m
from ringlog.envelope.boot import ActorBoot
from ringlog.errors import (
    ConfigError,
    ExitCode,
    ShuttingDown,
)
from ringlog.limits import COLD_READ_THREADS, COLD_READS_QUEUED_MAX
from ringlog.link.shard_requests import ShardRequests
from ringlog.logs import log_event
from ringlog.ring.doorbell import EventBell
from ringlog.runtime.control import ActorControlSocket, Sleeper
from ringlog.runtime.thread_pool import BackgroundThread, ThreadPool
from ringlog.signals import StopFlag
from ringlog.storage.real_disk import RealDisk
from ringlog.storage.segment_hold import SegmentHold
from ringlog.tier.copies import SegmentCopies
from ringlog.tier.open_store import open_owned_store

log: logging.Logger = logging.getLogger("ringlog.relocator")
REQUESTS_PER_TURN = 256
REQUEST_TIMEOUT_S = 10.0
STOP_S = 2.0
"""Longest wait for a move in progress at the exit, in seconds. The next incarnation repeats the move."""


class RelocatorShell:
    """One incarnation of the relocator."""

    def __init__(self, boot: ActorBoot, settings: Config, *, clock: Clock | None = None) -> None:
        """Create the shell. Raises ConfigError if the settings name no store that can be opened."""
        self._boot, self._cold = boot, settings.cold
        self._clock = clock or SystemClock()
        disk = RealDisk()
        opened = open_owned_store(settings.cold, disk, boot.data_dir, boot.engine_id)
        if opened is None:
            raise ConfigError("no cold store configured: set cold.dir or cold.url")
        self._store = opened
        self._slot = Board.open(boot.shm_dir, writable=True).process(boot.slot)
        self._bell = EventBell()
        self._stopping = threading.Event()
        self.core: ColdReads = ColdReads(settings.cold.cache_bytes, round(settings.cold.timeout_s * 1e9))
        self._changed_parts: list[str] = []
        self._router = ActorControlSocket(socket_of(boot.shm_dir, boot.name), boot, self._slot)
        self._fetchers = ThreadPool("fetch", COLD_READ_THREADS, COLD_READS_QUEUED_MAX, self._bell.ring)
        hold = SegmentHold(boot.data_dir, self._clock, min_free_bytes=settings.data.min_free_bytes)
        self.mover: Mover = Mover(
            SegmentCopies(disk, boot.data_dir, self._store), settings.cold, shards=boot.shards, ask=self._ask,
            clock=self._clock, jitter=random.random, is_stopping=self._stopping.is_set,
            on_change=self._changed_parts.append, is_held=hold.is_held,
        )  # fmt: skip
        self._requests: ShardRequests | None = None
        self.exit_code: ExitCode | None = None

    # -- lifecycle: runtime.duty_cycle.Actor ----------------------------------------------------------

    def on_start(self, stop: StopFlag) -> None:
        """Start the moving thread."""
        self._sleeper = Sleeper(stop.fileno(), self._bell.fileno(), self._router.fileno())
        self._moving = BackgroundThread("move", self._move, self._bell.ring)
        log_event(log, logging.INFO, "ready", cold=self._cold.dir or self._cold.url)

    def do_work(self) -> int:
        """One pass of the main thread's loop."""
        self._moving.raise_failure()
        if self._stopping.is_set():
            self._moving.join(STOP_S)
            self.exit_code = ExitCode.OK
            return 0
        self._bell.drain()
        now_ns = self._clock.monotonic_ns()
        events: list[Any] = [Tick(self._clock.now_us(), now_ns)]
        while self._changed_parts:
            events.append(PartChanged(self._changed_parts.pop()))
        events += [Fetched(*done) for done in self._fetchers.take_results()]
        for client, envelope, attachment in self._router.receive_requests(REQUESTS_PER_TURN):
            if isinstance(envelope.message, m.ColdRead):
                events.append(ControlReceived(client, envelope.corr, envelope.message, attachment))
            else:
                self._router.refuse(client, envelope)
        effects = self.core.handle(events)
        for effect in effects:
            self._perform(effect)
        self._router.beat(now_ns)
        self._show_counts()
        return len(events) - 1 + len(effects)

    def idle(self, work: int) -> None:
        """Sleep until a request arrives, a thread finishes, or a read times out."""
        if not work and not self._router.has_input():
            self._sleeper.sleep(self._clock.monotonic_ns(), self.core.next_deadline_ns())

    def drain(self) -> bool:
        """Signal the moving thread to end."""
        self._stopping.set()
        return True

    def on_close(self) -> None:
        """Close the sockets. Threads are daemons and have no state that must survive."""
        self._router.close()
        self._bell.close()

    def _show_counts(self) -> None:
        counts, slot = self.mover.counts, self._slot
        for word, value in (
            (ProcessField.MOVED, counts.moved),
            (ProcessField.MOVED_BYTES, counts.moved_bytes), (ProcessField.MOVES_DUE, counts.segments_due),
            (ProcessField.MOVES_FAILED, counts.failed),
            (ProcessField.HEALED, counts.healed), (ProcessField.QUARANTINED,
            len(self.mover.backoff.quarantined)),
            (ProcessField.COLD_READS, self.core.requested), (ProcessField.COLD_HITS, self.core.hits),
            (ProcessField.COLD_FAILED, self.core.failed),
        ):  # fmt: skip
            slot.set(word, value)

    # -- requests -------------------------------------------------------------------------------------

    def _perform(self, effect: Any) -> None:
        if isinstance(effect, Fetch):
            read = functools.partial(self._store.get_range, effect.path, effect.start, effect.stop)
            # The core never has more fetches than threads and queue can take.
            is_taken = self._fetchers.submit(effect.ticket, read)
            assert is_taken, "as many fetches as the core counts"
            return
        self._router.send(effect.client, effect.message, effect.corr, effect.attachment)

    # -- the moving thread ----------------------------------------------------------------------------

    def _move(self) -> None:
        self._requests = ShardRequests(self._boot.shm_dir, self._boot.shards, stop=self._stopping)
        try:
            self.mover.owns_store()  # The interval may be a day, and removals wait for the claim.
            while not self._stopping.wait(self._cold.interval_s):
                try:
                    self.mover.run_round()
                except ShuttingDown:
                    # This process or a shard is stopping. The next round finds out which.
                    log_event(log, logging.DEBUG, "round ended early")
        finally:
            self._requests.close()

    def _ask(self, shard: int, message: m.Message, wanted: type[M]) -> M:
        assert self._requests is not None, "only the moving thread asks"
        return self._requests.ask(shard, message, wanted, timeout_s=REQUEST_TIMEOUT_S).message
