"""Every input gives a frame or a typed error, and the two decoders and `measure` agree."""

from __future__ import annotations

import contextlib
import tracemalloc
from typing import Any

import lz4.block
import msgpack
import numpy as np
import pytest
import zstandard
from hypothesis import example, given, settings
from hypothesis import strategies as st

from ringlog.errors import FrameInvalid
from ringlog.frame import (
    FrameFault,
    FrameType,
    control_frame,
    encode_records,
    frame,
    measure,
    open_frame,
    seal,
)
from ringlog.frame import batch as frames
from ringlog.frame.batch import FrameBatch, ScanEnd, scan
from ringlog.frame.compress import compress
from ringlog.frame.control import check_control
from ringlog.frame.header import FrameHeader, header_fault, pack_header, unpack_header
from ringlog.frame.layout import HEADER_BYTES, VERSION_FIRST, Column
from ringlog.frame.measure import FORMAT_FAULTS
from ringlog.limits import FRAME_BYTES_MAX, MIB
from ringlog.types import Codec
from ringlog.verify.frame_decoder import DecodedFrame, VerifyError, decode_frame
from tests.support import frame_oracle as oracle
from tests.support.frame_samples import (
    GOLDEN_SEED,
    any_frame,
    control_values,
    fix_body_checksum,
    golden_frames,
    mutated_frame,
)


def engine_reads(data: Any, seed: int | None = None) -> dict[str, list[Any]] | str | None:
    """Return the columns as stored, or the repr of a control body, or None if the engine refuses."""
    try:
        view = open_frame(data, seed=seed)
    except FrameInvalid:
        return None
    if not view.columns:
        return repr(view.control())
    view.records()
    view.to_arrow(nulls=True).validate(full=True)
    found: dict[str, list[Any]] = {}
    table, nulls = view.to_arrow().drop_columns(["seq", "ts"]), view.to_arrow(nulls=True)
    for name in table.schema.names:
        has_nulls = view.header.version > VERSION_FIRST and name in ("payload", "key", "tag", "node")
        column = (nulls if has_nulls else table).column(name)
        found[name] = (
            column.cast("int64").to_pylist()
            if name.endswith(("_ts", "_at", "_before"))
            else column.to_pylist()
        )
    stamps = view.fixed_column(Column.COMMIT_TS)
    if stamps is not None:
        found["commit_ts"] = stamps.tolist()
    if "headers" in found:
        found["headers"] = [[(pair["key"], pair["value"]) for pair in row] for row in found["headers"]]
    return found


def verifier_reads(data: bytes, seed: int | None = None) -> dict[str, list[Any]] | str | None:
    try:
        found: DecodedFrame = decode_frame(data, 0, seed)
    except VerifyError:
        return None
    return found.columns or repr(found.control)


def one_row(data: bytes) -> FrameBatch:
    """Return the batch of the single frame in `data`, whatever its header contains besides its length."""
    words = frames.words_of(data)
    return FrameBatch(np.zeros(1, np.int64), words[:10].reshape(1, 10).copy(), len(data), ScanEnd.CLEAN)


def judged_by_measure(data: bytes, times: int) -> set[int]:
    """Return the faults that `measure` gives for the frame repeated `times` times.

    `measure` processes few and many frames by different code.
    """
    row = one_row(data)
    whole = data * times
    offsets = np.arange(times, dtype=np.int64) * len(data)
    batch = FrameBatch(offsets, np.repeat(row.words, times, axis=0), len(whole), ScanEnd.CLEAN)
    found = measure(whole, batch)
    assert len(set(found.accounted.tolist())) == len(set(found.largest.tolist())) == 1
    return set(found.faults.tolist())


