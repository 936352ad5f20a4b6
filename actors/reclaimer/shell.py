"""The reclaimer's shell: a socket for ScrubNow, a check of free disk space, and threads that do the work.

One thread runs rounds, one scrubs, and one removes cold parts, so a hanging store delays no other work. The
main thread replies to requests, sends heartbeats, and watches the disk.
"""

from __future__ import annotations

import logging
import shutil
import threading
from collections import deque
from collections.abc import Callable
from typing import Any

from ringlog.actors.reclaimer.rate_limiter import ByteRateLimiter
from ringlog.actors.reclaimer.reclaim_round import Reclaimer
from ringlog.actors.reclaimer.rewriter import Rewriter
from ringlog.actors.reclaimer.scrub_pass import ScrubPass, pass_seconds, scrub_items
from ringlog.actors.reclaimer.scrubber import Scrubber
from ringlog.board.board import Board
from ringlog.board.layout import ProcessField
from ringlog.board.processes import COMPACTOR, socket_of
from ringlog.clock import Clock, SystemClock
from ringlog.config import Config
from ringlog.envelope import messages as m
from ringlog.envelope.boot import ActorBoot
from ringlog.envelope.refusal import error_reply
from ringlog.errors import (
    DiskError,
    ExitCode,
    Internal,
    Refused,
    RequestTimeout,
    ShuttingDown,
    Throttled,
)
from ringlog.limits import DISK_POLL_S, HEARTBEAT_INTERVAL_MS, SCRUB_EVERY_S
from ringlog.link.shard_requests import Requester, ShardRequests
from ringlog.logs import log_event
from ringlog.ring.doorbell import EventBell
from ringlog.runtime.control import ActorControlSocket, Sleeper
from ringlog.runtime.thread_pool import BackgroundThread, ThreadPool
from ringlog.segment.layout import CREATOR_RECLAIMER, CREATOR_SHIFT, NumberAllocator
from ringlog.signals import StopFlag
from ringlog.storage.real_disk import RealDisk
from ringlog.storage.segment_hold import SegmentHold
from ringlog.tier.copies import SegmentCopies
from ringlog.tier.open_store import open_owned_store

log: logging.Logger = logging.getLogger("ringlog.reclaimer")
REQUESTS_PER_TURN = 64
SCRUB_REQUESTS_MAX = 16
COLD_JOBS_MAX = 256
REQUEST_TIMEOUT_S = 10.0
CHECKPOINT_S = 60.0
CHECKPOINT_NS = 60 * 1_000_000_000
"""Interval at which snapshots are requested while orphans wait for them, in ns."""
STOP_S = 2.0
IDLE_S = HEARTBEAT_INTERVAL_MS / 1_000
FIRST_PASS_S = 30.0
"""Delay of the first pass after a start, when other work is more urgent, in seconds."""
_NS = 1_000_000_000


