"""JSON text of records, joined from the bytes of the columns of frames.

A payload that is JSON is copied as it is. The payloads are checked, since a client can write any bytes.
"""

from __future__ import annotations

import base64
from collections import deque
from collections.abc import Iterable, Sequence
from typing import cast

import msgspec

from ringlog.client.read.record_batches import RecordBatch
from ringlog.frame.layout import Column

Raw = msgspec.Raw
_NULL = b"null"
_decode_one = msgspec.json.Decoder(Raw).decode
_encode = msgspec.json.Encoder().encode
_NOT_JSON = (msgspec.DecodeError, RecursionError, UnicodeDecodeError)
_US_PER_MS = 1_000


def data_json(payload: bytes | None) -> bytes:
    """Return the JSON text of one payload, without line breaks.

    Bytes that are not JSON become {"$text": …} if they are UTF-8, else {"$base64": …}; None becomes null.
    """
    if payload is None:
        return _NULL
    try:
        text = payload.decode()
    except UnicodeDecodeError:
        return b'{"$base64":"%b"}' % base64.b64encode(payload)
    try:
        _decode_one(payload)
        if b"\n" in payload or b"\r" in payload:
            return msgspec.json.format(payload, indent=-1)
        return payload
    except _NOT_JSON:
        return b'{"$text":%b}' % _encode(text)


def data_texts(payloads: Sequence[bytes | None]) -> Sequence[bytes]:
    """Return the JSON text of each payload, as `data_json` does. Faster if all are JSON on one line."""
    if None in payloads:
        payloads = [_NULL if payload is None else payload for payload in payloads]
    texts = cast("Sequence[bytes]", payloads)
    lines = b"\n".join(texts)
    try:
        if b"\r" in lines or lines.count(b"\n") >= len(texts):
            return list(map(data_json, texts))
        if not lines.isascii():
            lines.decode()
        deque(map(_decode_one, texts), maxlen=0)
    except _NOT_JSON:
        return list(map(data_json, texts))
    return texts


def batch_json(
    batch: RecordBatch, *, include_data: bool = True, include_tags: bool = False, include_meta: bool = True
) -> bytes:
    """Return the records of a batch as JSON objects, separated by commas, without brackets."""
    count = len(batch)
    if not count:
        return b""
    stamps = batch.commit_stamps
    first_ts = int(stamps[0])
    if first_ts == int(stamps[-1]):  # Stamps never decrease within a frame, and a batch holds whole frames.
        begin: list[bytes | Sequence[bytes]] = [
            _numbers(batch.seqs.tolist()),
            b',"$ts":%d' % (first_ts // _US_PER_MS),
        ]
    else:
        begin = [_numbers(batch.seqs.tolist()), b',"$ts":', _numbers((stamps // _US_PER_MS).tolist())]
    pieces: list[bytes | Sequence[bytes]] = [b',{"$seq":', *begin]
    if (nodes := batch.column(Column.NODE)) is not None:
        pieces.append(_texts(b',"$node":', nodes))
    if include_tags and (tags := batch.column(Column.TAG)) is not None:
        pieces.append(_texts(b',"$tag":', tags))
    if include_data:
        _append_constant(pieces, b',"data":')
        pieces.append(data_texts(batch.payloads()))
    if include_meta and (metas := batch.column(Column.META)) is not None:
        pieces.append([b',"meta":%b' % data_json(meta) if meta else b"" for meta in metas])
    pieces.append(b"}")
    width = len(pieces)
    parts: list[bytes] = [b""] * (width * count)
    for index, piece in enumerate(pieces):
        parts[index::width] = [piece] * count if isinstance(piece, bytes) else piece
    parts[0] = b'{"$seq":'
    return b"".join(parts)


def records_json(
    batches: Iterable[RecordBatch], *, include_data: bool = True, include_tags: bool = False,
    include_meta: bool = True,
) -> bytes:  # fmt: skip
    """Return the records of a page as a JSON array: $seq, $ts (ms), $node, $tag, data and meta.

    A field that a record lacks is left out. `data` stays null for a null.
    """
    texts = [
        batch_json(batch, include_data=include_data, include_tags=include_tags, include_meta=include_meta)
        for batch in batches
    ]
    return b"[%b]" % b",".join([text for text in texts if text])


def text_json(text: bytes) -> bytes:
    """Return UTF-8 text as a JSON string. Bytes that are not UTF-8 are replaced."""
    return _encode(text.decode(errors="replace"))


def _numbers(numbers: list[int]) -> list[bytes]:
    return repr(numbers)[1:-1].encode().split(b", ")


def _texts(name: bytes, texts: list[bytes]) -> list[bytes]:
    """Return name and value of each text, nothing for an empty one. Encodes each distinct text once."""
    fields = {text: name + text_json(text) for text in set(texts)}
    fields[b""] = b""
    return [fields[text] for text in texts]


def _append_constant(pieces: list[bytes | Sequence[bytes]], constant: bytes) -> None:
    last = pieces[-1]
    if isinstance(last, bytes):
        pieces[-1] = last + constant
    else:
        pieces.append(constant)
