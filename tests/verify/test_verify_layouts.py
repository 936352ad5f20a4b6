"""The verifier on logs whose number of shards changed: what all shards absorbed may be gone."""

from __future__ import annotations

from ringlog.verify.findings import FileReport
from ringlog.verify.log_order import _is_covered
from ringlog.verify.snapshot_decoder import Facts


def snapshot(shard: int, shards: int, floor: int) -> FileReport:
    report = FileReport(f"meta/snapshot-{shard:02d}.1", "snapshot")
    report.header = {"shard": shard, "shards": shards, "number": 1}
    report.more = {"facts": Facts(0, floor, [], [])}
    return report


def test_a_file_may_be_gone_when_all_shards_of_another_layout_absorbed_it():
    report = FileReport("wal/shard-01/wal-18-0.log", "wal")
    report.header = {"shard": 1, "shards": 2}
    assert _is_covered(7, report, [snapshot(1, 2, 9)])
    assert _is_covered(7, report, [snapshot(0, 1, 9)])
    assert not _is_covered(7, report, [snapshot(0, 1, 5)])
    assert not _is_covered(7, report, [snapshot(0, 3, 9), snapshot(2, 3, 9)])
    assert _is_covered(7, report, [snapshot(0, 3, 9), snapshot(2, 3, 9), snapshot(1, 3, 9)])