@given(st.binary(max_size=400), st.integers(-8, 408), st.none() | st.integers(0, (1 << 64) - 1))
def test_arbitrary_bytes_end_in_a_frame_or_a_typed_error(data: bytes, offset: int, seed: int | None) -> None:
    """Both decoders accept the bytes, or both raise their error with offset and reason."""
    found = trouble = None
    try:
        found = open_frame(data, offset, seed=seed)
    except FrameInvalid as e:
        trouble = e
    assert found is not None or (trouble is not None and trouble.offset == offset and trouble.reason)
    verified = None
    with contextlib.suppress(VerifyError):
        verified = decode_frame(data, offset, seed)
    assert (found is None) == (verified is None)


@pytest.mark.slow
@given(mutated_frame())
@settings(max_examples=200)
def test_both_decoders_agree_on_damaged_frames(whole: bytearray) -> None:
    """The checksum is correct, so only the structure decides."""
    assert engine_reads(bytes(whole)) == verifier_reads(bytes(whole))


@given(any_frame(), st.integers(0, (1 << 64) - 1))
def test_both_decoders_agree_on_valid_frames(whole: bytearray, seed: int) -> None:
    seal(whole, seed)
    found = engine_reads(bytes(whole), seed)
    assert found is not None
    assert found == verifier_reads(bytes(whole), seed)


@given(mutated_frame() | any_frame())
@settings(max_examples=150)
def test_measure_reports_a_format_fault_exactly_when_open_frame_refuses(whole: bytearray) -> None:
    data = bytes(whole)
    if frames.scan(data).end != ScanEnd.CLEAN or len(frames.scan(data)) != 1:
        return
    refused = engine_reads(data) is None
    for times in (1, 20):
        faults = judged_by_measure(data, times)
        assert bool(faults & FORMAT_FAULTS) == refused, faults
        assert len(faults) == 1


@given(mutated_frame(counts=st.just(1)))
@settings(max_examples=150)
def test_the_vectorised_walk_of_one_record_frames_agrees_with_the_ordinary_walk(whole: bytearray) -> None:
    """`measure` uses the vectorised walk for many one-record frames."""
    data = bytes(whole)
    if frames.scan(data).end != ScanEnd.CLEAN or len(frames.scan(data)) != 1:
        return
    few, many = judged_by_measure(data, 1), judged_by_measure(data, 13)
    assert few == many or few | many <= FORMAT_FAULTS


@given(any_frame(), st.data())
def test_one_flipped_bit_is_always_detected(whole: bytearray, data: st.DataObject) -> None:
    """The two checksums cover every byte."""
    seal(whole, 5)
    at = data.draw(st.integers(0, 8 * len(whole) - 1))
    whole[at >> 3] ^= 1 << (at & 7)
    assert engine_reads(bytes(whole), 5) is None
    assert verifier_reads(bytes(whole), 5) is None


def test_a_frame_under_another_seed_does_not_verify() -> None:
    """Such bytes come from another file, or from an earlier use of this file."""
    for _, whole in golden_frames().values():
        with pytest.raises(FrameInvalid, match="seal"):
            open_frame(whole, seed=GOLDEN_SEED + 1)
        with pytest.raises(VerifyError, match="seal"):
            decode_frame(bytes(whole), 0, GOLDEN_SEED + 1)


def test_both_decoders_refuse_every_truncation_of_a_frame() -> None:
    for _, whole in golden_frames().values():
        for stop in range(len(whole)):
            assert engine_reads(bytes(whole[:stop])) is None
            assert verifier_reads(bytes(whole[:stop])) is None


def test_unverified_opening_still_checks_structure() -> None:
    whole = frame(encode_records([b"abc"]), topic_id=1)
    whole[HEADER_BYTES + 4] = 200
    with pytest.raises(FrameInvalid, match="past the body"):
        open_frame(whole, seed=None, verify=False)


# -- headers ------------------------------------------------------------------------------------------

