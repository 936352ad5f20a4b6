"""Frames that are built together equal frames that are built one by one."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ringlog.errors import BatchTooLarge, InvalidRequest, UsageError
from ringlog.frame.codec import encode_frames, frame
from ringlog.frame.columns import encode_records
from ringlog.limits import BATCH_RECORDS_MAX
from ringlog.types import Durability, PayloadKind

HEADER = {
    "topic_id": 7,
    "producer_id": 9,
    "epoch": 3,
    "durability": Durability.FSYNC,
    "payload_kind": PayloadKind.JSON,
}
alike = st.integers(1, 20).flatmap(
    lambda n: st.lists(st.binary(min_size=n, max_size=n), min_size=1, max_size=40)
)


@given(alike | st.lists(st.binary(max_size=20), min_size=1, max_size=40), st.integers(1, 12))
def test_frames_built_together_equal_frames_built_one_by_one(payloads: list[bytes], records: int) -> None:
    buffer, offsets = encode_frames(payloads, records, first_producer_seq=100, **HEADER)
    expected = [
        frame(encode_records(payloads[start : start + records]), producer_seq=100 + i, **HEADER)
        for i, start in enumerate(range(0, len(payloads), records))
    ]
    assert buffer == b"".join(expected)
    assert offsets.tolist() == [sum(map(len, expected[:i])) for i in range(len(expected) + 1)]


def test_impossible_numbers_of_records_are_refused() -> None:
    with pytest.raises(BatchTooLarge):
        encode_frames([b"x"] * 3, BATCH_RECORDS_MAX + 1, topic_id=1)
    with pytest.raises(InvalidRequest):
        encode_frames([], 2, topic_id=1)
    with pytest.raises(UsageError):
        encode_frames([b"xy"] * 4, 2, topic_id=1 << 64)
