"""Configuration of a topic: parsed from a request, validated once, stored completely. Pure.

ringlog/settings.py defines the type and range of each setting. A request raises InvalidRequest, which names
the field, for an unknown name, a wrong type, an unknown value, a number out of range, or a setting without
effect on this type of topic. The log contains only configurations that some version accepted: numbers are
moved into today's ranges, and names of later versions are ignored.

A config always states its durability class: `durability` decides; without it `durable` means fsync or disk.
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
    """Normalized configuration of one topic. Create it with `parse`, which validates.

    Times are in milliseconds.
    """

    type: str = LOG
    ttl_ms: int = 0
    """A record older than this is expired; 0 = never."""
    cap_records: int = 0
    cap_bytes: int = 0
    """Highest number of live records and of accounted bytes; 0 = no bound."""
    discard: str = DISCARD_OLD
    """Effect of a write that would exceed a cap: evict the oldest records, or refuse the write."""
    durability: Durability = Durability.DISK
    priority: int | None = None
    auto_priority: bool = True
    auto_create: bool = True
    idempotency_window_ms: int = 120_000
    idempotency_max: int = IDEMPOTENCY_KEYS_PER_TOPIC
    """Highest number of idempotency keys and dedup ids that are remembered within the window."""
    dedupe_node: bool = True
    lease_ms: int = 30_000
    backoff_ms: int = 0
    """Queue: delay of a returned job if the nack states none. It doubles with each delivery. 0 = no delay."""
    backoff_max_ms: int = 60_000
    """Longest backoff delay."""
    claim_jitter_ms: int = 0
    max_deliveries: int = 0
    dead_letter: str | None = None
    dead_letter_keep_expiry: bool = False
    """A dead letter expires at the time at which its job would have expired."""
    leases_durable: bool = False
    record_priority: bool = False
    """Queue: jobs of a higher priority are delivered first."""
    retain_until_acked: bool = False
    """Caps and TTL keep records that the slowest queue-mode group has not acked, up to the hard caps."""
    hard_cap_records: int = 0
    hard_cap_bytes: int = 0
    """Caps that apply even to records that `retain_until_acked` keeps; 0 = no bound."""
    priority_levels: int = 3
    """Number of priority levels of records: 0 to this number minus 1. A greater priority counts as the
    highest level."""
    starvation_ms: int = 30_000
    """Queue with priorities: a job below the highest level that waited longer is delivered first; 0 = no such
    rule."""
    expire_unused_ms: int = 0
    """The topic is deleted after this time without use; 0 = never. Set at creation; later it can only become
    longer or 0."""
    compression: str = "none"
    """Codec of the topic's records in segments: none (storage.compression decides), lz4 or zstd."""

    @property
    def logs_leases(self) -> bool:
        """The topic is a queue whose leases survive its shard.

        Queues of class `ephemeral` have no log for them.
        """
        return self.leases_durable and self.type == QUEUE and self.durability != Durability.EPHEMERAL

    @property
    def hidden_after_us(self) -> int:
        """Age in microseconds at which readers skip a record before it is removed; 0 = no such age.

        A record that waits for a group stays visible until it is removed."""
        return 0 if self.retain_until_acked else self.ttl_ms * 1_000

    @property
    def durable(self) -> bool:
        """Shorthand in responses: the class is fsync."""
        return self.durability is Durability.FSYNC

    @classmethod
    def parse(cls, given: Mapping[str, Any], topic: str = "", *, allow_inert: bool = False) -> TopicConfig:
        """Validate and normalize the settings of a request; missing ones get their defaults.

        `topic` is the topic's own name, which cannot be the dead-letter topic of a queue. Raises
        InvalidRequest with `field` and the found value. With `allow_inert` settings without effect on this
        type of topic are stored.
        """
        return cls().merged(given, topic, allow_inert=allow_inert)

    def merged(self, given: Mapping[str, Any], topic: str = "", *, allow_inert: bool = False) -> TopicConfig:
        """Return this config with only the named settings changed. The validation is that of `parse`."""
        named = check_settings(TOPIC_SETTINGS, _mapping(given))
        config = self._changed(named)
        if not allow_inert:
            require_effect(named, config.type)
        if topic and config.type == QUEUE and config.dead_letter == topic:
            raise InvalidRequest(
                f"dead_letter must be another topic than the queue itself, got {topic[:64]!r}",
                field="dead_letter", topic=topic,
            )  # fmt: skip
        return config

    def _changed(self, values: Mapping[str, Any]) -> TopicConfig:
        """Return this config with other values, which were validated."""
        changed = resolve_durable(values)
        if "durability" in changed:
            changed["durability"] = Durability.parse(changed["durability"])
        return replace(self, **changed)

    def require_type_of(self, existing: TopicConfig, topic: str) -> None:
        """Raise TopicIncompatible if this config would change the type of an existing topic."""
        if self.type != existing.type:
            raise TopicIncompatible(
                f"the topic exists with type {existing.type}, requested type {self.type}: it cannot change",
                topic=topic,
                existing_type=existing.type,
                requested_type=self.type,
            )

    def require_lifetime_of(self, existing: TopicConfig, topic: str) -> None:
        """Raise InvalidRequest if this config would shorten the idle time of an existing topic.

        A client that follows the topic reads shared memory and renews the topic at the interval that it
        knows. It would not notice a shorter one."""
        old, new = existing.expire_unused_ms, self.expire_unused_ms
        if new and (not old or new < old):
            rule = f"0 or >= {old}" if old else "0"
            raise InvalidRequest(
                f"expire_unused_ms must be {rule}, got {new}: it cannot be shortened",
                field="expire_unused_ms", topic=topic, existing=old, requested=new,
            )  # fmt: skip

    def to_dict(self) -> dict[str, Any]:
        """Return every setting as a plain value, as in requests and responses."""
        plain = {name: getattr(self, name) for name in _FIELDS}
        plain["durability"] = self.durability.label
        plain["durable"] = self.durable
        return plain

    def to_bytes(self) -> bytes:
        """Encode for the log (MessagePack map)."""
        return msgspec.msgpack.encode(self.to_dict())

    @classmethod
    def from_bytes(cls, data: bytes | memoryview) -> TopicConfig:
        """Decode a config from the log.

        Settings of later versions are ignored, missing ones get their defaults, and numbers that an earlier
        version accepted are moved into today's ranges. Raises CorruptData for anything that no version could
        have written.
        """
        try:
            given = _decoder.decode(data)
            return cls()._changed(clamp_stored(TOPIC_SETTINGS, given))
        except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError, InvalidRequest) as e:
            raise CorruptData("stored topic config cannot be decoded", reason=str(e)) from None


_decoder = msgspec.msgpack.Decoder(dict[str, Any])
_FIELDS = tuple(field.name for field in fields(TopicConfig))


def _mapping(given: object) -> Mapping[str, Any]:
    if not isinstance(given, Mapping):
        found = "null" if given is None else type(given).__name__
        raise InvalidRequest(f"a topic config must be an object, got {found}", field="config", found=found)
    return given


assert TopicConfig().to_dict() == defaults(TOPIC_SETTINGS), "every field has its row, with its default"
