"""Frames return the encoded values: from lists, buffers and Arrow, whole and sliced."""

from __future__ import annotations

import builtins
import itertools
from collections.abc import Mapping
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ringlog.errors import UsageError
from ringlog.frame import (
    Column,
    FrameType,
    FrameView,
    control_frame,
    encode_arrow,
    encode_frames,
    encode_records,
    frame,
    open_frame,
    patch_header,
    seal,
    total_bytes_at,
)
from ringlog.frame.batch import first_bad_body, malformed, scan
from ringlog.frame.columns import COLUMN_NAMES
from ringlog.frame.layout import EVENT_TS_NONE
from ringlog.types import Codec, Durability, PayloadKind
from tests.support import frame_oracle as oracle
from tests.support.frame_samples import any_frame, encoded, record_columns


def opened(columns: Any, **options: Any) -> FrameView:
    return open_frame(frame(columns, topic_id=1, **options), seed=None)


def expected(name: str, values: list[Any]) -> list[Any]:
    """Return the values that records() is expected to give for written values.

    Absence is None. For metadata an empty value is absence, and for times 0 is.
    """
    if name == "headers":
        return [list(value) if value else [] for value in values]
    if name == "metas":
        return [value or None for value in values]
    return (
        [None if value == 0 else value for value in values]
        if name in {"expires_at", "not_before"}
        else values
    )


@given(record_columns(), st.sampled_from(Codec))
def test_records_come_back_as_they_were_written(given: dict[str, list[Any]], codec: Codec) -> None:
    records = opened(encoded(given), codec=codec).records()
    assert records.payloads == given["payloads"]
    for name in (
        "keys",
        "tags",
        "nodes",
        "headers",
        "metas",
        "event_ts",
        "expires_at",
        "not_before",
        "priorities",
    ):
        found = getattr(records, name)
        assert found == (expected(name, given[name]) if name in given else None), name


_BITS = {name: Column(bit) for bit, name in enumerate(COLUMN_NAMES)}
_ABSENT = {"event_ts": EVENT_TS_NONE, "expires_at": 0, "not_before": 0, "priorities": 0}


def as_stored(name: str, values: list[Any]) -> list[Any]:
    """Return a column's values as the format stores them."""
    if name == "headers":
        pairs = [value.items() if isinstance(value, dict) else value or () for value in values]
        return [[(key.encode(), content) for key, content in each] for each in pairs]
    if name in _ABSENT:
        return [_ABSENT[name] if value is None else value for value in values]
    return [value.encode() if isinstance(value, str) else value for value in values]


@given(record_columns(), st.integers(1, 12))
def test_frames_with_any_columns_equal_the_oracles_frames(given: dict[str, list[Any]], records: int) -> None:
    columns = {name: values for name, values in given.items() if name != "payloads"}
    buffer, offsets = encode_frames(given["payloads"], records, columns, topic_id=7, first_producer_seq=3)
    frames = [
        oracle.frame_of(
            {_BITS[name]: as_stored(name, values[start : start + records]) for name, values in given.items()},
            topic_id=7, producer_seq=3 + start // records,
        )
        for start in range(0, len(given["payloads"]), records)
    ]  # fmt: skip
    assert buffer == b"".join(frames)
    assert offsets.tolist() == [0, *itertools.accumulate(map(len, frames))]
    loose = {name: np.array(v) if name == "priorities" else tuple(v) for name, v in columns.items()}
    assert (
        encode_frames(tuple(given["payloads"]), records, loose, topic_id=7, first_producer_seq=3)[0] == buffer
    )


@given(record_columns(), st.integers(0, 22), st.integers(0, 22))
def test_a_slice_of_a_view_is_the_slice_of_its_records(
    given: dict[str, list[Any]], start: int, stop: int
) -> None:
    whole = opened(encoded(given))
    part, full = whole.slice(start, stop), whole.records()
    stop = max(stop, min(start, len(whole)))
    records = part.records()
    assert records.payloads == full.payloads[start:stop]
    assert records.seqs == full.seqs[start:stop]
    for name in ("keys", "tags", "headers", "event_ts", "priorities"):
        values = getattr(full, name)
        assert getattr(records, name) == (None if values is None else values[start:stop])
    assert part.to_arrow().equals(whole.to_arrow().slice(start, len(part)))


@pytest.mark.slow
@given(record_columns())
def test_a_round_trip_through_arrow_gives_the_same_body(given: dict[str, list[Any]]) -> None:
    columns = encoded(given)
    opened(columns).to_arrow().validate(full=True)
    table = opened(columns).to_arrow(nulls=True)
    table.validate(full=True)
    again = encode_arrow(table.drop_columns(["seq", "ts"]))
    assert (again.body, again.bitmap, again.count) == (columns.body, columns.bitmap, columns.count)


