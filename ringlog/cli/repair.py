"""`ringlog repair`: build a repaired copy of a damaged data directory. The original never changes.

All complete frames are kept. Records in damaged frames are taken from the cold tier, or from log files that a
snapshot absorbed and that still exist. The plan lists all other records as lost, by topic and seq, before
anything is written. In the copy they are announced losses: readers receive a tombstone, never a silent gap.
Damaged files are copied unchanged to the directory `quarantine` of the copy.
"""

from __future__ import annotations

import re
import secrets
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any

import xxhash
from cyclopts import Parameter

from ringlog.cli.confirm import counted, needs_confirmation, require_confirmation
from ringlog.cli.copies import ENGINE_FILE, copy_file, copy_identity, make_empty, sync_tree, write_synced
from ringlog.cli.options import Options
from ringlog.cli.outcome import CliExit
from ringlog.cli.output import Format
from ringlog.cli.verify import refuse_running
from ringlog.errors import UsageError
from ringlog.limits import BATCH_RECORDS_MAX
from ringlog.segment.index_rebuild import rebuild_index
from ringlog.segment.layout import CREATOR_COMPACTOR, NumberAllocator
from ringlog.segment.salvage import SalvagedSlice, SalvagedTopic, write_deletion_marks, write_salvaged
from ringlog.storage.disk import Disk, RealDisk
from ringlog.storage.identity_file import encode_identity
from ringlog.storage.layout import META_DIR, QUARANTINE_DIR, ids_upper_bound
from ringlog.storage.log_register import RegisterEntry, encode_register, register_name
from ringlog.verify.directory import HOT, Verification, is_absorbed, verify_directory
from ringlog.verify.findings import DAMAGE, FileReport, Range, count_seqs, merge_ranges, subtract_ranges
from ringlog.verify.frame_decoder import VerifyError, record_ranges
from ringlog.verify.log_order import NeededLog, in_replay_order, needed_files
from ringlog.verify.repair import (
    DamagedSpan,
    PartialLog,
    header_bytes,
    placeholder_log,
    read_partial_log,
    repair_log,
    reseal_log,
    rewrite_snapshot,
    with_prev_seal,
)
from ringlog.verify.segment_decoder import frames_in, salts_of
from ringlog.verify.snapshot_decoder import authoritative_snapshot, snapshots_in_force
from ringlog.verify.wal_decoder import HEADER_BYTES, DecodedWalHeader

Given = Annotated[Options, Parameter(parse=False)]
_INDEX_PARTS = (".idx", ".tags")
_PARTS = (".data", ".idx", ".tags", ".del")
_WAL_NAME = re.compile(r"^wal/shard-(\d+)/wal-(\d+)-(\d+)\.log$")
_FILE_SHIFT = 24
_FRAME_BYTES_MIN = 96
_ROOM_BYTES, _LOST_BYTES = 4_096, 112
"""Size of a log file that replaces one of unknown content: a fixed part, and the bytes per lost range."""

Key = tuple[int, int]
"""(topic_id, epoch)."""

Lost = dict[tuple[int, int], list[Range]]


@dataclass(slots=True)
class RepairPlan:
    """Decisions about each file of the directory."""

    found: Verification
    root: Path
    cold: Path | None
    repaired_logs: dict[str, PartialLog] = field(default_factory=dict)
    """Log files with damaged spans, and placeholders for missing log files."""
    resealed: dict[str, bytes] = field(default_factory=dict)
    """Log files with a damaged header, under a new header."""
    quarantined: dict[str, str] = field(default_factory=dict)
    """Path or stem -> reason for the quarantine."""
    rebuilt: list[str] = field(default_factory=list)
    """Segments with sound data: their other parts are rebuilt from it."""
    dropped: set[int] = field(default_factory=set)
    """Numbers of segments that the copy does not contain."""
    salvaged: dict[Key, SalvagedTopic] = field(default_factory=dict)
    """Records for new segments."""
    lost: Lost = field(default_factory=dict)
    unknown: list[NeededLog] = field(default_factory=list)
    """Missing newest log files. Only an upper bound of their records is known."""
    unread_frames: dict[Key, list[SalvagedSlice]] | None = None
    """Complete frames in files that an engine does not read."""

    @property
    def snapshots(self) -> list[FileReport]:
        """The snapshots in force, in descending order of their numbers."""
        return snapshots_in_force([each for each in self.found.files if each.kind == "snapshot"])


