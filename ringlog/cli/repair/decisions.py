"""Decisions of a repair: which damaged files are repaired, rebuilt, replaced or put into the quarantine."""

from __future__ import annotations

import secrets
from pathlib import Path

from ringlog.cli.repair.losses import find_lost
from ringlog.cli.repair.plan import WAL_NAME, RepairPlan, log_file_id, numbers_of
from ringlog.errors import UsageError
from ringlog.verify.directory import verify_directory
from ringlog.verify.findings import DAMAGE, FileReport
from ringlog.verify.frame_decoder import VerifyError
from ringlog.verify.log_order import NeededLog, in_replay_order, needed_files
from ringlog.verify.repair import placeholder_log, read_partial_log, reseal_log
from ringlog.verify.wal_decoder import HEADER_BYTES, DecodedWalHeader

_ROOM_BYTES, _LOST_BYTES = 4_096, 112
"""Size of a log file that replaces one of unknown content: a fixed part, and the bytes per lost range."""


def plan_repair(data_dir: str, cold_dir: str = "", *, jobs: int = 0) -> RepairPlan:
    """Verify the directory with `jobs` processes (0: one per CPU) and decide about every damaged file.

    Raises UsageError.
    """
    cold = Path(cold_dir) if cold_dir else None
    plan = RepairPlan(verify_directory(data_dir, jobs=jobs, cold_dir=cold_dir), Path(data_dir), cold)
    _require_cold(plan)
    needed = needed_files(plan.found.files, plan.snapshots)
    for report in plan.found.files:
        if not report.is_damaged:
            continue
        if WAL_NAME.match(report.path):
            _plan_log(plan, report, needed)
        elif report.kind == "snapshot" or report.path.startswith("meta/snapshot-"):
            plan.quarantined[report.path] = report.findings[0].what
        elif report.kind == "segment" or report.path.startswith(("topics/", "packs/")):
            _plan_segment(plan, report)
    existing = {report.path for report in plan.found.files}
    used = {report.path for report in in_replay_order(plan.found.files)}
    for log in needed.values():
        if log.path not in used and log.path not in plan.repaired_logs:
            if log.path in existing:
                plan.quarantined[log.path] = "is empty, but other files refer to its content"
            _plan_placeholder(plan, log.path, needed)
    for report in plan.found.files:
        if report.kind == "snapshot":
            plan.dropped.update(
                number for stem, number, _ in report.extra["facts"].segments if stem not in existing
            )
    find_lost(plan)
    full_logs = [path for path, log in plan.repaired_logs.items() if not plan.has_room(path, log)]
    for path in full_logs:
        # Its damaged spans have no room for the announcements: replace the whole file by a placeholder.
        plan.quarantined[path] = "has no room for the announcement of its losses"
        plan.repaired_logs.pop(path)
        plan.resealed.pop(path, None)
        _plan_placeholder(plan, path, needed)
        find_lost(plan)
    return plan


def _require_cold(plan: RepairPlan) -> None:
    """Raise UsageError if records are in a cold tier that was not named: they may not be lost."""
    if plan.cold is not None:
        return
    reports = {report.path: report for report in plan.found.files if report.kind == "segment"}
    for snapshot in plan.snapshots:
        for stem, _, tier in snapshot.extra["facts"].segments:
            report = reports.get(stem)
            is_bad = report is None or (report.is_damaged and not report.extra["is_data_sound"])
            if tier and is_bad:
                raise UsageError(
                    "a damaged segment has a copy in the cold tier: name its directory with --cold-dir (copy "
                    "the objects of a store into one first)", segment=stem,
                )  # fmt: skip


def _plan_log(plan: RepairPlan, report: FileReport, needed: dict[int, NeededLog]) -> None:
    limit, path = report.extra.get("limit", 0), report.path
    try:
        data = (plan.root / path).read_bytes()
        if not report.extra.get("file_id"):
            header = _header_for(plan, path, 0, len(data))
            stop = next((each.stop for each in needed.values() if each.path == path), 0)
            plan.resealed[path] = reseal_log(data, header)
            plan.repaired_logs[path] = read_partial_log(plan.resealed[path], 0, stop)
            return
        plan.repaired_logs[path] = read_partial_log(data, limit, limit or report.extra.get("durable", 0))
    except (VerifyError, OSError) as e:
        plan.quarantined[path] = e.message if isinstance(e, VerifyError) else str(e.strerror)
        _plan_placeholder(plan, path, needed)


def _plan_placeholder(plan: RepairPlan, path: str, needed: dict[int, NeededLog]) -> None:
    """Plan a placeholder for a log file that other files refer to: recovery needs the file and its end."""
    log = next((each for each in needed.values() if each.path == path), None)
    if log is not None:
        stop = log.stop
        if not stop:
            plan.unknown.append(log)
            stop = HEADER_BYTES + _ROOM_BYTES + _LOST_BYTES * len(plan.found.histories.live_topics())
        plan.repaired_logs[path] = placeholder_log(_header_for(plan, path, log.shards, stop), stop)


def _header_for(plan: RepairPlan, path: str, shards: int, size: int) -> DecodedWalHeader:
    """Build a new header for a log file from the headers of other log files.

    `shards` 0: use their shard count. Raises VerifyError if there are no other log files."""
    shard, incarnation, n = numbers_of(path)
    logs = [each.header for each in plan.found.files if each.kind == "wal" and "boot_id" in each.header]
    if not logs:
        raise VerifyError("no other log file describes this one")
    # The end of the previous file is not known. Its existence proves that the incarnation served.
    before = log_file_id(path) - 1 if n else 0
    near = max(logs, key=lambda each: (int(each["incarnation"]) == incarnation, int(each["incarnation"])))
    return DecodedWalHeader(
        shard, shards or int(near["shards"]), n, incarnation, secrets.randbits(63) | 1,
        bytes.fromhex(near["boot_id"]), bytes.fromhex(near["engine_id"]), int(near["created_us"]), size,
        before, 0, 0, 0,
    )  # fmt: skip


def _plan_segment(plan: RepairPlan, report: FileReport) -> None:
    """If the data is sound, plan to rebuild the other parts. Otherwise quarantine the segment.

    The complete frames of a quarantined segment go into a new segment."""
    extra = report.extra
    if extra.get("is_data_sound") and not extra["is_misplaced"] and not extra.get("is_foreign"):
        plan.rebuilt.append(report.path)
        return
    plan.quarantined[report.path] = next(each.what for each in report.findings if each.severity == DAMAGE)
    plan.dropped.add(int(report.path.rpartition("-")[2], 16))
