"""Topic configuration: defaults, validation, merging and storage."""

from __future__ import annotations

import dataclasses

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ringlog.errors import CorruptData, InvalidRequest, TopicIncompatible
from ringlog.limits import DURATION_MS_MAX, EXPIRE_UNUSED_MS_MIN
from ringlog.settings import FLAG, NAME, TOPIC_SETTINGS, WHOLE
from ringlog.topic.config import TopicConfig
from ringlog.types import Durability

U64_MAX = (1 << 64) - 1
DEFAULTS = {
    "type": "log", "ttl_ms": 0, "cap_records": 0, "cap_bytes": 0, "discard": "old", "durable": False,
    "durability": "disk", "priority": None, "auto_priority": True, "auto_create": True,
    "idempotency_window_ms": 120_000, "idempotency_max": 65_536, "dedupe_node": True, "lease_ms": 30_000,
    "claim_jitter_ms": 0, "backoff_ms": 0, "backoff_max_ms": 60_000, "dead_letter_keep_expiry": False,
    "max_deliveries": 0, "dead_letter": None, "leases_durable": False, "record_priority": False,
    "starvation_ms": 30_000, "priority_levels": 3,
    "expire_unused_ms": 0, "compression": "none", "retain_until_acked": False, "hard_cap_records": 0,
    "hard_cap_bytes": 0,
}  # fmt: skip
UNSIGNED = [
    "ttl_ms", "cap_records", "cap_bytes", "idempotency_window_ms", "lease_ms", "claim_jitter_ms",
    "max_deliveries", "priority_levels", "expire_unused_ms", "starvation_ms", "hard_cap_records",
    "hard_cap_bytes", "idempotency_max", "backoff_ms", "backoff_max_ms",
]  # fmt: skip
BOOLEANS = [
    "durable", "record_priority", "auto_priority", "auto_create", "dedupe_node", "leases_durable",
    "retain_until_acked", "dead_letter_keep_expiry",
]  # fmt: skip
WORDS = ["type", "discard", "durability", "compression"]
NULLABLE = {"priority", "dead_letter"}


def test_an_empty_config_lists_every_field_with_its_default():
    """to_dict always contains every field."""
    assert TopicConfig.parse({}).to_dict() == DEFAULTS
    assert TopicConfig() == TopicConfig.parse({})


def test_queue_fields_of_a_log_are_kept():
    """The output of to_dict is valid input."""
    assert TopicConfig.parse({"type": "log", "lease_ms": 500}).lease_ms == 500
    echo = TopicConfig.parse({"ttl_ms": 5}).to_dict()
    assert TopicConfig.parse(echo).to_dict() == echo


@pytest.mark.parametrize("field", [name for name, row in TOPIC_SETTINGS.items() if row.topic_type_only])
def test_a_setting_that_does_nothing_on_this_type_is_refused(field):
    """A program that sets it expects an effect. Its default value has none and is accepted."""
    row = TOPIC_SETTINGS[field]
    other = {FLAG: not row.default, NAME: "dead"}.get(row.kind, row.high)
    with pytest.raises(InvalidRequest, match=f"{field} has no effect on a log"):
        TopicConfig.parse({field: other})
    assert TopicConfig.parse({field: row.default}) == TopicConfig()
    assert TopicConfig.parse({"type": "queue", field: other}).to_dict()[field] == other


@pytest.mark.parametrize(
    ("given", "nearest"),
    [("durabilty", "durability"), ("ttl", "ttl_ms"), ("cap_record", "cap_records"), ("colour", ""), ("", "")],
)
def test_an_unknown_field_is_refused_with_the_nearest_name(given, nearest):
    with pytest.raises(InvalidRequest) as caught:
        TopicConfig.parse({given: 5, "ttl_ms": 5})
    assert caught.value.detail.get("nearest", "") == nearest
    assert (f"did you mean {nearest}?" in str(caught.value)) == bool(nearest)
    assert repr(given) in str(caught.value)


@pytest.mark.parametrize("field", UNSIGNED)
@pytest.mark.parametrize("value", [-1, U64_MAX + 1, 1.0, "1", True, None, [], {}])
def test_an_unsigned_field_takes_only_unsigned_integers(field, value):
    """Booleans, floats and strings are refused."""
    refused(field, value)


@pytest.mark.parametrize("field", BOOLEANS)
@pytest.mark.parametrize("value", [0, 1, "true", None, []])
def test_a_boolean_field_takes_only_booleans(field, value):
    """Integers and strings are refused."""
    refused(field, value)


@pytest.mark.parametrize("field", WORDS)
@pytest.mark.parametrize("value", ["", "LOG", "fsync ", "new", 1, True, None, [], "x" * 10_000])
def test_an_enum_field_takes_only_its_values(field, value):
    """The values are case-sensitive."""
    refused(field, value)


@pytest.mark.parametrize("value", [1.5, "1", True, []])
def test_priority_takes_an_integer_or_null(value):
    """Other types are refused."""
    refused("priority", value)


