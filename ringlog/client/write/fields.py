"""Fields of a record beside its payload: as a program gives them, and as values of frame columns."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from datetime import datetime, timedelta
from typing import Any, TypedDict

import msgspec

from ringlog.client.requests.validation import check_sequence
from ringlog.clock import Clock
from ringlog.digests import digest_of_id
from ringlog.errors import InvalidRequest, UsageError
from ringlog.frame.columns import encode_records
from ringlog.limits import DEDUP_ID_BYTES_MAX, DURATION_MS_MAX, KEY_BYTES_MAX, NODE_BYTES_MAX, TAG_BYTES_MAX
from ringlog.names import utf8
from ringlog.payload import json_of

Payload = bytes | bytearray | memoryview | None
_EPOCH = datetime.fromisoformat("1970-01-01T00:00:00+00:00")
_MICROSECOND = timedelta(microseconds=1)
MICROSECONDS_MAX = (1 << 63) - 1
_OTHER_UNITS = {"seconds": 1, "milliseconds": 1_000, "nanoseconds": 1_000_000_000}
_UNIT_FROM_S, _UNIT_TO_S = 631_152_000, 4_102_444_800
"""1990 and 2100, in seconds. A number that lies between them in another unit was not meant as microseconds:
as microseconds it would be in the first weeks of 1970 or in the far future. A datetime can still express such
a time."""


class RecordFields(TypedDict, total=False):
    """Fields of a record as keyword arguments. Times are datetimes with a time zone, or microseconds since
    the epoch."""

    key: bytes
    tag: str
    node: str
    meta: Mapping[str, Any]
    headers: Mapping[str, bytes]
    event_ts: datetime | int
    ttl_ms: int
    expires_at: datetime | int
    not_before: datetime | int
    priority: int


class NewRecord(msgspec.Struct, frozen=True, kw_only=True):
    """Record to append, for calls that take many. Fields as in RecordFields; None = absent."""

    data: Any
    key: bytes | None = None
    tag: str | None = None
    node: str | None = None
    meta: Mapping[str, Any] | None = None
    headers: Mapping[str, bytes] | None = None
    event_ts: datetime | int | None = None
    ttl_ms: int | None = None
    expires_at: datetime | int | None = None
    not_before: datetime | int | None = None
    priority: int | None = None
    dedup_id: str | None = None
    """Within the topic's window, a record with this id is appended once. Not for producers."""


COLUMNS = {
    "key": "keys", "tag": "tags", "node": "nodes", "meta": "metas", "headers": "headers",
    "event_ts": "event_ts", "expires_at": "expires_at", "not_before": "not_before", "priority": "priorities",
}  # fmt: skip
"""Field of a record -> argument of frame.columns.encode_records."""
_BYTES_MAX = {"key": KEY_BYTES_MAX, "tag": TAG_BYTES_MAX, "node": NODE_BYTES_MAX}
PRIORITY_MAX = 255


def column_values(fields: Mapping[str, Any], clock: Clock) -> dict[str, Any]:
    """Convert fields to values by column, and check each one, so that one record's error does not fail a
    whole frame.

    Raises TypeError for an unknown field, UsageError for a value of the wrong type, InvalidRequest for a
    value over its limit.
    """
    values: dict[str, Any] = {}
    for name, value in fields.items():
        if value is None:
            continue
        if name == "ttl_ms":
            if fields.get("expires_at") is not None:
                raise UsageError("give ttl_ms or expires_at, not both")
            values["expires_at"] = clock.now_us() + _positive(name, value) * 1_000
        elif name == "dedup_id":
            raise UsageError("dedup_id is not supported by producers: use append, append_many or put")
        elif name not in COLUMNS:
            raise TypeError(f"a record has no field {name!r}; it may have {', '.join([*COLUMNS, 'ttl_ms'])}")
        else:
            values[COLUMNS[name]] = _CHECKS[name](name, value)
    return values


def digest_of(dedup_id: Any) -> bytes:
    """Return the digest of a dedup id, as messages contain it. Raises UsageError, InvalidRequest."""
    if not isinstance(dedup_id, str) or not dedup_id:
        raise UsageError("dedup_id must be a non-empty str", found=type(dedup_id).__name__)
    if len(dedup_id) > DEDUP_ID_BYTES_MAX or len(utf8(dedup_id, "dedup_id")) > DEDUP_ID_BYTES_MAX:
        raise InvalidRequest(f"dedup_id must have at most {DEDUP_ID_BYTES_MAX} bytes", max=DEDUP_ID_BYTES_MAX)
    return digest_of_id(dedup_id)


