"""`ringlog repair`: build a repaired copy of a damaged data directory. The original never changes.

All complete frames are kept. Records in damaged frames are taken from the cold tier, or from log files that a
snapshot absorbed and that still exist. The plan lists all other records as lost, by topic and seq, before
anything is written. In the copy they are announced losses: readers receive a tombstone, never a silent gap.
Damaged files are copied unchanged to the directory `quarantine` of the copy.
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

from cyclopts import Parameter

from ringlog.cli.confirm import counted, needs_confirmation, require_confirmation
from ringlog.cli.options import Options
from ringlog.cli.outcome import CliExit
from ringlog.cli.output import Format
from ringlog.cli.repair.decisions import plan_repair
from ringlog.cli.repair.plan import RepairPlan
from ringlog.cli.repair.repaired_copy import build_copy
from ringlog.cli.verify import refuse_running, require_cold_dir
from ringlog.segment.salvage import SalvagedTopic
from ringlog.verify.directory import verify_directory
from ringlog.verify.findings import DAMAGE, count_seqs

Given = Annotated[Options, Parameter(parse=False)]


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
    require_cold_dir(cold_dir)
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
                **({"is_bound": True} if last - first + 1 >= plan.max_unknown_records(key[0]) > 0 else {}),
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
