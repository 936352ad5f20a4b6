"""Frames that are decoded together give the same records as frames that are opened one by one."""

import tracemalloc

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ringlog.client.read.multi_frame_batch import MultiFrameRecordBatch, decode_frames
from ringlog.client.read.record_batches import (
    FrameRecordBatch,
    open_run_frame,
    record_batches_of,
    visible_record_batches,
)
from ringlog.errors import CorruptData
from ringlog.frame import layout
from ringlog.frame.layout import HEADER_BYTES, Column
from ringlog.storage.frame_run import FrameRun
from ringlog.types import Codec
from tests.support.piece_samples import CHOICES, FULL, OPTIONAL, RECORD, run_of


def one_by_one(run):
    return [FrameRecordBatch(open_run_frame(run, row, "t")) for row in range(len(run.batch))]


def flat(pieces, what):
    return [value for piece in pieces for value in getattr(piece, what)()]


@pytest.mark.slow
@settings(max_examples=80, deadline=None)
@given(
    stretches=st.lists(
        st.tuples(
            st.lists(RECORD, min_size=1, max_size=4),
            CHOICES,
        ),
        min_size=4,
        max_size=12,
    ),
    gap=st.sampled_from([0, 8, 4096]),
    after=st.integers(0, 10),
)
def test_records_decoded_together_equal_records_decoded_one_by_one(stretches, gap, after):
    stretches = sorted(stretches, key=lambda s: len(s[1]))
    run = run_of(stretches, gap=gap)
    pieces = list(record_batches_of(run, after, "t"))
    expected = [record for record in flat(one_by_one(run), "records") if record.seq > after]
    assert flat(pieces, "records") == expected
    assert flat(pieces, "payloads") == [record.data for record in expected]
    views = [None if view is None else bytes(view) for view in flat(pieces, "payload_views")]
    assert views == flat(pieces, "payloads")
    sizes = [len(record.data or b"") + len(record.meta_json or b"") for record in expected]
    assert [int(size) for piece in pieces for size in piece.sizes()] == sizes
    for piece in pieces:
        rows = np.arange(0, len(piece), 2)
        assert piece.select_rows(rows).records() == piece.records()[::2]
        assert piece.slice_rows(1, 3).records() == piece.records()[1:3]
        assert piece.select_rows(rows).slice_rows(0, 1).records() == piece.records()[:1]
        for column, name in ((Column.KEY, "key"), (Column.TAG, "tag"), (Column.NODE, "node")):
            found = piece.column(column)
            if found is not None:
                texts = [getattr(record, name) for record in piece.records()]
                assert found == [
                    t if isinstance(t, bytes) else (t or "").encode() for t in texts
                ] or found == [t or b"" for t in texts]


@settings(max_examples=80, deadline=None)
@given(
    counts=st.lists(st.integers(1, 9), min_size=1, max_size=12),
    bounds=st.tuples(st.integers(0, 60), st.integers(0, 60)),
    missing=st.sets(st.integers(0, 11), max_size=4), hidden=st.sets(st.integers(1, 60), max_size=6),
)  # fmt: skip
def test_visible_batches_contain_exactly_the_visible_records_of_the_range(counts, bounds, missing, hidden):
    """This includes runs with missing frames, whose records were all deleted."""
    run = run_of([([FULL] * count, ()) for count in counts])
    rows = [row for row in range(len(counts)) if row not in missing]
    if not rows:
        return
    run = FrameRun(run.buffer, run.batch.take(np.array(rows)), run.salt, run.path, run.origin)
    after, until = bounds
    there = [record.seq for record in flat(one_by_one(run), "records")]
    gone = np.array(sorted(hidden), dtype=np.int64)
    found = flat(visible_record_batches(run, after, until, gone, "t"), "records")
    assert [record.seq for record in found] == [n for n in there if after < n <= until and n not in hidden]
    assert run.last_seq == there[-1]
    if after < until:
        near = run.frames_in_range(after, until)
        assert len(near.batch) <= len(run.batch)
        assert all(int(base) <= until for base in near.batch.words[:, layout.W_BASE_SEQ])


