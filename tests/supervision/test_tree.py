"""The process tree is data, and prints as an indented list."""

from __future__ import annotations

import pytest

from ringlog.board.processes import (
    GATEWAY,
    HTTP_GATEWAY,
    KINDS,
    SCHEDULER,
    SUPERVISOR_SLOT,
    WAL_SHARD,
    http_gateway_slot,
    scheduler_slot,
    slot_of,
)
from ringlog.config_sources import load_config
from ringlog.errors import ConfigError
from ringlog.limits import HTTP_PROCESSES_MAX, PROCESSES_MAX, SCHEDULERS_MAX, SHARDS_MAX
from ringlog.supervision.tree import (
    BACKGROUND,
    build_tree,
)


def tree_of(**flags: str):
    return build_tree(load_config({k.replace("__", "."): v for k, v in flags.items()}, {}, "/nowhere").config)


def test_shards_come_first_and_stop_last() -> None:
    children = list(tree_of(wal__shards="2", storage__enabled="false"))
    assert [child.name for child in children] == ["wal_shard-00", "wal_shard-01", "gateway", "scheduler-00"]
    assert [child.shard for child in children] == [0, 1, -1, -1]
    everybody = list(tree_of(wal__shards="2", cold__dir="/cold"))
    assert [child.kind for child in everybody] == [WAL_SHARD, WAL_SHARD, GATEWAY, SCHEDULER, *BACKGROUND]
    shards = [child.stop_order for child in everybody if child.kind == WAL_SHARD]
    assert max(child.stop_order for child in everybody if child.kind != WAL_SHARD) < min(shards)


def test_every_child_has_its_own_slot() -> None:
    everything = {"cold__dir": "/cold", "delivery__schedulers": "8", "http__enabled": "true"}
    slots = [child.slot for child in tree_of(wal__shards="64", http__processes="16", **everything)]
    assert max(slots) < PROCESSES_MAX
    assert len(set(slots)) == len(slots)
    assert slots[:64] == list(range(1, 65))
    assert SUPERVISOR_SLOT not in slots


def test_the_slot_of_an_actor_does_not_depend_on_the_others() -> None:
    for flags in ({}, {"gateway__enabled": "false"}, {"cold__dir": "/cold"}):
        for child in tree_of(wal__shards="2", **flags):
            assert child.kind == WAL_SHARD or child.slot == slot_of(child.kind, 2)
    assert len({slot_of(kind, 2) for kind in KINDS[1:]}) == len(KINDS) - 1


def test_scheduler_slots_are_known_to_shards() -> None:
    found = tree_of(wal__shards="3", delivery__schedulers="8").of_kind(SCHEDULER)
    assert [child.slot for child in found] == [scheduler_slot(3, n) for n in range(8)]
    assert found[7].name == "scheduler-07"
    assert tree_of(delivery__schedulers="0").of_kind(SCHEDULER) == ()


def test_http_gateways_have_the_last_slots() -> None:
    for shards in ("1", "64"):
        found = tree_of(wal__shards=shards, http__enabled="true", http__processes="3").of_kind(HTTP_GATEWAY)
        assert [child.name for child in found] == ["http_gateway-00", "http_gateway-01", "http_gateway-02"]
        assert [child.slot for child in found] == [http_gateway_slot(n) for n in range(3)]
    assert http_gateway_slot(HTTP_PROCESSES_MAX - 1) == PROCESSES_MAX - 1
    assert scheduler_slot(SHARDS_MAX, SCHEDULERS_MAX - 1) < http_gateway_slot(0)
    assert len(tree_of(http__enabled="true").of_kind(HTTP_GATEWAY)) == 1
    assert tree_of(http__processes="3").of_kind(HTTP_GATEWAY) == ()


@pytest.mark.parametrize("processes", ["0", "17", "-1", "two"])
def test_the_number_of_http_gateways_is_bounded(processes: str) -> None:
    with pytest.raises(ConfigError, match=r"http\.processes"):
        tree_of(http__processes=processes)


def test_scheduler_slots_follow_all_other_slots() -> None:
    """A shard rings the bell only of sleeping schedulers (N5). Every possible scheduler has a page on the
    board."""
    slots = [scheduler_slot(5, n) for n in range(SCHEDULERS_MAX)]
    assert slots[0] == max(slot_of(kind, 5) for kind in KINDS[1:])
    assert scheduler_slot(SHARDS_MAX, SCHEDULERS_MAX - 1) < PROCESSES_MAX


def test_background_actors_run_only_if_storage_and_cold_tier_need_them():
    """A relocator needs a cold tier, and all background actors need enabled storage."""
    assert "relocator" not in {child.kind for child in tree_of()}
    assert {child.kind for child in tree_of(storage__enabled="false", cold__dir="/cold")} == {
        WAL_SHARD,
        GATEWAY,
        SCHEDULER,
    }


def test_a_disabled_gateway_is_not_in_the_tree() -> None:
    assert tree_of(wal__shards="1", gateway__enabled="false").of_kind(GATEWAY) == ()


def test_the_tree_prints_as_an_indented_list() -> None:
    lines = str(tree_of(wal__shards="2", supervisor__restart_max="7")).splitlines()
    assert lines[0] == "supervisor"
    names = ["wal_shard-00", "wal_shard-01", "gateway", "scheduler-00"]
    assert [line.split()[0] for line in lines[1:5]] == names
    assert all(line.startswith("  ") and "restarts <= 7 in 60 s" in line for line in lines[1:])


def test_limits_of_the_settings_apply_to_every_child() -> None:
    [shard] = tree_of(wal__shards="1", supervisor__stuck_after_s="4").of_kind(WAL_SHARD)
    assert shard.stuck_after_s == 4