@given(record_columns(counts=st.integers(2, 12)), st.integers(0, 11), st.integers(1, 12))
def test_a_sliced_arrow_batch_encodes_only_its_slice(
    given: dict[str, list[Any]], start: int, length: int
) -> None:
    table = opened(encoded(given)).to_arrow(nulls=True).drop_columns(["seq", "ts"])
    part = table.slice(min(start, table.num_rows - 1), length)
    rebuilt = opened(encode_arrow(part)).to_arrow(nulls=True).drop_columns(["seq", "ts"])
    assert rebuilt.equals(part)


@given(
    st.lists(st.binary(max_size=40), min_size=1, max_size=40)
    | st.lists(st.binary(min_size=5, max_size=5), min_size=1)
)
def test_encode_frames_of_one_record_equals_frame(payloads: list[bytes]) -> None:
    options: dict[str, Any] = {
        "topic_id": 9,
        "producer_id": 77,
        "epoch": 4,
        "durability": Durability.FSYNC,
        "payload_kind": PayloadKind.TEXT,
    }
    buffer, offsets = encode_frames(payloads, 1, first_producer_seq=5, **options)
    assert offsets[-1] == len(buffer)
    for index, payload in enumerate(payloads):
        one = frame(encode_records([payload]), producer_seq=5 + index, **options)
        assert buffer[offsets[index] : offsets[index + 1]] == one
    batch = scan(buffer)
    assert batch.offsets.tolist() == offsets[:-1].tolist()
    assert first_bad_body(buffer, batch) is None
    assert not malformed(batch.words).any()


def test_encode_arrow_accepts_every_type_that_can_contain_payloads() -> None:
    want = encode_records([b"a", b"", b"ccc"]).body
    values = ["a", "", "ccc"]
    for kind in (pa.binary(), pa.large_binary(), pa.string(), pa.large_string(), pa.binary_view()):
        assert encode_arrow(pa.array(values, type=pa.string()).cast(kind)).body == want, kind
    chunked = pa.chunked_array([["a"], [""], ["ccc"]], type=pa.binary())
    assert encode_arrow(chunked).body == want
    assert encode_arrow(pa.table({"payload": chunked})).body == want
    assert encode_arrow(pa.array(values).dictionary_encode()).body == want


def test_nulls_in_arrow_are_absent_values_even_over_bytes() -> None:
    """A null slot may cover bytes; they must not leak into the frame."""
    hidden = pa.Array.from_buffers(
        pa.binary(),
        2,
        [pa.py_buffer(b"\x01"), pa.py_buffer(np.array([0, 1, 7], "<i4").tobytes()), pa.py_buffer(b"ahidden")],
    )
    times = pa.array([None, 5], type=pa.timestamp("ms", tz="UTC"))
    table = pa.record_batch(
        {"payload": pa.array([b"x", b"y"]), "key": hidden, "event_ts": times, "expires_at": times}
    )
    records = opened(encode_arrow(table)).records()
    assert records.keys == [b"a", None]
    assert opened(encode_arrow(hidden)).to_list() == [b"a", None]
    assert records.event_ts == records.expires_at == [None, 5_000]


def test_headers_in_arrow_may_be_maps_and_null_lists_have_none() -> None:
    kind = pa.map_(pa.string(), pa.binary())
    maps = pa.array([[("a", b"1")], None, [], [("b", b"2"), ("c", b"3")]], type=kind)
    want = [[("a", b"1")], [], [], [("b", b"2"), ("c", b"3")]]
    payloads = pa.array([b"x"] * 4)
    for start in (0, 1, 3):
        table = pa.record_batch({"payload": payloads, "headers": maps}).slice(start)
        assert opened(encode_arrow(table)).records().headers == want[start:]


def test_a_null_list_over_entries_gives_no_headers() -> None:
    pairs = pa.array(
        [{"key": k, "value": b"v"} for k in "abc"], pa.struct([("key", pa.string()), ("value", pa.binary())])
    )
    lists = pa.ListArray.from_arrays(
        pa.array([0, 1, 2, 3], pa.int32()), pairs, mask=pa.array([False, True, False])
    )
    table = pa.record_batch({"payload": pa.array([b"x"] * 3), "headers": lists})
    assert opened(encode_arrow(table)).records().headers == [[("a", b"v")], [], [("c", b"v")]]


