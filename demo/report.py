"""Output of the demo: tables, texts and JSON."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from demo.copies import AIRPORT, Copies
from demo.judge import Verdict
from demo.spark_stage import SparkStage
from demo.stage import Stage
from ringlog.cli.probe import machine_facts

MS = 1e-6


@dataclass(frozen=True, slots=True)
class Speeds:
    """Rates and latencies of one run."""

    records_per_s: float
    ack_p50_ms: float
    ack_p99_ms: float
    pause_max_ms: float
    live_p50_ms: float
    """From a record's commit to its arrival at the watcher."""
    live_p99_ms: float

    @classmethod
    def of(
        cls, acked: int, seconds: float, latencies_ns: NDArray[np.int64], pause_ns: int,
        delays_us: NDArray[np.int64],
    ) -> Speeds:  # fmt: skip
        """Compute the figures from the measurements of producers and watchers."""
        p50, p99 = np.percentile(latencies_ns, [50, 99]) * MS if len(latencies_ns) else (0.0, 0.0)
        live_p50, live_p99 = np.percentile(delays_us, [50, 99]) / 1e3 if len(delays_us) else (0.0, 0.0)
        return cls(acked / seconds, float(p50), float(p99), pause_ns * MS, float(live_p50), float(live_p99))


def rows(verdict: Verdict, speeds: Speeds) -> list[tuple[str, str]]:
    """Return the lines of the table."""
    return [
        ("records acked", f"{verdict.acked:,}"),
        ("read back", f"{verdict.read:,}"),
        ("lost", f"{verdict.lost:,}"),
        ("doubled", f"{verdict.doubled:,}"),
        ("out of order", f"{verdict.out_of_order:,}"),
        ("records/s", f"{speeds.records_per_s:,.0f}"),
        ("ack p50", f"{speeds.ack_p50_ms:,.1f} ms"),
        ("ack p99", f"{speeds.ack_p99_ms:,.1f} ms"),
        ("longest producer pause", f"{speeds.pause_max_ms:,.0f} ms"),
        ("live, after commit p50", f"{speeds.live_p50_ms:,.1f} ms"),
        ("live, after commit p99", f"{speeds.live_p99_ms:,.1f} ms"),
    ]


def stage_text(stage: Stage) -> str:
    """Describe the cold-tier stage: removed records, location of the rest, and what a full read returns."""
    met = stage.tombstone
    told = "no tombstone" if met is None else f"tombstone {met.gap_from}..{met.gap_to}, reason {met.reason}"
    return (
        f"{stage.topic}: {stage.deleted:,} deleted by tag {stage.tag}, {stage.evicted:,} evicted by a cap; "
        f"{stage.cold_segments} of {stage.segments} segments relocated, restarted\n"
        f"{stage.topic}, read from 0: {told}, then {stage.verdict.read:,} records; "
        f"other carriers from the cold tier: {stage.rest.read:,}"
    )


def copies_text(copies: Copies) -> str:
    """Describe the router stage in one line."""
    wrong = copies.lost + copies.doubled + copies.out_of_order + copies.others
    return (
        f"{copies.routers} routers copied {copies.read:,} of {copies.wanted:,} flights from {AIRPORT}, "
        + (f"{wrong} WRONG" if wrong else "each once and in order")
    )


def spark_text(found: SparkStage) -> str:
    """Describe the Spark stage: three answers, their durations, and their comparison with pandas."""
    wrong = found.wrong_log + found.wrong_parquet + found.wrong_live
    verdict = "all as pandas has them" if not wrong else f"{wrong} ROWS UNLIKE PANDAS'"
    return (
        f"Spark: {found.rows} rows of delays by carrier and hour from the log {found.log_s:.1f} s, "
        f"{found.archived:,} records archived {found.archive_s:.1f} s, from Parquet {found.parquet_s:.1f} s\n"
        f"Spark, live: killed at {found.counted_at_kill:,} of {found.live_flights:,} flights, went on after "
        f"{found.restart_s:.1f} s; {verdict}\n"
        f"drawn: {found.picture}"
    )


def table(lines: list[tuple[str, str]]) -> str:
    """Format two columns; the second one is aligned right."""
    left = max(len(name) for name, _ in lines)
    right = max(len(value) for _, value in lines)
    rule = "─" * (left + right + 2)
    return "\n".join([rule, *(f"{name:<{left}}  {value:>{right}}" for name, value in lines), rule])


def write(path: Path, verdict: Verdict, speeds: Speeds, more: dict[str, Any]) -> None:
    """Write the same numbers as JSON."""
    facts = {
        "acked": verdict.acked,
        "read": verdict.read,
        "lost": verdict.lost,
        "doubled": verdict.doubled,
        "out_of_order": verdict.out_of_order,
        **{name: round(value, 3) for name, value in asdict(speeds).items()},
        "moved": verdict.moved,
        "others": verdict.others,
        **more,
        "machine": machine_facts(),
    }
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(facts, indent=2) + "\n")
