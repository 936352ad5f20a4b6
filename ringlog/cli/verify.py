"""`ringlog verify`: verify a data directory. Read-only; no engine may run on it."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

from cyclopts import Parameter

from ringlog.cli.option_parsing import human_bytes, within
from ringlog.cli.options import Options
from ringlog.cli.outcome import CliExit
from ringlog.cli.output import Format, Printer
from ringlog.errors import UsageError
from ringlog.verify.cross_check import TopicCoverage
from ringlog.verify.directory import Verification, verify_directory
from ringlog.verify.findings import Range, count_seqs

Given = Annotated[Options, Parameter(parse=False)]
RANGES_SHOWN = 4
JOBS_MAX = 256
"""Most processes of one verification."""


def verify(
    data_dir: str,
    *,
    deep: Annotated[bool, Parameter(negative=())] = False,
    jobs: Annotated[int, Parameter(validator=within(0, JOBS_MAX))] = 0,
    cold_dir: str = "",
    without_cold: Annotated[bool, Parameter(negative=())] = False,
    options: Given,
) -> int:
    """Verify every byte of a stopped engine's data directory.

    Accounts for every record with an independent decoder. Exit code 6: damage found.

    Parameters
    ----------
    data_dir
        Data directory; no engine may run on it.
    deep
        Decode every record, not only checksums.
    jobs
        Number of processes (default: one per CPU).
    cold_dir
        Directory of the cold tier. Without it only the indexes of cold segments are verified.
    without_cold
        Exit with 0 even if records in the cold tier are not verified. Without this option the exit code is 1
        in that case.

    Examples
    --------
    ringlog verify ./ringlog-data --deep
    """
    refuse_running(data_dir)
    require_cold_dir(cold_dir)
    found = verify_directory(data_dir, is_deep=deep, jobs=jobs, cold_dir=cold_dir)
    show(found, options.printer())
    if found.is_damaged:
        return CliExit.DAMAGE
    return CliExit.FAILED if found.is_incomplete and not without_cold else CliExit.DONE


def refuse_running(data_dir: str) -> None:
    """Raise UsageError while an engine has the directory locked: it is writing to the files."""
    import fcntl
    import os

    try:
        fd = os.open(os.path.join(data_dir, "LOCK"), os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW)
    except FileNotFoundError:
        return
    try:
        fcntl.flock(fd, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        raise UsageError("an engine runs on this data directory: stop it first", path=data_dir) from None
    finally:
        os.close(fd)


def require_cold_dir(path: str) -> None:
    """Raise UsageError if --cold-dir names no directory: its records would be taken for records elsewhere."""
    if path and not Path(path).is_dir():
        raise UsageError("--cold-dir names no directory: is it mounted?", cold_dir=path)


def show(found: Verification, printer: Printer) -> None:
    """Print the result: one object for programs, tables for users."""
    if printer.format is not Format.TABLE:
        printer.item(facts_of(found))
        return
    printer.rows([human_row(topic) for topic in found.topics])
    printer.caption("")
    for finding in found.findings:
        place = f"{finding.path}" + (f" at {finding.offset}" if finding.offset else "")
        printer.caption(f"{finding.severity}: {place}: {finding.what}")
    verdict = "undamaged"
    if found.is_incomplete:
        verdict += ", but cold records were not verified"
    printer.item({"verdict": "damaged" if found.is_damaged else verdict, **totals(found, is_human=True)})


def totals(found: Verification, *, is_human: bool = False) -> dict[str, Any]:
    """Return the counts of the whole directory."""
    size = sum(report.bytes for report in found.files)
    kinds = [report.kind for report in found.files]
    return {
        "topic_count": len(found.topics),
        "records": sum(topic.records for topic in found.topics),
        "bytes": human_bytes(size) if is_human else size,
        "wal_files": kinds.count("wal"),
        "segments": kinds.count("segment"),
        "snapshots": kinds.count("snapshot"),
    }


def facts_of(found: Verification) -> dict[str, Any]:
    """Return the complete result for programs."""
    return {
        "damaged": found.is_damaged,
        "incomplete": found.is_incomplete,
        **totals(found),
        "topics": [topic._asdict() for topic in found.topics],
        "findings": [finding._asdict() for finding in found.findings],
        "files": [
            {"path": report.path, "kind": report.kind, "bytes": report.bytes, "frames": report.frames,
             "records": report.records}
            for report in found.files if report.kind != "directory"
        ],
    }  # fmt: skip


def human_row(topic: TopicCoverage) -> dict[str, Any]:
    """Return the table row of one topic."""
    return {
        "topic": topic.topic,
        "earliest": topic.earliest,
        "head": topic.head,
        "records": topic.records,
        "deleted": topic.deleted,
        "lost": count_seqs(topic.lost),
        "missing": count_seqs(topic.gaps),
        "ranges": ranges_text(topic.ranges),
    }


def ranges_text(ranges: list[Range]) -> str:
    """Format the first ranges: `1..5 9..12`."""
    shown = [f"{first}..{last}" if last > first else f"{first}" for first, last in ranges[:RANGES_SHOWN]]
    return " ".join(shown) + (f" and {len(ranges) - RANGES_SHOWN} more" if len(ranges) > RANGES_SHOWN else "")
