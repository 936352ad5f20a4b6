"""`ringlog restore`: create a data directory from a backup. The backup is checked before any write."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

from cyclopts import Parameter

from ringlog.cli.copies import (
    COLD,
    ManifestEntry,
    changed_files,
    copy_file,
    make_empty,
    read_manifest,
    sync_tree,
    with_path,
    write_synced,
)
from ringlog.cli.options import Options
from ringlog.entropy import random_hex
from ringlog.errors import CorruptData, UsageError
from ringlog.storage.disk import Disk
from ringlog.storage.layout import META_DIR, RESTORED
from ringlog.storage.real_disk import RealDisk
from ringlog.tier.local import LocalStore
from ringlog.tier.ownership import OwnedStore

Given = Annotated[Options, Parameter(parse=False)]


def restore(backup: str, *, to: str, cold_dir: str = "", options: Given) -> int:
    """Check a backup and copy it into a new data directory.

    Existing data is never overwritten. The engine recovers the copy at its next start.

    Parameters
    ----------
    backup
        Directory that `ringlog backup` made.
    to
        Data directory to create; new or empty.
    cold_dir
        Directory for the cold tier of the backup; new or empty.

    Examples
    --------
    ringlog restore /backup/monday --to ./ringlog-data
    """
    source, target = Path(backup).absolute(), Path(to).absolute()
    manifest = read_manifest(source)
    cold = [entry for entry in manifest.files if entry.path.startswith(COLD)]
    if cold and not cold_dir:
        raise UsageError("the backup contains a cold tier: set --cold-dir", files=len(cold))
    wrong = changed_files(source, manifest.files)
    if wrong:
        raise CorruptData("the backup is damaged", file=wrong[0], files=len(wrong))
    disk = RealDisk()
    cold_target = Path(cold_dir).absolute()
    make_targets(disk, [target, cold_target] if cold else [target])
    # First, so that no directory with copied data lacks it.
    write_synced(disk, target / META_DIR / RESTORED, random_hex(8).encode())
    copy_back(disk, source, target, [entry for entry in manifest.files if entry not in cold])
    if cold:
        # An engine reads only a cold tier that it owns, and the volume may be read-only when it starts.
        OwnedStore(LocalStore(disk, str(cold_target)), disk, str(target), manifest.engine_id).claim()
        stripped = [with_path(entry, entry.path.removeprefix(COLD)) for entry in cold]
        copy_back(disk, source / COLD, cold_target, stripped)
    facts = {"restored": str(target), "files": len(manifest.files), "bytes": manifest.total}
    options.printer().item(facts | {"engine_id": manifest.engine_id, "cold_files": len(cold)})
    return 0


def make_targets(disk: Disk, targets: list[Path]) -> None:
    """Create the directories before anything is copied; raise UsageError if one cannot be used, DiskError."""
    data, *cold = [target.resolve() for target in targets]
    if any(place == data or place in data.parents for place in cold):
        raise UsageError("--cold-dir must not be or contain the data directory", cold_dir=str(targets[1]))
    for target in targets:
        make_empty(disk, target)


def copy_back(disk: Disk, source: Path, target: Path, entries: list[ManifestEntry]) -> None:
    """Copy the files of a manifest to an empty directory and compare them; raise DiskError or CorruptData."""
    for entry in entries:
        copy_file(disk, source / entry.path, target / entry.path)
    sync_tree(disk, target)
    broken = changed_files(target, entries)
    if broken:
        raise CorruptData("a restored file differs from the backup", file=broken[0], files=len(broken))
