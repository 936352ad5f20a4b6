"""Table of the settings of topics, consumer groups and calls: name, type, unit, range, default. Pure.

Client, command line, configuration file and shard check values against the same rows. A value that one of
them accepts is therefore valid for all of them. A value outside its range is refused where it enters. The
error names the setting, the value and the limit. A log or snapshot of an earlier release may contain a number
outside the range. It is clamped instead (`clamp_stored`): stored data never prevents a shard from starting.

The ranges keep arithmetic within 63 bits: a duration in nanoseconds, a time plus a duration in microseconds,
a sum of two counts.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from ringlog.errors import InvalidRequest
from ringlog.limits import (
    BACKOFF_MAX_MS_DEFAULT,
    CLAIM_JITTER_MS_MAX,
    COUNT_MAX,
    DELIVERIES_MAX,
    DURATION_MS_MAX,
    EXPIRE_UNUSED_MS_MIN,
    GROUP_PENDING_MAX,
    IDEMPOTENCY_KEYS_PER_TOPIC,
    IDEMPOTENCY_KEYS_PER_TOPIC_MAX,
    LEASE_MS_MAX,
    LEASE_MS_MIN,
    NACK_DELAY_MS_MAX,
    PRIORITY_LEVELS_MAX,
    TOPIC_PRIORITY_MAX,
)
from ringlog.names import check_topic_name
from ringlog.types import Durability

LOG = "log"
QUEUE = "queue"
DISCARD_OLD = "old"
DISCARD_REJECT = "reject"

WHOLE, FLAG, WORD, NAME = "integer", "boolean", "word", "topic name"
_SHOWN_CHARS_MAX = 64


@dataclass(frozen=True, slots=True, kw_only=True)
class Setting:
    """One setting: its type, range and default."""

    name: str
    kind: str
    default: Any
    low: int = 0
    high: int = 0
    unit: str = ""
    zero: str = ""
    """Meaning of the value 0, which is then accepted even if it is below `low`."""
    words: tuple[str, ...] = ()
    is_nullable: bool = False
    topic_type_only: str = ""
    """The only topic type on which the setting has an effect; "" = every type."""

    def check(self, value: Any) -> Any:
        """Return the value if it is valid, else raise InvalidRequest with setting, value and limit."""
        if value is None and self.is_nullable:
            return None
        if not self._is_of_type(value):
            found = "null" if value is None else type(value).__name__
            raise InvalidRequest(
                f"{self.name} must be {self.allowed}, got {found}", field=self.name, expected=self.kind,
                found=found,
            )  # fmt: skip
        if self.words and value not in self.words:
            raise InvalidRequest(
                f"{self.name} must be {self.allowed}, got {_shown(value)}", field=self.name,
                words=list(self.words), found=value[:_SHOWN_CHARS_MAX],
            )  # fmt: skip
        if self.kind == NAME:
            check_topic_name(value, self.name)
        if self.kind == WHOLE and not self._is_in_range(value):
            raise InvalidRequest(
                f"{self.name} must be {self.allowed}, got {_shown(value)}", field=self.name, min=self.low,
                max=self.high, found=_shown(value),
            )  # fmt: skip
        return value

    def clamp(self, value: Any) -> Any:
        """Return the value, clamped to the range. Raises InvalidRequest for another type or unknown word."""
        if self.kind == WHOLE and self._is_of_type(value) and not self._is_in_range(value):
            return min(max(value, self.low), self.high)
        return self.check(value)

    @property
    def allowed(self) -> str:
        """Description of the accepted values, for error texts."""
        if self.kind == FLAG:
            found = "true or false"
        elif self.kind == NAME:
            found = "a topic name"
        elif self.words:
            found = f"one of {', '.join(self.words)}"
        else:
            found = f"an integer from {self.low} to {self.high}"
            found += f" {self.unit}" if self.unit else ""
            found += f" (0 = {self.zero})" if self.zero else ""
        return f"{found}, or null" if self.is_nullable else found

    def _is_of_type(self, value: Any) -> bool:
        if self.kind == WHOLE:
            return isinstance(value, int) and not isinstance(value, bool)
        return isinstance(value, bool if self.kind == FLAG else str)

    def _is_in_range(self, value: int) -> bool:
        return self.low <= value <= self.high or (value == 0 and bool(self.zero))


def _flag(name: str, default: bool, only: str = "") -> Setting:
    return Setting(name=name, kind=FLAG, default=default, topic_type_only=only)


def _word(name: str, default: str, *words: str) -> Setting:
    return Setting(name=name, kind=WORD, default=default, words=words)


def _whole(name: str, default: int | None, low: int, high: int, unit: str = "", **more: Any) -> Setting:
    return Setting(name=name, kind=WHOLE, default=default, low=low, high=high, unit=unit, **more)


def _table(*rows: Setting) -> Mapping[str, Setting]:
    return {row.name: row for row in rows}


TOPIC_SETTINGS = _table(
    _word("type", LOG, LOG, QUEUE),
    _whole("ttl_ms", 0, 0, DURATION_MS_MAX, "ms", zero="never"),
    _whole("cap_records", 0, 0, COUNT_MAX, "records", zero="no bound"),
    _whole("cap_bytes", 0, 0, COUNT_MAX, "bytes", zero="no bound"),
    _word("discard", DISCARD_OLD, DISCARD_OLD, DISCARD_REJECT),
    _flag("durable", False),
    _word("durability", Durability.DISK.label, *(each.label for each in Durability)),
    _whole("priority", None, -TOPIC_PRIORITY_MAX, TOPIC_PRIORITY_MAX, is_nullable=True),
    _flag("auto_priority", True),
    _flag("auto_create", True),
    _whole("idempotency_window_ms", 120_000, 0, DURATION_MS_MAX, "ms", zero="nothing is remembered"),
    _whole(
        "idempotency_max", IDEMPOTENCY_KEYS_PER_TOPIC, 1, IDEMPOTENCY_KEYS_PER_TOPIC_MAX, "keys and dedup ids"
    ),
    _flag("dedupe_node", True),
    _whole("lease_ms", 30_000, LEASE_MS_MIN, LEASE_MS_MAX, "ms"),
    _whole("backoff_ms", 0, 0, NACK_DELAY_MS_MAX, "ms", zero="none", topic_type_only=QUEUE),
    _whole("backoff_max_ms", BACKOFF_MAX_MS_DEFAULT, 0, NACK_DELAY_MS_MAX, "ms", topic_type_only=QUEUE),
    _whole("claim_jitter_ms", 0, 0, CLAIM_JITTER_MS_MAX, "ms", zero="none", topic_type_only=QUEUE),
    _whole("max_deliveries", 0, 0, DELIVERIES_MAX, "deliveries", zero="no bound", topic_type_only=QUEUE),
    Setting(name="dead_letter", kind=NAME, default=None, is_nullable=True, topic_type_only=QUEUE),
    _flag("dead_letter_keep_expiry", False, QUEUE),
    _flag("leases_durable", False, QUEUE),
    _flag("record_priority", False),
    _whole("priority_levels", 3, 1, PRIORITY_LEVELS_MAX, "levels"),
    _whole("starvation_ms", 30_000, 0, DURATION_MS_MAX, "ms", zero="never"),
    _flag("retain_until_acked", False),
    _whole("hard_cap_records", 0, 0, COUNT_MAX, "records", zero="no bound"),
    _whole("hard_cap_bytes", 0, 0, COUNT_MAX, "bytes", zero="no bound"),
    _whole("expire_unused_ms", 0, EXPIRE_UNUSED_MS_MIN, DURATION_MS_MAX, "ms", zero="never"),
    _word("compression", "none", "none", "lz4", "zstd"),
)
"""Settings of a topic. `durable` is shorthand for two values of `durability`.

