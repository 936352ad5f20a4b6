"""Result of recovery, and the changes of the disk that follow from it."""

from __future__ import annotations

import logging
from dataclasses import dataclass, field

from ringlog.actors.wal_shard.commit.commit_batch import CommitBatch
from ringlog.actors.wal_shard.recovery.log_file_table import LogFileTable
from ringlog.logs import log_event
from ringlog.storage.disk import Disk, replace_file, unlink_if_present
from ringlog.storage.layout import QUARANTINE_DIR
from ringlog.topic.directory import Halt

log: logging.Logger = logging.getLogger("ringlog.shard")


@dataclass(slots=True)
class RecoveryResult:
    """Result of recovery, for the core's `begin` and for readers."""

    batch: CommitBatch = field(default_factory=CommitBatch)
    prev: tuple[int, int, int, bool] = (0, 0, 0, False)
    settled: dict[int, int] = field(default_factory=dict)
    """File -> its new end offset for the topics of this shard."""
    damaged: set[int] = field(default_factory=set)
    """Files that were cut at damage or are missing."""
    unused_files: list[str] = field(default_factory=list)
    """Paths to delete: files without durable header, absorbed files, damaged registers."""
    truncations: list[tuple[str, int]] = field(default_factory=list)
    """(path, end) of own last files. The space after the end is never read again and may be freed."""
    to_quarantine: list[str] = field(default_factory=list)
    """Damaged files of which a copy is kept, because their valid parts may be of use."""
    halts: list[Halt] = field(default_factory=list)
    """Topics that are not served because a part of their records is missing."""
    truncated_bytes: int = 0
    announced: list[tuple[str, int, int]] = field(default_factory=list)
    bytes: int = 0
    number: int = 0
    """Number of the snapshot that recovery started from; 0 if there was none."""
    has_base: bool = False
    """True if that snapshot is this shard's own.
    Its rows of topics that are not in `changed` are still valid."""
    listed: set[int] = field(default_factory=set)
    """Numbers of the segments that the snapshot lists."""
    waiting: list[tuple[int, str]] = field(default_factory=list)
    """(file, path) of absorbed files that are kept until the next snapshot."""
    changed: set[int] = field(default_factory=set)
    """Ids of topics that the replayed log changed."""
    log_files: LogFileTable = field(default_factory=LogFileTable)
    """The replayed files."""
    in_doubt: dict[tuple[int, int], int] = field(default_factory=dict)
    """(topic, producer) -> highest producer number among the frames in doubt, which are not applied.
    Filled only in read-only mode."""


def quarantine_file(disk: Disk, data_dir: str, path: str) -> None:
    """Copy a damaged file to `quarantine/`, which no process reads as data. Raise DiskError.

    An existing copy is complete, since it is renamed into place last. It is not written again.
    """
    target = f"{data_dir}/{QUARANTINE_DIR}/{path}"
    if disk.exists(target) or not disk.exists(f"{data_dir}/{path}"):
        return
    directory = data_dir
    for part in f"{QUARANTINE_DIR}/{path}".split("/")[:-1]:
        disk.make_dir(f"{directory}/{part}")
        disk.sync_dir(directory)
        directory = f"{directory}/{part}"
    source = disk.open_read(f"{data_dir}/{path}")
    try:
        copied = disk.read_at(source, disk.size(source), 0)
    finally:
        disk.close(source)
    replace_file(disk, directory, path.rpartition("/")[2], copied)
    log_event(
        log, logging.WARNING, "damaged file copied to quarantine", file=path, copy=f"{QUARANTINE_DIR}/{path}"
    )


def clean_up(disk: Disk, data_dir: str, found: RecoveryResult) -> None:
    """Copy damaged files to quarantine, delete unused files and truncate own files. Raise DiskError.

    Call this only after the MARK_COPIED of this incarnation is durable.
    """
    for path in found.to_quarantine:
        quarantine_file(disk, data_dir, path)
    for path in found.unused_files:
        # The compactor may still delete what its last checkpoint, with the shard before this one, released.
        unlink_if_present(disk, f"{data_dir}/{path}")
    for path, stop in found.truncations:
        fd = disk.open_for_truncate(f"{data_dir}/{path}")
        try:
            disk.truncate(fd, stop)
            disk.sync_file(fd)
        finally:
            disk.close(fd)
