"""The resources of an engine: its directories, locked and checked before any process starts.

The order matters. Nothing is modified before the data directory is locked, and nothing in the run directory
before that is locked too: another data directory may use it. Nothing of a predecessor is removed before its
last process is dead. No directory is used that another user can access.
"""

from __future__ import annotations

import contextlib
import logging
import os
from collections.abc import Callable

from ringlog.board.board import Board, ProcessSlot
from ringlog.board.layout import (
    CHUNK_BYTES,
    NEWS_BYTES,
    PAGE_BYTES,
    BoardError,
    BoardUnstable,
    ProcessField,
    WatermarkKind,
)
from ringlog.board.processes import KINDS, SCHEDULER, WAL_SHARD, bell_of
from ringlog.clock import Clock
from ringlog.config import Config
from ringlog.entropy import random_hex
from ringlog.envelope.engine_file import EngineInfo
from ringlog.errors import DiskError, NotConnected, StartRefused
from ringlog.limits import PROCESSES_MAX
from ringlog.logs import log_event
from ringlog.ring.doorbell import make_bell
from ringlog.storage.disk import Disk, replace_file
from ringlog.storage.layout import LOCK_NAME
from ringlog.supervision import run_dir
from ringlog.supervision.identity import EngineIdentity
from ringlog.supervision.rings import first_ring_file_bytes
from ringlog.supervision.tree import Tree

log: logging.Logger = logging.getLogger("ringlog.supervision")

ORPHAN_GRACE_S = 5.0
CONTAINER_FILES = ("/.dockerenv", "/run/.containerenv")
_ORPHAN_LOOK_S = 0.05


PublishedMarks = dict[int, tuple[int, int]]
"""By shard: (file id, offset in bytes) up to which readers may read its log."""


class EngineResources:
    """The engine's directories, locks, identity and board. `close` releases all of them."""

    def __init__(
        self, config: Config, tree: Tree, *, disk: Disk, clock: Clock, is_cancelled: Callable[[], bool]
    ) -> None:
        """Acquire everything. On StartRefused nothing stays locked and no shared memory is left."""
        self._disk = disk
        self.run_dir: str = config.run.dir
        self.start_id: str = random_hex(8)
        with contextlib.ExitStack() as undo:
            refuse_root(config)
            self.data_dir: str = os.path.realpath(config.data.dir)
            run_dir.make_private_dir(disk, self.data_dir, "data directory")
            self._lock = _take_lock(
                disk, os.path.join(self.data_dir, LOCK_NAME), "another engine runs on this data directory"
            )
            undo.callback(disk.unlock, self._lock)
            run_dir.make_private_dir(disk, self.run_dir, "run directory")
            self._run_lock = _take_run_lock(disk, self.run_dir)
            undo.callback(disk.unlock, self._run_lock)
            _require_disk_space(config, self.data_dir)
            self.identity: EngineIdentity = EngineIdentity(disk, self.data_dir)
            published = self._clear_predecessor(config, clock, is_cancelled)
            run_dir.require_shm_space(needed_shm_bytes(config))
            self.boot_incarnation: int = 0
            self.shm_dir: str = run_dir.make_shm_dir(lambda path: self._begin(path, 1 + len(tree.children)))
            undo.callback(run_dir.remove_shm_dir, self.shm_dir)
            self.board: Board = Board.create(self.shm_dir)
            self.liveness_fd: int = run_dir.open_liveness_lock(self.shm_dir)
            undo.callback(os.close, self.liveness_fd)
            self._restore_published_marks(published, tree)
            for spec in (*tree.of_kind(WAL_SHARD), *tree.of_kind(SCHEDULER)):
                make_bell(bell_of(self.shm_dir, spec.name))
            undo.pop_all()

    def time_base_us(self, boot_id: str, clock: Clock) -> int:
        """Return the time base of leases and waits in µs; see run_dir.time_base_us."""
        return run_dir.time_base_us(self._disk, self.run_dir, boot_id, clock)

    def _begin(self, shm_dir: str, expected: int) -> None:
        self.boot_incarnation = self.identity.record_start(shm_dir, expected)

    def _clear_predecessor(
        self, config: Config, clock: Clock, is_cancelled: Callable[[], bool]
    ) -> PublishedMarks:
        """Wait for the processes of a killed supervisor to exit, then remove their shared memory.

        Kills no process. Returns the published marks of the predecessor's shards; {} without a predecessor.
        Raises StartRefused if processes are still alive after `supervisor.drain_s` + ORPHAN_GRACE_S.
        """
        run_dir.remove_announcements(self._disk, self.run_dir)
        previous = self.identity.previous_shm_dir
        if not run_dir.is_stale_shm_dir(previous):
            return {}
        deadline = clock.monotonic_ns() + round((config.supervisor.drain_s + ORPHAN_GRACE_S) * 1e9)
        while run_dir.orphans_alive(previous):
            if is_cancelled() or clock.monotonic_ns() > deadline:
                raise StartRefused(
                    "processes of a killed supervisor are still running; stop them first (see pids)",
                    pids=_pids_on_board(previous),
                )
            clock.sleep(_ORPHAN_LOOK_S)
        log_event(log, logging.WARNING, "shared memory of the previous engine removed", dir=previous)
        published = _published_on(previous)
        run_dir.remove_shm_dir(previous)
        return published

    def _restore_published_marks(self, published: PublishedMarks, tree: Tree) -> None:
        """Pass the published marks of the predecessor on to the shards, as if only the shards had died.

        A killed shard may have written a part of a commit batch. Only the published mark proves that no
        process learned of it. Without the mark, the seqs that may have been assigned are reported as lost.
        With another number of shards the logs are distributed differently, and the marks do not apply.
        """
        shards = tree.of_kind(WAL_SHARD)
        if {spec.shard for spec in shards} == set(published):
            for spec in shards:
                self.board.process(spec.slot).set_watermark(WatermarkKind.PUBLISHED, *published[spec.shard])

    def announce(self, info: EngineInfo) -> None:
        """Write engine.json: the engine is ready."""
        run_dir.write_engine_json(self._disk, self.run_dir, info)

    def write_port_file(self, path: str, address: str) -> None:
        """Write the address of the HTTP gateway to `http.port_file`. Raises DiskError."""
        folder, name = os.path.split(path)
        replace_file(self._disk, folder, name, f"{address}\n".encode())

    def remove_port_file(self, path: str, address: str) -> None:
        """Remove the port file, if there is one and it has this engine's address."""
        with contextlib.suppress(DiskError, OSError, UnicodeDecodeError):
            with open(path) as file:
                is_ours = file.read() == f"{address}\n"
            if is_ours:
                self._disk.unlink(path)

    def write_starting_json(self, info: EngineInfo) -> None:
        """Write starting.json, so that `ringlog status` reaches an engine that is not ready yet."""
        run_dir.write_starting_json(self._disk, self.run_dir, info)

    def close(self) -> None:
        """Remove announcements and shared memory, then release the locks. Every child must be dead."""
        self.board.close()
        os.close(self.liveness_fd)
        if not run_dir.is_of_another_start(self.run_dir, self.start_id):
            run_dir.remove_announcements(self._disk, self.run_dir)
        run_dir.remove_shm_dir(self.shm_dir)
        try:
            self.identity.forget_shm_dir()
        except DiskError as e:
            # The record only triggers a cleanup: the next start finds nothing to remove.
            log_event(log, logging.ERROR, "meta/engine not updated", reason=str(e))
        # The next start takes them in the other order, and must find the second free when it has the first.
        self._disk.unlock(self._run_lock)
        self._disk.unlock(self._lock)


