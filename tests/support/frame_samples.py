"""Test frames: Hypothesis strategies, and the golden frames by name."""

from __future__ import annotations

import msgspec
import xxhash
from hypothesis import strategies as st

from ringlog.frame import (
    Column,
    EncodedRecords,
    FrameType,
    control_frame,
    encode_records,
    frame,
    patch_header,
    seal,
)
from ringlog.frame.header import pack_header
from ringlog.frame.layout import HEADER_BYTES, VALID_SHIFT, VERSION_FIRST, W_BODY_XXH3, padded
from ringlog.types import Codec, Durability, PayloadKind

GOLDEN_SEED = 0x0123456789ABCDEF
VERSION_AT = 5
"""Offset of the version in a header."""
COMMIT_TS = 1_700_000_000_000_000
FIXED = ("event_ts", "expires_at", "not_before", "priorities")

_text = st.text(max_size=12)
_bytes = st.binary(max_size=24)
_payload = st.one_of(_bytes, _bytes, st.none())
_time = st.integers(min_value=0, max_value=(1 << 63) - 1)
_VALUES = {
    "keys": st.one_of(st.none(), _bytes),
    "tags": st.one_of(st.none(), _text),
    "nodes": st.one_of(st.none(), _text),
    "headers": st.one_of(st.none(), st.lists(st.tuples(_text, _bytes), max_size=3)),
    "metas": st.one_of(st.none(), st.dictionaries(_text, _text, max_size=3).map(msgspec.json.encode)),
    "event_ts": st.one_of(st.none(), st.integers(min_value=-(1 << 63) + 1, max_value=(1 << 63) - 1)),
    "expires_at": st.one_of(st.none(), _time),
    "not_before": st.one_of(st.none(), _time),
    "priorities": st.integers(min_value=0, max_value=255),
}


@st.composite
def record_columns(draw: st.DrawFn, counts: st.SearchStrategy[int] | None = None) -> dict[str, list]:
    """Draw arguments of encode_records: payloads and any subset of the other columns."""
    if counts is None:
        counts = st.one_of(st.just(1), st.integers(1, 5), st.integers(15, 20))
    count = draw(counts)
    names = draw(st.sets(st.sampled_from(sorted(_VALUES)), max_size=9))
    column = {name: draw(st.lists(_VALUES[name], min_size=count, max_size=count)) for name in sorted(names)}
    return {"payloads": draw(st.lists(_payload, min_size=count, max_size=count)), **column}


def encoded(given: dict[str, list]) -> EncodedRecords:
    """Encode what record_columns drew."""
    return encode_records(given["payloads"], **{k: v for k, v in given.items() if k != "payloads"})


