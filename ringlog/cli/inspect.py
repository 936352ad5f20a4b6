"""`ringlog inspect`: print the content of one data file, frame by frame. Read-only; safe at any time."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Annotated, Any

from cyclopts import Parameter

from ringlog.cli.options import Options
from ringlog.cli.outcome import CliExit
from ringlog.cli.output import Format, Printer
from ringlog.errors import UsageError
from ringlog.verify import segment_decoder, snapshot_decoder, wal_decoder
from ringlog.verify.cross_check import durability_of
from ringlog.verify.directory import DECODE_ERRORS
from ringlog.verify.findings import FileReport
from ringlog.verify.frame_decoder import VerifyError, decode_frame
from ringlog.verify.log_order import wal_file_name
from ringlog.verify.register_decoder import verify_register

Given = Annotated[Options, Parameter(parse=False)]
Row = dict[str, Any]
TYPES = {
    1: "append", 2: "topic create", 3: "topic delete", 6: "delete", 7: "evict", 8: "checkpoint", 9: "config",
    11: "head", 12: "mark", 13: "lost range", 14: "idempotency key",
}  # fmt: skip


def inspect(
    path: str,
    *,
    json: Annotated[bool, Parameter(negative=())] = False,
    limit: int = 0,
    options: Given,
) -> int:
    """Show the header, frames, marks and tables of one data file.

    Parameters
    ----------
    path
        WAL file, part of a segment, snapshot or register.
    json
        Print one JSON object, regardless of --output.
    limit
        Maximum number of frames, entries or rows; 0 = all.

    Examples
    --------
    ringlog inspect ./ringlog-data/wal/shard-00/wal-1-1.log --limit 20
    """
    form = Format.JSON if json else options.format
    printer = Printer(form, is_colored=options.is_colored)
    header, rows, findings = _decode_file(Path(path))
    shown = rows[: limit or None]
    if form is Format.TABLE:
        printer.item(header)
        printer.caption("")
        printer.rows(shown)
        for finding in findings:
            printer.caption(f"{finding['severity']}: at {finding['offset']}: {finding['what']}")
    else:
        printer.item({"path": path, "header": header, "rows": shown, "findings": findings})
    return CliExit.DAMAGE if any(finding["severity"] == "damage" for finding in findings) else CliExit.DONE


def _decode_file(path: Path) -> tuple[Row, list[Row], list[Row]]:
    """Return (header, rows, findings) of a file. The first bytes determine its type."""
    data = path.read_bytes()
    readers = {
        b"RLOGWAL1": _wal, b"RLOGSEG1": _data_part, b"RLOGIDX1": _index_part, b"RLOGTAG1": _tags_part,
        b"RLOGDEL1": _marks_part, b"RLSNAP1\0": _snapshot,
    }  # fmt: skip
    # A register has two entries, and the first one may still be empty.
    is_register = b"RLOGREG1" in {data[:8], data[4096:4104]}
    reader = _register if is_register else readers.get(data[:8])
    if reader is None:
        raise UsageError("not a WAL file, a part of a segment, a snapshot or a register", path=str(path))
    report = FileReport(path.name, "file", bytes=len(data))
    try:
        header, rows = reader(report, data)
    except DECODE_ERRORS as e:
        report.add_damage(e.message if isinstance(e, VerifyError) else f"cannot be decoded: {e}")
        header, rows = {}, []
    return header, rows, [_finding(each) for each in report.findings]


def _finding(finding: Any) -> Row:
    return {"severity": finding.severity, "offset": finding.offset, "what": finding.what}


def _register(report: FileReport, data: bytes) -> tuple[Row, list[Row]]:
    found = verify_register(f"meta/{report.path}", data)
    report.findings += found.findings
    pairs = [{"shards": shards, "newest": wal_file_name(file)} for shards, file in found.extra["newest"]]
    return {"kind": "register", **found.header}, pairs


# -- the log ------------------------------------------------------------------------------------------


def _wal(report: FileReport, data: bytes) -> tuple[Row, list[Row]]:
    header = wal_decoder.read_header(data)
    walk = wal_decoder.WalFrameWalk(data, header.salt)
    rows = [_frame_row(seen.offset, seen.frame, seen.frame.control) for seen in walk.frames()]
    if walk.reason:
        durable = max([walk.durable, *(m.durable_stop for m in _behind(data, walk.stop, header.salt))])
        report_finding = report.add_damage if durable > walk.stop else report.add_remark
        report_finding(f"frames end: {walk.reason}; bytes up to {durable} were durable", walk.stop)
    for passed in walk.damaged_appends:
        report.add_remark(f"records {passed.first}..{passed.last} of class memory are damaged", passed.offset)
    facts = {"kind": "wal", **header.facts(), "frames_end": walk.stop, "durable": walk.durable}
    return facts | {"groups": len(walk.marks)}, rows


def _behind(data: bytes, start: int, salt: int) -> Iterable[wal_decoder.DecodedMark]:
    return wal_decoder.trailing_marks(data, start, salt)


def _frame_row(offset: int, frame: Any, control_body: Any = None) -> Row:
    return {
        "offset": offset, "bytes": frame.total, "type": TYPES.get(frame.type, str(frame.type)),
        "topic_id": f"{frame.topic_id:x}", "epoch": frame.epoch, "first_seq": frame.base_seq,
        "records": frame.count, "commit_ts": frame.commit_ts, "durability": frame.durability,
        "says": _displayed_body(frame.type, control_body),
    }  # fmt: skip


def _displayed_body(kind: int, control_body: Any) -> Any:
    """Return a control frame's body for display: configurations as classes, bitmaps as sizes."""
    if not isinstance(control_body, list):
        return control_body
    if kind in {2, 9}:
        return [durability_of(each) if isinstance(each, bytes) else each for each in control_body]
    return [f"{len(each)} bytes" if isinstance(each, bytes) else each for each in control_body]


