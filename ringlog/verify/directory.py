"""Verification of a data directory without a running engine: every file, byte and cross-reference.

Files are read in parallel by the independent decoders. Then the reports are combined: the order of the log,
the segments that must exist, and for each topic whether every seq is accounted for.
"""

from __future__ import annotations

import multiprocessing
import os
import re
import struct
from bisect import bisect_left
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

from ringlog.errors import UsageError
from ringlog.verify.cold_owner import require_own_cold_tier
from ringlog.verify.cross_check import TopicCoverage, TopicHistories
from ringlog.verify.findings import DAMAGE, UNREACHABLE, FileFinding, FileReport
from ringlog.verify.frame_decoder import VerifyError
from ringlog.verify.identity_decoder import verify_identity
from ringlog.verify.log_order import check_wal_order
from ringlog.verify.register_decoder import verify_register
from ringlog.verify.segment_verifier import verify_segment
from ringlog.verify.snapshot_decoder import (
    authoritative_snapshot,
    listed_segments,
    snapshots_in_force,
    verify_snapshot,
)
from ringlog.verify.wal_decoder import verify_wal

_WAL = re.compile(r"^wal/shard-\d+/wal-\d+-\d+\.log$")
_DATA = re.compile(r"^(topics/[0-9a-f]{16}/seg-\d{20}-[0-9a-f]{16}|packs/pack-[0-9a-f]{16})\.(data|idx)$")
_IDENTITY = "meta/engine"
_SNAPSHOT = re.compile(r"^meta/snapshot-\d+\.\d+$")
_REGISTER = re.compile(r"^meta/log-\d+$")
_OURS = ("wal", "topics", "packs", "meta")
_COLD = ("topics", "packs")
DECODE_ERRORS = (
    struct.error, ValueError, IndexError, KeyError, TypeError, OverflowError, MemoryError, RecursionError,
    VerifyError,
)  # fmt: skip
"""Errors of a decoder on bytes with valid checksums and contradictory contents."""
HOT = 0
"""Tier of a segment whose data part is on the host only."""
SERIAL_FILES_MAX = 2
"""Up to this number of files, starting further processes takes longer than it saves."""


@dataclass(slots=True)
class Verification:
    """Result of a verification."""

    files: list[FileReport] = field(default_factory=list)
    topics: list[TopicCoverage] = field(default_factory=list)
    findings: list[FileFinding] = field(default_factory=list)
    """All findings, damage first."""
    histories: TopicHistories = field(default_factory=TopicHistories)

    @property
    def is_damaged(self) -> bool:
        """Whether there is at least one finding of severity `damage`."""
        return any(finding.severity == DAMAGE for finding in self.findings)

    @property
    def is_incomplete(self) -> bool:
        """Whether some records could not be read, for example in an unreachable cold tier."""
        return any(finding.severity == UNREACHABLE for finding in self.findings)


def verify_directory(
    data_dir: str, *, is_deep: bool = False, jobs: int = 0, cold_dir: str = ""
) -> Verification:
    """Verify everything below `data_dir`, and the cold tier if `cold_dir` names its directory.

    Args:
        data_dir: A data directory that no engine uses.
        is_deep: Decode every record, instead of only verifying checksums.
        jobs: Number of processes; 0 = one for each CPU.
        cold_dir: Directory of the cold tier; "" = do not verify it.

    Raises:
        UsageError: `data_dir` is not a data directory, or `cold_dir` is not its cold tier.
    """
    root = Path(data_dir)
    if not (root / "wal").is_dir() and not (root / "meta").is_dir():
        raise UsageError("not a data directory: it has no wal/ and no meta/", path=data_dir)
    require_own_cold_tier(root, cold_dir)
    found = Verification()
    paths = data_paths(root, cold_dir)
    found.files = _read_all(root, paths, is_deep, jobs or len(os.sched_getaffinity(0)), cold_dir)
    combine_reports(found)
    return found


def data_paths(root: Path, cold_dir: str = "") -> list[str]:
    """Return the files with data, relative to the data directory, the largest first.

    A segment is one entry, named by its stem. Segments that exist in the cold tier only are included.
    """
    sizes: dict[str, int] = {}
    places = [(root, top) for top in _OURS] + [(Path(cold_dir), top) for top in _COLD if cold_dir]
    for place, top in places:
        for directory, _, names in os.walk(place / top):
            for name in names:
                path = os.path.relpath(os.path.join(directory, name), place)
                unit = _unit(path)
                if unit:
                    sizes[unit] = max(sizes.get(unit, 0), os.stat(os.path.join(directory, name)).st_size)
    return sorted(sizes, key=lambda path: -sizes[path])


