"""The repaired copy of a damaged directory, written as a plan says."""

from __future__ import annotations

import secrets
from collections.abc import Iterator
from pathlib import Path

from ringlog.cli.copies import ENGINE_FILE, copy_file, copy_identity, make_empty, sync_tree, write_synced
from ringlog.cli.repair.plan import WAL_NAME, Key, RepairPlan, intersection, log_file_id, shard_of
from ringlog.errors import UsageError
from ringlog.segment.index_rebuild import rebuild_index
from ringlog.segment.layout import CREATOR_COMPACTOR, NumberAllocator
from ringlog.segment.salvage import SalvagedTopic, write_deletion_marks, write_salvaged
from ringlog.storage.disk import Disk
from ringlog.storage.identity_file import encode_identity
from ringlog.storage.layout import META_DIR, QUARANTINE_DIR, RESTORED, ids_upper_bound
from ringlog.storage.log_register import RegisterEntry, encode_register, register_name
from ringlog.storage.real_disk import RealDisk
from ringlog.verify.directory import HOT
from ringlog.verify.findings import FileReport
from ringlog.verify.log_order import in_replay_order
from ringlog.verify.repair import read_partial_log, rewrite_snapshot, with_prev_seal

_INDEX_PARTS = (".idx", ".tags")
_PARTS = (".data", ".idx", ".tags", ".del")


def build_copy(plan: RepairPlan, target: Path, disk: Disk | None = None) -> None:
    """Build the repaired copy; raise UsageError if the target is not empty, VerifyError and DiskError."""
    disk = disk or RealDisk()
    source = plan.root
    make_empty(disk, target)
    _copy_identity(disk, plan, target)
    _copy_logs(disk, plan, target)
    for report in plan.found.files:
        if report.path.startswith(("topics/", "packs/")):
            _copy_segment(disk, plan, report, target)
        elif report.path.startswith("meta/snapshot-"):
            aside = QUARANTINE_DIR if report.path in plan.quarantined else ""
            copy_file(disk, source / report.path, target / aside / report.path)
        elif report.kind == "register" and report.header:
            copy_file(disk, source / report.path, target / report.path)
    _make_registers(disk, plan, target)
    _write_salvaged(disk, plan, target)
    _rewrite_snapshots(disk, plan, target)
    sync_tree(disk, target)


def _copy_identity(disk: Disk, plan: RepairPlan, target: Path) -> None:
    """Copy the identity of the directory. If it is damaged, rebuild it from the headers of other files."""
    restored = f"{META_DIR}/{RESTORED}"
    if (plan.root / restored).exists():
        copy_file(disk, plan.root / restored, target / restored)
    report = next((each for each in plan.found.files if each.path == ENGINE_FILE), None)
    if report is not None and not report.is_damaged:
        copy_identity(disk, plan.root, target)
        return
    owners = [each.header["engine_id"] for each in plan.found.files if "engine_id" in each.header]
    if not owners:
        raise UsageError("meta/engine is damaged, and no other file names the engine", path=str(plan.root))
    used = max((int(each.header.get("incarnation", 0)) for each in plan.found.files), default=0)
    if report is not None:
        copy_file(disk, plan.root / ENGINE_FILE, target / QUARANTINE_DIR / ENGINE_FILE)
    owner = max(owners, key=owners.count)
    write_synced(disk, target / ENGINE_FILE, encode_identity(owner, used + 1, ""))


def _copy_logs(disk: Disk, plan: RepairPlan, target: Path) -> None:
    """Copy each log file: unchanged, repaired, or to the quarantine.

    If a repair changed the last seal of a file, the next file refers to the new seal."""
    seals: dict[tuple[int, int], int] = {}
    reports = {report.path: report for report in plan.found.files if WAL_NAME.match(report.path)}
    for path in sorted({*reports, *plan.repaired_logs}, key=log_file_id):
        report = reports.get(path)
        if path in plan.quarantined or (path in plan.repaired_logs and report is not None):
            copy_file(disk, plan.root / path, target / QUARANTINE_DIR / path)
        if path in plan.repaired_logs:
            data = plan.repaired_bytes(path, plan.repaired_logs[path])
            is_new = report is None or path in plan.quarantined or path in plan.resealed
            before: dict[int, int] = {} if is_new or report is None else report.extra["ends"]
            for offset, seal in _seals_of(data):
                if before.get(offset) != seal:
                    seals[log_file_id(path), offset] = seal
        elif path in plan.quarantined or report is None or not report.extra.get("file_id"):
            continue
        else:
            data = (plan.root / path).read_bytes()
        if report is not None and report.extra.get("file_id") and path not in plan.quarantined:
            prev = (report.extra["prev"][0], report.extra["prev"][1])
            if prev in seals:
                data = with_prev_seal(data, seals[prev])
        write_synced(disk, target / path, data)