class ReclaimerShell:
    """One incarnation of the reclaimer."""

    def __init__(self, boot: ActorBoot, settings: Config, *, clock: Clock | None = None) -> None:
        """Create the shell. Raises ConfigError if the settings name a cold store that cannot be opened."""
        self._boot, self._settings = boot, settings
        self._clock = clock or SystemClock()
        self._stopping = threading.Event()
        self._bell = EventBell()
        self._disk = RealDisk()
        store = open_owned_store(settings.cold, self._disk, boot.data_dir, boot.engine_id)
        self._slot = Board.open(boot.shm_dir, writable=True).process(boot.slot)
        self._router = ActorControlSocket(socket_of(boot.shm_dir, boot.name), boot, self._slot)
        self._cold_jobs = ThreadPool("cold", 1, COLD_JOBS_MAX, self._bell.ring)
        self._links: dict[str, ShardRequests] = {}
        storage, stopping = settings.storage, self._stopping.is_set
        self._scrub_limiter = ByteRateLimiter(storage.scrub_bytes_per_s, self._clock, stopping)
        # A scrub that an operator requests may run at the rate of rewrites.
        self._manual_limiter = ByteRateLimiter(storage.reclaim_bytes_per_s, self._clock, stopping)
        self._is_manual = False
        copies = SegmentCopies(self._disk, boot.data_dir, store, self._limit_scrub)
        self.scrubber: Scrubber = Scrubber(
            self._disk, boot.data_dir, copies, rate_limiter=self._limit_scrub, is_current=self._is_current
        )
        self._passes = 0
        self._next_pass_ns = self._clock.monotonic_ns() + round(FIRST_PASS_S * _NS)
        self._pass = ScrubPass()
        self._total_bytes = 0
        self._scrub_requests: deque[tuple[bytes, int]] = deque()
        self._scrubs_done: deque[tuple[bytes, int, m.Message]] = deque()
        self._checkpoint_ns = 0
        reclaim_limiter = ByteRateLimiter(storage.reclaim_bytes_per_s, self._clock, stopping)
        # Incarnations are never reused, so segment numbers are not either, even of deleted segments.
        numbers = NumberAllocator(
            CREATOR_RECLAIMER, [(CREATOR_RECLAIMER << CREATOR_SHIFT) | boot.incarnation << 20]
        )
        rewriter = Rewriter(self._disk, boot.data_dir, storage, numbers, reclaim_limiter)
        hold = SegmentHold(boot.data_dir, self._clock, min_free_bytes=settings.data.min_free_bytes)
        self.reclaimer: Reclaimer = Reclaimer(
            self._disk, boot.data_dir, storage, copies=SegmentCopies(self._disk, boot.data_dir, store),
            rewriter=rewriter, shards=boot.shards, engine_id=bytes.fromhex(boot.engine_id),
            ask=lambda shard, message, attachment=None: self._ask("rounds", shard, message, attachment),
            clock=self._clock, quarantined=lambda: set(self.scrubber.quarantined),
            want_checkpoint=self._want_checkpoint, submit_cold_job=self._submit_cold_job,
            is_held=hold.is_held,
        )  # fmt: skip
        self.exit_code: ExitCode | None = None
        self._disk_poll_ns = 0
        self._is_low = False

    # -- lifecycle: runtime.duty_cycle.Actor ----------------------------------------------------------

    def on_start(self, stop: StopFlag) -> None:
        """Check the disk and start the threads."""
        self._sleeper = Sleeper(stop.fileno(), self._bell.fileno(), self._router.fileno())
        self._watch_disk(self._clock.monotonic_ns())
        self._loops = [
            BackgroundThread("rounds", self._rounds, self._bell.ring),
            BackgroundThread("scrub", self._scrub, self._bell.ring),
        ]
        log_event(log, logging.INFO, "ready")

    def do_work(self) -> int:
        """One pass of the main thread's loop."""
        for loop in self._loops:
            loop.raise_failure()
        if self._stopping.is_set():
            for loop in self._loops:
                loop.join(STOP_S)
            self.exit_code = ExitCode.OK
            return 0
        self._bell.drain()
        now_ns = self._clock.monotonic_ns()
        self._cold_jobs.take_results()
        work = self._receive()
        while self._scrubs_done:
            client, corr, report = self._scrubs_done.popleft()
            self._router.send(client, report, corr)
        self._watch_disk(now_ns)
        self._router.beat(now_ns)
        self._show_counts()
        return work

    def idle(self, work: int) -> None:
        """Sleep until a request or a thread of this process wakes the loop up."""
        if not work and not self._router.has_input():
            self._sleeper.sleep(self._clock.monotonic_ns())

    def drain(self) -> bool:
        """Signal the threads to end."""
        self._stopping.set()
        return True

    def on_close(self) -> None:
        """Close the sockets and clear the flag for low disk space."""
        self._slot.set(ProcessField.DISK_LOW, 0)
        self._router.close()
        self._bell.close()

    def _receive(self) -> int:
        count = 0
        for client, envelope, _ in self._router.receive_requests(REQUESTS_PER_TURN):
            count += 1
            if not isinstance(envelope.message, m.ScrubNow):
                self._router.refuse(client, envelope)
            elif len(self._scrub_requests) >= SCRUB_REQUESTS_MAX:
                throttled = Throttled("too many scrub requests waiting, retry later", retry_after_ms=1_000)
                self._router.send(client, error_reply(throttled), envelope.corr)
            else:
                self._scrub_requests.append((client, envelope.corr))
        return count

    def _show_counts(self) -> None:
        counts, scrubbed, settings = self.reclaimer.counts, self.scrubber.counts, self._settings.storage
        for word, value in (
            (ProcessField.SEGMENTS_DROPPED, counts.dropped),
            (ProcessField.SEGMENTS_REWRITTEN, counts.rewritten), (ProcessField.RECLAIMED_BYTES,
            counts.reclaimed_bytes),
            (ProcessField.SCRUB_BYTES, self._scrub_limiter.total_bytes + self._manual_limiter.total_bytes),
            (ProcessField.SCRUB_LEFT, self._pass.remaining_bytes), (ProcessField.SCRUB_PASSES, self._passes),
            (ProcessField.SCRUB_PASS_S, pass_seconds(self._total_bytes, settings.scrub_bytes_per_s)),
            (ProcessField.FINDINGS, scrubbed.findings), (ProcessField.HEALED, scrubbed.healed),
            (ProcessField.QUARANTINED, len(self.scrubber.quarantined)),
        ):  # fmt: skip
            self._slot.set(word, value)

    def _watch_disk(self, now_ns: int) -> None:
        """Publish low disk space to the shards, while there is still enough space to delete and to stop."""
        if now_ns < self._disk_poll_ns:
            return
        self._disk_poll_ns = now_ns + round(DISK_POLL_S * _NS)
        try:
            free = shutil.disk_usage(self._boot.data_dir).free
        except OSError as e:
            log_event(log, logging.WARNING, "cannot read the free disk space", reason=str(e))
            return
        least = self._settings.data.min_free_bytes
        is_low = free < least
        self._slot.set(ProcessField.DISK_FREE, free)
        self._slot.set(ProcessField.DISK_LOW, int(is_low))
        if is_low != self._is_low:
            self._is_low = is_low
            event = "disk space low, writes are refused" if is_low else "disk space sufficient again"
            log_event(
                log, logging.ERROR if is_low else logging.INFO, event, free_bytes=free, min_free_bytes=least
            )

    # -- rounds ---------------------------------------------------------------------------------------

    def _rounds(self) -> None:
        with _ThreadRequests(self._links, "rounds", self._connect()):
            while not self._stopping.wait(self._settings.storage.reclaim_interval_s):
                try:
                    self.reclaimer.run_round()
                except ShuttingDown:
                    # This process or a shard is stopping. The next round finds out which.
                    log_event(log, logging.DEBUG, "round ended early")

    def _connect(self) -> ShardRequests:
        return ShardRequests(self._boot.shm_dir, self._boot.shards, stop=self._stopping)

    def _ask(
        self, thread_name: str, shard: int, message: m.Message, attachment: Any = None
    ) -> tuple[Any, Any]:
        wanted = _REPLIES[type(message)]
        reply = self._links[thread_name].ask(
            shard, message, wanted, attachment=attachment, timeout_s=REQUEST_TIMEOUT_S
        )
        return reply.message, reply.attachment

    def _submit_cold_job(self, job: Callable[[], None]) -> bool:
        return self._cold_jobs.submit(0, job)

    def _want_checkpoint(self) -> None:
        """Request snapshots, at most once per CHECKPOINT_NS.

        A failure is only logged: they are also written without it.
        """
        now_ns = self._clock.monotonic_ns()
        if now_ns < self._checkpoint_ns:
            return
        self._checkpoint_ns = now_ns + CHECKPOINT_NS
        compactor = Requester("the compactor", socket_of(self._boot.shm_dir, COMPACTOR), stop=self._stopping)
        try:
            compactor.ask(m.CheckpointNow(), m.CheckpointMade, timeout_s=CHECKPOINT_S)
        except ShuttingDown:
            raise
        except (Refused, RequestTimeout) as e:
            log_event(log, logging.DEBUG, "no checkpoint was made", reason=str(e))
        finally:
            compactor.close()

    # -- scrub ----------------------------------------------------------------------------------------

    def _scrub(self) -> None:
        with _ThreadRequests(self._links, "scrub", self._connect()):
            while not self._stopping.is_set():
                try:
                    self._scrub_step()
                except ShuttingDown:
                    log_event(log, logging.DEBUG, "scrub ended early")
                except DiskError as e:
                    log_event(log, logging.ERROR, "scrub cannot read the data directory", reason=str(e))
                    self._stopping.wait(IDLE_S)

    def _scrub_step(self) -> None:
        if self._scrub_requests:
            self._serve_scrub_requests()
            return
        now_ns = self._clock.monotonic_ns()
        is_idle = not self._pass.pending and now_ns < self._next_pass_ns
        if is_idle or not self._settings.storage.scrub_bytes_per_s:
            self._stopping.wait(IDLE_S)
            return
        if not self._pass.pending:
            self._next_pass_ns = now_ns + round(SCRUB_EVERY_S * _NS)
            self._pass = ScrubPass.from_items(
                scrub_items(self._registered_segments(), self.scrubber.list_snapshots())
            )
            self._total_bytes = self._pass.remaining_bytes
            return
        item = self._pass.pending.popleft()
        self._pass.record(item, self.scrubber.verify_item(item, heals=True))
        if not self._pass.pending:
            self._passes += 1
            log_event(log, logging.INFO if not self._pass.findings_total else logging.WARNING,
            "scrub pass done",
                files=self._pass.files, bytes=self._pass.bytes,
                findings=self._pass.findings_total)  # fmt: skip

    def _serve_scrub_requests(self) -> None:
        """Run one pass for all waiting requests of operators. Each gets a reply, also after an error."""
        requests = [self._scrub_requests.popleft() for _ in range(len(self._scrub_requests))]
        answer: m.Message
        try:
            answer = self._whole_pass()
        except DiskError as e:
            log_event(log, logging.ERROR, "scrub cannot read the data directory", reason=str(e))
            answer = error_reply(Internal("the data directory cannot be read", reason=str(e)))
        self._scrubs_done.extend((client, corr, answer) for client, corr in requests)
        self._bell.ring()

    def _whole_pass(self) -> m.ScrubReport:
        """Verify all items once, at the rate of rewrites, without repairs."""
        full_pass = ScrubPass.from_items(
            scrub_items(self._registered_segments(), self.scrubber.list_snapshots())
        )
        self._is_manual = True
        try:
            while full_pass.pending:
                item = full_pass.pending.popleft()
                full_pass.record(item, self.scrubber.verify_item(item, heals=False))
        finally:
            self._is_manual = False
        return full_pass.report()

    def _limit_scrub(self, count: int) -> None:
        if self._is_manual:
            self._manual_limiter(count)
        elif not self._scrub_requests:  # An operator's request does not wait for the slow pass.
            self._scrub_limiter(count)

    def _registered_segments(self) -> list[m.SegmentRef]:
        """Return every registered segment once, in the hottest tier in which a shard knows it."""
        found: dict[int, m.SegmentRef] = {}
        for shard in range(self._boot.shards):
            for ref in self._plan(shard):
                if ref.number not in found or ref.tier < found[ref.number].tier:
                    found[ref.number] = ref
        return list(found.values())

    def _is_current(self, ref: m.SegmentRef) -> bool:
        return any(
            ref.number == each.number and ref.tier == each.tier for each in self._registered_segments()
        )

    def _plan(self, shard: int) -> list[m.SegmentRef]:
        try:
            segments: list[m.SegmentRef] = self._ask("scrub", shard, m.CheckpointOpen())[0].segments
        except ShuttingDown:
            raise
        except (Refused, RequestTimeout) as e:
            log_event(log, logging.DEBUG, "shard did not answer", shard=shard, reason=str(e))
            return []
        return segments


_REPLIES: dict[type[m.Message], type[m.Message]] = {
    m.CheckpointOpen: m.CheckpointPlan,
    m.ListLiveRecords: m.LiveRecordsReply,
    m.SegmentsChange: m.SegmentsChanged,
}


class _ThreadRequests:
    """Connections of one thread while it runs: a socket must be used only by the thread that created it."""

    def __init__(self, links: dict[str, ShardRequests], thread_name: str, requests: ShardRequests) -> None:
        self._links, self._thread_name = links, thread_name
        links[thread_name] = requests

    def __enter__(self) -> None:
        """Do nothing: the constructor has registered the connections."""

    def __exit__(self, *_: object) -> None:
        self._links.pop(self._thread_name).close()
