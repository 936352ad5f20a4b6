"""The tree is data that prints as an indented list."""

from __future__ import annotations

from ringlog.config import load_config
from ringlog.supervision.tree import GATEWAY, SUPERVISOR_SLOT, WAL_SHARD, build_tree


def tree_of(**flags: str):
    return build_tree(load_config({k.replace("__", "."): v for k, v in flags.items()}, {}, "/nowhere").config)


def test_shards_come_first_and_the_gateway_last_but_it_stops_first() -> None:
    children = list(tree_of(wal__shards="2"))
    assert [child.name for child in children] == ["wal_shard-00", "wal_shard-01", "gateway"]
    assert [child.shard for child in children] == [0, 1, -1]
    assert min(children, key=lambda child: child.stop_order).kind == GATEWAY


def test_every_child_has_a_slot_of_its_own_and_none_has_the_supervisors() -> None:
    slots = [child.slot for child in tree_of(wal__shards="64")]
    assert slots == list(range(1, 66))
    assert SUPERVISOR_SLOT not in slots


def test_a_disabled_gateway_is_not_in_the_tree() -> None:
    assert tree_of(wal__shards="1", gateway__enabled="false").of_kind(GATEWAY) == ()


def test_the_tree_prints_as_an_indented_list() -> None:
    lines = str(tree_of(wal__shards="2", supervisor__restart_max="7")).splitlines()
    assert lines[0] == "supervisor"
    assert [line.split()[0] for line in lines[1:]] == ["wal_shard-00", "wal_shard-01", "gateway"]
    assert all(line.startswith("  ") and "restarts <= 7 in 60 s" in line for line in lines[1:])


def test_limits_of_the_settings_reach_every_child() -> None:
    [shard] = tree_of(wal__shards="1", supervisor__stuck_after_s="2").of_kind(WAL_SHARD)
    assert shard.stuck_after_s == 2
