"""Decodes the metadata of records.

A shard checks only its length and that it is UTF-8, so a client of another make can store any text.
"""

from __future__ import annotations

import msgspec

NOT_JSON = (msgspec.MsgspecError, UnicodeDecodeError, RecursionError)
"""Errors of msgspec for bytes that are not JSON of the requested type. RecursionError: nested too deeply."""

object_decoder: msgspec.json.Decoder[dict[str, msgspec.Raw]] = msgspec.json.Decoder(dict[str, msgspec.Raw])
"""Decodes a JSON object, without its values. Raises NOT_JSON."""
_decode_value = msgspec.json.Decoder(msgspec.Raw).decode


def fields_of(meta: bytes) -> dict[str, msgspec.Raw] | None:
    """Return the fields of metadata; None if it is not a JSON object."""
    try:
        return object_decoder.decode(meta)
    except NOT_JSON:
        return None


def json_value_of(meta: bytes) -> msgspec.Raw | str:
    """Return metadata as the value of a JSON field: as it is, or as a string if it is not JSON."""
    try:
        return _decode_value(meta)
    except NOT_JSON:
        return meta.decode(errors="replace")