def fields_of(record: Any) -> tuple[Any, dict[str, Any]] | None:
    """Return (payload, fields) of a NewRecord, or of a Record that was read; None for a bare payload."""
    if isinstance(record, NewRecord):
        return record.data, {
            name: getattr(record, name) for name in NewRecord.__struct_fields__ if name != "data"
        }
    from ringlog.client.read.pages import Record

    if isinstance(record, Record):
        fields = {
            name: getattr(record, name) for name in COLUMNS if name not in {"meta", "headers", "priority"}
        }
        fields |= {"meta": record.meta_json, "headers": dict(record.headers) or None}
        return record.data, fields | {"priority": record.priority or None}
    return None


def _positive(name: str, value: Any) -> int:
    if not isinstance(value, int) or isinstance(value, bool) or not 0 < value <= DURATION_MS_MAX:
        raise UsageError(f"{name} must be an integer from 1 to {DURATION_MS_MAX} ms", found=repr(value)[:64])
    return value


def _microseconds(name: str, value: Any) -> int:
    if isinstance(value, datetime):
        if value.tzinfo is None:
            raise UsageError(
                f"{name} must be a datetime with a time zone, got {value.isoformat()}",
                found=value.isoformat(),
            )
        return (value - _EPOCH) // _MICROSECOND
    if isinstance(value, int) and not isinstance(value, bool):
        if not -MICROSECONDS_MAX <= value <= MICROSECONDS_MAX:
            raise UsageError(f"{name} must be within {MICROSECONDS_MAX} microseconds, got {str(value)[:32]}")
        for unit, per_second in _OTHER_UNITS.items():
            if _UNIT_FROM_S * per_second <= value < _UNIT_TO_S * per_second:
                raise UsageError(f"{name} is in microseconds since the epoch; {value} looks like {unit}")
        return value
    raise UsageError(
        f"{name} must be a datetime with a time zone, or microseconds since the epoch",
        found=type(value).__name__,
    )


def _bytes(name: str, value: Any) -> bytes:
    if not isinstance(value, bytes):
        raise UsageError(f"{name} must be bytes, got {type(value).__name__}", found=type(value).__name__)
    _require_bounded(name, len(value))
    return value


def _text(name: str, value: Any) -> str:
    if not isinstance(value, str):
        raise UsageError(f"{name} must be a str, got {type(value).__name__}", found=type(value).__name__)
    _require_bounded(name, len(value) if value.isascii() else len(utf8(value, name)))
    return value


def _require_bounded(name: str, size: int) -> None:
    if size > _BYTES_MAX[name]:
        raise InvalidRequest(
            f"{name} must have at most {_BYTES_MAX[name]} bytes, got {size}", bytes=size, max=_BYTES_MAX[name]
        )


def _priority(name: str, value: Any) -> int:
    if not isinstance(value, int) or isinstance(value, bool) or not 0 <= value <= PRIORITY_MAX:
        raise UsageError(
            f"{name} must be a whole number from 0 to {PRIORITY_MAX}, got {repr(value)[:64]}", found=value,
            min=0, max=PRIORITY_MAX,
        )  # fmt: skip
    return value


def _headers(name: str, value: Any) -> Any:
    if not isinstance(value, Mapping):
        pairs = list(check_sequence(value, name))
        encode_records([b""], headers=[pairs])
        value = dict(pairs)
        if len(value) < len(pairs):
            names = [key for key, _ in pairs]
            repeated = next(key for at, key in enumerate(names) if key in names[:at])
            raise UsageError(f"headers must have each name once, got {repeated[:64]!r} more than once")
    encode_records([b""], headers=[value])
    return value


def _meta(name: str, value: Any) -> bytes:
    encoded = value if isinstance(value, bytes) else _meta_json(value)
    encode_records([b""], metas=[encoded])
    return encoded


def _meta_json(value: Any) -> bytes:
    if not isinstance(value, Mapping):
        raise UsageError(f"meta must be a mapping, got {type(value).__name__}", found=type(value).__name__)
    return json_of(dict(value), "meta")


_CHECKS: dict[str, Callable[[str, Any], Any]] = {
    "key": _bytes, "tag": _text, "node": _text, "meta": _meta, "headers": _headers, "priority": _priority,
    "event_ts": _microseconds, "expires_at": _microseconds, "not_before": _microseconds,
}  # fmt: skip
