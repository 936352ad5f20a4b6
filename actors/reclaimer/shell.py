"""The reclaimer, performed: a socket for ScrubNow, a look at the free space, and threads that do the work.

One thread makes rounds, one scrubs, one removes what is cold: a store that hangs holds up no other. The
main one answers, beats, and watches the disk.
"""

from __future__ import annotations

import logging
import shutil
import threading
from collections import deque
from collections.abc import Callable
from typing import Any

from actors.reclaimer.pace import Pace
from actors.reclaimer.rewriter import Rewriter
from actors.reclaimer.rounds import Reclaimer
from actors.reclaimer.scrub import Pass, items, pass_seconds
from actors.reclaimer.scrubber import Scrubber
from ringlog.board.board import Board
from ringlog.board.layout import P
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
from ringlog.limits import DISK_LOOK_S, HEARTBEAT_INTERVAL_MS, SCRUB_EVERY_S
from ringlog.link.shard_requests import Requester, ShardRequests
from ringlog.logs import say
from ringlog.ring.doorbell import EventBell
from ringlog.runtime.control import ControlSocket, Sleeper
from ringlog.runtime.workers import Loop, Workers
from ringlog.segment.layout import MAKER_RECLAIMER, MAKER_SHIFT, NumberAllocator
from ringlog.signals import StopFlag
from ringlog.storage.disk import RealDisk
from ringlog.tier.copies import Copies
from ringlog.tier.opening import open_store

log = logging.getLogger("ringlog.reclaimer")
REQUESTS_PER_TURN = 64
SCRUBS_ASKED_MAX = 16
COLD_JOBS_MAX = 256
ASK_S = 10.0
CHECKPOINT_S = 60.0
CHECKPOINT_NS = 60 * 1_000_000_000
"""How often snapshots are asked for while something waits for them to be removed."""
STOP_S = 2.0
IDLE_S = HEARTBEAT_INTERVAL_MS / 1_000
FIRST_PASS_S = 30.0
"""After a start there is more urgent work."""
_NS = 1_000_000_000


