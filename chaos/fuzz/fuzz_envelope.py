"""Envelopes: any bytes decode to a message or raise EnvelopeInvalid, and a message survives a round trip.

If the first byte is the number of a message kind, the rest is the body of that kind. This lets MessagePack
bombs get past the outer array (RF-102). Otherwise the bytes are the whole envelope.
"""

from __future__ import annotations

from collections.abc import Iterator

import msgspec

from ringlog.envelope.messages import KINDS, ErrorReply, Hello, Read, TopicPut
from ringlog.envelope.wire import PROTOCOL, EnvelopeInvalid, decode, encode

MAX_LEN = 512
SHARE = 3.0
NAMES = sorted(KINDS)
_pack = msgspec.msgpack.encode


def check(data: bytes) -> None:
    """Decode the bytes; encode and decode a decoded message again. Both messages must be equal."""
    if not data:
        return
    if data[0] < len(NAMES):
        data = b"\x94" + _pack(PROTOCOL) + _pack(NAMES[data[0]]) + _pack(7) + data[1:]
    try:
        envelope = decode(data)
    except EnvelopeInvalid:
        return
    again = decode(encode(envelope.message, envelope.corr))
    if repr(again) != repr(envelope) and not isinstance(envelope.message, ErrorReply):
        raise AssertionError(f"{envelope!r} came back as {again!r}")


def seeds() -> Iterator[bytes]:
    """Yield some messages, one body for each kind, and well-known MessagePack bombs."""
    for message in (Hello(1, "x"), Read("t", 0), TopicPut("t", {"ttl_ms": 1})):
        yield encode(message, 9)
    for number in range(len(NAMES)):
        yield bytes([number]) + b"\x93\xa1t\x00\x01"
    put = NAMES.index("TopicPut")
    for bomb in (
        b"\x91" * 400, b"\xdd\xff\xff\xff\xff", b"\xdf\xff\xff\xff\xff", b"\xc6\xff\xff\xff\xff",
        b"\xdb\x7f\xff\xff\xff", b"\x82\xa1a\x01\xa1a\x02", b"\xc7\x08\x01" + bytes(8),
        b"\xd6\xff" + bytes(4), b"\xcb\x7f\xf8" + bytes(6), b"\xa2\xff\xfe",
        b"\x81\x81\x81\x80\x01\x02", b"\x80\x00", b"\xcf" + b"\xff" * 8, b"\xd3\x80" + bytes(7),
    ):  # fmt: skip
        yield bytes([200]) + bomb
        yield bytes([put]) + b"\x93\xa1t" + bomb + b"\xa6upsert"
