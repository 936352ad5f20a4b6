"""CloudEvents 1.0: events as records. https://github.com/cloudevents/spec, the HTTP and JSON bindings.

A record has the event's `type` as its tag, `time` as its event time, the data as its payload, and the other
attributes as headers under the names of the HTTP binding: `ce-id`, `ce-source`, `content-type`. Source and id
together identify an event: within the topic's deduplication window it is stored once.
"""

from __future__ import annotations

import base64
import binascii
import contextlib
import re
from collections.abc import Iterable, Mapping
from datetime import UTC, datetime, timedelta
from typing import Annotated, Any, Literal
from urllib.parse import unquote

import msgspec
import xxhash
from msgspec import Meta

from ringlog.actors.http_gateway.api.request import Request, check_structure
from ringlog.client.read.pages import Record
from ringlog.client.write.fields import NewRecord
from ringlog.errors import InvalidRequest
from ringlog.limits import DEDUP_ID_BYTES_MAX, TAG_BYTES_MAX

EVENT = "application/cloudevents+json"
BATCH = "application/cloudevents-batch+json"
_PREFIX = "ce-"
_VERSION = "1.0"
_NAME = re.compile("[a-z0-9]{1,40}")
_EPOCH = datetime(1970, 1, 1, tzinfo=UTC)
_OWN = {"specversion", "type", "time", "datacontenttype", "data", "data_base64"}
"""Members of an event that are not stored as headers."""
_encode = msgspec.json.Encoder().encode
_decode = msgspec.json.decode


class CloudEvent(msgspec.Struct):
    """An event of CloudEvents 1.0. It may have further members, its extensions."""

    id: Annotated[str, Meta(min_length=1)]
    source: Annotated[str, Meta(min_length=1)]
    type: Annotated[str, Meta(min_length=1, max_length=TAG_BYTES_MAX)]
    specversion: Literal["1.0"]
    time: Annotated[str, Meta(description="RFC 3339, with a time zone.")] | None = None
    subject: str | None = None
    dataschema: str | None = None
    datacontenttype: str | None = None
    data: Any = None
    data_base64: Annotated[str, Meta(description="Data that is no text.")] | None = None


Events = Annotated[list[CloudEvent], Meta(min_length=1)]
"""A batch of events."""


def is_event(request: Request) -> bool:
    """Return whether the request carries CloudEvents, in its body or in its headers."""
    kind = media_type(request.header("content-type"))
    return kind in {EVENT, BATCH} or bool(request.header("ce-specversion"))


def wants_events(request: Request) -> bool:
    """Return whether the reply shall be CloudEvents."""
    return "application/cloudevents" in request.header("accept").lower()


def media_type(header: str) -> str:
    """Return a content type without its parameters, in lower case."""
    return header.split(";", 1)[0].strip().lower()


async def read_events(request: Request) -> list[NewRecord]:
    """Return the events of a request as records. Raises InvalidRequest, which names the attribute."""
    body = await request.raw_body()
    kind = media_type(request.header("content-type"))
    if kind not in {EVENT, BATCH}:
        return [_of_headers(request.scope.headers.items(), request.header("content-type"), body)]
    check_structure(body)
    try:
        found = _decode(body, type=list[dict[str, Any]] if kind == BATCH else dict[str, Any])
    except (msgspec.DecodeError, RecursionError, UnicodeDecodeError) as e:
        raise InvalidRequest(f"the body is not valid: {e}") from None
    events = found if isinstance(found, list) else [found]
    if not events:
        raise InvalidRequest("events must not be empty", events=0, min=1)
    return [_record(index, event) for index, event in enumerate(events)]


def events_json(topic: str, epoch: int, records: Iterable[Record]) -> bytes:
    """Return records as a batch of CloudEvents.

    A record that was not written as an event gets its tag as `type`, or `record`, the topic as `source`, and
    epoch and seq as `id`.
    """
    return b"[%b]" % b",".join([_event_json(topic, epoch, record) for record in records])


# -- from an event to a record ----------------------------------------------------------------------


def _of_headers(headers: Iterable[tuple[str, str]], content_type: str, body: bytes) -> NewRecord:
    """Return the record of an event in binary mode: attributes are headers, the body is the data."""
    attributes: dict[str, Any] = {
        name[len(_PREFIX) :]: unquote(value) for name, value in headers if name.startswith(_PREFIX)
    }
    return _new_record(0, attributes, body or None, content_type)


def _record(index: int, event: Mapping[str, Any]) -> NewRecord:
    """Return the record of an event in structured mode."""
    content_type = event.get("datacontenttype", "")
    if not isinstance(content_type, str):
        raise _invalid(index, "datacontenttype", "must be a string")
    attributes = {name: value for name, value in event.items() if name not in {"data", "data_base64"}}
    return _new_record(index, attributes, _data(index, event, content_type), content_type)


