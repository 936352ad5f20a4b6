"""A real engine keeps its processors from halting: at idle priority, behind commits, needed by nobody."""

from __future__ import annotations

import os
from pathlib import Path

import psutil
import pytest

import ringlog
from actors.halt_poller.policy import group_with_quota, obstacle
from ringlog import compiled
from ringlog.testing.real_engine import engine, wait_until


def _read(path: str) -> str:
    return Path(path).read_text() if Path(path).exists() else ""


REASON = obstacle(
    len(os.sched_getaffinity(0)), compiled.can_linger(), group_with_quota(_read("/proc/self/cgroup"), _read)
)


def used(pid: int) -> float:
    try:
        return float(sum(psutil.Process(pid).cpu_times()[:2]))
    except psutil.NoSuchProcess:
        return 0.0


@pytest.mark.skipif(bool(REASON), reason=f"processors are not kept awake here: {REASON}")
def test_processors_are_kept_awake_behind_a_commit_and_a_killed_poller_is_replaced() -> None:
    with engine(run={"halt_poll_us": 1_000_000}) as host, ringlog.connect(host.url) as client:
        pid = host.pid_of("halt_poller")
        cpus = sorted(os.sched_getaffinity(0))

        def threads() -> list[int]:
            return [int(name) for name in os.listdir(f"/proc/{pid}/task")]

        def pinned() -> list[set[int]]:
            return sorted([os.sched_getaffinity(tid) for tid in threads()], key=len)[: len(cpus)]

        wait_until(lambda: pinned() == [{cpu} for cpu in sorted(set().union(*pinned()))], 30.0, "its threads")
        assert {min(each) for each in pinned()} == set(cpus)
        assert {os.sched_getscheduler(tid) for tid in threads()} == {os.SCHED_IDLE}

        def seen_at_work(who: int) -> bool:
            client.append("t", b"x")
            return used(who) > before + 0.2

        before = used(pid)
        wait_until(lambda: seen_at_work(pid), 60.0, "processor time to be used behind appends")
        host.kill("halt_poller")
        host.wait_ready("halt_poller")
        successor = host.pid_of("halt_poller")
        before = used(successor)
        wait_until(lambda: seen_at_work(successor), 60.0, "the successor to do the same")


def test_where_it_cannot_be_done_the_engine_says_so_and_serves() -> None:
    with (
        engine(run={"halt_poll_us": 1_000}, environ={"RINGLOG_KERNEL": "0"}) as host,
        ringlog.connect(host.url) as client,
    ):
        assert client.append("t", b"x").first_seq == 1
        told = "processors are not kept from halting"
        wait_until(lambda: told in host.log_path.read_text(), 30.0, "the poller's word")


def test_nobody_starts_it_unasked() -> None:
    with engine() as host:
        assert "halt_poller" not in {each.kind for each in host.status().processes}