def _unit(path: str) -> str:
    """Return the unit that a path is verified with; empty for a file without data."""
    segment = _DATA.match(path)
    if segment:
        return segment[1]
    is_ours = path == _IDENTITY or _WAL.match(path) or _SNAPSHOT.match(path) or _REGISTER.match(path)
    return path if is_ours else ""


def _read_all(root: Path, paths: Sequence[str], is_deep: bool, jobs: int, cold_dir: str) -> list[FileReport]:
    one = partial(verify_path, str(root), is_deep=is_deep, cold_dir=cold_dir)
    if jobs < 2 or len(paths) <= SERIAL_FILES_MAX:
        return [one(path) for path in paths]
    with ProcessPoolExecutor(jobs, mp_context=multiprocessing.get_context("spawn")) as pool:
        return list(pool.map(one, paths, chunksize=1))


def verify_path(root: str, path: str, *, is_deep: bool = False, cold_dir: str = "") -> FileReport:
    """Verify one file, or one segment by its stem, below a data directory. Never raises for bad data."""
    try:
        if _WAL.match(path):
            report = verify_wal(path, _bytes_of(root, path), is_deep=is_deep)
            _check_name(report)
        elif _SNAPSHOT.match(path):
            report = verify_snapshot(path, _bytes_of(root, path))
        elif _REGISTER.match(path):
            report = verify_register(path, _bytes_of(root, path))
        elif path == _IDENTITY:
            report = verify_identity(path, _bytes_of(root, path))
        else:
            report = verify_segment(root, path, is_deep=is_deep, cold_dir=cold_dir)
    except OSError as e:
        report = FileReport(path, "unreadable")
        report.add_damage(f"cannot be read: {e.strerror}")
    except DECODE_ERRORS as e:
        report = FileReport(path, "unreadable")
        report.add_damage(f"cannot be decoded: {type(e).__name__}: {e}")
    return report


def _bytes_of(root: str, path: str) -> bytes:
    with open(os.path.join(root, path), "rb") as file:
        return file.read()


def _check_name(report: FileReport) -> None:
    """Check that a WAL file has the path that its header implies."""
    if "incarnation" not in report.header:
        return
    header = report.header
    expected = f"wal/shard-{header['shard']:02d}/wal-{header['incarnation']}-{header['n']}.log"
    if report.path != expected:
        report.add_damage(f"has the wrong name: its header implies {expected}")


def combine_reports(found: Verification) -> None:
    """Add the findings of cross-checks to the reports in `found.files`, and fill topics and findings."""
    snapshots = snapshots_in_force([report for report in found.files if report.kind == "snapshot"])
    in_force = check_wal_order(found.files, snapshots)
    segments = _segments_in_use([report for report in found.files if report.kind == "segment"], snapshots)
    _check_identity(found.files)
    _check_counter(found.files)
    _check_listed(snapshots, segments)
    for report in snapshots:
        for topic in report.extra["topics"]:
            if authoritative_snapshot(snapshots, topic.topic_id) is report:
                found.histories.apply_snapshot_row(topic)
    for report in in_force:
        for wrong in found.histories.apply_control_frames(report.control_frames):
            report.add_damage(wrong)
    found.histories.mark_removed_topics(partial(_is_deleted, snapshots))
    for report in in_force:
        report.extra["in_force"] = True
        absorbed = partial(is_absorbed, snapshots, int(report.extra["file_id"]))
        report.served = {key: ranges for key, ranges in report.stored.items() if not absorbed(key[0])}
    for report in segments:
        report.served = report.stored
    for report in [*in_force, *segments]:
        found.histories.add_stored(report)
    for report in in_force:
        found.histories.add_given_up(report)
    found.topics = list(found.histories.coverages())
    unreadable = [report.path for report in found.files if report.is_damaged]
    directory_report = FileReport(".", "directory")
    for left in found.histories.orphan_topics():
        text = f"records of topic {left.topic_id:x}, epoch {left.epoch}"
        directory_report.add_remark(
            f"{text}: the topic was deleted, and its segments are not removed yet"
        ) if snapshots else directory_report.add_damage(f"{text}: the topic was never created")
    for topic in found.topics:
        for first, last in topic.gaps:
            directory_report.add_damage(
                f"records {first}..{last} of {topic.topic} are missing" + _because(unreadable)
            )
    found.files.append(directory_report)
    order = {DAMAGE: 0, UNREACHABLE: 1}
    found.findings = sorted(
        (finding for report in found.files for finding in report.findings),
        key=lambda finding: (order.get(finding.severity, 2), finding.path, finding.offset),
    )