def repair(
    data_dir: str,
    *,
    to: str,
    write: Annotated[bool, Parameter(negative=())] = False,
    cold_dir: str = "",
    yes: Annotated[bool, Parameter(name=["--yes", "-y"], negative=())] = False,
    options: Given,
) -> int:
    """Build a repaired copy of a damaged data directory.

    Prints which records are saved and which are lost.

    Parameters
    ----------
    data_dir
        Damaged data directory; no engine may run on it. It is never changed.
    to
        Directory of the repaired copy; new or empty.
    write
        Write the copy. Without it only the plan is printed.
    cold_dir
        Directory of the cold tier.
    yes
        Do not ask for confirmation. Required without a terminal.

    Examples
    --------
    ringlog repair ./ringlog-data --to ./repaired
    ringlog repair ./ringlog-data --to ./repaired --write --yes
    """
    asks = write and needs_confirmation(yes=yes)
    refuse_running(data_dir)
    plan = plan_repair(data_dir, cold_dir)
    printer = options.printer()
    facts = {"repaired": False, **_facts(plan)}
    if write:
        if asks:
            lost = sum(count_seqs(ranges) for ranges in plan.lost.values())
            require_confirmation(f"Write a repaired copy without {counted(lost, 'lost record')} to {to}?")
        build_copy(plan, Path(to).absolute())
        again = verify_directory(to, cold_dir=cold_dir)
        facts |= {"repaired": not again.is_damaged, "to": to}
        facts["left"] = [f"{each.path}: {each.what}" for each in again.findings if each.severity == DAMAGE]
    if printer.format is Format.TABLE:
        printer.rows(facts.pop("lost"))
        printer.caption("")
    printer.item(facts)
    return CliExit.DONE if not write or facts["repaired"] else CliExit.DAMAGE


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
        if _WAL_NAME.match(report.path):
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
    _find_lost(plan)
    full_logs = [path for path, log in plan.repaired_logs.items() if not _has_room(plan, path, log)]
    for path in full_logs:
        # Its damaged spans have no room for the announcements: replace the whole file by a placeholder.
        plan.quarantined[path] = "has no room for the announcement of its losses"
        plan.repaired_logs.pop(path)
        plan.resealed.pop(path, None)
        _plan_placeholder(plan, path, needed)
        _find_lost(plan)
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
    shard, incarnation, n = _numbers_of(path)
    logs = [each.header for each in plan.found.files if each.kind == "wal" and "boot_id" in each.header]
    if not logs:
        raise VerifyError("no other log file describes this one")
    # The end of the previous file is not known. Its existence proves that the incarnation served.
    before = _file_id(path) - 1 if n else 0
    near = max(logs, key=lambda each: (int(each["incarnation"]) == incarnation, int(each["incarnation"])))
    return DecodedWalHeader(
        shard, shards or int(near["shards"]), n, incarnation, secrets.randbits(63) | 1,
        bytes.fromhex(near["boot_id"]), bytes.fromhex(near["engine_id"]), int(near["created_us"]), size,
        before, 0, 0, 0,
    )  # fmt: skip


def _numbers_of(path: str) -> tuple[int, int, int]:
    """Return (shard, incarnation, n) from the name of a log file."""
    found = _WAL_NAME.match(path)
    assert found is not None, path
    return int(found[1]), int(found[2]), int(found[3])


def _file_id(path: str) -> int:
    _, incarnation, n = _numbers_of(path)
    return incarnation << _FILE_SHIFT | n


def _has_room(plan: RepairPlan, path: str, partial_log: PartialLog) -> bool:
    try:
        _repaired_bytes(plan, path, partial_log)
    except VerifyError:
        return False
    return True


