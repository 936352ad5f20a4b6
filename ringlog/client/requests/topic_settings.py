"""Settings of a topic as keyword arguments, for type checkers. `ringlog.settings` has their ranges and
defaults."""

from __future__ import annotations

from typing import Literal, TypedDict

from ringlog.types import Durability


class TopicSettings(TypedDict, total=False):
    """Keyword arguments of `topics.create` and `topics.configure`.

    Names that end in `_ms` are milliseconds. The reference of topic settings states range, default and
    meaning of each.
    """

    type: Literal["log", "queue"]
    ttl_ms: int
    cap_records: int
    cap_bytes: int
    discard: Literal["old", "reject"]
    durable: bool
    durability: Literal["ephemeral", "memory", "disk", "fsync"] | Durability
    priority: int | None
    auto_priority: bool
    auto_create: bool
    idempotency_window_ms: int
    idempotency_max: int
    dedupe_node: bool
    lease_ms: int
    backoff_ms: int
    backoff_max_ms: int
    claim_jitter_ms: int
    max_deliveries: int
    dead_letter: str | None
    dead_letter_keep_expiry: bool
    leases_durable: bool
    record_priority: bool
    priority_levels: int
    starvation_ms: int
    retain_until_acked: bool
    hard_cap_records: int
    hard_cap_bytes: int
    expire_unused_ms: int
    compression: Literal["none", "lz4", "zstd"]