@pytest.mark.parametrize("value", [1, True, [], "", "../x", "a b"])
def test_a_dead_letter_must_be_a_topic_name(value):
    """The value is a valid topic name or null."""
    refused("dead_letter", value)


def refused(field, value):
    with pytest.raises(InvalidRequest) as caught:
        TopicConfig.parse({field: value})
    assert caught.value.detail["field"] == field
    assert len(str(caught.value)) < 500


@pytest.mark.parametrize("field", [field for field in DEFAULTS if field not in NULLABLE])
def test_null_is_refused_unless_the_field_is_nullable(field):
    """Only `priority` and `dead_letter` are nullable."""
    refused(field, None)


@pytest.mark.parametrize("field", sorted(NULLABLE))
def test_null_clears_a_nullable_field(field):
    config = TopicConfig.parse({"type": "queue", "priority": 5, "dead_letter": "dead"}).merged({field: None})
    assert config.to_dict()[field] is None


@pytest.mark.parametrize(
    ("field", "given", "stored"),
    [
        ("priority", -1001, -1000), ("priority", -1000, -1000), ("priority", 1000, 1000),
        ("priority", 10**6, 1000), ("lease_ms", 0, 100), ("lease_ms", 99, 100), ("lease_ms", 100, 100),
        ("lease_ms", 86_400_000, 86_400_000), ("lease_ms", U64_MAX, 86_400_000),
        ("claim_jitter_ms", 5000, 5000), ("claim_jitter_ms", 5001, 5000), ("priority_levels", 0, 1),
        ("priority_levels", 257, 256), ("ttl_ms", U64_MAX, DURATION_MS_MAX),
        ("max_deliveries", U64_MAX, 10**6), ("cap_bytes", U64_MAX, (1 << 63) - 1), ("expire_unused_ms", 0, 0),
    ],
)  # fmt: skip
def test_a_number_out_of_range_is_refused_but_clamped_when_read_from_a_stored_config(field, given, stored):
    kind = {"type": "queue"}
    if given == stored:
        assert TopicConfig.parse({**kind, field: given}).to_dict()[field] == stored
    else:
        with pytest.raises(InvalidRequest, match=f"{field} must be an integer from .* got {given}") as caught:
            TopicConfig.parse({**kind, field: given})
        assert caught.value.detail["field"] == field
    old = msgspec.msgpack.encode({**TopicConfig.parse(kind).to_dict(), field: given})
    assert TopicConfig.from_bytes(old).to_dict()[field] == stored


@pytest.mark.parametrize("field", [row.name for row in TOPIC_SETTINGS.values() if row.kind == WHOLE])
def test_the_largest_and_the_smallest_value_are_kept(field):
    for value in (TOPIC_SETTINGS[field].low, TOPIC_SETTINGS[field].high):
        config = TopicConfig.parse({"type": "queue", field: value})
        assert TopicConfig.from_bytes(config.to_bytes()).to_dict()[field] == value


@pytest.mark.parametrize(
    ("given", "resolved"),
    [
        ({}, "disk"), ({"durable": False}, "disk"), ({"durable": True}, "fsync"),
        ({"durability": "memory"}, "memory"), ({"durability": "ephemeral", "durable": True}, "ephemeral"),
        ({"durability": "fsync", "durable": False}, "fsync"), ({"durability": "disk"}, "disk"),
    ],
)  # fmt: skip
def test_durability_is_resolved_and_sets_durable(given, resolved):
    """`durability` takes precedence over `durable`."""
    config = TopicConfig.parse(given)
    assert config.durability is Durability.parse(resolved)
    assert config.to_dict()["durability"] == resolved
    assert config.to_dict()["durable"] is (resolved == "fsync")


def test_a_queue_is_not_its_own_dead_letter():
    """A queue cannot be its own dead-letter topic."""
    with pytest.raises(InvalidRequest) as caught:
        TopicConfig.parse({"type": "queue", "dead_letter": "jobs"}, "jobs")
    assert caught.value.detail["field"] == "dead_letter"
    assert TopicConfig.parse({"type": "queue", "dead_letter": "dead"}, "jobs").dead_letter == "dead"


def test_a_merge_changes_only_the_named_fields():
    before = TopicConfig.parse({"ttl_ms": 5, "durability": "memory", "cap_bytes": 9})
    after = before.merged({"ttl_ms": 6})
    assert after == dataclasses.replace(before, ttl_ms=6)
    assert before.ttl_ms == 5


def test_a_merge_of_durable_sets_the_durability_class():
    memory = TopicConfig.parse({"durability": "memory"})
    assert memory.merged({"durable": True}).durability is Durability.FSYNC
    assert memory.merged({"durable": False}).durability is Durability.DISK
    assert memory.merged({"ttl_ms": 1}).durability is Durability.MEMORY


def test_a_merge_that_makes_a_queue_its_own_dead_letter_is_refused():
    """The merged configuration is validated as a whole."""
    config = TopicConfig.parse({"type": "queue"}, "jobs")
    with pytest.raises(InvalidRequest):
        config.merged({"dead_letter": "jobs"}, "jobs")