def stamped(columns: EncodedRecords, stamps: list[int]) -> EncodedRecords:
    """Return the same records with the column of commit stamps, which only the engine adds."""
    column = b"".join(stamp.to_bytes(8, "little", signed=True) for stamp in stamps)
    bitmaps = (columns.bitmap >> VALID_SHIFT).bit_count() * padded((columns.count + 7) // 8)
    split = len(columns.body) - bitmaps
    body = columns.body[:split] + column + columns.body[split:]
    header = columns.header
    header = header._replace(
        frame_len=header.frame_len + len(column), columns=columns.bitmap | 1 << Column.COMMIT_TS,
        raw_len=len(body), body_xxh3=xxhash.xxh3_64_intdigest(body),
    )  # fmt: skip
    return EncodedRecords(bytearray(pack_header(header) + body))


control_values = st.recursive(
    st.none() | st.booleans() | st.integers(-(1 << 63), (1 << 64) - 1) | st.floats() | _text | _bytes,
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(_text, inner, max_size=4),
    max_leaves=12,
)


@st.composite
def any_frame(draw: st.DrawFn, counts: st.SearchStrategy[int] | None = None) -> bytearray:
    """Draw a valid append or control frame, unsealed."""
    if counts is None and draw(st.integers(0, 4)) == 0:
        body = msgspec.msgpack.encode(draw(control_values))
        return control_frame(FrameType.TOPIC_CREATE, draw(st.integers(0, 99)), body)
    columns = encoded(draw(record_columns(counts)))
    if draw(st.integers(0, 7)) == 0:
        columns = stamped(columns, draw(st.lists(_time, min_size=columns.count, max_size=columns.count)))
    whole = frame(
        columns,
        topic_id=draw(st.integers(0, (1 << 64) - 1)),
        producer_id=draw(st.integers(0, (1 << 64) - 1)),
        producer_seq=draw(st.integers(0, (1 << 64) - 1)),
        epoch=draw(st.integers(0, (1 << 32) - 1)),
        durability=draw(st.sampled_from(Durability)),
        payload_kind=draw(st.sampled_from(PayloadKind)),
        codec=draw(st.sampled_from(Codec)),
    )
    if not columns.bitmap >> VALID_SHIFT and draw(st.integers(0, 3)) == 0:
        whole[VERSION_AT] = VERSION_FIRST
    return whole


@st.composite
def mutated_frame(draw: st.DrawFn, counts: st.SearchStrategy[int] | None = None) -> bytearray:
    """Draw a frame with up to three changed bytes and a correct body checksum, so that only its structure can
    fail.

    Structure often breaks in the low bytes of offsets and in padding, so the strategy favours small values.
    """
    whole = draw(any_frame(counts))
    for _ in range(draw(st.integers(1, 3))):
        at = draw(st.integers(4, len(whole) - 1))
        whole[at] = draw(st.sampled_from([0, 1, 2, 7, 8, 0x7F, 0x80, 0xC3, 0xFF]) | st.integers(0, 255))
    fix_body_checksum(whole)
    return whole


def fix_body_checksum(whole: bytearray) -> None:
    """Recompute the body checksum of one whole frame."""
    value = xxhash.xxh3_64_intdigest(bytes(whole[HEADER_BYTES:]))
    whole[8 * W_BODY_XXH3 : 8 * W_BODY_XXH3 + 8] = value.to_bytes(8, "little")


def _append(given: dict[str, list], base_seq: int, **options: object) -> bytearray:
    whole = frame(encoded(given), topic_id=42, epoch=3, **options)  # type: ignore[arg-type]
    patch_header(whole, base_seq=base_seq, commit_ts=COMMIT_TS)
    seal(whole, GOLDEN_SEED)
    return whole


def _sealed(given: dict[str, list], base_seq: int, stamps: list[int]) -> bytearray:
    whole = frame(stamped(encoded(given), stamps), topic_id=42, epoch=3)
    patch_header(whole, base_seq=base_seq, commit_ts=stamps[0])
    seal(whole, GOLDEN_SEED)
    return whole


def _control(frame_type: FrameType, body: object) -> bytearray:
    whole = control_frame(frame_type, 42, msgspec.msgpack.encode(body), epoch=3, commit_ts=COMMIT_TS)
    seal(whole, GOLDEN_SEED)
    return whole


EVERY_COLUMN: dict[str, list] = {
    "payloads": [b'{"a":1}', b"", b"third"],
    "keys": [b"k1", None, b"\x00\xff"],
    "tags": ["red", None, "blue"],
    "nodes": [None, "n-1", "n-2"],
    "headers": [[("trace", b"\x01\x02"), ("empty", b"")], None, [("x", b"y")]],
    "metas": [b'{"m":"1"}', None, b"{}"],
    "event_ts": [-5, None, 1_699_999_999_000_000],
    "expires_at": [None, 1_800_000_000_000_000, None],
    "not_before": [1, None, 2],
    "priorities": [0, 1, 255],
}


NULLS: dict[str, list] = {
    "payloads": [None, b"", b"x", None, b"", b"y", b"", None, b"z", None],
    "keys": [b"", None, b"k", b"", None, b"", b"", b"", b"", b""],
    "tags": ["", "", "t", None, "", "", "", "", "", "u"],
    "nodes": [None] * 9 + [""],
}


def golden_frames() -> dict[str, tuple[str, bytearray]]:
    """Return every golden frame by name: its description, and its bytes as today's encoder makes them."""
    repeated = [b'{"flight":%d,"carrier":"UA"}' % (i % 3) for i in range(40)]
    return {
        "payload_only": ("two payloads, no other column", _append({"payloads": [b"hello", b"ringlog!"]}, 7)),
        "one_record": ("one record, JSON, fsync class, with a producer", _append(
            {"payloads": [b'{"n":1}']}, 1, durability=Durability.FSYNC, payload_kind=PayloadKind.JSON,
            producer_id=(1 << 63) | 5, producer_seq=9,
        )),
        "nulls": ("payloads, keys, tags and nodes that are null, empty, or neither", _append(NULLS, 200)),
        "empty_payloads": ("five records without a byte", _append({"payloads": [b""] * 5}, 100)),
        "every_column": ("every column, with absent values in each", _append(EVERY_COLUMN, 1_000)),
        "unicode_tags": ("tags and nodes beyond ASCII", _append(
            {"payloads": [b"a", b"b", b"c"], "tags": ["größe", "日本", None], "nodes": ["é", None, "🙂"]}, 5,
        )),
        "lz4": ("body compressed with LZ4", _append({"payloads": repeated}, 11, codec=Codec.LZ4)),
        "zstd": ("body compressed with Zstandard", _append(
            {"payloads": repeated, "tags": ["UA"] * 40}, 12, codec=Codec.ZSTD
        )),
        "sealed": ("a segment's frame: records of three commits", _sealed(
            {"payloads": [b"one", b"two", b"three"], "tags": ["a", None, "b"]}, 21,
            [COMMIT_TS, COMMIT_TS + 1, COMMIT_TS + 5_000_000],
        )),
        "group_mark": ("control frame: a group's mark", _control(
            FrameType.GROUP_MARK, [12, 8192, 0xFEDCBA9876543210, 4096, 1048576, 0]
        )),
        "topic_create": ("control frame: a topic begins", _control(
            FrameType.TOPIC_CREATE, ["flights.UA", 3, {"type": "log", "cap_records": None, "durable": True}]
        )),
        "group_with_letters": ("control frame: a consumer group begins that has dead letters", _control(
            FrameType.LEASE, [
                0x18000000005, 1, 1, 1_700_000_000_000, 8, "", 0, [], 0, [],
                ["billing", 1, "^eu.", 500, 50, 3, "dead"],
            ]
        )),
        "group_created": ("control frame: a consumer group begins, without dead letters", _control(
            FrameType.LEASE, [
                0x18000000005, 1, 1, 1_700_000_000_000, 8, "", 0, [], 0, [], ["billing", 1, "^eu.", 500, 50],
            ]
        )),
        "group_claimed": ("control frame: a group's records are leased in two runs", _control(
            FrameType.LEASE, [
                0x18000000005, 2, 2, 1_700_000_000_500, 12, "ann", 1_700_000_030_500,
                [8, 2, 1, 0x18000000006, 11, 1, 3, 0x18000000008], 77, [], None,
            ]
        )),
        "group_rejected": ("control frame: a group's records are given up, with the reason", _control(
            FrameType.LEASE, [
                0x18000000005, 3, 11, 1_700_000_000_900, 12, "ann", 0, [8, 2], 78, [], None, "no address",
            ]
        )),
        "jobs_claimed": ("control frame: a queue's jobs are leased, as queues wrote it once", _control(
            FrameType.LEASE, [
                0, 2, 2, 1_700_000_000_500, 0, "ann", 1_700_000_030_500,
                [8, 2, 1, 0x30000000006, 11, 1, 3, 0x30000000008], 77, [], None,
                [4_711, 815], "", [5, 2], None,
            ]
        )),
        "leases_claimed": ("control frame: a queue's jobs are leased, two more exhausted", _control(
            FrameType.LEASE, [
                0, 2, 2, 1_700_000_000_500, 0, "ann", 1_700_000_030_500,
                [8, 2, 1, 0x30000000006, 11, 1, 3, 0x30000000008], 77, [], None,
                "", [4_711, 815], [5, 2], None,
            ]
        )),
        "leases_rejected": ("control frame: a group's records are given up, with the reason", _control(
            FrameType.LEASE, [
                0x18000000005, 3, 11, 1_700_000_000_900, 12, "ann", 0, [8, 2], 78, [], None, "no address",
                [0, 0], [], None,
            ]
        )),
    }  # fmt: skip
