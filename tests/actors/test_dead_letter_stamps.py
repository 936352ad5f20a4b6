"""Every job can become a dead letter: its stamps find space, or space is made for them."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from ringlog.actors.scheduler.forwarding.dead_letter_stamps import dead_letter_columns
from ringlog.actors.scheduler.forwarding.forward_batch import stamped_meta
from ringlog.client.leases.dead_letters import dead_letter_field, is_dead_letter_of, src_seq_of_dead_letter
from ringlog.client.read.pages import Record
from ringlog.envelope import messages as m
from ringlog.frame import open_frame
from ringlog.frame.codec import frame
from ringlog.frame.metadata import fields_of
from ringlog.limits import (
    DEAD_LETTER_REASON_BYTES_MAX,
    HEADER_BYTES_MAX,
    HEADERS_BYTES_MAX,
    HEADERS_PER_RECORD_MAX,
    META_BYTES_MAX,
    META_KEYS_MAX,
    RECORD_BYTES_DEFAULT,
)

GROUP = "g" * 255
TOPIC = "t" * 255
REASON = "r" * DEAD_LETTER_REASON_BYTES_MAX


def spent(group: str = "") -> m.ExhaustedReply:
    return m.ExhaustedReply(
        TOPIC, 7, 1, "dead", [(1, 1, 3)], {1: REASON}, group, 9, [5], {1: (1_700_000_000_000, 12)}
    )


def large_meta(size: int = META_BYTES_MAX, keys: int = 1) -> bytes:
    fields = {f"k{n}": 1 for n in range(keys - 1)}
    fields["x"] = "x" * (size - len(msgspec.json.encode(fields | {"x": ""})))
    return msgspec.json.encode(fields)


def many_headers(count: int = HEADERS_PER_RECORD_MAX, size: int = HEADERS_BYTES_MAX) -> dict[str, bytes]:
    each = size // count - 6
    return {f"h{n:05d}": bytes(each) for n in range(count)}


def routed(meta: bytes) -> bytes:
    """Return metadata as a router with stamps copies it."""
    return stamped_meta(meta, "source->queue", "source", 5, 2, 9)


JOBS: dict[str, dict[str, Any]] = {
    "small": {"data": b"x"},
    "as large as a record may be": {"data": bytes(RECORD_BYTES_DEFAULT)},
    "almost as large": {"data": bytes(RECORD_BYTES_DEFAULT - 50)},
    "with metadata, as large": {
        "data": bytes(RECORD_BYTES_DEFAULT - META_BYTES_MAX), "meta_json": large_meta(),
    },
    "full of metadata": {"data": b"x", "meta_json": large_meta()},
    "as many keys as there may be": {"data": b"x", "meta_json": large_meta(5_000, META_KEYS_MAX)},
    "full of headers": {"data": b"x", "headers": many_headers()},
    "few headers, full": {"data": b"x", "headers": many_headers(16)},
    "as large, full of headers": {"data": bytes(RECORD_BYTES_DEFAULT), "headers": many_headers()},
    "as large, few headers, full": {"data": bytes(RECORD_BYTES_DEFAULT), "headers": many_headers(16)},
    "full of everything": {
        "data": bytes(RECORD_BYTES_DEFAULT - META_BYTES_MAX), "meta_json": large_meta(keys=META_KEYS_MAX),
        "headers": many_headers(),
    },
    "metadata that is no object": {"data": b"x", "meta_json": b"[1]"},
    "a number out of range": {"data": b"x", "meta_json": b'{"own":1e999}'},
    "metadata that is no JSON": {"data": b"x", "meta_json": b"\xff{"},
    "no object, as large": {"data": bytes(RECORD_BYTES_DEFAULT - 8), "meta_json": b'"' + b"x" * 6 + b'"'},
    "full of metadata, stamped by a router": {"data": b"x", "meta_json": routed(large_meta())},
    "as large, stamped by a router": {"data": bytes(RECORD_BYTES_DEFAULT), "meta_json": routed(b"")},
    "more keys than there may be": {"data": b"x", "meta_json": large_meta(5_000, META_KEYS_MAX + 1)},
    "more keys, as large, full of headers": {
        "data": bytes(RECORD_BYTES_DEFAULT - 5_000), "meta_json": large_meta(5_000, META_KEYS_MAX + 1),
        "headers": many_headers(),
    },
    "control characters, stamped by a router": {"data": b"x", "meta_json": routed(b"\1" * META_BYTES_MAX)},
    "forged": {
        "data": bytes(RECORD_BYTES_DEFAULT - 200), "meta_json": b'{"$dead_letter_from":"else","own":1}',
        "headers": {"$dead_letter_src_seq": b"99", "$dead_letter_nacks": b"x", "own": b"2"},
    },
}  # fmt: skip


def moved(job: dict[str, Any], group: str = "", record_bytes: int = RECORD_BYTES_DEFAULT) -> Record:
    """Return the dead letter that a job becomes."""
    record = Record(seq=1, ts=0, **job)
    view = open_frame(
        frame(dead_letter_columns(record, spent(group), 3, record_bytes), topic_id=8), seed=None
    )
    found = view.records()
    return Record(
        seq=1, ts=0, data=bytes(found.payloads[0]), meta_json=found.metas[0] if found.metas else None,
        headers=dict(found.headers[0]) if found.headers else {},
    )  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize("group", ["", GROUP], ids=["queue", "group"])
@pytest.mark.parametrize("name", JOBS)
def test_every_job_becomes_a_dead_letter_that_names_its_origin(name: str, group: str) -> None:
    job = JOBS[name]
    letter = moved(job, group)
    assert letter.data == job["data"]
    assert len(letter.data) + len(letter.meta_json or b"") <= RECORD_BYTES_DEFAULT
    assert is_dead_letter_of(TOPIC, letter, group)
    assert not is_dead_letter_of(TOPIC, letter, "other")
    assert dead_letter_field(letter, "$dead_letter_src_seq") == "1"
    assert dead_letter_field(letter, "$dead_letter_reason") == REASON
    assert dead_letter_field(letter, "$dead_letter_nacks") == "12"
    assert src_seq_of_dead_letter(letter, 7) == (1 if group else 0)
    own = {key: value for key, value in job.get("headers", {}).items() if not key.startswith("$")}
    kept = {key: value for key, value in letter.headers.items() if not key.startswith("$")}
    left_out = int(dead_letter_field(letter, "$dead_letter_headers_left_out") or 0)
    assert len(kept) + left_out == len(own)
    assert kept == dict(list(own.items())[: len(kept)])
    assert_metadata_is_kept_or_noted(job.get("meta_json") or b"", letter)
    # A dead letter that fails is moved again, with its own new stamps.
    again = moved({"data": letter.data, "meta_json": letter.meta_json, "headers": letter.headers}, group)
    assert dead_letter_field(again, "$dead_letter_src_seq") == "1"
    assert len(again.data) + len(again.meta_json or b"") <= RECORD_BYTES_DEFAULT
    if "$dead_letter_meta_left_out" not in letter.headers:
        assert_metadata_is_kept_or_noted(job.get("meta_json") or b"", again)


@pytest.mark.parametrize("time_us", [-(1 << 63), -5])
def test_a_job_with_times_before_the_epoch_becomes_a_dead_letter(time_us: int) -> None:
    """A client of another make can store such times. They have passed."""
    record = Record(seq=1, ts=0, data=b"x", not_before=time_us, expires_at=time_us)
    exhausted = msgspec.structs.replace(spent(), keeps_expiry=True)
    columns = dead_letter_columns(record, exhausted, 3, RECORD_BYTES_DEFAULT)
    found = open_frame(frame(columns, topic_id=8), seed=None).records()
    assert (found.not_before, found.expires_at) == (None, None)


def assert_metadata_is_kept_or_noted(meta: bytes, letter: Record) -> None:
    """Assert that the letter has the fields of the job, or its metadata as text, or states its size."""
    text = meta.decode(errors="replace")
    if not meta or letter.headers.get("$dead_letter_meta") == meta:
        return
    fields = fields_of(letter.meta_json or b"") or {}
    if "$dead_letter_meta" in fields:
        assert msgspec.json.decode(fields["$dead_letter_meta"]) == text
        return
    if (left_out := letter.headers.get("$dead_letter_meta_left_out")) is not None:
        assert int(left_out) == len(meta) > HEADER_BYTES_MAX
        return
    own = fields_of(meta) or {}
    kept = [{key: bytes(raw) for key, raw in each.items() if key[0] != "$"} for each in (fields, own)]
    assert kept[0] == kept[1]


def test_metadata_that_is_an_object_is_kept() -> None:
    letter = moved({"data": bytes(100), "meta_json": b'{"own":[1,2.50]}'}, record_bytes=150)
    assert letter.meta_json == b'{"own":[1,2.50]}'
    assert dead_letter_field(letter, "$dead_letter_from") == TOPIC
    stamped = moved({"data": bytes(100), "meta_json": b'{"own":[1,2.50]}'})
    assert stamped.meta["own"] == [1, 2.5]
    assert not stamped.headers


def test_metadata_that_is_no_object_becomes_a_field() -> None:
    letter = moved({"data": b"x", "meta_json": b"[1]"})
    assert letter.meta["$dead_letter_meta"] == "[1]"