def test_another_topic_type_is_incompatible_and_reports_both_types():
    """A topic keeps its type for its whole life."""
    log, queue = TopicConfig(), TopicConfig.parse({"type": "queue"})
    log.require_type_of(TopicConfig.parse({"ttl_ms": 4}), "t")
    with pytest.raises(TopicIncompatible) as caught:
        queue.require_type_of(log, "t")
    assert caught.value.detail == {"topic": "t", "existing_type": "log", "requested_type": "queue"}


@pytest.mark.parametrize("given", [None, [], "{}", 3])
def test_a_config_that_is_no_object_is_refused(given):
    with pytest.raises(InvalidRequest):
        TopicConfig.parse(given)


def test_a_config_is_immutable_and_hashable():
    config = TopicConfig()
    with pytest.raises(dataclasses.FrozenInstanceError):
        config.ttl_ms = 3
    assert hash(config) == hash(TopicConfig())


def in_range(field):
    row = TOPIC_SETTINGS[field]
    return st.integers(row.low, row.high) | st.just(0 if row.zero else row.low)


@given(
    st.fixed_dictionaries(
        {},
        optional={
            **{field: in_range(field) for field in UNSIGNED},
            **{field: st.booleans() for field in BOOLEANS},
            "discard": st.sampled_from(["old", "reject"]),
            "durability": st.sampled_from([each.label for each in Durability]),
            "compression": st.sampled_from(["none", "lz4", "zstd"]),
            "priority": st.none() | st.integers(-1_000, 1_000),
            "dead_letter": st.sampled_from([None, "dead", "a:b.c-d_e", "x" * 255]),
        },
    )
)
def test_every_valid_config_survives_to_dict_and_the_log(given):
    """Normalising a normalised configuration changes nothing."""
    config = TopicConfig.parse({"type": "queue", **given})
    assert TopicConfig.parse(config.to_dict()) == config
    assert TopicConfig.from_bytes(config.to_bytes()) == config


@pytest.mark.parametrize("value", [1, EXPIRE_UNUSED_MS_MIN - 1])
def test_expire_unused_ms_has_a_minimum(value):
    """With a shorter time, a follower could not renew the topic before it expires."""
    refused("expire_unused_ms", value)
    assert TopicConfig.parse({"expire_unused_ms": EXPIRE_UNUSED_MS_MIN}).expire_unused_ms
    assert not TopicConfig.parse({"expire_unused_ms": 0}).expire_unused_ms


def test_a_stored_expire_unused_ms_below_the_minimum_reads_as_the_minimum():
    """Older versions stored such values without effect, and their logs must stay readable."""
    stored = msgspec.msgpack.encode({**TopicConfig().to_dict(), "expire_unused_ms": 5})
    assert TopicConfig.from_bytes(stored).expire_unused_ms == EXPIRE_UNUSED_MS_MIN


@pytest.mark.parametrize(("old", "new", "is_legal"), [
    (0, 0, True), (5_000, 5_000, True), (5_000, 5_001, True), (5_000, 0, True), (5_000, 4_999, False),
    (0, 5_000, False),
])  # fmt: skip
def test_expire_unused_ms_can_only_be_raised_or_disabled(old, new, is_legal):
    """The followers of a topic would not learn of a shorter time."""
    existing = TopicConfig.parse({"expire_unused_ms": old})
    config = TopicConfig.parse({"expire_unused_ms": new})
    if is_legal:
        config.require_lifetime_of(existing, "t")
        return
    with pytest.raises(InvalidRequest) as caught:
        config.require_lifetime_of(existing, "t")
    assert caught.value.detail["field"] == "expire_unused_ms"


def test_a_stored_config_of_an_older_version_uses_defaults_for_newer_fields():
    old = msgspec.msgpack.encode({"type": "queue", "ttl_ms": 7, "durability": "fsync"})
    assert TopicConfig.from_bytes(old) == TopicConfig.parse({"type": "queue", "ttl_ms": 7, "durable": True})


def test_a_stored_config_of_a_newer_version_is_read_without_unknown_fields():
    newer = msgspec.msgpack.encode({**TopicConfig().to_dict(), "later": [1, 2]})
    assert TopicConfig.from_bytes(newer) == TopicConfig()


@given(st.binary(max_size=60))
def test_any_stored_bytes_give_a_config_or_corrupt_data(data):
    """No other exception is raised."""
    try:
        config = TopicConfig.from_bytes(data)
    except CorruptData:
        return
    assert isinstance(config, TopicConfig)


@pytest.mark.parametrize("data", [b"", b"\x90", b"\x81\xa6ttl_ms\xc0", b"\xc1", b"\x81\x01\x02"])
def test_stored_bytes_that_are_no_config_are_corrupt(data):
    with pytest.raises(CorruptData):
        TopicConfig.from_bytes(data)
