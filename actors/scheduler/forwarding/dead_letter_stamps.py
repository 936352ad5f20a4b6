"""Stamps of a dead letter: where they are stored, and what gives way if there is no room.

The stamps are stored in the metadata, unless the copy would then exceed the limit of a record. In that case
they are stored in the headers, which do not count towards that limit. Metadata that exceeds a limit itself
moves into a header: a router's stamp can make it too large, and a client of another make can write more keys
than there may be. If the headers are full, the job's last ones are left out and the dead letter states their
number. So every job can become a dead letter, whatever it contains, if its payload is within the limit.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import msgspec

from ringlog.actors.scheduler.forwarding.redrive import record_columns
from ringlog.client.read.pages import Record
from ringlog.envelope import messages as m
from ringlog.frame.columns import (
    DEAD_LETTER_DELIVERIES,
    DEAD_LETTER_FROM,
    DEAD_LETTER_GROUP,
    DEAD_LETTER_HEADERS_LEFT_OUT,
    DEAD_LETTER_LAST_FAILURE,
    DEAD_LETTER_META,
    DEAD_LETTER_META_KEYS,
    DEAD_LETTER_META_LEFT_OUT,
    DEAD_LETTER_NACKS,
    DEAD_LETTER_REASON,
    DEAD_LETTER_SRC_ID,
    DEAD_LETTER_SRC_SEQ,
)
from ringlog.frame.metadata import fields_of
from ringlog.limits import (
    HEADER_BYTES_MAX,
    HEADERS_BYTES_MAX,
    HEADERS_PER_RECORD_MAX,
    META_BYTES_MAX,
    META_KEYS_MAX,
)

_encode = msgspec.json.encode


def dead_letter_columns(
    record: Record, exhausted: m.ExhaustedReply, deliveries: int, record_bytes: int
) -> Any:
    """Return the columns of a dead letter: all fields of the job, and the stamps of its origin.

    The job's own expiry is kept only if the request says so. `record_bytes` is the maximum size of payload
    and metadata together.
    """
    stamps = _stamps(record.seq, exhausted, deliveries)
    own_meta = record.meta_json or b""
    fields = _fields(own_meta)
    headers = {name: value for name, value in record.headers.items() if name not in DEAD_LETTER_META_KEYS}
    stamped = _encode(fields | stamps)
    if _fits(record, stamped, len(fields), record_bytes):
        return record_columns(record, stamped, headers, keeps_expiry=exhausted.keeps_expiry)
    meta = _encode(fields) if fields else b""
    if not _fits(record, meta, len(fields), record_bytes):
        meta, stamps = b"", stamps | _noted_meta(own_meta)
    return record_columns(record, meta, stamped_headers(headers, stamps), keeps_expiry=exhausted.keeps_expiry)


def _stamps(seq: int, exhausted: m.ExhaustedReply, deliveries: int) -> dict[str, str]:
    stamps = {
        DEAD_LETTER_FROM: exhausted.topic, DEAD_LETTER_DELIVERIES: str(deliveries),
        DEAD_LETTER_SRC_SEQ: str(seq),
    }  # fmt: skip
    if exhausted.group:
        stamps |= {DEAD_LETTER_GROUP: exhausted.group, DEAD_LETTER_SRC_ID: str(exhausted.topic_id)}
    if seq in exhausted.reasons:
        stamps[DEAD_LETTER_REASON] = exhausted.reasons[seq]
        at_ms, nacks = exhausted.failed.get(seq, (0, 0))
        stamps |= {DEAD_LETTER_LAST_FAILURE: str(at_ms)} if at_ms else {}
        stamps |= {DEAD_LETTER_NACKS: str(nacks)} if nacks else {}
    return stamps


def _fields(meta: bytes) -> dict[str, Any]:
    """Return the fields of a job's metadata, without stamps.

    Stamps of an earlier move do not apply to this one, and stamps written by a producer are forged. Metadata
    that is no JSON object, which a foreign client may write, becomes one field.
    """
    if not meta:
        return {}
    found = fields_of(meta)
    if found is None:
        return {DEAD_LETTER_META: meta.decode(errors="replace")}
    return {name: value for name, value in found.items() if name not in DEAD_LETTER_META_KEYS}


def _noted_meta(meta: bytes) -> dict[str, str]:
    """Return the header that holds a job's metadata, or states its size if it is too large for a header."""
    text = meta.decode(errors="replace")
    if len(text.encode()) > HEADER_BYTES_MAX:
        return {DEAD_LETTER_META_LEFT_OUT: str(len(meta))}
    return {DEAD_LETTER_META: text} if meta else {}


def _fits(record: Record, meta: bytes, keys: int, record_bytes: int) -> bool:
    is_legal = len(meta) <= META_BYTES_MAX and keys <= META_KEYS_MAX
    return is_legal and len(record.data or b"") + len(meta) <= record_bytes


def stamped_headers(own: Mapping[str, bytes], stamps: Mapping[str, str]) -> dict[str, bytes]:
    """Return the headers of a dead letter: the stamps, and as many of the job's own headers as fit."""
    noted = {name: value.encode() for name, value in stamps.items()}
    size = _bytes_of(own) + _bytes_of(noted)
    if len(own) + len(noted) <= HEADERS_PER_RECORD_MAX and size <= HEADERS_BYTES_MAX:
        return {**own, **noted}
    noted[DEAD_LETTER_HEADERS_LEFT_OUT] = b"%d" % len(own)
    room = HEADERS_BYTES_MAX - _bytes_of(noted)
    kept: dict[str, bytes] = {}
    for name, value in own.items():
        room -= len(name.encode()) + len(value)
        if room < 0 or len(kept) + len(noted) == HEADERS_PER_RECORD_MAX:
            break
        kept[name] = value
    noted[DEAD_LETTER_HEADERS_LEFT_OUT] = b"%d" % (len(own) - len(kept))
    return {**kept, **noted}


def _bytes_of(headers: Mapping[str, bytes]) -> int:
    return sum(len(name.encode()) + len(value) for name, value in headers.items())
