"""Every field of every message has a range, and the decoder refuses values outside."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

import msgspec
import pytest
from msgspec import inspect

from ringlog.envelope import messages as m
from ringlog.envelope.messages import KINDS
from ringlog.envelope.wire import PROTOCOL, EnvelopeInvalid, MessageInvalid, decode, encode
from ringlog.errors import InvalidRequest
from ringlog.limits import MILLIS_MAX, NAME_CHARS_MAX, PID_MAX, SEQ_MAX
from tests.support.extremes import extreme_bodies, plain_body

_encode = msgspec.msgpack.encode


def sent(kind: str, body: Any, corr: int = 7) -> Any:
    """Return the message that a receiver decodes from this envelope."""
    return decode(_encode([PROTOCOL, kind, corr, body])).message


def _taken(kind: str, body: Any) -> Any:
    """Return the message, or the error that its sender receives."""
    try:
        return sent(kind, body)
    except MessageInvalid as e:
        return m.ErrorReply(int(e.status), e.message, e.detail) if e.corr == 7 else None


def _unranged(kind: inspect.Type, place: str) -> Iterator[str]:
    """Yield the paths of integer fields without a range."""
    match kind:
        case inspect.IntType():
            if kind.ge is None:
                yield place
        case inspect.StructType():
            for field in kind.fields:
                yield from _unranged(field.type, f"{place}.{field.name}")
        case inspect.UnionType():
            for part in kind.types:
                yield from _unranged(part, place)
        case inspect.ListType():
            yield from _unranged(kind.item_type, f"{place}[]")
        case inspect.TupleType():
            for n, part in enumerate(kind.item_types):
                yield from _unranged(part, f"{place}[{n}]")
        case inspect.DictType():
            yield from _unranged(kind.key_type, f"{place} key")
            yield from _unranged(kind.value_type, f"{place}[]")


@pytest.mark.parametrize("kind", KINDS)
def test_every_integer_of_every_message_has_a_range(kind: str) -> None:
    """A new field needs an annotation of ringlog/envelope/messages/ranges.py."""
    assert list(_unranged(inspect.type_info(KINDS[kind]), kind)) == []


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
def test_extreme_field_values_decode_or_are_refused_to_their_sender(kind: str) -> None:
    refused = 0
    for what, body in extreme_bodies(KINDS[kind], {}):
        answer = _taken(kind, body)
        if isinstance(answer, m.ErrorReply) and kind != "ErrorReply":
            refused += 1
            assert answer.detail["kind"] == kind
            assert answer.detail.get("field") or answer.detail.get("reason"), what
            assert decode(encode(answer, 7)).corr == 7, what
        elif kind != "ErrorReply" and "nan" not in what:  # Long errors are cut.
            assert type(answer) is KINDS[kind]
            assert decode(encode(answer, 7)).message == answer
    assert refused or not KINDS[kind].__struct_fields__ or kind == "ErrorReply"
    assert sent(kind, plain_body(KINDS[kind], {})) is not None


@pytest.mark.parametrize(
    ("kind", "body", "text"),
    [
        ("Claim", ["q", "w", 1, 0, 0, 0, -1], "pid must be >= 0, got -1"),
        ("Claim", ["q", "w", 1, 0, 0, 0, PID_MAX + 1], f"pid must be <= {PID_MAX}, got {PID_MAX + 1}"),
        ("Claim", ["q", "w", 1, 0, -5], "wait_ms must be >= 0, got -5"),
        ("Extend", ["t", "w", b"", b"", MILLIS_MAX + 1],
         f"lease_ms must be <= {MILLIS_MAX}, got {MILLIS_MAX + 1}"),
        ("Subscribe", [-1, [], 1], "subscription must be >= 0, got -1"),
        ("Subscribe", [1, [[1, "t", 2, 0, 0, 0], [1, "t", 2, 0, 0, -4]], 1],
         "feeds[1].after must be >= 0, got -4"),
        ("RouterPut", [[1, "n", "s", 2, 1, "d", 3, 0, "", -9]], "facts.cursor must be >= 0, got -9"),
        ("Read", ["t", SEQ_MAX + 1], f"after must be <= {SEQ_MAX}, got {SEQ_MAX + 1}"),
        ("Read", ["t" * (NAME_CHARS_MAX + 1), 0],
         f"topic must be str of length <= {NAME_CHARS_MAX}, got {'t' * 64}"),
        ("Read", ["t", "0"], "after must be int, got str"),
        ("CheckpointRows", [True, True, [-1]], "absorbed[0] must be >= 0, got -1"),
        ("Read", [msgspec.Raw(b"\xa3\xed\xa0\x80"), 0], "topic must be UTF-8 text"),
    ],
)  # fmt: skip
def test_the_error_names_the_field_the_value_and_the_limit(kind: str, body: list[Any], text: str) -> None:
    with pytest.raises(InvalidRequest) as refused:
        sent(kind, body)
    assert refused.value.message == text
    assert refused.value.detail["field"] == re.split(" must", text)[0]
    assert refused.value.detail["limit"]


def test_a_malformed_envelope_has_no_sender() -> None:
    for data in (b"", b"\xc1", _encode([PROTOCOL, "Ping", -1, []]), _encode([PROTOCOL, 5, 1, []])):
        with pytest.raises(EnvelopeInvalid) as refused:
            decode(data)
        assert refused.value.corr == 0
    with pytest.raises(EnvelopeInvalid) as refused:
        decode(_encode([PROTOCOL, "Pang", 9, []]))
    assert refused.value.corr == 9


@pytest.mark.parametrize("kind", ["RecordsDelete", "RouterCreate", "TopicPut"])
def test_extension_types_are_refused_in_fields_of_any_type(kind: str) -> None:
    """The envelope fuzzer found one: it was passed on to the code behind, which knows no such value."""
    body = plain_body(KINDS[kind], {})
    place = {"RecordsDelete": 2, "RouterCreate": 3, "TopicPut": 1}[kind]
    extension = msgspec.msgpack.Ext(93, b"x")
    body[place] = {"ttl_ms": extension} if kind == "TopicPut" else extension
    with pytest.raises(MessageInvalid, match="Extension type 93 is not allowed"):
        sent(kind, body)