def _seals_of(data: bytes) -> Iterator[tuple[int, int]]:
    """Yield (end offset, seal) of every frame of a complete file."""
    for seen in read_partial_log(data).frames:
        yield seen.offset + seen.frame.total, seen.seal


def _make_registers(disk: Disk, plan: RepairPlan, target: Path) -> None:
    """Create registers that are missing or empty, from the existing log."""
    newest: dict[int, dict[int, FileReport]] = {}
    for report in in_replay_order(plan.found.files):
        if report.path not in plan.quarantined:
            newest.setdefault(report.header["shard"], {})[report.header["shards"]] = report
    known = plan.found.histories.max_identities()
    for shard, files in newest.items():
        path = target / META_DIR / register_name(shard)
        if path.exists():
            continue
        last = max(files.values(), key=lambda report: int(report.extra["file_id"]))
        shards, size = int(last.header["shards"]), int(last.header["file_bytes"])
        entry = RegisterEntry(
            shard, 1, bytes.fromhex(last.header["engine_id"]), *ids_upper_bound(known, size, shards), size,
            shards,
            int(last.extra["file_id"]),
            tuple(sorted((n, int(each.extra["file_id"])) for n, each in files.items() if n != shards)),
        )  # fmt: skip
        write_synced(disk, path, encode_register(entry))


def _copy_segment(disk: Disk, plan: RepairPlan, report: FileReport, target: Path) -> None:
    stem, source = report.path, plan.root
    is_rebuilt = stem in plan.rebuilt
    has_bad_marks = bool(is_rebuilt and report.extra.get("has_bad_marks"))
    for suffix in _PARTS:
        path = stem + suffix
        if not (source / path).exists():
            continue
        is_bad = is_rebuilt and (suffix in _INDEX_PARTS or (suffix == ".del" and has_bad_marks))
        if stem in plan.quarantined or is_bad:
            copy_file(disk, source / path, target / QUARANTINE_DIR / path)
        else:
            copy_file(disk, source / path, target / path)
    if is_rebuilt:
        is_cold = report.extra["tier"] == "cold"
        rebuild_index(disk, str(target), stem, source_dir=str(plan.cold) if is_cold else None).close()
    if has_bad_marks:
        dead = {(each.topic_id, each.epoch): each.removed for each in plan.found.histories.live_topics()}
        write_deletion_marks(disk, str(target), stem, dead)


def _write_salvaged(disk: Disk, plan: RepairPlan, target: Path) -> None:
    """Write one segment for each shard with salvaged records, with a number as from the compactor."""
    known = [int(each.extra["number"]) for each in plan.found.files if each.kind == "segment"]
    known += [
        number
        for each in plan.found.files if each.kind == "snapshot"
        for _, number, _ in each.extra["facts"].segments
    ]  # fmt: skip
    numbers = NumberAllocator(CREATOR_COMPACTOR, [*known, *plan.dropped])
    headers = [each.header for each in plan.found.files]
    newest = max(
        (each for each in headers if "shards" in each and "incarnation" in each),
        key=lambda header: int(header["incarnation"]), default={"shards": 1},
    )  # fmt: skip
    shards = int(newest["shards"])
    owner = next(each["engine_id"] for each in headers if "engine_id" in each)
    created = max((int(each.get("created_us", 0)) for each in headers), default=0)
    by_shard: dict[int, dict[Key, SalvagedTopic]] = {}
    for key, salvaged in plan.salvaged.items():
        by_shard.setdefault(shard_of(key[0], shards), {})[key] = salvaged
    for shard, topics in sorted(by_shard.items()):
        write_salvaged(
            disk, str(target), topics, number=numbers.allocate(), salt=secrets.randbits(63) | 1, shard=shard,
            shards=shards, engine_id=bytes.fromhex(owner), created_us=created,
        )  # fmt: skip


def _rewrite_snapshots(disk: Disk, plan: RepairPlan, target: Path) -> None:
    """Rewrite snapshots: announce lost records, and list only existing segments in their actual tier."""
    cold = {
        int(each.extra["number"])
        for each in plan.found.files
        if each.kind == "segment" and each.extra["tier"] == "cold" and each.extra["has_data"]
    }
    for report in plan.found.files:
        if report.kind != "snapshot" or report.path in plan.quarantined:
            continue
        lost = {
            row.topic_id: intersection(plan.lost[row.topic_id, row.epoch], [(1, row.head)])
            for row in report.extra["topics"]
            if (row.topic_id, row.epoch) in plan.lost and row.head
        }
        lost = {topic_id: ranges for topic_id, ranges in lost.items() if ranges}
        listed = {number: tier for _, number, tier in report.extra["facts"].segments}
        moved = {number for number in cold if listed.get(number) == HOT}
        if lost or moved or listed.keys() & plan.dropped:
            data = (target / report.path).read_bytes()
            disk.unlink(str(target / report.path))
            write_synced(disk, target / report.path, rewrite_snapshot(data, lost, plan.dropped, moved))