def test_arrow_views_share_the_frames_memory() -> None:
    whole = frame(encode_records([b"0123456789" * 10] * 50, tags=["tag"] * 50), topic_id=1)
    batch = open_frame(whole, seed=None).to_arrow()
    low = np.frombuffer(whole, dtype=np.uint8).ctypes.data
    for name in ("payload", "tag"):
        address = batch.column(name).buffers()[2].address
        assert low <= address < low + len(whole), name


def test_the_arrow_schema_can_be_fixed_and_absent_columns_are_filled() -> None:
    view = opened(encode_records([b"a", b"b"], tags=["t", None]))
    names = [
        "seq",
        "ts",
        "payload",
        "key",
        "tag",
        "node",
        "headers",
        "meta",
        "event_ts",
        "expires_at",
        "not_before",
        "priority",
    ]
    stamp = pa.timestamp("us", tz="UTC")
    for nulls in (False, True):
        batch = view.to_arrow(nulls=nulls, columns=(1 << len(Column)) - 1)
        assert batch.schema.names == names
        assert batch.schema.field("seq").type == pa.uint64()
        assert batch.schema.field("ts").type == batch.schema.field("expires_at").type == stamp
        assert batch.schema.field("priority").type == pa.uint8()
        assert batch.column("tag").to_pylist() == ["t", None if nulls else ""]
        assert batch.column("key").to_pylist() == ([None] * 2 if nulls else [b""] * 2)
        assert batch.column("headers").to_pylist() == [[], []]
    texts = {"keys": [b"k"], "tags": ["t"], "nodes": ["n"], "headers": [{"h": b"v"}], "metas": [b"{}"]}
    times = {"event_ts": [1], "expires_at": [1], "not_before": [1], "priorities": [1]}
    full = opened(encoded({"payloads": [b"a"], **texts, **times}))
    assert full.to_arrow().schema.equals(view.to_arrow(columns=1023).schema)


def test_without_pyarrow_the_error_names_the_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    real = builtins.__import__

    def refuse(name: str, *args: Any, **options: Any) -> Any:
        if name == "pyarrow":
            raise ImportError(name)
        return real(name, *args, **options)

    view = opened(encode_records([b"a"]))
    monkeypatch.setattr(builtins, "__import__", refuse)
    for call in (view.to_arrow, lambda: encode_arrow([b"a"])):
        with pytest.raises(UsageError, match="arrow"):
            call()


@given(any_frame(), st.integers(0, (1 << 63) - 99), st.integers(1, (1 << 64) - 1))
@settings(max_examples=40)
def test_patch_header_and_seal_change_only_the_given_fields(
    whole: bytearray, base_seq: int, seed: int
) -> None:
    before = open_frame(bytes(whole), seed=None).header
    changes = {"topic_id": 5, "epoch": 6, "producer_id": 7, "producer_seq": 8, "commit_ts": 9}
    patch_header(whole, base_seq=base_seq, **changes)
    value = seal(whole, seed)
    after = open_frame(whole, seed=seed).header
    assert after == before._replace(base_seq=base_seq, seal_xxh3=value, **changes)
    assert total_bytes_at(whole) == len(whole) == after.total_bytes


def test_a_control_frame_has_a_body_and_no_records() -> None:
    view = open_frame(control_frame(FrameType.GROUP_MARK, 1, b"\x93\x01\x02\x03"), seed=None)
    assert (view.control(), len(view), view.header.raw_len, view.total_bytes) == ([1, 2, 3], 0, 4, 88)
    for read in (lambda: view.payloads, view.to_list, view.to_arrow):
        with pytest.raises(UsageError, match="must be an append"):
            read()
    with pytest.raises(UsageError, match="must be a control frame"):
        opened(encode_records([b"a"])).control()


def test_slice_after_gives_the_records_above_a_seq() -> None:
    whole = frame(encode_records([b"a", b"b", b"c"]), topic_id=1)
    patch_header(whole, base_seq=10)
    view = open_frame(whole, seed=None)
    assert [view.slice_after(seq).to_list() for seq in (0, 9, 10, 12, 99)] == [
        [b"a", b"b", b"c"], [b"a", b"b", b"c"], [b"b", b"c"], [], [],
    ]  # fmt: skip
    assert (view.slice_after(10).first_seq, view.slice_after(10).last_seq) == (11, 12)


def test_headers_may_be_mappings_or_pairs() -> None:
    rows: list[Mapping[str, bytes] | list[tuple[str, bytes]] | None] = [
        {"a": b"1"},
        [("b", b"2"), ("b", b"3")],
        None,
    ]
    view = opened(encode_records([b"x"] * 3, headers=rows))
    assert view.records().headers == [[("a", b"1")], [("b", b"2"), ("b", b"3")], []]
