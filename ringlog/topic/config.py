"""What a topic is configured to be: read from a request, normalised once, stored whole. Pure.

Unknown fields are ignored; a wrong type, an unknown word or a number out of range is InvalidRequest
that names the field; what is documented as clamped is clamped, so that the stored and echoed value is
the one in force. A config always states its class: `durability` decides, else `durable` means fsync
or disk. To add a field: give it a default here and a row in the table; stored configs without it
then read as that default.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields, replace
from typing import Any

import msgspec

from ringlog.errors import CorruptData, InvalidRequest, TopicIncompatible
from ringlog.limits import (
    EXPIRE_UNUSED_MS_MIN,
    IDEMPOTENCY_KEYS_PER_TOPIC,
    IDEMPOTENCY_KEYS_PER_TOPIC_MAX,
    LEASE_MS_MAX,
    LEASE_MS_MIN,
    NACK_DELAY_MS_MAX,
)
from ringlog.topic.names import check_topic_name
from ringlog.types import Durability

U64_MAX = (1 << 64) - 1
PRIORITY_MAX = 1_000
CLAIM_JITTER_MS_MAX = 5_000
PRIORITY_LEVELS_MAX = 256
"""The priority column of a frame is one byte."""

LOG = "log"
QUEUE = "queue"
DISCARD_OLD = "old"
DISCARD_REJECT = "reject"


@dataclass(frozen=True, slots=True, kw_only=True)
class TopicConfig:
    """One topic's configuration, normalised. Build it with `parse`, which checks; times in milliseconds."""

    type: str = LOG
    ttl_ms: int = 0
    """A record older than this is expired; 0 = never."""
    cap_records: int = 0
    cap_bytes: int = 0
    """Most live records and accounted bytes to retain; 0 = no bound."""
    discard: str = DISCARD_OLD
    """What a write that would exceed a cap does: evict the oldest, or be refused."""
    durability: Durability = Durability.DISK
    priority: int | None = None
    auto_priority: bool = True
    auto_create: bool = True
    idempotency_window_ms: int = 120_000
    idempotency_max: int = IDEMPOTENCY_KEYS_PER_TOPIC
    """Most keys and dedup ids remembered within the window."""
    dedupe_node: bool = True
    lease_ms: int = 30_000
    backoff_ms: int = 0
    """Queue: how long a job rests that came back and nobody said how long, twice as long after each delivery;
    0 = not at all."""
    backoff_max_ms: int = 60_000
    """And the longest of these rests."""
    claim_jitter_ms: int = 0
    max_deliveries: int = 0
    dead_letter: str | None = None
    dead_letter_keep_expiry: bool = False
    """Does a dead letter end when its job would have?"""
    leases_durable: bool = False
    record_priority: bool = False
    """Queue: are jobs of a higher priority handed out first?"""
    retain_until_acked: bool = False
    """Caps and TTL wait for the queue-mode group that is furthest behind, up to the hard caps."""
    hard_cap_records: int = 0
    hard_cap_bytes: int = 0
    """Caps that wait for nobody, where `retain_until_acked` lets the others wait; 0 = no bound."""
    priority_levels: int = 3
    """Levels of a record's own priority: 0 up to this less one. One above that counts as the highest."""
    starvation_ms: int = 30_000
    """Queue with priorities: a job below the highest level that waited longer goes first; 0 = none does."""
    expire_unused_ms: int = 0
    """The topic is removed when nobody used it for this long; 0 = never. Said when it is made: later it may
    become longer, or 0."""
    compression: str = "none"
    """Codec of frames written by the library's own producers: none, lz4 or zstd."""

    @property
    def logs_leases(self) -> bool:
        """Is it a queue whose leases outlive their shard? Those of class `ephemeral` have no log (QL-19)."""
        return self.leases_durable and self.type == QUEUE and self.durability != Durability.EPHEMERAL

    @property
    def hidden_after_us(self) -> int:
        """A record older than this is hidden from readers before it is removed; 0 = none is. What waits for a
        group has to be seen until it goes."""
        return 0 if self.retain_until_acked else self.ttl_ms * 1_000

    @property
    def durable(self) -> bool:
        """Shorthand that responses carry: the class is fsync."""
        return self.durability is Durability.FSYNC

    @classmethod
    def parse(cls, given: Mapping[str, Any], topic: str = "") -> TopicConfig:
        """Check and normalise a request's fields, absent ones taking their defaults (PUT).

        `topic` is the topic's own name, which a queue may not have as its dead letter. Raises
        InvalidRequest with `field` and what was found.
        """
        return cls().merged(given, topic)

    def merged(self, given: Mapping[str, Any], topic: str = "") -> TopicConfig:
        """Return this config with only the named fields changed; the same checks as `parse`."""
        if not isinstance(given, Mapping):
            raise InvalidRequest("a topic config must be an object", field="config", found=_type_of(given))
        changed = {name: check(name, given[name]) for name, check in _CHECKS.items() if name in given}
        durable = changed.pop("durable", None)
        if durable is not None and "durability" not in changed:
            changed["durability"] = Durability.FSYNC if durable else Durability.DISK
        config = replace(self, **changed)
        if topic and config.type == QUEUE and config.dead_letter == topic:
            raise InvalidRequest("a queue cannot be its own dead letter", field="dead_letter", topic=topic)
        return config

    def require_type_of(self, existing: TopicConfig, topic: str) -> None:
        """Raise TopicIncompatible when this config would change an existing topic's type (C-7)."""
        if self.type != existing.type:
            raise TopicIncompatible(
                "the topic exists with another type",
                topic=topic,
                existing_type=existing.type,
                requested_type=self.type,
            )

    def require_lifetime_of(self, existing: TopicConfig, topic: str) -> None:
        """Raise InvalidRequest when an existing topic would go unused sooner than was said: whoever follows
        it reads shared memory, and would not know that he has to say so, or how soon."""
        old, new = existing.expire_unused_ms, self.expire_unused_ms
        if new and (not old or new < old):
            raise InvalidRequest(
                "a topic's time without use is never made shorter", field="expire_unused_ms", topic=topic,
                existing=old, requested=new,
            )  # fmt: skip

    def to_dict(self) -> dict[str, Any]:
        """Every field as plain values, as requests and responses carry them."""
        plain = {name: getattr(self, name) for name in _FIELDS}
        plain["durability"] = self.durability.label
        plain["durable"] = self.durable
        return plain

    def to_bytes(self) -> bytes:
        """Encode for the log (MessagePack map)."""
        return msgspec.msgpack.encode(self.to_dict())

    @classmethod
    def from_bytes(cls, data: bytes | memoryview) -> TopicConfig:
        """Decode what the log holds; fields of later versions are ignored, missing ones take defaults.

        Raises CorruptData for anything that `to_bytes` of no version could have written.
        """
        try:
            given = _decoder.decode(data)
            unused_ms = given.get("expire_unused_ms")
            if type(unused_ms) is int and 0 < unused_ms < EXPIRE_UNUSED_MS_MIN:
                given["expire_unused_ms"] = EXPIRE_UNUSED_MS_MIN  # Stored when it had no effect.
            return cls.parse(given)
        except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError, InvalidRequest) as e:
            raise CorruptData("stored topic config does not decode", reason=str(e)) from None