@pytest.mark.parametrize("nulls", [False, True])
def test_arrow_batches_of_several_frames_equal_those_of_single_frames(nulls):
    record = FULL
    empty = {name: type(value)() if not isinstance(value, int) else None for name, value in record.items()}
    empty |= {"payload": b"", "priority": 0, "meta": None}
    null = empty | dict.fromkeys(("payload", "key", "tag", "node"))
    run = run_of([([record, empty, null], OPTIONAL)] * 5)
    (piece,) = record_batches_of(run, 0, "t")
    assert isinstance(piece, MultiFrameRecordBatch)
    for columns in (None, 1, (1 << 10) - 1):
        (made,) = piece.arrow_batches(nulls=nulls, columns=columns)
        each = [b for p in one_by_one(run) for b in p.arrow_batches(nulls=nulls, columns=columns)]
        assert pa.Table.from_batches([made]).equals(pa.Table.from_batches(each).combine_chunks())
    plain = run_of([([record], ())] * 5)
    (piece,) = record_batches_of(plain, 0, "t")
    (made,) = piece.arrow_batches(nulls=nulls, columns=(1 << 10) - 1)
    each = [b for p in one_by_one(plain) for b in p.arrow_batches(nulls=nulls, columns=(1 << 10) - 1)]
    assert pa.Table.from_batches([made]).equals(pa.Table.from_batches(each).combine_chunks())


def test_large_and_compressed_frames_are_opened_one_by_one():
    record = FULL | {"payload": b"x" * 50}
    large = run_of([([record] * 64, ())] * 6)
    packed = run_of([([record] * 3, ())] * 6, codec=Codec.LZ4)
    for run in (large, packed):
        pieces = list(record_batches_of(run, 0, "t"))
        assert all(isinstance(piece, FrameRecordBatch) for piece in pieces)
        assert len(flat(pieces, "payloads")) == len(one_by_one(run)) * len(pieces[0])


@settings(max_examples=300, deadline=None)
@given(st.integers(0, 1 << 20), st.integers(-(1 << 31), (1 << 31) - 1) | st.integers(-2, 40))
def test_a_column_with_a_wrong_size_is_corrupt_and_nothing_outside_is_read(where, value):
    """The decoder returns values of the frame or raises CorruptData.

    This holds for frames whose checksums match although their structure is wrong.
    """
    run = run_of([([FULL, FULL], OPTIONAL)] * 4)
    words = np.frombuffer(run.buffer, "<i4")
    sizes = run.batch.total_bytes // 4
    row = where % 4
    at = int(run.batch.offsets[row]) // 4 + HEADER_BYTES // 4
    words[at + (where >> 2) % (int(sizes[row]) - HEADER_BYTES // 4)] = value
    try:
        piece = decode_frames(run, slice(0, 4), 0, "t")
    except CorruptData as e:
        damage = e.detail
    else:
        damage = None
        within = int(run.batch.total_bytes[0])
        assert len(piece) == 8
        assert all(len(payload) < within for payload in piece.payloads())
        assert len(piece.column(Column.KEY)) == len(piece.sizes()) == 8
    assert damage in (None, {"topic": "t", "file": "wal", "offset": int(run.batch.offsets[row])})


def test_a_wrong_offset_is_detected():
    run = run_of([([FULL, FULL], OPTIONAL)] * 4)
    np.frombuffer(run.buffer, "<i4")[HEADER_BYTES // 4 + 1] = 1 << 30
    with pytest.raises(CorruptData, match="malformed"):
        decode_frames(run, slice(0, 4), 0, "t")


def test_a_wrong_number_of_headers_allocates_no_memory():
    """The decoder compares the number of entries with the frame's size before it allocates arrays."""
    run = run_of([([FULL, FULL], ("headers",))] * 4)
    words = np.frombuffer(run.buffer, "<i4")
    lists_at = HEADER_BYTES // 4 + 6
    assert words[lists_at : lists_at + 3].tolist() == [0, 1, 2]
    words[lists_at + 2] = (1 << 31) - 1
    tracemalloc.start()
    with pytest.raises(CorruptData):
        decode_frames(run, slice(0, 4), 0, "t")
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 1 << 20
