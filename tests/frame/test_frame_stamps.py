"""Frames of segments carry a commit stamp for each record, and every reader takes the time from there."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ringlog.client.read.multi_frame_batch import decode_frames
from ringlog.client.read.record_batches import FrameRecordBatch, record_batches_of
from ringlog.errors import UsageError
from ringlog.frame import Column, encode_arrow, frame, measure, open_frame, patch_header
from ringlog.frame.batch import scan
from ringlog.frame.layout import PRODUCER_COLUMNS
from ringlog.storage.frame_run import FrameRun
from tests.support.frame_samples import COMMIT_TS, encoded, golden_frames, record_columns, stamped

STAMPS = [COMMIT_TS, COMMIT_TS + 1, COMMIT_TS + 5_000_000]


def sealed():
    return open_frame(golden_frames()["sealed"][1], seed=None)


def run_of(frames: list[bytes]) -> FrameRun:
    whole = b"".join(frames)
    return FrameRun(whole, scan(whole), 0, "file", 0)


def test_a_view_and_its_slices_have_the_stamp_of_each_record() -> None:
    view = sealed()
    assert view.commit_stamps.tolist() == STAMPS
    assert view.commit_ts == STAMPS[0]
    assert view.slice(1, 3).commit_stamps.tolist() == STAMPS[1:]
    assert len(view.slice(1, 1).commit_stamps) == 0


def test_without_the_column_every_record_has_the_headers_stamp() -> None:
    view = open_frame(golden_frames()["payload_only"][1], seed=None)
    assert view.commit_stamps.tolist() == [COMMIT_TS] * 2
    assert view.commit_stamps.dtype == np.int64


def test_arrow_shows_the_stamps_as_ts_and_adds_no_column() -> None:
    table = sealed().to_arrow()
    assert table.schema.names == ["seq", "ts", "payload", "tag"]
    assert table.column("ts").cast("int64").to_pylist() == STAMPS
    assert sealed().to_arrow(columns=1 << Column.COMMIT_TS).schema.names == ["seq", "ts", "payload"]


def test_encode_arrow_refuses_a_column_of_stamps() -> None:
    pyarrow = pytest.importorskip("pyarrow")
    batch = pyarrow.RecordBatch.from_pydict({"payload": [b"a"], "commit_ts": [5]})
    with pytest.raises(UsageError):
        encode_arrow(batch)


def test_records_of_a_batch_have_their_own_stamps() -> None:
    """The same holds for a filtered or cut batch. The batch's time is that of its first record."""
    piece = FrameRecordBatch(sealed())
    assert [record.ts for record in piece.records()] == STAMPS
    assert [record.ts for record in piece.select_rows(np.array([0, 2])).records()] == [STAMPS[0], STAMPS[2]]
    assert piece.select_rows(np.array([2])).commit_stamps.tolist() == STAMPS[2:]
    assert FrameRecordBatch(sealed().slice_after(22)).commit_ts == STAMPS[2]
    assert [record.ts for record in FrameRecordBatch(sealed().slice_after(21)).records()] == STAMPS[1:]


@given(record_columns(), st.lists(st.integers(0, 1 << 50), min_size=4, max_size=9))
def test_many_frames_with_stamps_decode_like_single_frames(given_columns, firsts) -> None:
    columns, frames, seq = encoded(given_columns), [], 1
    for first in firsts:
        whole = frame(stamped(columns, [first + i for i in range(columns.count)]), topic_id=1)
        patch_header(whole, base_seq=seq, commit_ts=first)
        frames.append(bytes(whole))
        seq += columns.count
    run = run_of(frames)
    expected = [record for one in frames for record in FrameRecordBatch(open_frame(one, seed=None)).records()]
    found = decode_frames(run, slice(None), 0, "t")
    assert found.records() == expected
    assert found.commit_stamps.tolist() == [record.ts for record in expected]
    pieces = list(record_batches_of(run, 0, "t"))
    assert [record for piece in pieces for record in piece.records()] == expected
    assert found.bitmap & ~PRODUCER_COLUMNS == 0
    arrow = found.arrow_batches(nulls=False, columns=None)[0]
    assert arrow.column("ts").cast("int64").to_pylist() == [record.ts for record in expected]


def test_measure_accepts_a_frame_with_commit_stamps() -> None:
    whole = frame(stamped(encoded({"payloads": [b"a"]}), [5]), topic_id=1)
    assert not measure(whole, scan(whole)).faults.any()
