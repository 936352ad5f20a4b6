"""`ringlog repair`: a copy of a damaged data directory that starts; the original stays as it is.

What cannot be saved is said before anything is written: which numbers of which topics. In the copy they
are announced losses, so that readers meet a tombstone, never a silent gap.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any

from cyclopts import Parameter

from ringlog.cli.copies import copy_file, copy_identity, make_empty, sync_tree, write_synced
from ringlog.cli.options import Options
from ringlog.cli.outcome import Exit
from ringlog.cli.output import Format
from ringlog.cli.verify import refuse_running
from ringlog.storage.disk import Disk, RealDisk
from ringlog.storage.layout import META_DIR
from ringlog.storage.log_register import Entry, beyond, encode_register, register_name
from ringlog.verify.directory import Verification, verify_directory
from ringlog.verify.findings import DAMAGE, FileReport, Range, join, without
from ringlog.verify.frame_decoder import VerifyError, holdings
from ringlog.verify.log_order import in_order
from ringlog.verify.mending import Islands, islands_in, mend, with_lost, with_prev_seal

Given = Annotated[Options, Parameter(parse=False)]
QUARANTINE = "quarantine"
_INDEX_PARTS = (".idx", ".tags")
_PARTS = (".data", ".idx", ".tags", ".del")

Lost = dict[tuple[int, int], list[Range]]


@dataclass(slots=True)
class Plan:
    """What becomes of each file of the directory."""

    found: Verification
    mended: dict[str, Islands] = field(default_factory=dict)
    """Log files that are whole but for some spots."""
    quarantined: dict[str, str] = field(default_factory=dict)
    """Path or stem -> why it is put aside."""
    rebuilt: list[str] = field(default_factory=list)
    """Segments whose index the next start makes anew."""
    lost: Lost = field(default_factory=dict)


def repair(
    data_dir: str,
    *,
    to: str,
    write: Annotated[bool, Parameter(negative=())] = False,
    cold_dir: str = "",
    options: Given,
) -> int:
    """Show what a repair would save and lose; with --write build the repaired copy. Changes nothing in DIR.

    Parameters
    ----------
    data_dir
        The damaged data directory; no engine may run there.
    to
        Directory for the repaired copy; new or empty.
    write
        Build it. Without this nothing is written.
    cold_dir
        The cold tier, when it is a directory.
    """
    refuse_running(data_dir)
    plan = plan_repair(data_dir, cold_dir)
    printer = options.printer()
    facts = {"repaired": False, **_facts(plan)}
    if write:
        build(plan, Path(data_dir), Path(to).absolute())
        again = verify_directory(to, cold_dir=cold_dir)
        facts |= {"repaired": not again.is_damaged, "to": to}
        facts["left"] = [f"{each.path}: {each.what}" for each in again.findings if each.severity == DAMAGE]
    if printer.format is Format.TABLE:
        printer.rows(facts.pop("lost"))
        printer.say("")
    printer.thing(facts)
    return Exit.DONE if not write or facts["repaired"] else Exit.DAMAGE


def plan_repair(data_dir: str, cold_dir: str = "") -> Plan:
    """Verify the directory and decide about every damaged file; raises UsageError."""
    plan = Plan(verify_directory(data_dir, cold_dir=cold_dir))
    for report in plan.found.files:
        if report.kind == "wal" and report.is_damaged:
            _plan_log(plan, report, Path(data_dir))
        elif report.kind == "segment" and report.is_damaged:
            _plan_segment(plan, report)
        elif report.is_damaged and report.kind in {"snapshot", "unreadable"}:
            plan.quarantined[report.path] = report.findings[0].what
    _find_lost(plan)
    return plan


def _plan_log(plan: Plan, report: FileReport, root: Path) -> None:
    try:
        found = islands_in((root / report.path).read_bytes(), report.more.get("limit", 0))
    except VerifyError as e:
        plan.quarantined[report.path] = e.message
        return
    if any(spot.has_first_marks for spot in found.spots):
        plan.quarantined[report.path] = "its first marks are gone, which say what it holds"
        return
    plan.mended[report.path] = found


def _plan_segment(plan: Plan, report: FileReport) -> None:
    """An index is made anew; damaged data is put aside whole, with everything that belongs to it."""
    wrong = [finding.what for finding in report.findings if finding.severity == DAMAGE]
    if all("can be rebuilt" in what or "it is rebuilt" in what for what in wrong):
        plan.rebuilt.append(report.path)
    else:
        plan.quarantined[report.path] = wrong[0]


# -- what is lost -------------------------------------------------------------------------------------


def _find_lost(plan: Plan) -> None:
    """Numbers that nothing holds once damaged files are mended or put aside, and where to announce them."""
    stories = plan.found.stories
    for topic in stories.alive():
        key = (topic.topic_id, topic.epoch)
        topic.stored = [span for path, span in _stored(plan, key) if path not in plan.quarantined]
        ends = [spot.lost[key] for spot in _spots(plan) if key in spot.lost]
        known = join([span for spans in ends for span in spans])
        summary = topic.summary()
        beyond = [span for span in without(known, join(topic.stored)) if span[0] > summary.head]
        gaps = join([*summary.gaps, *beyond])
        if gaps:
            plan.lost[key] = gaps
    _place(plan)


def _stored(plan: Plan, key: tuple[int, int]) -> Iterator[tuple[str, Range]]:
    for report in plan.found.files:
        for span in report.stored.get(key, ()):
            yield report.path, span
    for path, islands in plan.mended.items():
        for seen in islands.frames:
            frame = seen.frame
            for held in holdings(frame):
                if held[:2] == key:
                    yield path, (held[2], held[2] + held[3] - 1)


def _spots(plan: Plan) -> Iterator[Any]:
    for islands in plan.mended.values():
        yield from islands.spots


def _place(plan: Plan) -> None:
    """Announce each lost range at the last spot before the record that follows on it in the log."""
    left = {key: list(ranges) for key, ranges in plan.lost.items()}
    last_spot = None
    for spot in _spots(plan):
        said = {key: _within(ranges, left.get(key, [])) for key, ranges in spot.lost.items()}
        spot.lost = {key: ranges for key, ranges in said.items() if ranges}
        for key, ranges in spot.lost.items():
            left[key] = without(left[key], ranges)
    for report in in_order(plan.found.files):
        islands = plan.mended.get(report.path)
        if islands is None:
            for key, ranges in report.stored.items():
                _announce(left, key, ranges[-1][0], last_spot)
            continue
        spots = iter(islands.spots)
        coming = next(spots, None)
        for seen in islands.frames:
            while coming is not None and coming.start < seen.offset:
                last_spot, coming = coming, next(spots, None)
            for topic_id, epoch, base_seq, _ in holdings(seen.frame):
                _announce(left, (topic_id, epoch), base_seq, last_spot)


def _within(ranges: list[Range], wanted: list[Range]) -> list[Range]:
    """Numbers in both."""
    return without(ranges, without(ranges, wanted))


def _announce(left: Lost, key: tuple[int, int], before: int, spot: Any) -> None:
    """Put ranges that end below `before` where the engine will read them before it reads that record."""
    if spot is None or key not in left:
        return
    ready = [span for span in left[key] if span[1] < before]
    if ready:
        spot.lost[key] = join([*spot.lost.get(key, []), *ready])
        left[key] = [span for span in left[key] if span[1] >= before]


def _facts(plan: Plan) -> dict[str, Any]:
    names = {(topic.topic_id, topic.epoch): topic.name for topic in plan.found.stories.alive()}
    return {
        "damaged": plan.found.is_damaged,
        "mended": sorted(plan.mended),
        "rebuilt": plan.rebuilt,
        "quarantined": [{"path": path, "why": why} for path, why in plan.quarantined.items()],
        "lost": [
            {"topic": names[key], "first": first, "last": last, "records": last - first + 1}
            for key, ranges in plan.lost.items()
            for first, last in ranges
        ],
    }


# -- the copy -----------------------------------------------------------------------------------------


def build(plan: Plan, source: Path, target: Path, disk: Disk | None = None) -> None:
    """Build the repaired copy; raises UsageError when the target is not empty, VerifyError, DiskError."""
    disk = disk or RealDisk()
    make_empty(disk, target)
    copy_identity(disk, source, target)
    seals: dict[tuple[int, int], int] = {}
    for report in in_order(plan.found.files):
        _copy_log(disk, plan, report, source, target, seals)
    for report in plan.found.files:
        if report.kind == "segment":
            _copy_segment(disk, plan, report.path, source, target)
        elif report.kind in {"snapshot", "unreadable"}:
            aside = QUARANTINE if report.path in plan.quarantined else ""
            copy_file(disk, source / report.path, target / aside / report.path)
        elif report.kind == "register" and report.header:
            copy_file(disk, source / report.path, target / report.path)
    _make_registers(disk, plan, target)
    _announce_in_snapshots(disk, plan, target)
    sync_tree(disk, target)


def _copy_log(
    disk: Disk, plan: Plan, report: FileReport, source: Path, target: Path,
    seals: dict[tuple[int, int], int],
) -> None:  # fmt: skip
    """One log file: as it is, mended, or aside. `seals` are those that mending changed, by file and end."""
    path = report.path
    if path in plan.quarantined:
        copy_file(disk, source / path, target / QUARANTINE / path)
        return
    data = (source / path).read_bytes()
    if path in plan.mended:
        before = report.more["ends"]
        limit = report.more.get("limit", 0)
        data = mend(data, plan.mended[path], limit)
        for offset, seal in _seals_of(data):
            if before.get(offset, seal) != seal or offset not in before:
                seals[report.more["file_id"], offset] = seal
    prev = (report.more["prev"][0], report.more["prev"][1])
    if prev in seals:
        data = with_prev_seal(data, seals[prev])
    write_synced(disk, target / path, data)


def _seals_of(data: bytes) -> Iterator[tuple[int, int]]:
    """(offset, seal of the frame that ends there) of every frame of a whole file."""
    for seen in islands_in(data).frames:
        yield seen.offset + seen.frame.total, seen.seal


def _make_registers(disk: Disk, plan: Plan, target: Path) -> None:
    """A register that is missing or says nothing is made anew from the log that is there."""
    newest: dict[int, dict[int, FileReport]] = {}
    for report in in_order(plan.found.files):
        if report.path not in plan.quarantined:
            newest.setdefault(report.header["shard"], {})[report.header["shards"]] = report
    known = plan.found.stories.identities()
    for shard, files in newest.items():
        path = target / META_DIR / register_name(shard)
        if path.exists():
            continue
        last = max(files.values(), key=lambda report: int(report.more["file_id"]))
        shards, size = int(last.header["shards"]), int(last.header["file_bytes"])
        entry = Entry(
            shard, 1, bytes.fromhex(last.header["engine_id"]), *beyond(known, size, shards), size, shards,
            int(last.more["file_id"]),
            tuple(sorted((n, int(each.more["file_id"])) for n, each in files.items() if n != shards)),
        )  # fmt: skip
        write_synced(disk, path, encode_register(entry))


def _copy_segment(disk: Disk, plan: Plan, stem: str, source: Path, target: Path) -> None:
    for suffix in _PARTS:
        path = stem + suffix
        if not (source / path).exists():
            continue
        if stem in plan.quarantined:
            copy_file(disk, source / path, target / QUARANTINE / path)
        elif stem not in plan.rebuilt or suffix not in _INDEX_PARTS:
            copy_file(disk, source / path, target / path)


def _announce_in_snapshots(disk: Disk, plan: Plan, target: Path) -> None:
    """What the snapshot counts as there and is not: its rows say so."""
    by_topic = {topic_id: ranges for (topic_id, _), ranges in plan.lost.items()}
    for report in plan.found.files:
        if report.kind != "snapshot" or report.path in plan.quarantined:
            continue
        lost = {
            row.topic_id: [span for span in by_topic[row.topic_id] if span[1] <= row.head]
            for row in report.more["topics"]
            if row.topic_id in by_topic
        }
        lost = {topic_id: ranges for topic_id, ranges in lost.items() if ranges}
        if lost:
            data = (target / report.path).read_bytes()
            disk.unlink(str(target / report.path))
            write_synced(disk, target / report.path, with_lost(data, lost))