To add one, add a row here and a field to TopicConfig. A stored configuration without it has the default.
"""

GROUP_SETTINGS = _table(
    _whole("max_in_flight", 0, 0, GROUP_PENDING_MAX, "records", zero="no bound"),
    _whole("member_max_in_flight", 0, 0, GROUP_PENDING_MAX, "records", zero="no bound"),
    _whole("max_deliveries", 0, 0, DELIVERIES_MAX, "deliveries", zero="no bound"),
    _whole("backoff_ms", 0, 0, NACK_DELAY_MS_MAX, "ms", zero="none"),
    _whole("backoff_max_ms", BACKOFF_MAX_MS_DEFAULT, 0, NACK_DELAY_MS_MAX, "ms"),
)
"""Numeric settings of a consumer group, fixed at its creation."""

CALL_SETTINGS = _table(
    _whole("lease_ms", 0, LEASE_MS_MIN, LEASE_MS_MAX, "ms", zero="the setting of the topic"),
    _whole("delay_ms", 0, 0, NACK_DELAY_MS_MAX, "ms", zero="at once"),
    _whole("wait_ms", 0, 0, DURATION_MS_MAX, "ms", zero="no wait"),
    _whole("min_idle_ms", 0, 0, DURATION_MS_MAX, "ms", zero="any"),
    _whole("window_ms", 0, 0, DURATION_MS_MAX, "ms", zero="the setting of the topic"),
)
"""Numeric arguments of requests, by their names in messages."""


def defaults(table: Mapping[str, Setting]) -> dict[str, Any]:
    """Return the default of every setting."""
    return {name: row.default for name, row in table.items()}


def check_settings(
    table: Mapping[str, Setting], given: Mapping[str, Any], what: str = "topic"
) -> dict[str, Any]:
    """Return the given settings after a check of each value.

    Raises InvalidRequest. For an unknown name the error suggests the nearest known one. `what` is the noun of
    the error text.
    """
    for name in given:
        if name not in table:
            raise unknown_setting_error(name, table, what)
    return {name: table[name].check(value) for name, value in given.items()}


def require_no_auto_create(named: Mapping[str, Any]) -> None:
    """Raise InvalidRequest for `auto_create = false` in a call that creates or configures a topic itself."""
    if named.get("auto_create") is False:
        raise InvalidRequest(
            "auto_create has no effect here: it applies to writes that carry a configuration. To keep a "
            "producer from creating a topic, open it with create=False",
            field="auto_create",
        )


def require_effect(named: Mapping[str, Any], kind: str) -> None:
    """Raise InvalidRequest for a setting that has no effect on topics of type `kind`.

    A setting with its default value is accepted.
    """
    for name, value in named.items():
        row = TOPIC_SETTINGS[name]
        if row.topic_type_only and row.topic_type_only != kind and value != row.default:
            raise InvalidRequest(
                f"{name} has no effect on a {kind}: it is a setting of topics of type {row.topic_type_only}",
                field=name, type=kind,
            )  # fmt: skip


def clamp_stored(table: Mapping[str, Setting], stored: Mapping[str, Any]) -> dict[str, Any]:
    """Return stored settings: numbers clamped to their ranges, settings of later releases left out.

    Raises InvalidRequest for a value that no release can have written.
    """
    return {name: table[name].clamp(value) for name, value in stored.items() if name in table}


def unknown_setting_error(name: object, known: Iterable[str], what: str = "topic") -> InvalidRequest:
    """Return the error for a setting that does not exist."""
    nearest = nearest_name(str(name), list(known))
    hint = f"; did you mean {nearest}?" if nearest else ""
    detail: dict[str, Any] = {"nearest": nearest} if nearest else {}
    return InvalidRequest(
        f"a {what} has no setting {_shown(name)}{hint}", field=str(name)[:_SHOWN_CHARS_MAX], **detail
    )


def nearest_name(name: str, known: Sequence[str]) -> str:
    """Return the known name that is most similar; "" if none is similar."""
    return next(iter(difflib.get_close_matches(name[:_SHOWN_CHARS_MAX], known, n=1, cutoff=0.5)), "")


def resolve_durable(given: Mapping[str, Any]) -> dict[str, Any]:
    """Return a topic's settings with `durable` replaced by `durability`, unless that is given as well.

    `durable = true` becomes `fsync`, `false` becomes `disk`.
    """
    found = dict(given)
    durable = found.pop("durable", None)
    if durable is not None and "durability" not in found:
        found["durability"] = (Durability.FSYNC if durable else Durability.DISK).label
    return found


def differences(asked: Mapping[str, Any], existing: Mapping[str, Any]) -> dict[str, tuple[Any, Any]]:
    """Return name -> (existing, requested) for each requested setting that differs from the existing one."""
    return {name: (existing.get(name), value) for name, value in asked.items() if existing.get(name) != value}


def describe_differences(differing: Mapping[str, tuple[Any, Any]]) -> str:
    """Return the differences as text."""
    return "; ".join(f"{name} is {now!r}, asked for {asked!r}" for name, (now, asked) in differing.items())


def _shown(value: object) -> str:
    """Return the value as text for an error: at most 64 characters, and huge integers as a power of 2."""
    if isinstance(value, int) and value.bit_length() > 8 * _SHOWN_CHARS_MAX:
        return f"{'-' if value < 0 else ''}2**{value.bit_length() - 1} or more"
    text = repr(value)
    return text if len(text) <= _SHOWN_CHARS_MAX else f"{text[:_SHOWN_CHARS_MAX]}..."