def needed_shm_bytes(config: Config) -> int:
    """Return the bytes of shared memory that the engine needs at least.

    Counted are the board, the topic tables, the news rings, and one client's ring to each shard.
    """
    board = PAGE_BYTES * (PROCESSES_MAX + 1)
    news = NEWS_BYTES if config.delivery.schedulers else 0
    return board + config.wal.shards * (CHUNK_BYTES + news + first_ring_file_bytes(config.run))


def _published_on(shm_dir: str) -> PublishedMarks:
    """Return the marks of all shards on a board without writers. Marks that cannot be read are omitted."""
    found: PublishedMarks = {}
    with contextlib.suppress(BoardError, OSError):
        board = Board.open(shm_dir, writable=False)
        try:
            for n in range(board.processes):
                page = board.process(n)
                if page.get(ProcessField.SHARD) and page.get(ProcessField.KIND) == KINDS.index(WAL_SHARD):
                    found[page.get(ProcessField.SHARD) - 1] = _mark_of(page)
        finally:
            board.close()
    return found


def _mark_of(page: ProcessSlot) -> tuple[int, int]:
    try:
        return page.watermark(WatermarkKind.PUBLISHED)
    except BoardUnstable:
        # The shard died while it wrote the mark: treat it as never written.
        return (0, 0)


def refuse_root(config: Config) -> None:
    """Raise StartRefused for uid 0, unless `run.allow_root` is set or the engine runs in a container."""
    if os.geteuid() == 0 and not config.run.allow_root:
        if is_in_container():
            log_event(
                log,
                logging.WARNING,
                "running as root in a container; use another user (USER, --user)",
            )
            return
        raise StartRefused(
            "running as root is refused: use another user, or say so with --set run.allow_root=true "
            "(or RINGLOG_ALLOW_ROOT=1)"
        )


def is_in_container() -> bool:
    """Return whether this looks like a container: pid 1, or a file that container engines create."""
    return os.getpid() == 1 or any(map(os.path.exists, CONTAINER_FILES))


def _take_lock(disk: Disk, path: str, refusal: str) -> int:
    """Return the handle of a lock in a directory. If another engine has it, raise StartRefused(`refusal`)."""
    try:
        return disk.lock(path)
    except DiskError as e:
        folder, holder = os.path.dirname(path), e.detail.get("holder")
        if holder is None:
            raise StartRefused("a directory cannot be locked", path=path, reason=e.message) from None
        raise StartRefused(refusal, dir=folder, holder=holder) from None


def _take_run_lock(disk: Disk, path: str) -> int:
    """Lock the run directory. Raise StartRefused, with what is known of the engine that uses it."""
    try:
        return _take_lock(
            disk,
            os.path.join(path, run_dir.RUN_LOCK),
            "an engine of another data directory uses this run directory: stop it, or give each engine its "
            "own run.dir",
        )
    except StartRefused as e:
        with contextlib.suppress(NotConnected):  # It is not ready yet, or the lock could not be opened.
            e.detail["data_dir"] = run_dir.read_engine_json(path).data_dir
        raise


def _require_disk_space(config: Config, data_dir: str) -> None:
    facts = os.statvfs(data_dir)
    free = facts.f_bavail * facts.f_frsize
    if free < config.data.min_free_bytes:
        raise StartRefused(
            "free disk space is below data.min_free_bytes; free some space or lower the setting",
            dir=data_dir, free_bytes=free, min_free_bytes=config.data.min_free_bytes,
        )  # fmt: skip


def _pids_on_board(shm_dir: str) -> list[int]:
    """Return the pids of living processes on a dead supervisor's board, for the error text."""
    board = Board.open(shm_dir, writable=False)
    try:
        pids = {board.process(slot).get(ProcessField.PID) for slot in range(board.processes)}
    finally:
        board.close()
    return sorted(pid for pid in pids if pid and os.path.exists(f"/proc/{pid}"))
