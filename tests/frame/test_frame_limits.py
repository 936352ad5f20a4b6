"""Limits of encode and measure: a value at the limit passes, a value one above it is refused."""

from __future__ import annotations

from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ringlog.errors import (
    BatchTooLarge,
    FrameInvalid,
    InvalidRequest,
    PayloadTooLarge,
    RecordTooLarge,
    RinglogError,
    UsageError,
)
from ringlog.frame import (
    Column,
    FrameFault,
    FrameType,
    control_frame,
    encode_arrow,
    encode_frames,
    encode_records,
    frame,
    measure,
    open_frame,
    patch_header,
)
from ringlog.frame.batch import scan
from ringlog.limits import (
    BATCH_RECORDS_MAX,
    FRAME_BYTES_MAX,
    HEADER_BYTES_MAX,
    HEADERS_BYTES_MAX,
    HEADERS_PER_RECORD_MAX,
    KEY_BYTES_MAX,
    META_BYTES_MAX,
    META_KEYS_MAX,
    MIB,
    NODE_BYTES_MAX,
    RECORD_BYTES_MAX,
    TAG_BYTES_MAX,
)
from tests.support import frame_oracle as oracle


def meta_of(length: int) -> bytes:
    return b'{"m":"' + b"x" * (length - 8) + b'"}'


