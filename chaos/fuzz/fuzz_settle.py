"""Decoders of shared memory that another process wrote: settle entries and ring headers."""

from __future__ import annotations

import struct
from collections.abc import Iterator

import numpy as np
import xxhash

from ringlog.actors.gateway.requests.append_validation import SentFrames
from ringlog.errors import Refused, RingError, Status
from ringlog.frame.settle_entry import WORDS, entry_error
from ringlog.ring import layout

MAX_LEN = 640
SHARE = 1.5


def check(data: bytes) -> None:
    """Decode one input. An entry is an ack or a refusal; a ring header is valid or raises RingError."""
    whole = data[: len(data) // (8 * WORDS) * 8 * WORDS]
    for entry in np.frombuffer(whole, dtype="<u8").reshape(-1, WORDS):
        error = entry_error(entry, "t")
        if error is not None and not isinstance(error, Refused):
            raise AssertionError(f"an entry became {error!r}")
    SentFrames.has_stale_topic(whole)
    for identity in (data, mended(data)):
        try:
            layout.decode_identity(identity, "ring")
        except RingError:
            continue


def mended(data: bytes) -> bytes:
    """Return a ring header with valid magic, version and checksum, so that mutations reach other checks."""
    body = HEAD[:12] + data[12 : layout.IDENTITY_BYTES - 8].ljust(layout.IDENTITY_BYTES - 20, b"\0")
    return body + xxhash.xxh3_64_intdigest(body).to_bytes(8, "little")


HEAD = layout.RingIdentity(0, 1 << 20, 64, layout.hash_id("e"), layout.hash_id("c"), 1, 2).encode()


def seeds() -> Iterator[bytes]:
    """Yield acks, refusals of every status, and a ring header."""
    for status in (*Status, 0xFFFF):
        yield struct.pack("<8Q", 64, 1, 2, 3 | int(status) << 32, 5, 1, 7, 8)
    yield HEAD
