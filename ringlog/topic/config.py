"""What a topic is configured to be: read from a request, checked once, stored whole. Pure.

The rows of ringlog/settings.py say what each field takes. A request with an unknown name, a wrong type, an
unknown word, a number out of range or a setting without effect on this type of topic raises InvalidRequest
that names the field. What the log holds was accepted by some version: numbers are moved into today's ranges,
names of later versions are passed over. A config always states its class: `durability` decides, else
`durable` means fsync or disk.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from typing import Any

import msgspec

from ringlog.errors import CorruptData, InvalidRequest, TopicIncompatible
from ringlog.limits import IDEMPOTENCY_KEYS_PER_TOPIC
from ringlog.settings import (
    DISCARD_OLD,
    DISCARD_REJECT,
    LOG,
    QUEUE,
    TOPIC_SETTINGS,
    check_settings,
    clamp_stored,
    defaults,
    require_effect,
    resolve_durable,
)
from ringlog.types import Durability

__all__ = ["DISCARD_OLD", "DISCARD_REJECT", "LOG", "QUEUE", "TopicConfig"]


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
    """Codec of the topic's records in segments: none (as storage.compression says), lz4 or zstd."""

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
        named = check_settings(TOPIC_SETTINGS, _mapping(given))
        config = self._changed(named)
        require_effect(named, config.type)
        if topic and config.type == QUEUE and config.dead_letter == topic:
            raise InvalidRequest("a queue cannot be its own dead letter", field="dead_letter", topic=topic)
        return config

    def _changed(self, values: Mapping[str, Any]) -> TopicConfig:
        """This config with other values, which were checked."""
        changed = resolve_durable(values)
        if "durability" in changed:
            changed["durability"] = Durability.parse(changed["durability"])
        return replace(self, **changed)

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
        """Decode what the log holds. Fields of later versions are ignored, missing ones take defaults, and
        numbers that an earlier version accepted are moved into today's ranges.

        Raises CorruptData for anything that `to_bytes` of no version could have written.
        """
        try:
            given = _decoder.decode(data)
            return cls()._changed(clamp_stored(TOPIC_SETTINGS, given))
        except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError, InvalidRequest) as e:
            raise CorruptData("stored topic config does not decode", reason=str(e)) from None


_decoder = msgspec.msgpack.Decoder(dict[str, Any])
_FIELDS = tuple(field.name for field in fields(TopicConfig))


def _mapping(given: object) -> Mapping[str, Any]:
    if not isinstance(given, Mapping):
        found = "null" if given is None else type(given).__name__
        raise InvalidRequest(f"a topic config must be an object, got {found}", field="config", found=found)
    return given


assert TopicConfig().to_dict() == defaults(TOPIC_SETTINGS), "every field has its row, with its default"
