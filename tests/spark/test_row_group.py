"""The archive's columns equal, column by column, those of every other reader."""

from __future__ import annotations

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ringlog.client.read.record_batches import FrameRecordBatch, RecordBatch, open_run_frame
from ringlog.client.read.tail_batch import TailBatch
from ringlog.spark.arrow import ArrowBatchBuilder
from ringlog.spark.jobs import row_group
from ringlog.spark.jobs.row_group import RowGroup
from ringlog.spark.options import source_options
from ringlog.spark.schema import arrow_schema, columns_of, record_schema
from ringlog.types import Codec
from tests.support.piece_samples import CHOICES, FULL, OPTIONAL, RECORD, run_of

OPTIONS = source_options({"path": "/x", "subscribePattern": ".*", "includeHeaders": "true"}, streaming=False)
SCHEMA = arrow_schema(record_schema(OPTIONS))
SPECS = columns_of(OPTIONS)


def group_of(pieces: list[RecordBatch]) -> RowGroup:
    """Return a row group of these batches, of epoch 3, without the topic."""
    group = RowGroup(SPECS[1:], SCHEMA.remove(0), 3)
    for piece in pieces:
        group.add(piece)
    return group


@pytest.mark.slow
@settings(max_examples=80, deadline=None)
@given(
    stretches=st.lists(st.tuples(st.lists(RECORD, min_size=1, max_size=4), CHOICES), min_size=1, max_size=12),
    codec=st.sampled_from([Codec.NONE, Codec.LZ4]),
    hidden=st.sets(st.integers(1, 30), max_size=8),
)
def test_a_row_group_equals_the_batches_of_the_same_frames(stretches, codec, hidden) -> None:
    """The frames have any records, are large or small, and contain deleted records."""
    run = run_of(sorted(stretches, key=lambda each: len(each[1])), codec=codec)
    gone = np.array(sorted(seq for seq in hidden if seq < run.last_seq), dtype=np.int64)
    item = TailBatch("t", 3, run, 0, run.last_seq, gone)
    batches = ArrowBatchBuilder(record_schema(OPTIONS), OPTIONS)
    expected = pa.Table.from_batches([*batches.add(item), *batches.flush()], SCHEMA).remove_column(0)
    found = group_of([piece for piece in item.batches if len(piece)])
    assert found.rows == expected.num_rows
    assert found.table().equals(expected)
    assert found.table().schema == expected.schema


def test_large_frames_are_not_copied() -> None:
    """Their payloads are chunks in the mapped memory of the log."""
    run = run_of([([FULL] * 100, OPTIONAL), ([FULL] * 50, ())])
    pieces = [FrameRecordBatch(open_run_frame(run, row, "t")) for row in range(2)]
    payload = group_of(pieces).table().column("payload")
    start = np.frombuffer(run.buffer, np.uint8).__array_interface__["data"][0]
    assert [len(chunk) for chunk in payload.chunks] == [100, 50]
    for chunk in payload.chunks:
        assert start <= chunk.buffers()[2].address < start + len(run.buffer)


def test_a_group_is_full_by_rows_or_by_bytes(monkeypatch) -> None:
    """The first limit that is reached counts."""
    run = run_of([([FULL] * 100, ())] * 2)
    pieces = [FrameRecordBatch(open_run_frame(run, row, "t")) for row in range(2)]
    monkeypatch.setattr(row_group, "ROWS_MAX", 101)
    assert [group_of(pieces[:count]).is_full for count in (1, 2)] == [False, True]
    monkeypatch.setattr(row_group, "ROWS_MAX", 1_000)
    monkeypatch.setattr(row_group, "BYTES_MAX", len(pieces[0].buffer) + 1)
    assert [group_of(pieces[:count]).is_full for count in (1, 2)] == [False, True]
    assert group_of([pieces[0].slice_rows(0, 50)]).is_full is False
