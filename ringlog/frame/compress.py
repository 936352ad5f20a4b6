"""Compression of bodies, and decompression that trusts no declared size.

A compressed body is a 64-bit length, the compressed bytes, and zeros up to a multiple of 8. The result is
allocated by `raw_len` only after three checks. It must be below the frame limit and within the ratio limit of
the compressed length. For Zstandard, the compressed frame's own header must declare the same size, because
Zstandard allocates what that header declares.
"""

from __future__ import annotations

import threading
from typing import Any

import lz4.block
import zstandard

from ringlog.errors import FrameInvalid
from ringlog.frame.layout import padded
from ringlog.limits import DECOMPRESS_RATIO_MAX, MIB
from ringlog.types import Codec

PREFIX_BYTES = 8
ZSTD_LEVEL = 3
ZSTD_WINDOW_BYTES_MAX = 8 * MIB
"""Window size that RFC 8878 recommends every decoder to support. Level 3 writes at most 2 MiB."""

_ZSTD_MAGIC = b"\x28\xb5\x2f\xfd"


class _Zstd(threading.local):
    """One compressor and decompressor per thread: they are not thread-safe and slow to create."""

    def __init__(self) -> None:
        self.compressor = zstandard.ZstdCompressor(level=ZSTD_LEVEL)
        self.decompressor = zstandard.ZstdDecompressor(max_window_size=ZSTD_WINDOW_BYTES_MAX)


_zstd = _Zstd()


def compress(raw: bytes, codec: Codec) -> tuple[Codec, bytes]:
    """Compress a body if that makes it smaller. Return the codec used and the body to store.

    If Zstandard exceeds the ratio that readers accept, LZ4 is used, which cannot exceed it.
    """
    if codec == Codec.NONE:
        return codec, raw
    packed = (
        _zstd.compressor.compress(raw) if codec == Codec.ZSTD else lz4.block.compress(raw, store_size=False)
    )
    if len(raw) > len(packed) * DECOMPRESS_RATIO_MAX:
        return compress(raw, Codec.LZ4)
    stored_bytes = PREFIX_BYTES + padded(len(packed))
    if stored_bytes >= len(raw):
        return Codec.NONE, raw
    return codec, (len(packed).to_bytes(PREFIX_BYTES, "little") + packed).ljust(stored_bytes, b"\0")


def decompress(stored: memoryview, codec: int, raw_len: int) -> bytes:
    """Return the body of exactly `raw_len` bytes. The caller has checked `raw_len` against the frame limit.

    Raises FrameInvalid. Allocates nothing before all declared sizes are compared.
    """
    packed = _packed_part(stored)
    if raw_len > len(packed) * DECOMPRESS_RATIO_MAX:
        raise FrameInvalid("raw_len is too large for the packed size", raw_len=raw_len, stored=len(packed))
    raw = _unpack_zstd(packed, raw_len) if codec == Codec.ZSTD else _unpack_lz4(packed, raw_len)
    if len(raw) != raw_len:
        raise FrameInvalid("body does not decompress to raw_len bytes", raw_len=raw_len, found=len(raw))
    return raw


def _packed_part(stored: memoryview) -> memoryview:
    length = int.from_bytes(stored[:PREFIX_BYTES], "little")
    if PREFIX_BYTES + padded(length) != len(stored):
        raise FrameInvalid("compressed length does not match the size of the body", length=length)
    if any(stored[PREFIX_BYTES + length :]):
        raise FrameInvalid("padding is not zero", offset=length)
    return stored[PREFIX_BYTES : PREFIX_BYTES + length]


def _unpack_lz4(packed: memoryview, raw_len: int) -> bytes:
    try:
        raw: bytes = lz4.block.decompress(packed, uncompressed_size=raw_len)
    except (lz4.block.LZ4BlockError, ValueError):
        raise FrameInvalid("body does not decompress") from None
    return raw


def _unpack_zstd(packed: memoryview, raw_len: int) -> bytes:
    if packed[:4] != _ZSTD_MAGIC:
        raise FrameInvalid("body does not decompress")
    try:
        declared: Any = zstandard.get_frame_parameters(packed)
    except zstandard.ZstdError:
        raise FrameInvalid("body does not decompress") from None
    if declared.content_size != raw_len:
        raise FrameInvalid("Zstandard header declares another size than raw_len", raw_len=raw_len)
    if declared.window_size > ZSTD_WINDOW_BYTES_MAX or declared.dict_id:
        raise FrameInvalid("compressed frame needs a dictionary or too large a window")
    try:
        return _zstd.decompressor.decompress(packed, allow_extra_data=False)
    except zstandard.ZstdError:
        raise FrameInvalid("body does not decompress") from None
