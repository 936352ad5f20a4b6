"""Every value of every setting works, or is refused with an error that names the setting.

For each row of ringlog/settings.py and each extreme value, a shard performs create, append, claim, kill,
recovery, snapshot and an orderly restart. If the shard refuses a value, the error contains the setting, the
value and the limit, and the shard continues.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import xxhash
from msgspec import structs

from ringlog.envelope import messages as m
from ringlog.errors import InvalidRequest, TopicNotFound
from ringlog.frame import encode_records, frame
from ringlog.frame.batch import words_of
from ringlog.frame.layout import HEADER_BYTES, W_BODY_XXH3
from ringlog.limits import CLAIM_JITTER_MS_MAX, DURATION_MS_MAX
from ringlog.settings import CALL_SETTINGS, FLAG, GROUP_SETTINGS, QUEUE, TOPIC_SETTINGS, WHOLE, Setting
from ringlog.topic.config import TopicConfig
from tests.support.checkpoint_world import checkpoint_all
from tests.support.shard_world import NoReply, World, refusals
from tests.support.shard_worlds import new_world, restart

HUGE = (2**31, 2**63 - 1, 2**63, 2**64 - 1, 2**64 // 1_000)
WRONG = (float("nan"), float("inf"), 1.5, "1", "", True, None, [], {}, b"1")


def extremes(row: Setting) -> list[Any]:
    """Return values at and beyond the limits of a setting. Settings that are no integers get 0, 1 and -1."""
    edges = [row.low - 1, row.low, row.low + 1, row.high - 1, row.high, row.high + 1]
    return list(dict.fromkeys([0, 1, -1, *edges, -(2**63), *HUGE])) if row.kind == WHOLE else [0, 1, -1]


CASES = [
    pytest.param(row, value, id=f"{row.name}={value!r}")
    for row in TOPIC_SETTINGS.values()
    for value in [*extremes(row), *WRONG, *row.words]
]


def live(world: World, config: dict[str, Any]) -> None:
    """Use a topic with this configuration, with all kinds of requests and restarts."""
    world.put_topic("t", **config)
    world.append("t", [b"a", b"b", b"c"])
    world.request(
        m.Append("t", 1, idempotency_key="k"),
        frame(encode_records([b"d"]), topic_id=0, producer_id=7, producer_seq=1),
    )
    use(world, config)
    restart(world)
    use(world, config)
    checkpoint_all(world)
    world.append("t", [b"e"])
    restart(world)
    use(world, config)
    restart(world, "stop")
    use(world, config)
    world.put_topic("t", **config)
    world.power_loss(seed=1)
    world.start()
    for run in world.runs.values():
        run.core.check()


def use(world: World, config: dict[str, Any]) -> None:
    """Send the requests of typical clients, now and one day later."""
    is_queue = config.get("type") == QUEUE
    for _ in range(2):
        world.append("t", [b"more"])
        world.request(m.TopicState("t"))
        world.records("t")
        world.request(m.TopicState("t"))
        if is_queue:
            for first, count, _, token in claimed_runs(world):
                seqs = np.arange(first, first + count, dtype="<u8").tobytes()
                tokens = np.arange(token, token + count, dtype="<u8").tobytes()
                world.request(m.Nack("t", "w", seqs, tokens, has_backoff=True))
            world.request(m.LeaseStats("t"))
        world.tick(86_400.0)
        if world.run_of("t").core.directory.find("t") is None:
            world.put_topic("t", **config)  # The topic was idle (expire_unused_ms).


def claimed_runs(world: World) -> list[tuple[int, int, int, int]]:
    """Return the runs of a claim. With `claim_jitter_ms` the claim is answered after its window."""
    run = world.run_of("t")
    try:
        return world.ask(run, m.Claim("t", "w", 2)).runs
    except NoReply:
        world.tick(CLAIM_JITTER_MS_MAX / 1_000)
        return run.replies.popitem()[1].runs


@pytest.mark.slow
@pytest.mark.parametrize(("row", "value"), CASES)
def test_a_topic_setting_is_refused_by_name_or_works_forever(row: Setting, value: Any) -> None:
    config = {row.name: value}
    if row.topic_type_only or row.name == "lease_ms":
        config = {"type": QUEUE, "record_priority": True, "dead_letter": "dead"} | config
    world = new_world()
    world.put_topic("other")
    if is_legal(row, value):
        live(world, config)
    else:
        with pytest.raises(InvalidRequest) as caught:
            world.put_topic("t", **config)
        require_told(caught.value, row, value)
    world.append("other", [b"goes on"])
    restart(world)
    assert len(world.records("other")) == 1


def is_legal(row: Setting, value: Any) -> bool:
    """Return whether this setting may have this value, according to its row."""
    if value is None:
        return row.is_nullable
    if row.kind == WHOLE:
        in_range = type(value) is int and row.low <= value <= row.high
        return in_range or (value == 0 and type(value) is int and bool(row.zero))
    if row.kind == FLAG:
        return isinstance(value, bool)
    return value in row.words if row.words else value == "1"


def require_told(error: InvalidRequest, row: Setting, value: Any) -> None:
    """Check that the error names the setting, the value and the limit."""
    assert error.detail["field"] == row.name
    assert row.name in str(error)
    if row.kind == WHOLE and type(value) is int:
        assert f"from {row.low} to {row.high}" in error.message
        assert str(value) in error.message


@pytest.mark.parametrize("row", [row for row in TOPIC_SETTINGS.values() if row.kind == WHOLE])
def test_a_number_from_an_earlier_version_is_moved_into_the_range(row: Setting) -> None:
    """The number is in the log or in a snapshot, and prevents no start."""
    for stored in (max(row.low - 1, 0), row.high + 1, 2**64 - 1):
        kind = QUEUE if row.topic_type_only else "log"
        old = TopicConfig(**{"type": kind, row.name: stored})  # As `parse` of that version allowed it.
        kept = TopicConfig.from_bytes(old.to_bytes()).to_dict()[row.name]
        assert kept == min(max(stored, row.low), row.high) or (stored == 0 and row.zero)
        world = new_world()
        world.put_topic("t", type=kind)
        world.topic("t").config = old
        world.put_topic("t", "merge", discard="reject")  # Logs the whole configuration.
        world.append("t", [b"a"])
        restart(world)
        assert world.topic("t").config.to_dict()[row.name] == kept
        assert [payload for _, payload in world.records("t")] == [b"a"]
        checkpoint_all(world)
        world.append("t", [b"b"])
        restart(world)
        world.run_of("t").core.check()
        assert len(world.records("t")) == 2


PLACEHOLDER = 0x1122334455667788


@pytest.mark.slow
@pytest.mark.parametrize("value", [0, 1, -1, 2**31, 2**53, 2**63 - 1, -(2**63)])
@pytest.mark.parametrize("field", ["event_ts", "expires_at", "not_before"])
@pytest.mark.parametrize("config", [{}, {"ttl_ms": DURATION_MS_MAX}, {"type": QUEUE}], ids=str)
def test_a_record_may_contain_any_time(config: dict[str, Any], field: str, value: int) -> None:
    world = new_world()
    world.put_topic("t", **config)
    topic_id = world.topic("t").topic_id
    for number in range(1, 3):
        columns = encode_records([b"a", b"b"], **{field: [PLACEHOLDER, PLACEHOLDER]})
        # Another client may send this. Ours refuses negative values with an error that names the field.
        data = frame(columns, topic_id=topic_id, producer_id=5, producer_seq=number)
        placeholder, given = PLACEHOLDER.to_bytes(8, "little"), value.to_bytes(8, "little", signed=True)
        data[HEADER_BYTES:] = bytes(data[HEADER_BYTES:]).replace(placeholder, given)
        words_of(data)[W_BODY_XXH3] = xxhash.xxh3_64_intdigest(bytes(data[HEADER_BYTES:]))
        assert not any(each is not None for each in refusals(world.send("t", [data])))
        use(world, config)
        restart(world)
        use(world, config)
        checkpoint_all(world)
    restart(world)
    use(world, config)
    world.run_of("t").core.check()


CALLS = [
    (m.Claim("q", "w"), "lease_ms"), (m.Claim("q", "w"), "wait_ms"),
    (m.Claim("q", "w", call=7), "lease_ms"), (m.Claim("q", "w", call=7), "wait_ms"),
    (m.AckAndClaim("q", "w", b"", b"", call=7), "lease_ms"), (m.Nack("q", "w", b""), "delay_ms"),
    (m.Extend("q", "w", b""), "lease_ms"), (m.Claim("q", "w", group="g"), "lease_ms"),
    (m.Claim("q", "w", group="g"), "wait_ms"), (m.Claim("q", "w", group="g"), "min_idle_ms"),
    (m.Nack("q", "w", b"", group="g"), "delay_ms"), (m.Extend("q", "w", b"", group="g"), "lease_ms"),
    (m.Steal("q", "w", b"", group="g"), "lease_ms"), (m.Steal("q", "w", b"", group="g"), "min_idle_ms"),
    (m.Append("q", 1, idempotency_key="k"), "window_ms"),
]  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize(
    ("message", "name"), CALLS, ids=[f"{type(each).__name__}.{name}" for each, name in CALLS]
)
def test_a_number_of_a_request_is_refused_by_name_or_works(message: Any, name: str) -> None:
    row = CALL_SETTINGS[name]
    for value in extremes(row):
        world = new_world()
        world.put_topic("q", type=QUEUE)
        world.append("q", [b"a", b"b", b"c"])
        world.request(m.GroupOpen("q", "g", 1))
        asked = structs.replace(message, **{name: value})
        attachment = (
            frame(encode_records([b"d"]), topic_id=0, producer_id=7, producer_seq=1)
            if name == "window_ms"
            else None
        )
        if is_legal(row, value):
            world.request(asked, attachment)
        else:
            with pytest.raises(InvalidRequest) as caught:
                world.request(asked, attachment)
            require_told(caught.value, row, value)
        world.tick(60.0)
        world.run_of("q").core.check()
        restart(world)
        world.run_of("q").core.check()
        checkpoint_all(world)
        restart(world)
        assert len(world.records("q")) >= 3


GROUP_FIELDS = {
    "max_in_flight": "pending_max",
    "member_max_in_flight": "member_max",
    "max_deliveries": "max_deliveries",
    "backoff_ms": "backoff_ms",
    "backoff_max_ms": "backoff_max_ms",
}


@pytest.mark.parametrize("row", GROUP_SETTINGS.values(), ids=lambda row: row.name)
def test_a_setting_of_a_group_is_refused_by_name_or_works_forever(row: Setting) -> None:
    for value in extremes(row):
        world = new_world()
        world.put_topic("t")
        world.append("t", [b"a", b"b"])
        opened = m.GroupOpen("t", "g", 1, dead_letter="dead", **{GROUP_FIELDS[row.name]: value})
        if not is_legal(row, value):
            with pytest.raises(InvalidRequest) as caught:
                world.request(opened)
            require_told(caught.value, row, value)
            restart(world)
            continue
        world.request(opened)
        assert world.request(m.Claim("t", "w", 1, group="g")).runs
        restart(world)
        checkpoint_all(world)
        restart(world)
        world.request(m.LeaseStats("t", group="g"))
        world.run_of("t").core.check()


@pytest.mark.parametrize(
    ("create", "config", "is_made"),
    [
        (None, None, True), (None, {}, True), (None, {"auto_create": True, "ttl_ms": 5_000}, True),
        (None, {"auto_create": False}, False), (False, None, False), (False, {"auto_create": True}, False),
        (True, None, True), (True, {"auto_create": False}, True),
    ],
)  # fmt: skip
def test_a_write_creates_its_topic_according_to_its_option_and_configuration(
    create: bool | None, config: dict[str, Any] | None, is_made: bool
) -> None:
    """The option `create` of the request takes precedence over `auto_create` of the configuration."""
    world = new_world()
    write = m.Append("t", 1, create=create, config=config)
    data = frame(encode_records([b"a"]), topic_id=0, producer_id=7, producer_seq=1)
    if not is_made:
        with pytest.raises(TopicNotFound):
            world.request(write, data)
        assert world.run_of("t").core.directory.find("t") is None
        return
    assert world.request(write, data).created
    stored = world.topic("t").config.to_dict()
    assert stored["auto_create"] is (config or {}).get("auto_create", True)
    restart(world)
    assert world.topic("t").config.to_dict() == stored
    assert [payload for _, payload in world.records("t")] == [b"a"]