_u64 = st.integers(0, (1 << 64) - 1) | st.sampled_from([0, 1, (1 << 63) - 1, 1 << 63])
headers = st.builds(
    FrameHeader,
    frame_len=st.sampled_from([76, 84, 92, 108]),
    type=st.integers(0, 16),
    version=st.sampled_from([0, 1, 2, 2, 3]),
    columns=st.sampled_from([0, 1, 1, 3, 0x3FF, 0x400, 0x801, 0x1001, 0x7FFF, 0x8001]),
    topic_id=_u64,
    base_seq=_u64,
    commit_ts=_u64,
    records=st.sampled_from([0, 1, 1, 2, (1 << 32) - 1]),
    epoch=st.integers(0, (1 << 32) - 1),
    producer_id=_u64,
    producer_seq=_u64,
    raw_len=st.sampled_from([0, 1, 8, 9, 16, 32, FRAME_BYTES_MAX - 80, FRAME_BYTES_MAX]),
    codec=st.sampled_from([0, 0, 1, 2, 3]),
    flags=st.sampled_from([0, 2, 0x13, 0x23, 0x33, 0x04, 0x80]),
    hops=st.sampled_from([0, 0, 0, 1, 8, 9, 256]),
    body_xxh3=_u64,
    seal_xxh3=_u64,
)
_GOOD = unpack_header(golden_frames()["payload_only"][1], 0)


@given(st.lists(headers, min_size=1, max_size=8))
@example([_GOOD, _GOOD._replace(base_seq=(1 << 63) - 2), _GOOD._replace(base_seq=(1 << 63) - 1)])
@settings(max_examples=150)
def test_checks_of_one_header_and_of_many_headers_agree(rows: list[FrameHeader]) -> None:
    assert [unpack_header(pack_header(row), 0) for row in rows] == rows
    words = np.frombuffer(b"".join(map(pack_header, rows)), dtype="<u8").reshape(-1, 10)
    assert frames.malformed(words).tolist() == [oracle.header_fault(row) is not None for row in rows]
    assert [header_fault(pack_header(row)) for row in rows] == list(map(oracle.header_fault, rows))


# -- decompression ------------------------------------------------------------------------------------


def compressed_frame(
    packed: bytes, raw_len: int, codec: Codec, count: int = 1, length: int | None = None
) -> bytes:
    """Return a frame around any compressed bytes, with matching checksums."""
    stored = (len(packed) if length is None else length).to_bytes(8, "little") + packed
    stored += bytes(-len(stored) & 7)
    like = unpack_header(frame(encode_records([b"x"]), topic_id=1), 0)
    header = like._replace(frame_len=76 + len(stored), raw_len=raw_len, codec=codec, records=count)
    whole = bytearray(pack_header(header) + stored)
    fix_body_checksum(whole)
    return bytes(whole)


def body_of(payload: bytes) -> bytes:
    return encode_records([payload]).body


def zstd(data: bytes, **options: Any) -> bytes:
    return zstandard.ZstdCompressor(**options).compress(data)


