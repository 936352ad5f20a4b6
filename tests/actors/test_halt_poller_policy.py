"""When processors are kept from halting, and where that may not be done (docs/performance.md)."""

from __future__ import annotations

import pytest

from actors.halt_poller.policy import (
    LOOK_IDLE_NS,
    LOOK_NS,
    RECENT_NS,
    UNIFIED,
    Traffic,
    group_with_quota,
    obstacle,
)
from ringlog.limits import HALT_POLL_CPUS_MAX

MS = 1_000_000


def files(**texts: str):
    found = {f"{UNIFIED}/{name.replace('__', '/')}": text for name, text in texts.items()}
    return lambda path: found.get(path.replace("cpu.max", "max").replace("cpu.cfs_quota_us", "quota"), "")


@pytest.mark.parametrize(
    ("own", "texts", "group"),
    [
        ("0::/", {}, ""),
        ("0::/", {"max": "max 100000\n"}, ""),
        ("0::/", {"max": "50000 100000\n"}, "/"),
        ("0::/a/b", {"a__max": "50000 100000\n", "a__b__max": "max 100000\n"}, "/a"),
        ("0::/a/b", {"a__b__max": "50000 100000\n", "a__max": "max 100000\n"}, "/a/b"),
        ("0::/../..", {"max": "50000 100000\n"}, "/"),
        ("1:cpu:/\n0::/", {"cpu__quota": "-1\n"}, ""),
        ("1:cpu:/\n0::/", {"cpu__quota": "20000\n"}, "/"),
        ("3:cpuset:/x\n2:cpu,cpuacct:/d", {"cpu,cpuacct__d__quota": "20000\n"}, "/d"),
        ("4:cpuacct:/d", {"cpuacct__d__quota": "20000\n"}, ""),
        ("", {}, ""),
        ("no group at all", {"max": "1 1\n"}, ""),
    ],
)
def test_a_quota_of_any_group_above_us_is_found(own: str, texts: dict[str, str], group: str) -> None:
    assert group_with_quota(own, files(**texts)) == group


def test_each_obstacle_is_named_and_none_is_none() -> None:
    assert obstacle(HALT_POLL_CPUS_MAX, True, "") == ""
    assert "kernel" in obstacle(2, False, "")
    assert f"{HALT_POLL_CPUS_MAX + 1} processors" in obstacle(HALT_POLL_CPUS_MAX + 1, True, "")
    assert "/a/b" in obstacle(2, True, "/a/b")


def test_traffic_is_what_changed_within_the_window() -> None:
    traffic = Traffic(10 * MS)
    assert not traffic.is_there([5, 7], 0), "the first look finds no change"
    assert not traffic.is_there([5, 7], 1 * MS)
    assert traffic.is_there([5, 8], 2 * MS)
    assert traffic.is_there([5, 8], 12 * MS - 1)
    assert not traffic.is_there([5, 8], 12 * MS)
    assert traffic.is_there([0, 8], 13 * MS), "a shard that began anew counts from nothing"


def test_looks_are_rarer_the_longer_nothing_happens() -> None:
    traffic = Traffic(4 * MS)
    traffic.is_there([0], 0)
    assert traffic.rest_ns(0) == LOOK_IDLE_NS, "nothing has happened yet"
    traffic.is_there([1], 20 * MS)
    assert traffic.rest_ns(20 * MS) == 2 * MS, "twice a window, so that none ends unseen"
    assert traffic.rest_ns(24 * MS) == LOOK_NS
    assert traffic.rest_ns(20 * MS + RECENT_NS) == LOOK_IDLE_NS


@pytest.mark.parametrize("window_us", [1, 500, 1_000])
def test_a_short_window_costs_no_more_than_a_thousand_looks_a_second(window_us: int) -> None:
    traffic = Traffic(window_us * 1_000)
    traffic.is_there([0], 0)
    traffic.is_there([1], MS)
    assert traffic.rest_ns(MS) == MS
