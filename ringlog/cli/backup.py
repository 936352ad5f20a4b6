"""`ringlog backup`: make a consistent copy of the data directory of a running or stopped engine.

A running engine makes a checkpoint and lists the files of a consistent set. They are copied and verified with
the decoder of `ringlog verify`. A manifest with sizes and checksums is written last. The engine keeps writing
its log meanwhile: of the newest file, the copy contains the frames that were complete when it was read.

The set stays complete while it is copied. A hold keeps the parts of segments (segment_hold.py), for a day at
most and as long as the disk is not low. Log files and snapshots are opened before the first byte is copied,
and an open file can be read without its name. The copy is verified after the end of the hold.
"""

from __future__ import annotations

import errno
import os
import re
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, BinaryIO

import msgspec
from cyclopts import Parameter

from ringlog import __version__
from ringlog.cli.copies import (
    COLD,
    ENGINE_FILE,
    BackupManifest,
    ManifestEntry,
    copy_file,
    copy_identity,
    copy_open_file,
    entry_of,
    make_dirs,
    make_empty,
    read_registers,
    truncate_file,
    with_path,
    write_manifest,
    write_synced,
)
from ringlog.cli.maintenance import COMPACTOR, local_engine, request_process
from ringlog.cli.options import Options
from ringlog.cli.settings import warn
from ringlog.cli.verify import refuse_running, require_cold_dir
from ringlog.config_sources import load_config
from ringlog.descriptors import raise_descriptor_limit
from ringlog.envelope.messages import CheckpointMade, CheckpointNow
from ringlog.errors import CorruptData, UsageError
from ringlog.storage.disk import Disk, disk_error
from ringlog.storage.real_disk import RealDisk
from ringlog.storage.segment_hold import hold_segments
from ringlog.verify.cold_owner import require_own_cold_tier
from ringlog.verify.directory import Verification, verify_directory
from ringlog.verify.findings import DAMAGE
from ringlog.verify.frame_decoder import VerifyError
from ringlog.verify.wal_decoder import WalFrameWalk, read_header

Given = Annotated[Options, Parameter(parse=False)]
TRIES = 3
"""Attempts. A file of the set may be replaced during the copy; then a new checkpoint lists a new set."""
_WANTED = re.compile(
    r"^(wal/shard-\d+/wal-\d+-\d+\.log|(topics|packs)/.*\.(data|idx|tags|del)|meta/snapshot-[\d.]+)$"
)
_IS_LOG = re.compile(r"\.log$")
_IS_SHORT_LIVED = re.compile(r"^(wal/.*\.log|meta/snapshot-[\d.]+)$")
_MARKS = ".del"
"""Suffix of a segment's deletion marks."""
_DESCRIPTORS_OF_A_COPY = 64
"""Descriptors that a copy needs besides the files that it opens in advance."""


def backup(data_dir: str | None = None, *, to: str, cold_dir: str | None = None, options: Given) -> int:
    """Copy the data of an engine into a new directory, verified and consistent.

    A running engine makes a checkpoint first. The copy is consistent as of that checkpoint.

    Parameters
    ----------
    data_dir
        Data directory of a stopped engine (default: the running engine of --url).
    to
        Directory of the backup; new or empty.
    cold_dir
        Directory of the cold tier, which is copied as well (default: that of the running engine, or as
        configured).

    Examples
    --------
    ringlog backup --to /backup/monday
    ringlog backup ./ringlog-data --to /backup/monday
    """
    target = Path(to).absolute()
    if cold_dir is not None:
        require_cold_dir(cold_dir)
    disk = RealDisk()
    if data_dir is None:
        engine = local_engine(options)
        cold = engine.cold_dir if cold_dir is None else cold_dir
        make_empty(disk, target)
        copying = BackupJob(Path(engine.data_dir), target, cold, is_online=True, disk=disk)
        manifest = copy_running(options, copying)
    else:
        refuse_running(data_dir)
        cold = _configured_cold_dir(options) if cold_dir is None else cold_dir
        make_empty(disk, target)
        copying = BackupJob(Path(data_dir), target, cold, is_online=False, disk=disk)
        manifest = copy_stopped(copying, options.clock.now_us())
    facts = {"backup": str(target), "files": len(manifest.files), "bytes": manifest.total}
    facts |= {"engine_id": manifest.engine_id, "online": manifest.is_online}
    options.printer().item(facts | {"left_in_cold_tier": _left_behind(manifest)})
    return 0