_BODY = body_of(b"a" * 400)
_BOMB = zstd(bytes(32 * MIB), level=3)
_SKIPPABLE = b"\x50\x2a\x4d\x18\x01\0\0\0a"
_LZ4 = lz4.block.compress(_BODY, store_size=False)
_LZ4_BOMB = lz4.block.compress(bytes(8 * MIB), store_size=False)
# RFC 8878: magic, a descriptor with a 4-byte content size, a window of 2**24 bytes, the size.
_WIDE = b"\x28\xb5\x2f\xfd\x80" + bytes([14 << 3]) + (20 * MIB).to_bytes(4, "little") + bytes(20 * MIB // 900)
HOSTILE: dict[str, tuple[str, bytes, int, Codec]] = {
    "a bomb that lies about its size": ("another size", _BOMB, len(_BODY), Codec.ZSTD),
    "a bomb that tells its size": ("raw_len is too large", _BOMB, 32 * MIB, Codec.ZSTD),
    "an LZ4 bomb": ("does not decompress", _LZ4_BOMB, 800, Codec.LZ4),
    "no content size": ("another size", zstd(_BODY, write_content_size=False), len(_BODY), Codec.ZSTD),
    "two frames": ("another size", zstd(_BODY[:200]) + zstd(_BODY[200:]), len(_BODY), Codec.ZSTD),
    "the whole twice": ("does not decompress", zstd(_BODY) * 2, len(_BODY), Codec.ZSTD),
    "a skippable frame after": ("does not decompress", zstd(_BODY) + _SKIPPABLE, len(_BODY), Codec.ZSTD),
    "a skippable frame first": ("does not decompress", _SKIPPABLE + zstd(_BODY), len(_BODY), Codec.ZSTD),
    "nothing": ("raw_len is too large", b"", 8, Codec.ZSTD),
    "LZ4 with its size in front": ("does not", lz4.block.compress(_BODY), len(_BODY), Codec.LZ4),
    "declares less than raw_len": ("another size", zstd(_BODY), len(_BODY) + 8, Codec.ZSTD),
    "LZ4 shorter than it says": ("to raw_len bytes", _LZ4, len(_BODY) + 8, Codec.LZ4),
    "LZ4 longer than it says": ("does not decompress", _LZ4, len(_BODY) - 8, Codec.LZ4),
    "codec says the other": ("does not decompress", zstd(_BODY), len(_BODY), Codec.LZ4),
    "raw_len of nothing": ("raw_len is impossible", zstd(b""), 0, Codec.ZSTD),
    "raw_len not whole": ("raw_len does not match", zstd(_BODY[:-1]), len(_BODY) - 1, Codec.ZSTD),
    "too large a window": ("window", _WIDE, 20 * MIB, Codec.ZSTD),
}


@pytest.mark.parametrize("name", sorted(HOSTILE))
def test_hostile_compressed_bodies_are_refused_before_a_large_allocation(name: str) -> None:
    """The decoders check the declared size before they decompress (RF-103)."""
    reason, packed, raw_len, codec = HOSTILE[name]
    data = compressed_frame(packed, raw_len, codec)
    tracemalloc.start()
    try:
        with pytest.raises(FrameInvalid, match=reason):
            open_frame(data, seed=None)
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert peak < MIB
    assert verifier_reads(data) is None
    assert judged_by_measure(data, 1) == {FrameFault.STRUCTURE}


@pytest.mark.parametrize("length", [0, 1, len(zstd(_BODY)) - 1, len(zstd(_BODY)) + 9, 1 << 40, (1 << 64) - 1])
def test_a_compressed_length_that_does_not_fit_the_body_is_refused(length: int) -> None:
    data = compressed_frame(zstd(_BODY), len(_BODY), Codec.ZSTD, length=length)
    assert engine_reads(data) is None
    assert verifier_reads(data) is None


@given(st.binary(max_size=200), st.sampled_from([Codec.LZ4, Codec.ZSTD]), st.integers(0, 4_000))
def test_both_decoders_agree_on_arbitrary_compressed_bytes(packed: bytes, codec: Codec, raw_len: int) -> None:
    data = compressed_frame(packed, raw_len, codec)
    assert engine_reads(data) == verifier_reads(data)


@given(st.data(), st.sampled_from([Codec.LZ4, Codec.ZSTD]))
@settings(max_examples=200)
def test_both_decoders_agree_on_damaged_compressed_bodies(data: st.DataObject, codec: Codec) -> None:
    body = encode_records([b"abcdefgh" * 20, b"", b"12345"], tags=["t"] * 3).body
    packed = bytearray(zstd(body) if codec == Codec.ZSTD else lz4.block.compress(body, store_size=False))
    for _ in range(data.draw(st.integers(1, 3))):
        packed[data.draw(st.integers(0, len(packed) - 1))] = data.draw(st.integers(0, 255))
    whole = compressed_frame(bytes(packed), len(body), codec, count=3)
    assert engine_reads(whole) == verifier_reads(whole)


def test_a_body_that_shrinks_too_much_for_zstd_is_stored_as_lz4() -> None:
    """A well-behaved producer must not make frames that the check for decompression bombs refuses."""
    columns = encode_records([bytes(1 * MIB)] * 4)
    whole = frame(columns, topic_id=1, codec=Codec.ZSTD)
    view = open_frame(whole, seed=None)
    assert view.codec == Codec.LZ4
    assert view.body == columns.body


def test_a_body_that_does_not_shrink_is_stored_uncompressed() -> None:
    assert compress(b"abcdefgh", Codec.ZSTD) == (Codec.NONE, b"abcdefgh")
    assert (
        open_frame(frame(encode_records([b"a"]), topic_id=1, codec=Codec.LZ4), seed=None).codec == Codec.NONE
    )


# -- control bodies -----------------------------------------------------------------------------------


def reads_control(body: bytes) -> bool:
    try:
        check_control(body)
    except FrameInvalid:
        return False
    return True


def control_around(body: bytes) -> bytes:
    """Return a control frame around any bytes, including bodies that the encoder refuses."""
    like = unpack_header(control_frame(FrameType.LEASE, 1, b"\xc0"), 0)
    stored = body + bytes(-len(body) & 7)
    whole = bytearray(pack_header(like._replace(frame_len=76 + len(stored), raw_len=len(body))) + stored)
    fix_body_checksum(whole)
    return bytes(whole)


HOSTILE_CONTROL = {
    "nothing": b"",
    "two values": b"\x01\x01",
    "huge array": b"\xdd\xff\xff\xff\xff",
    "huge map": b"\xdf\xff\xff\xff\xff",
    "huge text": b"\xdb\xff\xff\xff\xff",
    "deep nesting": b"\x91" * 17 + b"\x01",
    "very deep nesting": b"\x91" * 100_000,
    "extension": b"\xd4\x05\x00",
    "timestamp": b"\xd6\xff\x00\x00\x00\x01",
    "unused byte": b"\xc1",
    "doubled key": b"\x82\xa1a\x01\xa1a\x02",
    "doubled key, once in a wider form": b"\x82\xa1a\x01\xd9\x01a\x02",
    "number as key": b"\x81\x01\x01",
    "bytes as key": b"\x81\xc4\x01a\x01",
    "map as key": b"\x81\x80\x01",
    "not UTF-8": b"\xa1\xff",
    "surrogate": b"\xa3\xed\xa0\x80",
    "over a mebibyte": b"\xc6\x00\x10\x00\x00" + bytes(MIB),
}


@pytest.mark.parametrize("name", sorted(HOSTILE_CONTROL))
def test_both_decoders_refuse_hostile_control_bodies(name: str) -> None:
    """Both decoders refuse nesting, extensions, bad keys and sizes beyond the limits (RF-102)."""
    data = control_around(HOSTILE_CONTROL[name])
    assert engine_reads(data) is None
    assert verifier_reads(data) is None


def test_both_decoders_read_the_deepest_allowed_control_body() -> None:
    data = control_around(b"\x91" * 16 + b"\x01")
    assert engine_reads(data) == verifier_reads(data) is not None


def test_both_decoders_refuse_nonzero_padding_of_a_control_body() -> None:
    whole = bytearray(control_around(b"\x01"))
    whole[-1] = 1
    fix_body_checksum(whole)
    assert engine_reads(bytes(whole)) is None
    assert verifier_reads(bytes(whole)) is None
    assert judged_by_measure(bytes(whole), 1) == {FrameFault.STRUCTURE}


@given(st.binary(max_size=40) | control_values.map(msgpack.packb))
@settings(max_examples=150)
def test_both_decoders_agree_on_arbitrary_control_bodies(body: bytes) -> None:
    data = control_around(body)
    assert engine_reads(data) == verifier_reads(data)
    assert reads_control(body) == (engine_reads(data) is not None)


@given(st.binary(max_size=600))
def test_scan_of_arbitrary_bytes_stays_inside_the_buffer(data: bytes) -> None:
    data = data[: len(data) & ~7]
    found = scan(data)
    assert found.stop <= len(data)
    assert isinstance(found.end, ScanEnd)