def _repaired_bytes(plan: RepairPlan, path: str, partial_log: PartialLog) -> bytes:
    report = next((each for each in plan.found.files if each.path == path), None)
    if path in plan.resealed:
        return repair_log(plan.resealed[path], partial_log)
    if report is None or path in plan.quarantined:
        return repair_log(header_bytes(partial_log.header), partial_log)
    return repair_log((plan.root / path).read_bytes(), partial_log, report.extra.get("limit", 0))


def _plan_segment(plan: RepairPlan, report: FileReport) -> None:
    """If the data is sound, plan to rebuild the other parts. Otherwise quarantine the segment.

    The complete frames of a quarantined segment go into a new segment."""
    extra = report.extra
    if extra.get("is_data_sound") and not extra["is_misplaced"] and not extra.get("is_foreign"):
        plan.rebuilt.append(report.path)
        return
    plan.quarantined[report.path] = next(each.what for each in report.findings if each.severity == DAMAGE)
    plan.dropped.add(int(report.path.rpartition("-")[2], 16))


# -- saved and lost records ---------------------------------------------------------------------------


def _find_lost(plan: RepairPlan) -> None:
    """Compute which seqs no readable file holds, which can be salvaged, and where to announce the rest."""
    plan.salvaged, plan.lost = {}, {}
    for partial_log in plan.repaired_logs.values():
        for damaged_span in partial_log.damaged_spans:
            damaged_span.lost = dict(damaged_span.known)
    for topic in plan.found.histories.live_topics():
        key = (topic.topic_id, topic.epoch)
        served = merge_ranges(_served(plan, key))
        topic.stored = list(served)
        known = merge_ranges(
            [span for damaged in _damaged_spans(plan) for span in damaged.known.get(key, ())]
        )
        head = topic.coverage().head
        beyond = [span for span in subtract_ranges(known, served) if span[0] > head]
        bound = _max_unknown_records(plan, topic.topic_id)
        beyond = merge_ranges([*beyond, (head + 1, head + bound)]) if bound else beyond
        if not topic.coverage().gaps and not beyond:
            continue
        wanted = subtract_ranges([(topic.floor, max([head, *[span[1] for span in beyond]]))], served)
        pieces = _found_elsewhere(plan, key, subtract_ranges(wanted, merge_ranges(topic.lost)))
        if pieces:
            plan.salvaged[key] = SalvagedTopic(pieces, topic.removed)
            topic.stored += [(piece.first, piece.last) for piece in pieces]
        gaps = merge_ranges([*topic.coverage().gaps, *subtract_ranges(beyond, merge_ranges(topic.stored))])
        if gaps:
            plan.lost[key] = gaps
    _place_announcements(plan)