def _configured_cold_dir(options: Options) -> str:
    loaded = load_config()
    warn(loaded, options)
    return loaded.config.cold.dir


@dataclass(frozen=True, slots=True)
class BackupJob:
    """Source and target of a backup."""

    source: Path
    target: Path
    cold_dir: str
    is_online: bool
    disk: Disk


def copy_stopped(copying: BackupJob, now_us: int) -> BackupManifest:
    """Back up the directory of a stopped engine. On DiskError or CorruptData no manifest is written."""
    registers = read_registers(copying.source)
    return _finish(copying, _copy(copying, _files_in(copying.source), registers, {}), now_us)


def copy_running(options: Options, copying: BackupJob) -> BackupManifest:
    """Back up the directory of the running engine of `options`.

    On DiskError, CorruptData, OSError and the errors of a checkpoint no manifest is written.
    """
    for _ in range(TRIES - 1):
        try:
            return _attempt_copy(options, copying)
        except (FileNotFoundError, CorruptData):
            _clear(copying)
    return _attempt_copy(options, copying)


def _attempt_copy(options: Options, copying: BackupJob) -> BackupManifest:
    with hold_segments(str(copying.source)), ExitStack() as stack:
        # Read before the checkpoint: the newest log files that registers name are then in the set, or
        # absorbed.
        registers = read_registers(copying.source)
        files = request_process(options, COMPACTOR, CheckpointNow(), CheckpointMade).files
        opened = _open_short_lived(stack, copying.source, files)
        now_us = options.clock.now_us()
        entries = _copy(copying, files, registers, opened)
    return _finish(copying, entries, now_us)


def _open_short_lived(stack: ExitStack, source: Path, files: list[str]) -> dict[str, BinaryIO]:
    """Open the files that the next checkpoints delete: log files and snapshots.

    Raises FileNotFoundError if one was deleted since it was listed, and DiskError at the descriptor limit.
    """
    wanted = [path for path in files if _IS_SHORT_LIVED.match(path)]
    raise_descriptor_limit(len(wanted) + _DESCRIPTORS_OF_A_COPY)
    try:
        return {path: stack.enter_context((source / path).open("rb")) for path in wanted}
    except OSError as e:
        if e.errno not in {errno.EMFILE, errno.ENFILE}:
            raise
        raise disk_error("open", str(source), e.errno, files=len(wanted)) from None


def _left_behind(manifest: BackupManifest) -> int:
    """Return the number of segments whose data stays in the cold tier: the backup has only the index."""
    paths = {entry.path.removeprefix(COLD) for entry in manifest.files}
    return sum(path.endswith(".idx") and _data_of(path) not in paths for path in paths)


def _clear(copying: BackupJob) -> None:
    """Delete the copied files. Directories stay for the next attempt."""
    for path in copying.target.rglob("*"):
        if not path.is_dir():
            copying.disk.unlink(str(path))


def _files_in(data_dir: Path) -> list[str]:
    """Return all data files of a stopped engine's directory."""
    paths = [
        os.path.relpath(os.path.join(at, name), data_dir)
        for at, _, names in os.walk(data_dir)
        for name in names
    ]
    found = sorted(path for path in paths if _WANTED.match(path))
    if not found:
        raise UsageError("not a data directory: it holds no log and no snapshot", path=str(data_dir))
    return found


