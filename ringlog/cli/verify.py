"""`ringlog verify`: is everything in a data directory whole? Read-only, while no engine runs there."""

from __future__ import annotations

from typing import Annotated, Any

from cyclopts import Parameter

from ringlog.cli.options import Options
from ringlog.cli.outcome import Exit
from ringlog.cli.output import Format, Printer
from ringlog.cli.places import human_bytes
from ringlog.verify.directory import Verification, verify_directory
from ringlog.verify.findings import Range, size_of
from ringlog.verify.story import Summary

Given = Annotated[Options, Parameter(parse=False)]
RANGES_SHOWN = 4


def verify(
    data_dir: str,
    *,
    deep: Annotated[bool, Parameter(negative=())] = False,
    jobs: int = 0,
    cold_dir: str = "",
    without_cold: Annotated[bool, Parameter(negative=())] = False,
    options: Given,
) -> int:
    """Read every byte of a data directory with a decoder of its own, and account for every record.

    Parameters
    ----------
    data_dir
        The data directory; no engine may run there.
    deep
        Look into every record, not only at checksums.
    jobs
        Processes to read with (default: one a CPU).
    cold_dir
        The cold tier, when it is a directory; without it only the indexes of cold segments are verified.
    without_cold
        Accept that records in the cold tier are not verified. Otherwise the exit code is 1 if there are any.
    """
    refuse_running(data_dir)
    found = verify_directory(data_dir, is_deep=deep, jobs=jobs, cold_dir=cold_dir)
    show(found, options.printer())
    if found.is_damaged:
        return Exit.DAMAGE
    return Exit.FAILED if found.is_incomplete and not without_cold else Exit.DONE


def refuse_running(data_dir: str) -> None:
    """Raise UsageError while an engine holds the directory: its files are being written."""
    import fcntl
    import os

    from ringlog.errors import UsageError

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


def show(found: Verification, printer: Printer) -> None:
    """Print it: one object for programs, tables for people."""
    if printer.format is not Format.TABLE:
        printer.thing(facts_of(found))
        return
    printer.rows([human_row(topic) for topic in found.topics])
    printer.say("")
    for finding in found.findings:
        place = f"{finding.path}" + (f" at {finding.offset}" if finding.offset else "")
        printer.say(f"{finding.severity}: {place}: {finding.what}")
    verdict = "whole" if not found.is_incomplete else "whole but for what is unreachable"
    printer.thing({"verdict": "damaged" if found.is_damaged else verdict, **totals(found, is_human=True)})


def totals(found: Verification, *, is_human: bool = False) -> dict[str, Any]:
    """Counts over the whole directory."""
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
    """Everything, for programs."""
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


def human_row(topic: Summary) -> dict[str, Any]:
    """One topic for people."""
    return {
        "topic": topic.topic,
        "earliest": topic.earliest,
        "head": topic.head,
        "records": topic.records,
        "deleted": topic.deleted,
        "lost": size_of(topic.lost),
        "missing": size_of(topic.gaps),
        "ranges": ranges_text(topic.ranges),
    }


def ranges_text(ranges: list[Range]) -> str:
    """`1..5 9..12`, the first few."""
    shown = [f"{first}..{last}" if last > first else f"{first}" for first, last in ranges[:RANGES_SHOWN]]
    return " ".join(shown) + (f" and {len(ranges) - RANGES_SHOWN} more" if len(ranges) > RANGES_SHOWN else "")
