"""The summary of an audit task, instead of one row for each frame: pure functions, compared with the rows."""

from __future__ import annotations

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ringlog.spark.jobs.audit_source import (
    FAULT,
    FAULTS_PER_TASK_MAX,
    SCHEMA,
    STORED,
    TOTAL,
    merge_seq_ranges,
    summarize_audit,
)
from ringlog.spark.schema import arrow_schema
from ringlog.spark.views import view_schema

AUDIT = arrow_schema(view_schema("audit"))


def frame(topic="t", epoch=1, first=1, count=1, *, kind="append", fault=None, file="seg", offset=0):
    return {
        "topic": topic, "topic_id": None if topic is None else "0" * 16, "epoch": epoch, "first_seq": first,
        "last_seq": first + count - 1, "records": count, "file": file, "tier": "hot", "offset": offset,
        "bytes": 100 * count, "kind": kind, "fault": fault,
    }  # fmt: skip


def told(*batches):
    found = summarize_audit(pa.RecordBatch.from_pylist(rows, schema=AUDIT) for rows in batches)
    assert found.schema.names == SCHEMA.fieldNames()
    return found.to_pylist()


def stored(rows):
    return sorted(
        (row["topic"], row["epoch"], row["first_seq"], row["last_seq"])
        for row in rows
        if row["what"] == STORED
    )


ranges = st.lists(st.tuples(st.integers(1, 60), st.integers(1, 8)), max_size=30)


@given(ranges)
def test_merge_seq_ranges_keeps_exactly_the_same_seqs(pairs):
    firsts = np.array([first for first, _ in pairs], dtype=np.int64)
    lasts = np.array([first + count - 1 for first, count in pairs], dtype=np.int64)
    both = merge_seq_ranges(firsts, lasts)
    assert {n for a, b in zip(*both, strict=True) for n in range(a, b + 1)} == {
        n for a, b in zip(firsts, lasts, strict=True) for n in range(a, b + 1)
    }
    assert (both.firsts[1:] > both.lasts[:-1] + 1).all(), "they neither touch nor overlap"
    assert (both.firsts <= both.lasts).all()


@given(
    st.lists(
        st.lists(st.tuples(st.sampled_from("ab"), st.integers(1, 2), st.integers(1, 40), st.integers(1, 5))),
        max_size=6,
    )
)
def test_stored_ranges_are_reported_by_topic_and_epoch_for_any_batches(batches):
    rows = told(*([frame(*each) for each in batch] for batch in batches))
    seen = {
        (topic, epoch, n)
        for batch in batches
        for topic, epoch, first, count in batch
        for n in range(first, first + count)
    }
    assert {(topic, epoch, n) for topic, epoch, a, b in stored(rows) for n in range(a, b + 1)} == seen
    (total,) = [row for row in rows if row["what"] == TOTAL]
    counts = [count for batch in batches for *_, count in batch]
    assert (total["frames"], total["records"], total["bytes"]) == (
        len(counts),
        sum(counts),
        100 * sum(counts),
    )
    assert total["damaged"] == 0


def test_a_log_without_gaps_is_one_row_per_topic():
    rows = told(
        *([frame("a", first=n, count=10), frame("b", first=n, count=10)] for n in range(1, 2_000, 10))
    )
    assert stored(rows) == [("a", 1, 1, 2_000), ("b", 1, 1, 2_000)]
    assert len(rows) == 3


def test_faults_are_reported_and_a_damaged_append_counts_as_stored():
    rows = told(
        [
            frame(first=1, count=5),
            frame(first=6, count=5, fault="body does not match its checksum", offset=512),
        ],
        [frame(None, None, 0, 0, kind="part", fault="file is missing", file="a")],
        [frame(None, 7, 99, 3, kind="append", fault="header does not match its seal", file="b", offset=8)],
    )
    faults = [row for row in rows if row["what"] == FAULT]
    assert [(row["file"], row["fault"], row["topic"]) for row in faults] == [
        ("a", "file is missing", None), ("b", "header does not match its seal", None),
        ("seg", "body does not match its checksum", "t"),
    ]  # fmt: skip
    assert faults[2]["offset"] == 512
    assert stored(rows) == [("t", 1, 1, 10)], "of one whose owner is not known nothing is believed"
    (total,) = [row for row in rows if row["what"] == TOTAL]
    assert (total["frames"], total["damaged"]) == (3, 3), "a part is no frame"


@pytest.mark.parametrize("batches", [1, 3])
def test_faults_are_bounded_and_the_first_are_kept(batches):
    count = FAULTS_PER_TASK_MAX + 500
    found = [frame(first=n + 1, fault="x", offset=8 * n) for n in reversed(range(count))]
    rows = told(*(found[at::batches] for at in range(batches)))
    faults = [row["offset"] for row in rows if row["what"] == FAULT]
    assert faults == [8 * n for n in range(FAULTS_PER_TASK_MAX)]
    assert rows[0]["damaged"] == count


def test_an_audit_of_no_frames_has_a_total_of_zero():
    assert [(row["what"], row["frames"], row["bytes"]) for row in told()] == [(TOTAL, 0, 0)]
    assert [(row["what"], row["frames"], row["bytes"]) for row in told([])] == [(TOTAL, 0, 0)]