def _max_unknown_records(plan: RepairPlan, topic_id: int) -> int:
    """Return how many records of a topic the missing newest log files may have contained.

    The repaired engine must not assign their seqs again."""
    files = [log for log in plan.unknown if _shard_of(topic_id, log.shards) == _numbers_of(log.path)[0]]
    return sum(log.file_bytes // _FRAME_BYTES_MIN * BATCH_RECORDS_MAX for log in files)


def _served(plan: RepairPlan, key: Key) -> Iterator[Range]:
    """Yield the seqs that an engine will read from the retained files."""
    for report in plan.found.files:
        if report.path not in plan.quarantined:
            yield from report.served.get(key, ())
    for path, partial_log in plan.repaired_logs.items():
        if is_absorbed(plan.snapshots, _file_id(path), key[0]):
            continue
        for seen in partial_log.frames:
            for topic_id, epoch, base_seq, count in record_ranges(seen.frame):
                if (topic_id, epoch) == key:
                    yield base_seq, base_seq + count - 1


def _found_elsewhere(plan: RepairPlan, key: Key, wanted: list[Range]) -> list[SalvagedSlice]:
    """Return frames, or parts of frames, with the wanted seqs: ascending, without duplicates."""
    if plan.unread_frames is None:
        plan.unread_frames = {}
        for owner, piece in _unread(plan):
            plan.unread_frames.setdefault(owner, []).append(piece)
    found = []
    for piece in plan.unread_frames.get(key, ()):
        for first, last in _within([(piece.first, piece.last)], wanted):
            found.append(piece._replace(first=first, last=last))
        wanted = subtract_ranges(wanted, [(piece.first, piece.last)])
    return sorted(found)


def _unread(plan: RepairPlan) -> Iterator[tuple[Key, SalvagedSlice]]:
    """Yield complete frames of damaged segments, of cold copies, and of log files that are not replayed."""
    for report in plan.found.files:
        is_segment = report.path.startswith(("topics/", "packs/"))
        is_unread = report.path in plan.quarantined or report.extra.get("is_copy")
        if is_segment and is_unread and not report.extra.get("is_foreign"):
            yield from _in_segment(plan, report.path)
    for report in plan.found.files:
        is_unread = report.served != report.stored or report.path in plan.quarantined
        if report.kind == "wal" and is_unread and not report.extra.get("is_foreign"):
            yield from _in_log(plan.root / report.path)


def _in_segment(plan: RepairPlan, stem: str) -> Iterator[tuple[Key, SalvagedSlice]]:
    places = [plan.root] if plan.cold is None else [plan.root, plan.cold]
    salts = [salt for place in places for salt in salts_of(str(place / stem))]
    for place in places:
        path = place / f"{stem}.data"
        if not path.exists():
            continue
        data = path.read_bytes()
        for salt in dict.fromkeys(salts):
            for offset, frame in frames_in(data, salt):
                piece = SalvagedSlice(
                    frame.base_seq, frame.base_seq + frame.count - 1, str(path), offset, frame.total, salt
                )
                yield (frame.topic_id, frame.epoch), piece


def _in_log(path: Path) -> Iterator[tuple[Key, SalvagedSlice]]:
    try:
        partial_log = read_partial_log(path.read_bytes())
    except (VerifyError, OSError):
        return
    for seen in partial_log.frames:
        for topic_id, epoch, base_seq, count in record_ranges(seen.frame):
            last = base_seq + count - 1
            piece = SalvagedSlice(
                base_seq, last, str(path), seen.offset, seen.frame.total, partial_log.header.salt
            )  # fmt: skip
            yield (topic_id, epoch), piece


def _damaged_spans(plan: RepairPlan) -> Iterator[DamagedSpan]:
    for partial_log in plan.repaired_logs.values():
        yield from partial_log.damaged_spans


def _place_announcements(plan: RepairPlan) -> None:
    """Assign each lost range that no snapshot announces to a damaged span.

    It is the last span before the topic's next record in the log. Ranges without a next record go to the last
    span of all."""
    left = {key: subtract_ranges(ranges, _in_snapshot(plan, key)) for key, ranges in plan.lost.items()}
    for damaged_span in _damaged_spans(plan):
        announced = {key: _within(ranges, left.get(key, [])) for key, ranges in damaged_span.known.items()}
        damaged_span.lost = {key: ranges for key, ranges in announced.items() if ranges}
        for key, ranges in damaged_span.lost.items():
            left[key] = subtract_ranges(left[key], ranges)
    spans_by_file: list[tuple[int, DamagedSpan]] = []
    reports = {report.path: report for report in in_replay_order(plan.found.files)}
    for path in sorted({*reports, *plan.repaired_logs}, key=_file_id):
        partial_log = plan.repaired_logs.get(path)
        if partial_log is None:
            for key, ranges in reports[path].served.items():
                _announce(plan, left, key, ranges[-1][0], spans_by_file)
            continue
        coming = list(partial_log.damaged_spans)
        for seen in partial_log.frames:
            while coming and coming[0].start < seen.offset:
                spans_by_file.append((_file_id(path), coming.pop(0)))
            for topic_id, epoch, base_seq, _ in record_ranges(seen.frame):
                _announce(plan, left, (topic_id, epoch), base_seq, spans_by_file)
        spans_by_file += [(_file_id(path), damaged_span) for damaged_span in coming]
    for key in left:
        _announce(plan, left, key, 1 << 63, spans_by_file)


def _in_snapshot(plan: RepairPlan, key: Key) -> list[Range]:
    """Return the seqs that the snapshot of a topic accounts for."""
    last_word = authoritative_snapshot(plan.snapshots, key[0])
    rows = last_word.extra["topics"] if last_word is not None else ()
    return [(1, row.head) for row in rows if (row.topic_id, row.epoch) == key and row.head]


def _within(ranges: Sequence[Range], wanted: list[Range]) -> list[Range]:
    """Return the intersection."""
    return subtract_ranges(list(ranges), subtract_ranges(list(ranges), wanted))


def _announce(
    plan: RepairPlan, left: Lost, key: Key, before: int, spans_by_file: list[tuple[int, DamagedSpan]]
) -> None:
    """Assign ranges that end below `before` to a span that an engine reads before that record."""
    ready = [span for span in left.get(key, ()) if span[1] < before]
    if not ready:
        return
    for file_id, damaged_span in reversed(spans_by_file):
        if not is_absorbed(plan.snapshots, file_id, key[0]):
            damaged_span.lost[key] = merge_ranges([*damaged_span.lost.get(key, []), *ready])
            left[key] = [span for span in left[key] if span[1] >= before]
            return


def _facts(plan: RepairPlan) -> dict[str, Any]:
    names = {(topic.topic_id, topic.epoch): topic.name for topic in plan.found.histories.live_topics()}
    return {
        "damaged": plan.found.is_damaged,
        "mended": sorted(plan.repaired_logs),
        "rebuilt": plan.rebuilt,
        "quarantined": [{"path": path, "why": why} for path, why in plan.quarantined.items()],
        "saved": [
            {"topic": names[key], "records": _alive_in(salvaged)} for key, salvaged in plan.salvaged.items()
        ],
        "lost": [
            {
                "topic": names[key],
                "first": first,
                "last": last,
                "records": last - first + 1,
                **({"is_bound": True} if last - first + 1 >= _max_unknown_records(plan, key[0]) > 0 else {}),
            }
            for key, ranges in plan.lost.items()
            for first, last in ranges
        ],
    }


def _alive_in(salvaged: SalvagedTopic) -> int:
    dead = salvaged.dead
    return sum(
        piece.last + 1 - piece.first - dead.range_cardinality(piece.first, piece.last + 1)
        for piece in salvaged.pieces
    )


# -- the copy -----------------------------------------------------------------------------------------


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
    reports = {report.path: report for report in plan.found.files if _WAL_NAME.match(report.path)}
    for path in sorted({*reports, *plan.repaired_logs}, key=_file_id):
        report = reports.get(path)
        if path in plan.quarantined or (path in plan.repaired_logs and report is not None):
            copy_file(disk, plan.root / path, target / QUARANTINE_DIR / path)
        if path in plan.repaired_logs:
            data = _repaired_bytes(plan, path, plan.repaired_logs[path])
            is_new = report is None or path in plan.quarantined or path in plan.resealed
            before: dict[int, int] = {} if is_new or report is None else report.extra["ends"]
            for offset, seal in _seals_of(data):
                if before.get(offset) != seal:
                    seals[_file_id(path), offset] = seal
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
        by_shard.setdefault(_shard_of(key[0], shards), {})[key] = salvaged
    for shard, topics in sorted(by_shard.items()):
        write_salvaged(
            disk, str(target), topics, number=numbers.allocate(), salt=secrets.randbits(63) | 1, shard=shard,
            shards=shards, engine_id=bytes.fromhex(owner), created_us=created,
        )  # fmt: skip


def _shard_of(topic_id: int, shards: int) -> int:
    return xxhash.xxh3_64_intdigest(topic_id.to_bytes(8, "little")) % shards


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
            row.topic_id: _within(plan.lost[row.topic_id, row.epoch], [(1, row.head)])
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
