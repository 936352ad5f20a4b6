"""The compactor's shell: a socket for operators, requests to shards, and passes in threads.

It performs one task at a time and has no state that must survive. Its successor repeats unfinished work. An
idle compactor wakes up about once a second.
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable
from dataclasses import replace
from typing import Any

from ringlog.actors.compactor.checkpoint import CheckpointContext, CheckpointTask
from ringlog.actors.compactor.checkpoint import CheckpointResult as Result
from ringlog.actors.compactor.core import (
    CheckpointFailed,
    CheckpointFinished,
    Compactor,
    FilesListed,
    ListFiles,
    MakeCheckpoint,
    MakeShutdownCheckpoints,
    PollShard,
    ShardPolled,
)
from ringlog.actors.compactor.pass_executor import BACKLOG_BYTES, PassExecutor
from ringlog.actors.compactor.schedule import NS_PER_S, CheckpointBacklog
from ringlog.actors.compactor.shard_client import CompactorShardClient
from ringlog.actors.compactor.throttle import CompactionThrottle
from ringlog.board.board import Board
from ringlog.board.layout import ProcessField
from ringlog.board.processes import shard_slot, socket_of
from ringlog.clock import Clock, SystemClock
from ringlog.config import Config
from ringlog.contract import ControlReceived, DrainRequested, Reply, Stop, Tick
from ringlog.envelope import messages as m
from ringlog.envelope.boot import ActorBoot
from ringlog.errors import (
    CorruptData,
    DiskError,
    ExitCode,
    InvariantViolation,
    RinglogError,
    ShuttingDown,
)
from ringlog.limits import STOP_CHECKPOINT_BYTES_MIN, STOP_CHECKPOINT_SHARE
from ringlog.link.shard_requests import ShardRequests, StopSignal
from ringlog.logs import log_event
from ringlog.runtime.control import ActorControlSocket, Sleeper
from ringlog.segment.layout import (
    CREATOR_COMPACTOR,
    CREATOR_SHIFT,
    DATA,
    IDX,
    SUFFIXES,
    NumberAllocator,
    parse_stem,
)
from ringlog.segment.parts import part_names
from ringlog.segment.segment import find_segments
from ringlog.signals import StopFlag
from ringlog.storage import snapshot as snapshots
from ringlog.storage.disk import Disk
from ringlog.storage.layout import META_DIR, WAL_DIR, parse_shard_dir, parse_wal_name
from ringlog.storage.real_disk import RealDisk

log: logging.Logger = logging.getLogger("ringlog.compactor")

REQUESTS_PER_TURN = 16
NUMBERS_SHIFT = 24
"""Number of bits for segment numbers of one incarnation."""


class PassPreempted(RinglogError):
    """A background pass ended early, because an operator waits for a pass at normal priority."""


class _Deadline:
    """A stop signal that is set after this many seconds."""

    def __init__(self, clock: Clock, seconds: float) -> None:
        self._clock = clock
        self._end_ns = clock.monotonic_ns() + round(seconds * NS_PER_S)

    def is_set(self) -> bool:
        """Return whether the time is over."""
        return self._clock.monotonic_ns() >= self._end_ns


class CompactorShell:
    """One incarnation of the compactor."""

    def __init__(
        self, boot: ActorBoot, settings: Config, *, clock: Clock | None = None, disk: Disk | None = None
    ) -> None:
        self._boot = boot
        self._clock = clock or SystemClock()
        self._disk = disk or RealDisk()
        self._board = Board.open(boot.shm_dir, writable=True)
        self._slot = self._board.process(boot.slot)
        self._router = ActorControlSocket(socket_of(boot.shm_dir, boot.name), boot, self._slot)
        self.core: Compactor = Compactor(
            boot.shards, file_bytes=settings.wal.file_bytes, age_ms=settings.storage.segment_age_ms,
            now_ns=self._clock.monotonic_ns(),
        )  # fmt: skip
        stems = map(parse_stem, find_segments(self._disk, boot.data_dir))
        numbers = [parsed[2] for parsed in stems if parsed is not None]
        # Above the numbers of all earlier incarnations, including those of deleted segments.
        numbers.append(CREATOR_COMPACTOR << CREATOR_SHIFT | boot.incarnation << NUMBERS_SHIFT)
        self._drain_s = settings.supervisor.drain_s
        self._passes = PassExecutor()
        self._throttle = CompactionThrottle(self._clock, self._shard_commit_counters, self._beat)
        self._context = CheckpointContext(
            disk=self._disk, data_dir=boot.data_dir, engine_id=bytes.fromhex(boot.engine_id),
            storage=settings.storage, clock=self._clock, numbers=NumberAllocator(CREATOR_COMPACTOR, numbers),
            heartbeat=self._step, throttle=self._throttle_pass,
        )  # fmt: skip
        self._stop: StopSignal | None = None
        self.exit_code: ExitCode | None = None
        self._events: list[Any] = []
        self._is_urgent = False
        """The pass in progress runs at normal priority."""
        self._perform: dict[type, Callable[[Any], Any]] = {
            PollShard: self._poll_shard,
            MakeCheckpoint: self._make,
            ListFiles: self._list_files,
            MakeShutdownCheckpoints: self._make_shutdown_checkpoints,
            Reply: self._reply,
            Stop: self._set_exit_code,
        }

    # -- lifecycle: runtime.duty_cycle.Actor ----------------------------------------------------------

    def on_start(self, stop: StopFlag) -> None:
        """Open the sockets for sleeping and for requests to shards."""
        self._stop = stop
        self._sleeper = Sleeper(stop.fileno(), self._router.fileno())
        self._requests = ShardRequests(self._boot.shm_dir, self._boot.shards, stop=stop, beat=self._beat)
        self._shards = [CompactorShardClient(self._requests, number) for number in range(self._boot.shards)]

    def do_work(self) -> int:
        """One pass of the loop: collect events, process them, and perform the effects."""
        self._beat()
        self._receive()
        events, self._events = self._events, []
        return self._pump(events)

    def idle(self, work: int) -> None:
        """Sleep until the next poll is due or a request arrives."""
        if not work:
            self._sleeper.sleep(self._clock.monotonic_ns(), self.core.next_deadline_ns())

    def drain(self) -> bool:
        """Make checkpoints before the exit, so that the next start replays little log."""
        self._events.append(DrainRequested())
        return True

    def on_close(self) -> None:
        """Stop the threads and close the socket."""
        self._passes.close()
        self._router.close()

    def _pump(self, events: list[Any]) -> int:
        """Process events and perform their effects until none is left; return the amount of work."""
        effects = self.core.handle([self._tick(), *events])
        work = len(events) + len(effects)
        while effects:
            done = [event for effect in effects if (event := self._perform[type(effect)](effect)) is not None]
            effects = self.core.handle([self._tick(), *done]) if done else []
        return work

    def _tick(self) -> Tick:
        return Tick(self._clock.now_us(), self._clock.monotonic_ns())

    def _receive(self) -> None:
        for client, envelope, _ in self._router.receive_requests(REQUESTS_PER_TURN):
            if isinstance(envelope.message, m.CheckpointNow):
                self._events.append(ControlReceived(client, envelope.corr, envelope.message))
            else:
                self._router.refuse(client, envelope)

    def _reply(self, effect: Reply) -> None:
        self._router.send(effect.client, effect.message, effect.corr)

    def _set_exit_code(self, effect: Stop) -> None:
        self.exit_code = ExitCode(effect.code)

    def _make_shutdown_checkpoints(self, _: MakeShutdownCheckpoints) -> None:
        """Absorb the log of shards with a large backlog, so that the next start replays little.

        It ends after a part of the drain time. The log of an unfinished checkpoint stays unchanged.
        """
        if self._passes.is_abandoned:
            return  # The abandoned thread still uses the sockets and the checkpoint context.
        self._requests.close()
        deadline = _Deadline(self._clock, self._drain_s * STOP_CHECKPOINT_SHARE)

        def raise_if_over() -> None:
            if deadline.is_set():
                raise ShuttingDown("no time left for another checkpoint")

        def beat() -> None:
            self._beat()
            raise_if_over()

        ctx = replace(self._context, heartbeat=beat, throttle=raise_if_over)
        with contextlib.closing(
            ShardRequests(self._boot.shm_dir, self._boot.shards, stop=deadline, beat=self._beat)
        ) as requests:
            for number in range(self._boot.shards):
                shard, started_ns = CompactorShardClient(requests, number), self._clock.monotonic_ns()
                try:
                    if (
                        deadline.is_set()
                        or shard.fetch_plan_summary(roll=False).log_bytes < STOP_CHECKPOINT_BYTES_MIN
                    ):
                        continue
                    self._record_checkpoint(
                        number, CheckpointTask(ctx, shard, shard.fetch_plan(roll=True)).run(), started_ns
                    )
                except InvariantViolation:
                    raise
                except RinglogError as e:
                    log_event(
                        log, logging.WARNING, "shutdown checkpoint not made", shard=number, reason=str(e)
                    )

    def _beat(self) -> None:
        self._router.beat(self._clock.monotonic_ns())

    def _is_stopping(self) -> bool:
        return self._stop is not None and self._stop.is_set()

    def _step(self) -> None:
        """Run between two steps of a pass. A pass may end after any step; the next one repeats it.

        While the main thread waits for a pass, only the pass's thread uses the socket.
        """
        self._beat()
        self._raise_if_stopping()
        if not self._is_urgent:
            self._receive()
            if self._events:
                # On a host without idle CPU this pass may never end.
                raise PassPreempted("an operator requested a checkpoint")

    def _throttle_pass(self) -> None:
        self._raise_if_stopping()
        self._throttle.pause_if_contended()

    def _raise_if_stopping(self) -> None:
        if self._is_stopping():
            raise ShuttingDown("stop requested during a pass")

    def _shard_commit_counters(self) -> tuple[int, int]:
        pages = [self._board.process(shard_slot(number)) for number in range(self._boot.shards)]
        return sum([page.get(ProcessField.GROUPS) for page in pages]), sum(
            [page.get(ProcessField.BYTES) for page in pages]
        )

    # -- checkpoints ----------------------------------------------------------------------------------

    def _poll_shard(self, effect: PollShard) -> ShardPolled | CheckpointFailed:
        try:
            summary = self._shards[effect.shard].fetch_plan_summary(roll=effect.roll)
        except InvariantViolation:
            raise
        except RinglogError as e:
            return self._failed(effect.shard, e)
        files = tuple(each.stop - each.start for each in summary.files)
        return ShardPolled(effect.shard, CheckpointBacklog(files, summary.log_bytes))

    def _make(self, effect: MakeCheckpoint) -> CheckpointFinished | CheckpointFailed:
        shard, started_ns = self._shards[effect.shard], self._clock.monotonic_ns()
        self._throttle.is_urgent = effect.log_bytes >= BACKLOG_BYTES
        self._is_urgent = effect.is_requested or self._throttle.is_urgent
        try:
            checkpoint = CheckpointTask(self._context, shard, shard.fetch_plan())
            result = self._passes.run(
                checkpoint.run, is_urgent=self._is_urgent, is_stopping=self._is_stopping
            )
        except InvariantViolation:
            raise
        except RinglogError as e:
            return self._failed(effect.shard, e)
        self._record_checkpoint(shard.number, result, started_ns)
        return CheckpointFinished(shard.number)

    def _record_checkpoint(self, shard: int, result: Result, started_ns: int) -> None:
        took_ns = self._clock.monotonic_ns() - started_ns
        self._slot.add(ProcessField.ABSORBED, result.absorbed_bytes)
        self._slot.add(ProcessField.SEGMENTS, result.segments)
        self._slot.add(ProcessField.CHECKPOINTS, 1)
        self._slot.add(ProcessField.BUSY_NS, took_ns)
        self._slot.set(ProcessField.SNAPSHOT, result.snapshot)
        log_event(
            log, logging.INFO, "checkpoint", shard=shard, snapshot=result.snapshot, segments=result.segments,
            records=result.records, log_bytes=result.absorbed_bytes, unlinked=result.unlinked,
            took_ms=took_ns * 1_000 // NS_PER_S,
        )  # fmt: skip

    def _failed(self, shard: int, error: RinglogError) -> CheckpointFailed:
        """Count and log a failed poll or checkpoint. The log is unchanged, and the shard is retried later."""
        if not isinstance(error, ShuttingDown | PassPreempted):
            self._slot.add(ProcessField.FAILURES, 1)
            if isinstance(error, CorruptData):
                self._slot.add(ProcessField.CORRUPT, 1)
            # A shard that restarts is normal operation; damaged data and a failing disk are not.
            level = logging.ERROR if isinstance(error, CorruptData | DiskError) else logging.WARNING
            log_event(log, level, "checkpoint failed", shard=shard, reason=str(error))
        return CheckpointFailed(shard, error)

    def _list_files(self, effect: ListFiles) -> FilesListed:
        try:
            return FilesListed(effect.tickets, self._files_of_a_copy())
        except InvariantViolation:
            raise
        except RinglogError as e:
            return FilesListed(effect.tickets, e)

    def _files_of_a_copy(self) -> list[str]:
        """Return the files of a consistent copy: identity, snapshots, registered segments, and the log.

        The log is complete. Recovery from the copy skips the parts that a snapshot covers.
        """
        disk, data_dir = self._disk, self._boot.data_dir
        plans = [shard.fetch_plan() for shard in self._shards]
        registered = {ref.stem for plan in plans for ref in plan.segments}
        parts = [
            name for name in part_names(disk, data_dir)
            if name.endswith(SUFFIXES) and name.rpartition(".")[0] in registered
        ]  # fmt: skip
        # Missing segments are listed, too: a copy without them is incomplete, and the copying program must
        # notice.
        parts += [ref.stem + (IDX if ref.tier else DATA) for plan in plans for ref in plan.missing]
        known = snapshots.snapshot_numbers(disk, data_dir)
        meta = [f"{META_DIR}/engine", *(f"{META_DIR}/{snapshots.snapshot_name(*each)}" for each in known)]
        return [*meta, *parts, *self._log_files()]

    def _log_files(self) -> list[str]:
        root = f"{self._boot.data_dir}/{WAL_DIR}"
        return [
            f"{WAL_DIR}/{stream}/{name}"
            for stream in self._disk.list_dir(root) if parse_shard_dir(stream) is not None
            for name in self._disk.list_dir(f"{root}/{stream}") if parse_wal_name(name) is not None
        ]  # fmt: skip
