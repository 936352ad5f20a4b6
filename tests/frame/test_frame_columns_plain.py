"""encode_records takes payloads alone by a shorter way; both ways must give the same bytes."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ringlog.errors import BatchTooLarge, InvalidRequest, PayloadTooLarge, RecordTooLarge, UsageError
from ringlog.frame.columns import encode_buffer, encode_records
from ringlog.limits import BATCH_RECORDS_MAX, RECORD_BYTES_MAX


@given(st.lists(st.binary(max_size=40), min_size=1, max_size=50))
def test_payloads_alone_encode_as_they_do_beside_other_columns(payloads: list[bytes]) -> None:
    offsets = [0]
    for payload in payloads:
        offsets.append(offsets[-1] + len(payload))
    general = encode_buffer(b"".join(payloads), offsets)
    plain = encode_records(payloads)
    assert (plain.body, plain.bitmap, plain.count, plain.raw_len) == (
        general.body,
        general.bitmap,
        general.count,
        general.raw_len,
    )


def test_the_short_way_keeps_every_limit() -> None:
    with pytest.raises(InvalidRequest):
        encode_records([])
    with pytest.raises(BatchTooLarge):
        encode_records([b""] * (BATCH_RECORDS_MAX + 1))
    with pytest.raises(RecordTooLarge) as refused:
        encode_records([b"", bytes(RECORD_BYTES_MAX + 1)])
    assert refused.value.detail == {"index": 1, "bytes": RECORD_BYTES_MAX + 1, "max": RECORD_BYTES_MAX}
    with pytest.raises(PayloadTooLarge):
        encode_records([bytes(RECORD_BYTES_MAX)] * 66)
    with pytest.raises(UsageError):
        encode_records([1])  # type: ignore[list-item]