# -- segments -----------------------------------------------------------------------------------------


def _data_part(report: FileReport, data: bytes) -> tuple[Row, list[Row]]:
    header = segment_decoder.read_data_header(data)
    rows: list[Row] = []
    at = segment_decoder.DATA_HEADER_BYTES
    while at < len(data):
        try:
            frame = decode_frame(data, at, header.salt)
        except VerifyError as e:
            report.add_damage(e.message, at)
            at = segment_decoder.next_frame(data, at, header.salt)
            continue
        rows.append(_frame_row(at, frame))
        at += frame.total
    return {"kind": "segment data", **header.facts()}, rows


def _index_part(report: FileReport, data: bytes) -> tuple[Row, list[Row]]:
    index = segment_decoder.read_index(data)
    report.records = index.records
    rows: list[Row] = []
    for row in index.topics:
        rows += [
            {"topic_id": f"{row.topic_id:x}", "epoch": row.epoch, **entry._asdict()}
            for entry in index.entries[row.entry_start : row.entry_stop]
        ]
    topics = [row._asdict() | {"topic_id": f"{row.topic_id:x}"} for row in index.topics]
    return {"kind": "segment index", **index.header, "table": topics}, rows


def _tags_part(report: FileReport, data: bytes) -> tuple[Row, list[Row]]:
    tags = segment_decoder.read_tags(data)
    report.records = tags.records
    return {"kind": "segment tags", **tags.header}, [
        {"topic": topic, "tag": text, "postings": postings} for topic, text, postings in tags.dictionary
    ]


def _marks_part(report: FileReport, data: bytes) -> tuple[Row, list[Row]]:
    number, salt, marks = segment_decoder.read_marks(data)
    odd = len(marks) - marks.count(0) - marks.count(segment_decoder.DELETED)
    if odd:
        report.add_damage(f"{odd} deletion marks have an invalid value")
    header = {"kind": "segment marks", "number": number, "salt": f"{salt:016x}", "records": len(marks)}
    deleted_records = [i for i, mark in enumerate(marks) if mark == segment_decoder.DELETED]
    return header | {"deleted": len(deleted_records)}, [{"record": i} for i in deleted_records]


# -- snapshots ----------------------------------------------------------------------------------------


def _snapshot(report: FileReport, data: bytes) -> tuple[Row, list[Row]]:
    found = snapshot_decoder.verify_snapshot(report.path, data)
    report.findings = found.findings
    rows = [
        {"topic": row.name, "topic_id": f"{row.topic_id:x}", "epoch": row.epoch, "head": row.head,
         "live": row.live, "floor": row.floor, "durability": row.durability, "lost": row.lost}
        for row in found.extra["topics"]
    ]  # fmt: skip
    facts = found.extra["facts"]
    extra = {"covers_below": facts.floor, "covers": facts.absorbed, "segments": facts.segments}
    return {"kind": "snapshot", **found.header, **extra}, rows
