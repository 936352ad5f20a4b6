"""Order of a directory's WAL files: which are in force, where each one ends, which are missing.

A later file records where earlier ones ended (docs/reference/format.md, Marks). The end of a file is checked
against its own marks, the next file's header, and the first marks of later incarnations.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import NamedTuple

from ringlog.verify.findings import FileReport
from ringlog.verify.wal_decoder import HEADER_BYTES

Claims = dict[int, list[tuple[int, int, int]]]
"""file id -> (shards, shard, stop): by that shard of so many shards, the file ends at `stop`."""


def in_replay_order(reports: Sequence[FileReport]) -> list[FileReport]:
    """Return the used WAL files in the order of their replay."""
    used = [report for report in reports if report.kind == "wal" and report.extra.get("file_id")]
    return sorted(used, key=lambda report: int(report.extra["file_id"]))


def check_wal_order(reports: Sequence[FileReport], snapshots: Sequence[FileReport] = ()) -> list[FileReport]:
    """Add findings from the comparison of WAL files and registers. Returns the files in force, in order.

    Files that a snapshot of their shard covers may be deleted.
    """
    ordered = in_replay_order(reports)
    by_id = {int(report.extra["file_id"]): report for report in ordered}
    claims, damaged = _claims(ordered)
    for report in ordered:
        _judge_passed(report, ordered, claims)
    serving = _serving(ordered, claims)
    for report in ordered:
        if report.header["incarnation"] not in serving:
            report.add_remark("ignored: its incarnation did not complete recovery")
    in_force = [report for report in ordered if report.header["incarnation"] in serving]
    for report in in_force:
        _judge_predecessor(report, by_id, snapshots, damaged)
    registers = {each.extra["shard"]: each for each in reports if each.kind == "register"}
    for report in registers.values():
        _judge_register(report, ordered, snapshots, damaged)
    _require_registers(ordered, registers)
    for report in in_force:
        _judge_end(report, claims.get(report.extra["file_id"], []), damaged)
    return in_force


def _claims(ordered: Sequence[FileReport]) -> tuple[Claims, set[int]]:
    claims: Claims = {}
    damaged: set[int] = set()
    for report in ordered:
        for mark in report.extra["copied"]:
            damaged.update(mark["damaged"])
            for file_id, stop in mark["settled"]:
                said = (report.header["shards"], report.header["shard"], stop)
                claims.setdefault(file_id, []).append(said)
    return claims, damaged


def _judge_passed(report: FileReport, ordered: Sequence[FileReport], claims: Claims) -> None:
    """Replace a report by its `torn` variant if the damaged records are above everything that was durable.

    Such records are a torn end, whatever their durability class.
    """
    torn = report.extra.pop("torn", None)
    if torn is None:
        return
    file_id = report.extra["file_id"]
    known = [stop for _, _, stop in claims.get(file_id, ())]
    known += [each.extra["prev"][1] for each in ordered if each.extra["prev"][0] == file_id]
    if max(known, default=0) <= torn.extra["stop"]:
        for name in ("frames", "records", "stored", "control_frames", "extra", "findings"):
            setattr(report, name, getattr(torn, name))


def _serving(ordered: Sequence[FileReport], claims: Claims) -> set[int]:
    """Return the incarnations that served.

    An incarnation served if its own marks record it, or if a later one settled one of its files. It also
    served if its first file, which has these marks, is deleted: only covered files are ever deleted.
    """
    first = {report.header["incarnation"] for report in ordered if report.header["n"] == 0}
    return {
        report.header["incarnation"]
        for report in ordered
        if report.extra["copied"]
        or report.extra["file_id"] in claims
        or report.header["incarnation"] not in first
    }


def _judge_predecessor(
    report: FileReport, by_id: dict[int, FileReport], snapshots: Sequence[FileReport], damaged: set[int]
) -> None:
    """Check that the predecessor of this file exists and ends with the frame that this file recorded."""
    file_id, stop, seal = report.extra["prev"]
    before = by_id.get(file_id)
    if not file_id or stop <= HEADER_BYTES:
        return
    if before is None:
        if file_id not in damaged and not is_covered(file_id, report, snapshots):
            report.add_damage(
                f"the WAL file before this one is missing: {wal_file_name(file_id)}, {stop} bytes"
            )
        return
    before.extra["durable"] = max(before.extra["durable"], stop)
    found = before.extra["ends"].get(stop)
    if before.extra["stop"] >= stop and found is not None and found != seal:
        report.add_damage(f"{before.path} does not end at {stop} with the frame that this file saw there")


def _judge_register(
    register: FileReport, ordered: Sequence[FileReport], snapshots: Sequence[FileReport], damaged: set[int]
) -> None:
    """Check that the files exist which the register names as the newest of its shard."""
    there = {int(report.extra["file_id"]) for report in ordered}
    for _, file_id in register.extra["newest"]:
        if file_id not in there | damaged and not is_covered(file_id, register, snapshots):
            register.add_damage(
                f"the newest WAL file of shard {register.extra['shard']} is missing: {wal_file_name(file_id)}"
            )
    own = [
        each for each in ordered if each.header["shard"] == register.extra["shard"] and each.extra["groups"]
    ]
    if own and own[-1].extra["file_id"] > max(
        (file_id for _, file_id in register.extra["newest"]), default=0
    ):
        register.add_remark(f"is older than the log: {own[-1].path} was written later")


def _require_registers(ordered: Sequence[FileReport], registers: dict[int, FileReport]) -> None:
    """Require a register for each file whose header says that one exists."""
    for report in ordered:
        shard = report.header["shard"]
        if report.header["has_register"] and report.extra["groups"] and shard not in registers:
            report.add_damage(f"the register of its stream is missing: meta/log-{shard:02d}")


def is_covered(file_id: int, report: FileReport, snapshots: Sequence[FileReport]) -> bool:
    """Return whether snapshots cover that file.

    A snapshot of the same shard is enough. After a change of the number of shards, all shards of one other
    layout must cover the file, because every shard reads earlier files until all have covered them.
    """
    layouts: dict[int, set[int]] = {}
    for snapshot in snapshots:
        if snapshot.extra["facts"].absorbs(file_id):
            if snapshot.header["shard"] == report.header["shard"]:
                return True
            layouts.setdefault(snapshot.header["shards"], set()).add(snapshot.header["shard"])
    return any(len(covering) == shards for shards, covering in layouts.items())


def _judge_end(report: FileReport, said: list[tuple[int, int, int]], damaged: set[int]) -> None:
    extra = report.extra
    own = (report.header["shards"], report.header["shard"])
    limits = [stop for shards, shard, stop in said if (shards, shard) == own]
    extra["limit"] = max(limits, default=0)
    if extra["file_id"] in damaged:
        report.add_remark("was truncated at damage by an earlier start; the loss is announced", extra["stop"])
        return
    needed = extra["limit"] or extra["durable"]
    if extra["stop"] < needed:
        reason = extra["reason"] or "frames end"
        report.add_damage(f"{reason}, but bytes up to {needed} were durable", extra["stop"])
    elif extra["reason"] and not extra["limit"]:
        report.add_remark(f"torn end, never acknowledged: {extra['reason']}", extra["stop"])


def wal_file_name(file_id: int) -> str:
    """Return the name of a WAL file from its file id."""
    return f"wal-{file_id >> 24}-{file_id & 0xFFFFFF}.log"


class NeededLog(NamedTuple):
    """A log file that other files refer to and that no snapshot covers."""

    path: str
    shards: int
    stop: int
    """The file was durable up to this offset; 0 = unknown, because it is the newest of its shard."""
    file_bytes: int = 0
    """If the offset is unknown: the size with which the file was created."""


def needed_files(reports: Sequence[FileReport], snapshots: Sequence[FileReport]) -> dict[int, NeededLog]:
    """Return file id -> what the log files in force and the registers record about that file."""
    found: dict[int, NeededLog] = {}
    for report in in_replay_order(reports):
        if not report.extra.get("in_force"):
            continue
        said = [(report.extra["prev"][0], report.extra["prev"][1])]
        said += [(file_id, stop) for mark in report.extra["copied"] for file_id, stop in mark["settled"]]
        known = {file_id for mark in report.extra["copied"] for file_id in mark["damaged"]}
        for file_id, stop in said:
            if not file_id or stop <= HEADER_BYTES or file_id in known:
                continue
            if not is_covered(file_id, report, snapshots):
                before = found.get(file_id)
                path = f"{os.path.dirname(report.path)}/{wal_file_name(file_id)}"
                most = stop if before is None else max(stop, before.stop)
                found[file_id] = NeededLog(
                    path if before is None else before.path, report.header["shards"], most
                )
    for register in reports:
        for shards, file_id in register.extra.get("newest", ()) if register.kind == "register" else ():
            if file_id not in found and not is_covered(file_id, register, snapshots):
                path = f"wal/shard-{register.extra['shard']:02d}/{wal_file_name(file_id)}"
                found[file_id] = NeededLog(path, shards, 0, int(register.header["file_bytes"]))
    return found