def _copy(
    copying: BackupJob,
    files: list[str],
    registers: dict[str, bytes],
    opened: dict[str, BinaryIO],
) -> list[ManifestEntry]:
    """Copy files; return their entries. Files in `opened` are read there and closed.

    Deletion marks are copied before the log: the log then contains the deletions that they belong to.
    """
    target, disk = copying.target, copying.disk
    cold_parts = _cold_parts(copying, files)
    order = sorted(files, key=lambda path: (not path.endswith(_MARKS), path not in opened))
    entries = [_copy_one(copying, path, opened) for path in dict.fromkeys([*order, ENGINE_FILE])]
    for path, data in registers.items():
        write_synced(disk, target / path, data)
        entries.append(entry_of(target / path, path))
    if copying.cold_dir:
        make_dirs(disk, target / COLD)  # With it, the verification requires the data of every segment.
    for part in cold_parts:
        entry = copy_file(disk, Path(copying.cold_dir) / part, target / COLD / part)
        entries.append(with_path(entry, COLD + part))
    return entries


def _finish(copying: BackupJob, entries: list[ManifestEntry], now_us: int) -> BackupManifest:
    """Verify the copy, and write and return its manifest. Raises CorruptData if it does not verify."""
    target = copying.target
    _require_whole(verify_directory(str(target), cold_dir=str(target / COLD)))
    identity: dict[str, Any] = msgspec.json.decode((target / ENGINE_FILE).read_bytes())
    manifest = BackupManifest(1, identity["engine_id"], __version__, now_us, copying.is_online, entries)
    write_manifest(copying.disk, target, manifest)
    return manifest


def _copy_one(copying: BackupJob, path: str, opened: dict[str, BinaryIO]) -> ManifestEntry:
    source, target, disk = copying.source, copying.target, copying.disk
    if path == ENGINE_FILE:
        return copy_identity(disk, source, target)
    with opened.get(path) or (source / path).open("rb") as reading:
        entry = copy_open_file(disk, reading, target / path)
    if copying.is_online and _IS_LOG.search(path):
        _cut_at_last_frame(disk, target / path)
        entry = entry_of(target / path, path)
    return with_path(entry, path)


def _cut_at_last_frame(disk: Disk, path: Path) -> None:
    """Cut a log file that was written during the copy after its last complete frame."""
    data = path.read_bytes()
    try:
        walk = WalFrameWalk(data, read_header(data).salt)
    except VerifyError:
        return
    for _ in walk.frames():
        continue
    truncate_file(disk, path, walk.stop)


def _cold_parts(copying: BackupJob, files: list[str]) -> list[str]:
    """Return the data parts of the set that are in the cold directory and not on the host.

    Raises UsageError if one is in neither place, and for the cold tier of another engine. Of a stopped
    engine, `files` may contain an index that a crash left, so that only the verification of the copy can
    tell.
    """
    require_own_cold_tier(copying.source, copying.cold_dir)
    cold, listed = Path(copying.cold_dir), set(files)
    if not copying.cold_dir:
        return []
    wanted = [_data_of(path) for path in files if path.endswith(".idx") and _data_of(path) not in listed]
    found = [part for part in wanted if (cold / part).exists()]
    absent = sorted(set(wanted) - set(found))
    if absent and (copying.is_online or not cold.is_dir()):
        raise UsageError(
            "the cold directory lacks the data of segments: is it mounted, and is it the right one?",
            cold_dir=copying.cold_dir, segment=absent[0], segments=len(absent),
        )  # fmt: skip
    return found


def _data_of(index: str) -> str:
    return f"{index.removesuffix('.idx')}.data"


def _require_whole(found: Verification) -> None:
    wrong = [finding for finding in found.findings if finding.severity == DAMAGE]
    if wrong:
        raise CorruptData(
            "the copy is damaged", file=wrong[0].path, offset=wrong[0].offset, reason=wrong[0].what,
            findings=len(wrong),
        )  # fmt: skip
