"""Encode and decode messages.

An envelope is a MessagePack array of four: [version, kind, correlation id, body]. The body is an array of the
message's fields. Attachments (frames) are further parts of the ZeroMQ message and never pass through this
module.

Decoding is total: any bytes give a message or an EnvelopeInvalid. If a field is out of its range
(envelope/messages/ranges.py), the error is a MessageInvalid, which the sender receives as its reply.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import msgspec

from ringlog.envelope.decode_errors import EnvelopeInvalid, MessageInvalid, message_invalid
from ringlog.envelope.messages import KINDS, ErrorReply, Message
from ringlog.limits import ENVELOPE_BYTES_MAX

__all__ = [
    "PROTOCOL", "Envelope", "EnvelopeInvalid", "MessageInvalid", "decode", "encode",
    "version_mismatch_message",
]  # fmt: skip

PROTOCOL = 3
"""Version of the messages, and of the frames in them. The envelope and ErrorReply have the same form in every
version."""
ERROR_BYTES_MAX = 8_192
"""Longer errors are shortened. An error repeats parts of the request, and it must fit an envelope."""
_FACT_CHARS_MAX = 256
_CORR_MAX = (1 << 64) - 1


class Envelope(NamedTuple):
    """One decoded envelope."""

    kind: str
    corr: int
    message: Message


def _refuse_extension(code: int, data: memoryview) -> Any:
    """Refuse extension types: no message has any, and two equal ones would not compare as equal."""
    raise msgspec.ValidationError(f"Extension type {code} is not allowed")


_encoder = msgspec.msgpack.Encoder()
_outer = msgspec.msgpack.Decoder(tuple[int, str, int, msgspec.Raw], strict=True)
_bodies = {
    name: msgspec.msgpack.Decoder(kind, strict=True, ext_hook=_refuse_extension)
    for name, kind in KINDS.items()
}


def encode(message: Message, corr: int = 0, version: int = PROTOCOL) -> bytes:
    """Encode one message under a correlation id (0..2**64-1).

    `version` is the protocol version of the receiver. It differs from PROTOCOL only for an ErrorReply.
    """
    data = _encoder.encode((version, type(message).__name__, corr, message))
    if len(data) > ERROR_BYTES_MAX and isinstance(message, ErrorReply):
        return _encoder.encode((version, "ErrorReply", corr, _cut(message)))
    return data


def version_mismatch_message(other: int) -> str:
    """Return the error text for a client and an engine of different protocol versions."""
    return (
        f"client and engine use different protocol versions, {other} and {PROTOCOL}: "
        "install the same ringlog release on both"
    )


def _cut(error: ErrorReply) -> ErrorReply:
    """Return the same error with every text cut to 256 characters."""
    detail: dict[str, Any] = {
        name: fact if isinstance(fact, int | float | None) else str(fact)[:_FACT_CHARS_MAX]
        for name, fact in error.detail.items()
    }
    return ErrorReply(error.status, error.message[:_FACT_CHARS_MAX], detail, error.outcome)


def decode(data: bytes | memoryview, *, bytes_max: int = ENVELOPE_BYTES_MAX) -> Envelope:
    """Decode one envelope. Raises EnvelopeInvalid for all other bytes.

    `bytes_max` is larger than the default only for replies of this engine's shards.
    """
    if len(data) > bytes_max:
        raise EnvelopeInvalid(
            f"envelope must have at most {bytes_max} bytes, got {len(data)}", bytes=len(data), max=bytes_max
        )
    try:
        version, kind, corr, raw = _outer.decode(data)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as e:
        raise EnvelopeInvalid("message is not a valid envelope", reason=str(e)) from None
    if version != PROTOCOL:
        other = EnvelopeInvalid(version_mismatch_message(version), version=version, known=PROTOCOL)
        other.corr, other.version = corr if 0 <= corr <= _CORR_MAX else 0, version
        raise other
    if not 0 <= corr <= _CORR_MAX:
        raise EnvelopeInvalid(f"correlation id must be from 0 to 2**64 - 1, got {corr}", kind=kind)
    decoder = _bodies.get(kind)
    if decoder is None:
        unknown = EnvelopeInvalid("unknown message kind", kind=kind[:64])
        unknown.corr = corr
        raise unknown
    try:
        return Envelope(kind, corr, decoder.decode(raw))
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as e:
        raise message_invalid(kind, KINDS[kind], corr, raw, e) from None