AT_LIMIT: dict[str, tuple[Any, Any, type[RinglogError], int]] = {
    "keys": (b"k" * KEY_BYTES_MAX, b"k" * (KEY_BYTES_MAX + 1), InvalidRequest, KEY_BYTES_MAX),
    "tags": ("é" * (TAG_BYTES_MAX // 2), "é" * (TAG_BYTES_MAX // 2) + "x", InvalidRequest, TAG_BYTES_MAX),
    "nodes": ("n" * NODE_BYTES_MAX, "n" * (NODE_BYTES_MAX + 1), InvalidRequest, NODE_BYTES_MAX),
    "metas": (meta_of(META_BYTES_MAX), meta_of(META_BYTES_MAX + 1), InvalidRequest, META_BYTES_MAX),
    "header names": ([("k" * HEADER_BYTES_MAX, b"")], [("k" * (HEADER_BYTES_MAX + 1), b"")], InvalidRequest,
                     HEADER_BYTES_MAX),
    "header values": ([("k", b"v" * HEADER_BYTES_MAX)], [("a", b""), ("k", b"v" * (HEADER_BYTES_MAX + 1))],
                      InvalidRequest, HEADER_BYTES_MAX),
    "all headers": (
        [(f"{n:02d}", b"v" * (HEADERS_BYTES_MAX // 32 - 2)) for n in range(32)],
        [(f"{n:02d}", b"v" * (HEADERS_BYTES_MAX // 32 - 2 + (n == 9))) for n in range(32)], InvalidRequest,
        HEADERS_BYTES_MAX,
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", sorted(AT_LIMIT))
@pytest.mark.parametrize("index", [0, 2])
def test_a_value_above_its_limit_is_refused_with_index_bytes_and_max(name: str, index: int) -> None:
    passes, fails, kind, most = AT_LIMIT[name]
    name = "headers" if "header" in name else name
    values: list[Any] = [None, None, None]
    values[index] = passes
    assert encode_records([b"x"] * 3, **{name: values}).count == 3
    values[index] = fails
    with pytest.raises(kind) as caught:
        encode_records([b"x"] * 3, **{name: values})
    assert caught.value.detail == {"index": index, "bytes": most + 1, "max": most}


def test_accounted_bytes_of_a_record_are_its_payload_and_its_meta() -> None:
    """The limit of a record counts its payload and its meta."""
    meta = b'{"a":"1"}'
    at_limit = b"x" * (RECORD_BYTES_MAX - len(meta))
    assert encode_records([b"", at_limit], metas=[meta, meta]).count == 2
    with pytest.raises(RecordTooLarge) as caught:
        encode_records([b"", at_limit + b"x"], metas=[meta, meta])
    assert caught.value.detail == {"index": 1, "bytes": RECORD_BYTES_MAX + 1, "max": RECORD_BYTES_MAX}
    for call in (encode_records, lambda payloads: encode_frames(payloads, 1, topic_id=1)):
        assert call([b"x" * RECORD_BYTES_MAX])
        with pytest.raises(RecordTooLarge):
            call([b"", b"x" * (RECORD_BYTES_MAX + 1)])


def test_a_write_contains_one_to_ten_thousand_records() -> None:
    """An empty write, and a write of more than BATCH_RECORDS_MAX records, are refused."""
    assert encode_records([b""] * BATCH_RECORDS_MAX).count == BATCH_RECORDS_MAX
    with pytest.raises(BatchTooLarge) as caught:
        encode_records([b""] * (BATCH_RECORDS_MAX + 1))
    assert caught.value.detail == {"records": BATCH_RECORDS_MAX + 1, "max": BATCH_RECORDS_MAX}
    for empty in (
        lambda: encode_records([]),
        lambda: encode_records([], event_ts=np.array([], dtype=np.int64)),
        lambda: encode_arrow(pa.array([], pa.binary())),
        lambda: encode_frames([], 1, topic_id=1),
    ):
        with pytest.raises(InvalidRequest, match="records must be >= 1"):
            empty()


def test_too_many_headers_are_refused_with_the_record_index() -> None:
    many = [(str(i), b"") for i in range(HEADERS_PER_RECORD_MAX)]
    assert encode_records([b"x"], headers=[many]).count == 1
    with pytest.raises(InvalidRequest) as caught:
        encode_records([b"x", b"y"], headers=[None, [*many, ("one more", b"")]])
    assert caught.value.detail["index"] == 1


def test_a_write_larger_than_a_frame_is_refused_before_it_is_built() -> None:
    """The whole frame, with its header and offsets, is at most FRAME_BYTES_MAX long."""
    big = b"x" * MIB
    assert 66 * MIB == FRAME_BYTES_MAX
    for call in (lambda n: encode_records([big] * n), lambda n: encode_frames([big] * n, 1, topic_id=1)):
        with pytest.raises(PayloadTooLarge) as caught:
            call(66)
        assert caught.value.detail["max"] == FRAME_BYTES_MAX


@pytest.mark.parametrize(
    "meta", [b"[]", b"1", b'"x"', b"null", b"{", b"{}x", b'{"a":}', b"\xff", b"[" * 3_000]
)
def test_a_meta_that_is_no_json_object_is_refused(meta: bytes) -> None:
    """The meta of a record is one valid JSON object."""
    with pytest.raises(InvalidRequest, match="JSON object") as caught:
        encode_records([b"x", b"y"], metas=[b"{}", meta])
    assert caught.value.detail["index"] == 1


def test_a_meta_has_at_most_sixty_four_keys() -> None:
    """A meta has at most META_KEYS_MAX keys."""
    for names, passes in ((META_KEYS_MAX, True), (META_KEYS_MAX + 1, False)):
        meta = ("{" + ",".join(f'"{i}":1' for i in range(names)) + "}").encode()
        if passes:
            assert encode_records([b"x"], metas=[meta]).count == 1
        else:
            with pytest.raises(InvalidRequest, match=f"meta must have <= {META_KEYS_MAX} keys"):
                encode_records([b"x"], metas=[meta])


@pytest.mark.parametrize(
    ("column", "value"),
    [("expires_at", -1), ("not_before", -1), ("priorities", 256), ("priorities", -1)],
)
def test_numbers_out_of_range_are_refused_with_their_index(column: str, value: int) -> None:
    for values in ([0, value], np.array([0, value])):
        with pytest.raises(InvalidRequest, match=rf"must be in .* got {value}") as caught:
            encode_records([b"x", b"y"], **{column: values})
        assert caught.value.detail["index"] == 1


def test_numbers_beyond_64_bits_are_refused() -> None:
    with pytest.raises(RinglogError):
        encode_records([b"x"], event_ts=[1 << 63])
    with pytest.raises(RinglogError):
        encode_records([b"x", b"y"], event_ts=[-1, 1 << 64])


@pytest.mark.parametrize(
    "call",
    [
        lambda: encode_records(b"abc"),  # type: ignore[arg-type]
        lambda: encode_records(iter([b"a"])),  # type: ignore[arg-type]
        lambda: frame(encode_records(["a"]), topic_id=1),  # type: ignore[list-item]
        lambda: frame(encode_records([memoryview(np.zeros(3, np.int64))]), topic_id=1),  # type: ignore[list-item]
        lambda: encode_frames(["a", "b"], 1, topic_id=1),  # type: ignore[list-item]
        lambda: encode_frames(["a", "bc"], 1, topic_id=1),  # type: ignore[list-item]
        lambda: encode_frames([memoryview(np.zeros(3, np.int64))], 1, topic_id=1),  # type: ignore[list-item]
        lambda: encode_frames([1], 1, topic_id=1),  # type: ignore[list-item]
        lambda: encode_records([b"x"], tags=[b"bytes"]),  # type: ignore[list-item]
        lambda: encode_records([b"x"], tags=["a", "b"]),
        lambda: encode_records([b"x"], keys=[]),
        lambda: encode_records([b"x"], metas=["{}"]),  # type: ignore[list-item]
        lambda: encode_records([b"x"], headers=[["no pair"]]),  # type: ignore[list-item]
        lambda: encode_records([b"x"], headers=[]),
        lambda: encode_records([b"x"], event_ts=[1.5]),  # type: ignore[list-item]
        lambda: encode_records([b"x"], event_ts=[True]),
        lambda: encode_records([b"x"], event_ts=["1"]),  # type: ignore[list-item]
        lambda: encode_records([b"x"], event_ts=np.zeros((1, 1), np.int64)),
        lambda: encode_arrow(pa.array([1, 2])),
        lambda: encode_arrow([b"a"]),
        lambda: encode_arrow(pa.record_batch({"key": pa.array([b"a"])})),
        lambda: encode_arrow(pa.record_batch({"payload": pa.array([b"a"]), "other": pa.array([1])})),
        lambda: encode_arrow(pa.record_batch({"payload": pa.array([b"a"]), "headers": pa.array([1])})),
        lambda: encode_arrow(pa.record_batch({"payload": pa.array([b"a"]), "priority": pa.array([0.5])})),
        lambda: encode_arrow(pa.record_batch({"payload": pa.array([b"a"]), "tag": pa.array([b"\xff"])})),
        lambda: frame(encode_records([b"a"]), topic_id=-1),
        lambda: frame(encode_records([b"a"]), topic_id=1, epoch=1 << 32),
        lambda: control_frame(FrameType.APPEND, 1, b"\xc0"),
        lambda: patch_header(frame(encode_records([b"a"]), topic_id=1), epoch=1 << 32),
        lambda: patch_header(frame(encode_records([b"a"]), topic_id=1), topic_id=-1),
    ],
)
def test_wrong_arguments_are_usage_errors(call: Any) -> None:
    with pytest.raises(UsageError):
        call()


def test_text_that_utf8_cannot_encode_is_refused() -> None:
    with pytest.raises(InvalidRequest, match="UTF-8"):
        encode_records([b"x"], tags=["\ud800"])
    with pytest.raises(FrameInvalid):
        control_frame(FrameType.LEASE, 1, b"\x01\x02")


# -- measure ------------------------------------------------------------------------------------------


def unchecked(payloads: list[bytes], column: Column, values: list[bytes]) -> bytearray:
    """Return a frame beyond the encoder's limits, as a third-party client may send it."""
    given: list[Any] = values
    if column == Column.HEADERS:
        given = [[(b"k", value) for value in values], *[[] for _ in payloads[1:]]]
    return oracle.frame_of({Column.PAYLOAD: payloads, column: given}, topic_id=1)


OVER = [
    (Column.TAG, TAG_BYTES_MAX, FrameFault.TAG_TOO_LONG),
    (Column.NODE, NODE_BYTES_MAX, FrameFault.NODE_TOO_LONG),
    (Column.KEY, KEY_BYTES_MAX, FrameFault.KEY_TOO_LONG),
    (Column.META, META_BYTES_MAX, FrameFault.META_TOO_LONG),
    (Column.HEADERS, HEADER_BYTES_MAX, FrameFault.HEADERS_TOO_LARGE),
]


@pytest.mark.parametrize(("column", "most", "fault"), OVER)
@pytest.mark.parametrize(("records", "times"), [(1, 1), (1, 20), (3, 1), (30, 20)])
def test_measure_reports_the_limit_that_a_frame_exceeds(
    column: Column, most: int, fault: FrameFault, records: int, times: int
) -> None:
    """The frame stays readable: only admission enforces the limits."""
    payloads = [b"p"] * records
    for length, want in ((most, FrameFault.OK), (most + 1, fault)):
        values = [b"a" * length, *([] if column == Column.HEADERS else [b"a"] * (records - 1))]
        whole = unchecked(payloads, column, values) * times
        found = measure(whole, scan(whole))
        assert found.faults.tolist() == [want] * times
        meta = length + records - 1 if column == Column.META else 0
        assert found.accounted.tolist() == [records + meta] * times
        assert found.largest.tolist() == [1 + (length if column == Column.META else 0)] * times
        assert open_frame(whole, seed=None).count == records


def test_measure_limits_the_number_of_headers() -> None:
    for number, want in (
        (HEADERS_PER_RECORD_MAX, FrameFault.OK),
        (HEADERS_PER_RECORD_MAX + 1, FrameFault.HEADERS_TOO_LARGE),
    ):
        whole = unchecked([b"p"], Column.HEADERS, [b""] * number)
        assert measure(whole, scan(whole)).faults.tolist() == [want]


def test_measure_limits_the_total_bytes_of_headers() -> None:
    for length, want in ((32_767, FrameFault.OK), (32_768, FrameFault.HEADERS_TOO_LARGE)):
        whole = unchecked([b"p"], Column.HEADERS, [b"v" * 32_767] * 31 + [b"v" * length])
        assert measure(whole, scan(whole)).faults.tolist() == [want]


some_records = st.lists(
    st.tuples(st.binary(max_size=30), st.sampled_from([None, b"{}", b'{"a":"b"}'])), min_size=1, max_size=4
)


@given(st.lists(some_records, min_size=1, max_size=30), st.booleans())
def test_measure_adds_up_payloads_and_metas(
    rows: list[list[tuple[bytes, bytes | None]]], with_metas: bool
) -> None:
    """The accounted bytes are right for any mix of one-record frames and larger frames."""
    whole = bytearray()
    sizes = []
    for row in rows:
        payloads = [payload for payload, _ in row]
        metas = [meta for _, meta in row] if with_metas else None
        whole += frame(encode_records(payloads, metas=metas), topic_id=1)
        sizes.append([len(p) + (len(m or b"") if with_metas else 0) for p, m in row])
    found = measure(whole, scan(whole))
    assert found.accounted.tolist() == [sum(row) for row in sizes]
    assert found.largest.tolist() == [max(row) for row in sizes]
    assert not found.faults.any()


def test_measure_of_control_frames_is_zero_and_of_no_frames_is_empty() -> None:
    whole = control_frame(FrameType.GROUP_MARK, 1, b"\x90") * 20
    found = measure(whole, scan(whole))
    assert (found.accounted.sum(), found.largest.sum(), found.faults.sum()) == (0, 0, 0)
    assert len(measure(b"", scan(b"")).faults) == 0


def test_measure_distinguishes_text_faults_on_both_paths() -> None:
    good = frame(encode_records([b"x"], tags=["abcdefgh"]), topic_id=1)
    bad = bytearray(good)
    bad[-8] = 0xFF
    for times in (1, 20):
        whole = good * times + bad * times
        found = measure(whole, scan(whole))
        assert found.faults.tolist() == [FrameFault.OK] * times + [FrameFault.TEXT] * times
        assert found.accounted.tolist() == [1] * times + [0] * times


@pytest.mark.parametrize("records", [1, 30])
def test_a_character_may_not_continue_in_the_next_tag(records: int) -> None:
    """Both halves of the character decode when joined; each half alone does not."""
    whole = frame(encode_records([b""] * (records + 1), tags=["é"] + [None] * records), topic_id=1)
    words = np.frombuffer(whole, "<i4")
    first = int(np.flatnonzero(words[22:] == 2)[0]) + 22
    words[first] = 1
    found = measure(whole, scan(whole))
    assert found.faults.tolist() == [FrameFault.TEXT]
    with pytest.raises(FrameInvalid, match="UTF-8"):
        open_frame(whole, seed=None, verify=False)