class Shell:
    """One incarnation of the reclaimer."""

    def __init__(self, boot: ActorBoot, settings: Config, *, clock: Clock | None = None) -> None:
        """Raises ConfigError when the settings name a cold store that cannot be opened."""
        self._boot, self._settings = boot, settings
        self._clock = clock or SystemClock()
        self._ending = threading.Event()
        self._bell = EventBell()
        self._disk = RealDisk()
        store = open_store(settings.cold, self._disk)
        self._slot = Board.open(boot.shm_dir, writable=True).process(boot.slot)
        self._router = ControlSocket(socket_of(boot.shm_dir, boot.name), boot, self._slot)
        self._cold_jobs = Workers("cold", 1, COLD_JOBS_MAX, self._bell.ring)
        self._links: dict[str, ShardRequests] = {}
        storage, stopping = settings.storage, self._ending.is_set
        self._scrub_pace = Pace(storage.scrub_bytes_per_s, self._clock, stopping)
        # By hand it may go as fast as reclaiming may.
        self._hand_pace = Pace(storage.reclaim_bytes_per_s, self._clock, stopping)
        self._by_hand = False
        copies = Copies(self._disk, boot.data_dir, store, self._on_scrubbed)
        self.scrubber = Scrubber(
            self._disk, boot.data_dir, copies, pace=self._on_scrubbed, is_current=self._is_current
        )
        self._passes = 0
        self._next_pass_ns = self._clock.monotonic_ns() + round(FIRST_PASS_S * _NS)
        self._pass = Pass()
        self._total_bytes = 0
        self._scrubs_asked: deque[tuple[bytes, int]] = deque()
        self._scrubs_done: deque[tuple[bytes, int, m.Message]] = deque()
        self._checkpoint_ns = 0
        reclaim_pace = Pace(storage.reclaim_bytes_per_s, self._clock, stopping)
        # Incarnations are never reused, so neither are numbers, whatever became of the segments.
        numbers = NumberAllocator(
            MAKER_RECLAIMER, [(MAKER_RECLAIMER << MAKER_SHIFT) | boot.incarnation << 20]
        )
        rewriter = Rewriter(self._disk, boot.data_dir, storage, numbers, reclaim_pace)
        self.reclaimer = Reclaimer(
            self._disk, boot.data_dir, storage, copies=Copies(self._disk, boot.data_dir, store),
            rewriter=rewriter, shards=boot.shards, engine_id=bytes.fromhex(boot.engine_id),
            ask=lambda shard, message, attachment=None: self._ask("rounds", shard, message, attachment),
            clock=self._clock, quarantined=lambda: set(self.scrubber.quarantined),
            want_checkpoint=self._want_checkpoint, later=self._later,
        )  # fmt: skip
        self.exit_code: ExitCode | None = None
        self._disk_look_ns = 0
        self._is_low = False

    # -- life: runtime.duty_cycle.Actor ---------------------------------------------------------------

    def on_start(self, stop: StopFlag) -> None:
        """See Actor."""
        self._sleeper = Sleeper(stop.fileno(), self._bell.fileno(), self._router.fileno())
        self._watch_disk(self._clock.monotonic_ns())
        self._loops = [
            Loop("rounds", self._rounds, self._bell.ring),
            Loop("scrub", self._scrub, self._bell.ring),
        ]
        say(log, logging.INFO, "ready")

    def do_work(self) -> int:
        """One pass of the main thread."""
        for loop in self._loops:
            loop.check()
        if self._ending.is_set():
            for loop in self._loops:
                loop.join(STOP_S)
            self.exit_code = ExitCode.OK
            return 0
        self._bell.drain()
        now_ns = self._clock.monotonic_ns()
        self._cold_jobs.take()
        work = self._receive()
        while self._scrubs_done:
            client, corr, report = self._scrubs_done.popleft()
            self._router.send(client, report, corr)
        self._watch_disk(now_ns)
        self._router.beat(now_ns)
        self._show_counts()
        return work

    def idle(self, work: int) -> None:
        """Sleep until a request, or a thread of ours, wakes us."""
        if not work and not self._router.has_input():
            self._sleeper.sleep(self._clock.monotonic_ns())

    def drain(self) -> bool:
        """Have the threads come to an end."""
        self._ending.set()
        return True

    def on_close(self) -> None:
        """See Actor."""
        self._slot.set(P.DISK_LOW, 0)
        self._router.close()
        self._bell.close()

    def _receive(self) -> int:
        count = 0
        for client, envelope, _ in self._router.requests(REQUESTS_PER_TURN):
            count += 1
            if not isinstance(envelope.message, m.ScrubNow):
                self._router.refuse(client, envelope)
            elif len(self._scrubs_asked) >= SCRUBS_ASKED_MAX:
                throttled = Throttled("scrubs are being made", retry_after_ms=1_000)
                self._router.send(client, error_reply(throttled), envelope.corr)
            else:
                self._scrubs_asked.append((client, envelope.corr))
        return count

    def _show_counts(self) -> None:
        counts, scrubbed, pace = self.reclaimer.counts, self.scrubber.counts, self._settings.storage
        for word, value in (
            (P.SEGMENTS_DROPPED, counts.dropped),
            (P.SEGMENTS_REWRITTEN, counts.rewritten), (P.RECLAIMED_BYTES, counts.reclaimed_bytes),
            (P.SCRUB_BYTES, self._scrub_pace.bytes + self._hand_pace.bytes),
            (P.SCRUB_LEFT, self._pass.left_bytes), (P.SCRUB_PASSES, self._passes),
            (P.SCRUB_PASS_S, pass_seconds(self._total_bytes, pace.scrub_bytes_per_s)),
            (P.FINDINGS, scrubbed.findings), (P.HEALED, scrubbed.healed),
            (P.QUARANTINED, len(self.scrubber.quarantined)),
        ):  # fmt: skip
            self._slot.set(word, value)

    def _watch_disk(self, now_ns: int) -> None:
        """Tell the shards when space runs out, while there is still enough to delete and to stop (ST-13)."""
        if now_ns < self._disk_look_ns:
            return
        self._disk_look_ns = now_ns + round(DISK_LOOK_S * _NS)
        try:
            free = shutil.disk_usage(self._boot.data_dir).free
        except OSError as e:
            say(log, logging.WARNING, "free space not known", reason=str(e))
            return
        least = self._settings.data.min_free_bytes
        is_low = free < least
        self._slot.set(P.DISK_FREE, free)
        self._slot.set(P.DISK_LOW, int(is_low))
        if is_low != self._is_low:
            self._is_low = is_low
            event = "disk space low, writes are refused" if is_low else "disk space sufficient again"
            say(log, logging.ERROR if is_low else logging.INFO, event, free_bytes=free, min_free_bytes=least)

    # -- rounds ---------------------------------------------------------------------------------------

    def _rounds(self) -> None:
        with _Links(self._links, "rounds", self._connect()):
            while not self._ending.wait(self._settings.storage.reclaim_interval_s):
                try:
                    self.reclaimer.round()
                except ShuttingDown:
                    # Ours, or a shard's that stops first: the next round tells which.
                    say(log, logging.DEBUG, "round ended early")

    def _connect(self) -> ShardRequests:
        return ShardRequests(self._boot.shm_dir, self._boot.shards, stop=self._ending)

    def _ask(self, who: str, shard: int, message: m.Message, attachment: Any = None) -> tuple[Any, Any]:
        wanted = _REPLIES[type(message)]
        reply = self._links[who].ask(shard, message, wanted, attachment=attachment, timeout_s=ASK_S)
        return reply.message, reply.attachment

    def _later(self, job: Callable[[], None]) -> bool:
        return self._cold_jobs.submit(0, job)

    def _want_checkpoint(self) -> None:
        """Ask for snapshots, now and then; it is not waited for, they come without being asked too."""
        now_ns = self._clock.monotonic_ns()
        if now_ns < self._checkpoint_ns:
            return
        self._checkpoint_ns = now_ns + CHECKPOINT_NS
        compactor = Requester("the compactor", socket_of(self._boot.shm_dir, COMPACTOR), stop=self._ending)
        try:
            compactor.ask(m.CheckpointNow(), m.CheckpointMade, timeout_s=CHECKPOINT_S)
        except ShuttingDown:
            raise
        except (Refused, RequestTimeout) as e:
            say(log, logging.DEBUG, "no checkpoint was made", reason=str(e))
        finally:
            compactor.close()

    # -- scrub ----------------------------------------------------------------------------------------

    def _scrub(self) -> None:
        with _Links(self._links, "scrub", self._connect()):
            while not self._ending.is_set():
                try:
                    self._scrub_step()
                except ShuttingDown:
                    say(log, logging.DEBUG, "scrub ended early")
                except DiskError as e:
                    say(log, logging.ERROR, "scrub cannot read the data directory", reason=str(e))
                    self._ending.wait(IDLE_S)

    def _scrub_step(self) -> None:
        if self._scrubs_asked:
            self._scrub_by_hand()
            return
        now_ns = self._clock.monotonic_ns()
        is_idle = not self._pass.waiting and now_ns < self._next_pass_ns
        if is_idle or not self._settings.storage.scrub_bytes_per_s:
            self._ending.wait(IDLE_S)
            return
        if not self._pass.waiting:
            self._next_pass_ns = now_ns + round(SCRUB_EVERY_S * _NS)
            self._pass = Pass.over(items(self._refs(), self.scrubber.snapshots()))
            self._total_bytes = self._pass.left_bytes
            return
        item = self._pass.waiting.popleft()
        self._pass.note(item, self.scrubber.verify(item, heals=True))
        if not self._pass.waiting:
            self._passes += 1
            say(log, logging.INFO if not self._pass.found else logging.WARNING, "scrub pass done",
                files=self._pass.files, bytes=self._pass.bytes, findings=self._pass.found)  # fmt: skip

    def _scrub_by_hand(self) -> None:
        """One pass for all that asked before it began; each is answered, whatever becomes of it."""
        asked = [self._scrubs_asked.popleft() for _ in range(len(self._scrubs_asked))]
        answer: m.Message
        try:
            answer = self._whole_pass()
        except DiskError as e:
            say(log, logging.ERROR, "scrub cannot read the data directory", reason=str(e))
            answer = error_reply(Internal("the data directory cannot be read", reason=str(e)))
        self._scrubs_done.extend((client, corr, answer) for client, corr in asked)
        self._bell.ring()

    def _whole_pass(self) -> m.ScrubReport:
        """Everything once, at the pace of reclaiming, changing nothing (SG-15)."""
        whole = Pass.over(items(self._refs(), self.scrubber.snapshots()))
        self._by_hand = True
        try:
            while whole.waiting:
                item = whole.waiting.popleft()
                whole.note(item, self.scrubber.verify(item, heals=False))
        finally:
            self._by_hand = False
        return whole.report()

    def _on_scrubbed(self, count: int) -> None:
        if self._by_hand:
            self._hand_pace(count)
        elif not self._scrubs_asked:  # who asks by hand does not wait for the slow one
            self._scrub_pace(count)

    def _refs(self) -> list[m.SegmentRef]:
        """Every registered segment once, in the hottest tier a shard knows it in."""
        found: dict[int, m.SegmentRef] = {}
        for shard in range(self._boot.shards):
            for ref in self._plan(shard):
                if ref.number not in found or ref.tier < found[ref.number].tier:
                    found[ref.number] = ref
        return list(found.values())

    def _is_current(self, ref: m.SegmentRef) -> bool:
        return any(ref.number == each.number and ref.tier == each.tier for each in self._refs())

    def _plan(self, shard: int) -> list[m.SegmentRef]:
        try:
            segments: list[m.SegmentRef] = self._ask("scrub", shard, m.CheckpointOpen())[0].segments
        except ShuttingDown:
            raise
        except (Refused, RequestTimeout) as e:
            say(log, logging.DEBUG, "shard did not answer", shard=shard, reason=str(e))
            return []
        return segments


_REPLIES: dict[type[m.Message], type[m.Message]] = {
    m.CheckpointOpen: m.CheckpointPlan,
    m.LiveAsk: m.LiveReply,
    m.SegmentsChange: m.SegmentsChanged,
}


class _Links:
    """Connections of one thread, as long as it runs: a socket belongs to the thread that made it."""

    def __init__(self, links: dict[str, ShardRequests], who: str, made: ShardRequests) -> None:
        self._links, self._who = links, who
        links[who] = made

    def __enter__(self) -> None:
        """Nothing more to do."""

    def __exit__(self, *_: object) -> None:
        self._links.pop(self._who).close()