_decoder = msgspec.msgpack.Decoder(dict[str, Any])
_FIELDS = tuple(field.name for field in fields(TopicConfig))

Check = Callable[[str, Any], Any]


def _type_of(value: object) -> str:
    return "null" if value is None else type(value).__name__


def _wrong_type(field: str, expected: str, value: object) -> InvalidRequest:
    return InvalidRequest("wrong type", field=field, expected=expected, found=_type_of(value))


def _boolean(field: str, value: Any) -> bool:
    if not isinstance(value, bool):
        raise _wrong_type(field, "boolean", value)
    return value


def _integer(field: str, value: Any) -> int:
    if not isinstance(value, int) or isinstance(value, bool):
        raise _wrong_type(field, "integer", value)
    return value


def _unsigned(field: str, value: Any) -> int:
    number = _integer(field, value)
    if not 0 <= number <= U64_MAX:
        raise InvalidRequest("out of range", field=field, min=0, max=U64_MAX, found=str(number)[:32])
    return number


def _none_or_from(low: int) -> Check:
    """Check an unsigned field that is 0 or at least `low`."""

    def check(field: str, value: Any) -> int:
        number = _unsigned(field, value)
        if 0 < number < low:
            raise InvalidRequest("out of range", field=field, min=low, max=U64_MAX, found=str(number), none=0)
        return number

    return check


def _clamped(low: int, high: int) -> Check:
    """Check an unsigned field and move it into [low, high]."""
    return lambda field, value: min(max(_unsigned(field, value), low), high)


def _one_of(*words: str) -> Check:
    def check(field: str, value: Any) -> str:
        if not isinstance(value, str):
            raise _wrong_type(field, "string", value)
        if value not in words:
            raise InvalidRequest("not one of the words", field=field, words=list(words), found=value[:64])
        return value

    return check


_class_word = _one_of(*(each.label for each in Durability))


def _durability(field: str, value: Any) -> Durability:
    return Durability.parse(_class_word(field, value))


def _priority(field: str, value: Any) -> int | None:
    if value is None:
        return None
    return min(max(_integer(field, value), -PRIORITY_MAX), PRIORITY_MAX)


def _dead_letter(field: str, value: Any) -> str | None:
    if value is not None:
        check_topic_name(value, field)
    return value if value is None else str(value)


_CHECKS: dict[str, Check] = {
    "type": _one_of(LOG, QUEUE),
    "ttl_ms": _unsigned,
    "cap_records": _unsigned,
    "cap_bytes": _unsigned,
    "discard": _one_of(DISCARD_OLD, DISCARD_REJECT),
    "durable": _boolean,
    "durability": _durability,
    "priority": _priority,
    "auto_priority": _boolean,
    "auto_create": _boolean,
    "idempotency_window_ms": _unsigned,
    "idempotency_max": _clamped(1, IDEMPOTENCY_KEYS_PER_TOPIC_MAX),
    "dedupe_node": _boolean,
    "lease_ms": _clamped(LEASE_MS_MIN, LEASE_MS_MAX),
    "backoff_ms": _clamped(0, NACK_DELAY_MS_MAX),
    "backoff_max_ms": _clamped(0, NACK_DELAY_MS_MAX),
    "claim_jitter_ms": _clamped(0, CLAIM_JITTER_MS_MAX),
    "max_deliveries": _unsigned,
    "dead_letter": _dead_letter,
    "dead_letter_keep_expiry": _boolean,
    "leases_durable": _boolean,
    "record_priority": _boolean,
    "starvation_ms": _unsigned,
    "retain_until_acked": _boolean,
    "hard_cap_records": _unsigned,
    "hard_cap_bytes": _unsigned,
    "priority_levels": _clamped(1, PRIORITY_LEVELS_MAX),
    "expire_unused_ms": _none_or_from(EXPIRE_UNUSED_MS_MIN),
    "compression": _one_of("none", "lz4", "zstd"),
}

assert set(_CHECKS) == {*_FIELDS, "durable"}, "every field has its check"