def _data(index: int, event: Mapping[str, Any], content_type: str) -> bytes | None:
    text = event.get("data_base64")
    if text is not None:
        if event.get("data") is not None:
            raise _invalid(index, "data_base64", "and data must not both be there")
        try:
            return base64.b64decode(text, validate=True)
        except (binascii.Error, TypeError, ValueError):
            raise _invalid(index, "data_base64", "must be base64 with padding") from None
    if "data" not in event:
        return None
    data = event["data"]
    return data.encode() if isinstance(data, str) and not _is_json(content_type) else _encode(data)


def _is_json(content_type: str) -> bool:
    kind = media_type(content_type)
    return not kind or kind.endswith(("/json", "+json"))


def _new_record(
    index: int, attributes: Mapping[str, Any], data: bytes | None, content_type: str
) -> NewRecord:
    if attributes.get("specversion") != _VERSION:
        raise _invalid(index, "specversion", f"must be {_VERSION}, got {attributes.get('specversion')!r:.40}")
    for name in ("id", "source", "type"):
        if not isinstance(attributes.get(name), str) or not attributes[name]:
            raise _invalid(index, name, "must be a string that is not empty")
    headers = {
        _PREFIX + name: _text(index, name, value).encode()
        for name, value in attributes.items() if name not in _OWN and value is not None
    }  # fmt: skip
    if content_type:
        headers["content-type"] = content_type.encode()
    identity = f"{attributes['source']}\n{attributes['id']}"
    if len(identity.encode()) > DEDUP_ID_BYTES_MAX:
        identity = xxhash.xxh3_128_hexdigest(identity.encode())
    return NewRecord(
        data=data, tag=attributes["type"], headers=headers, event_ts=_time(index, attributes.get("time")),
        dedup_id=identity,
    )  # fmt: skip


def _text(index: int, name: str, value: Any) -> str:
    if not _NAME.fullmatch(name):
        raise _invalid(index, name[:40], "must be a name of 1 to 40 letters a to z and digits")
    if isinstance(value, bool):
        return "true" if value else "false"
    if not isinstance(value, str | int):
        raise _invalid(index, name, "must be a string, an integer or a boolean")
    return str(value)


def _time(index: int, value: Any) -> datetime | None:
    if value is None:
        return None
    try:
        found = datetime.fromisoformat(value)
    except (TypeError, ValueError):
        raise _invalid(index, "time", f"must be a time as in RFC 3339, got {value!r:.40}") from None
    if found.tzinfo is None:
        raise _invalid(index, "time", f"must have a time zone, got {value!r:.40}")
    return found


def _invalid(index: int, attribute: str, problem: str) -> InvalidRequest:
    return InvalidRequest(f"events[{index}]: {attribute} {problem}", index=index, attribute=attribute)


# -- from a record to an event ----------------------------------------------------------------------


def _event_json(topic: str, epoch: int, record: Record) -> bytes:
    stored = {name: value.decode(errors="replace") for name, value in record.headers.items()}
    content_type = stored.pop("content-type", "")
    event = {
        "specversion": _VERSION, "id": f"{epoch}-{record.seq}", "source": f"/v0/topics/{topic}",
        "type": record.tag or "record",
        "time": _time_text(record),
        **{
            name[len(_PREFIX) :]: text for name, text in stored.items()
            if name.startswith(_PREFIX) and _NAME.fullmatch(name[len(_PREFIX) :])
            and name[len(_PREFIX) :] not in _OWN
        },
    }  # fmt: skip
    data: bytes | None = record.data
    if content_type:
        event["datacontenttype"] = content_type
    if data is None:
        return _encode(event)
    name, value = _data_member(data, is_json=_is_json(content_type))
    return b'%b,"%b":%b}' % (_encode(event)[:-1], name, value)


def _time_text(record: Record) -> str:
    """Return the event time; the commit time without one, and for one outside of the years 1 to 9999."""
    try:
        at = _EPOCH + timedelta(microseconds=record.ts if record.event_ts is None else record.event_ts)
    except OverflowError:
        at = record.time
    return at.isoformat().replace("+00:00", "Z")


def _data_member(data: bytes, *, is_json: bool) -> tuple[bytes, bytes]:
    """Return the name and the JSON text of an event's data. Data that is not what its type says is text."""
    if is_json:
        with contextlib.suppress(msgspec.DecodeError, RecursionError, UnicodeDecodeError):
            return b"data", bytes(_decode(data, type=msgspec.Raw))
    try:
        return b"data", _encode(data.decode())
    except UnicodeDecodeError:
        return b"data_base64", _encode(base64.b64encode(data).decode())