def _is_deleted(snapshots: Sequence[FileReport], topic_id: int) -> bool:
    """Return whether a topic was deleted, according to its authoritative snapshot.

    The log file with the deletion may be removed before the log file with the creation. The first belongs to
    one shard, while after a change of the number of shards every shard may need the second.
    """
    authority = authoritative_snapshot(snapshots, topic_id)
    if authority is None or topic_id > authority.extra["facts"].last_id:
        return False
    rows = authority.extra["topics"]
    at = bisect_left(rows, topic_id, key=lambda row: int(row.topic_id))
    return at == len(rows) or rows[at].topic_id != topic_id


def is_absorbed(snapshots: Sequence[FileReport], file_id: int, topic_id: int) -> bool:
    """Return whether the authoritative snapshot of a topic covers that log file.

    An engine then does not replay the file for the topic, even while the file exists.
    """
    authority = authoritative_snapshot(snapshots, topic_id)
    return authority is not None and bool(authority.extra["facts"].absorbs(file_id))


def _because(unreadable: Sequence[str]) -> str:
    return f" (perhaps in {', '.join(unreadable[:3])})" if unreadable else ""


def _check_identity(reports: Sequence[FileReport]) -> None:
    """Check that all files belong to one data directory."""
    owners: dict[str, list[FileReport]] = {}
    for report in reports:
        if "engine_id" in report.header:
            owners.setdefault(report.header["engine_id"], []).append(report)
    most = max(owners, key=lambda owner: len(owners[owner]), default="")
    for owner, theirs in owners.items():
        for report in theirs if owner != most else ():
            report.add_damage("belongs to another data directory")
            report.extra["is_foreign"] = True


def _check_counter(reports: Sequence[FileReport]) -> None:
    """Check that the next incarnation number is greater than that of every file."""
    used = max((int(each.header.get("incarnation", 0)) for each in reports if each.kind == "wal"), default=0)
    for report in reports:
        if report.kind == "identity" and 0 < report.header.get("next_incarnation", 0) <= used:
            report.add_damage(f"the counter of incarnations is older than the log: {used} was used")


def _segments_in_use(segments: Sequence[FileReport], snapshots: Sequence[FileReport]) -> list[FileReport]:
    """Return the segments, without remains of segments and without segments in the cold tier only.

    A crash can leave an index without a data part and without an entry in a snapshot. Either the segment was
    being created, because the data part gets its name last. Or it was being removed, because the index is
    deleted last, after the cold copy. A segment that was moved to the cold tier has an entry. Nothing refers
    to a segment that is in the cold tier only. It does no harm, and a segment that is missing because of it
    is reported by its own check.
    """
    listed = {stem for report in snapshots for stem, _, _ in listed_segments(report, snapshots)}
    found = []
    for report in segments:
        if report.extra["is_copy"]:
            name = " under the name of another segment" if report.extra["is_misplaced"] else ""
            _ignore(report, f"is in the cold tier only{name}: no file on the host refers to it")
        elif report.extra["tier"] == "hot" or report.path in listed:
            found.append(report)
        else:
            _ignore(report, "is not a segment: its data part was not created yet, or was removed")
    return found


def _ignore(report: FileReport, why: str) -> None:
    """Reduce a report to one remark: no record depends on the segment, so its damage does no harm."""
    report.findings.clear()
    report.stored.clear()
    report.marked.clear()
    report.add_remark(why)


def _check_listed(snapshots: Sequence[FileReport], segments: Sequence[FileReport]) -> None:
    """Check that segments listed by snapshots exist, or that newer segments replace them."""
    there = {report.path for report in segments}
    only_index = {report.path: report for report in segments if report.extra.get("only_index")}
    no_data = {report.path: report for report in segments if report.extra.get("no_data")}
    unseen = {
        report.path: report
        for report in segments
        if report.extra["tier"] == "cold" and not report.extra["has_data"]
    }
    newest = max((each.extra["number"] for each in segments if not each.extra["is_misplaced"]), default=0)
    for report in snapshots:
        for stem, number, tier in listed_segments(report, snapshots):
            if stem not in there and number >= newest:
                report.add_damage(f"segment {stem} is missing")
            if stem in only_index:
                only_index[stem].add_damage("the tags part is missing: it can be rebuilt from the data")
            if stem in no_data:
                no_data[stem].add_damage("the data part is neither here nor in the cold tier")
            elif stem in unseen and tier == HOT:
                unseen[stem].add_damage(
                    "the data part is missing, and by its snapshot it was not moved to the cold tier: if it "
                    "was moved since, name the cold tier with --cold-dir"
                )
