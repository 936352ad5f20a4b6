"""Parts of the client that need no engine: fields, payloads, frames of one record, options."""

from __future__ import annotations

from datetime import UTC, datetime

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ringlog.client.write.assembler import Assembler
from ringlog.client.write.fields import NewRecord, column_values, fields_of
from ringlog.client.write.producer_options import (
    ProducerOptions,
    named_producer_id,
    parse_codec,
    parse_durability,
)
from ringlog.errors import InvalidRequest, UsageError
from ringlog.payload import JSON, RAW, TEXT
from ringlog.types import Codec, Durability


@given(tags=st.lists(st.one_of(st.none(), st.text("abc", min_size=1, max_size=3)), min_size=1, max_size=20))
def test_a_column_is_empty_for_rows_before_its_first_value(tags):
    records = Assembler()
    for n, tag in enumerate(tags):
        records.add(b"%d" % n, None if tag is None else {"tags": tag})
    column = records.columns.get("tags")
    assert column == (tags if any(tags) else None)


def test_ttl_ms_becomes_an_expiry_time(clock):
    assert column_values({"ttl_ms": 5}, clock) == {"expires_at": clock.now_us() + 5_000}


def test_times_must_be_aware_datetimes_or_microseconds(clock):
    moment = datetime(2020, 1, 1, 0, 0, 0, 7, tzinfo=UTC)
    assert column_values({"event_ts": moment}, clock) == {"event_ts": 1_577_836_800_000_007}
    with pytest.raises(UsageError, match="time zone"):
        column_values({"event_ts": moment.replace(tzinfo=None)}, clock)


@pytest.mark.parametrize(
    ("fields", "error"),
    [
        ({"colour": "red"}, TypeError),
        ({"key": "text"}, UsageError),
        ({"tag": b"bytes"}, UsageError),
        ({"priority": 256}, UsageError),
        ({"priority": True}, UsageError),
        ({"ttl_ms": 0}, UsageError),
        ({"ttl_ms": 1, "expires_at": 1}, UsageError),
        ({"meta": [1]}, UsageError),
        ({"meta": {"a": object()}}, UsageError),
        ({"meta": {str(n): 0 for n in range(65)}}, InvalidRequest),
        ({"node": "x" * 129}, InvalidRequest),
        ({"tag": "ü" * 129}, InvalidRequest),
        ({"key": b"x" * 4097}, InvalidRequest),
        ({"headers": {"h": b"x" * 65_536}}, InvalidRequest),
    ],
)
def test_a_bad_field_is_refused_by_name(clock, fields, error):
    """The error type depends on the defect.

    Unknown fields raise `TypeError`, invalid values `UsageError`, and values above a size limit
    `InvalidRequest`.
    """
    with pytest.raises(error):
        column_values(fields, clock)


def test_unset_fields_of_a_new_record_are_omitted(clock):
    data, fields = fields_of(NewRecord(data=b"x", tag="t"))
    assert (data, column_values(fields, clock)) == (b"x", {"tags": "t"})
    assert fields_of(b"bare") is None


def test_payload_codecs_refuse_values_they_cannot_encode():
    assert RAW.encode(bytearray(b"x")) == b"x"
    assert TEXT.decode(TEXT.encode("ü")) == "ü"
    assert JSON.decode(JSON.encode({"a": [1, None]})) == {"a": [1, None]}
    for codec, value in ((RAW, "text"), (TEXT, b"bytes"), (TEXT, "\ud800"), (JSON, object())):
        with pytest.raises(UsageError):
            codec.encode(value)


def test_a_producer_name_maps_to_one_id_below_the_range_of_session_ids():
    """The ids of named producers have the top bit clear."""
    ids = {named_producer_id(f"loader-{n}") for n in range(1_000)}
    assert len(ids) == 1_000
    assert all(0 < one < 1 << 63 for one in ids)
    assert named_producer_id("a") == named_producer_id("a")
    with pytest.raises(UsageError):
        named_producer_id("")


@pytest.mark.parametrize(
    "options",
    [{"max_frame_records": 10_001}, {"linger_ms": -1}, {"on_full": "drop"}, {"max_frame_bytes": 0}],
)
def test_producer_options_out_of_range_are_refused(options):
    with pytest.raises(UsageError):
        ProducerOptions(**options)


def test_durabilities_and_codecs_can_be_given_by_name():
    assert parse_durability("fsync") is Durability.FSYNC
    assert parse_codec("zstd") is Codec.ZSTD
    for parse in (parse_durability, parse_codec):
        with pytest.raises(UsageError):
            parse("nonsense")
