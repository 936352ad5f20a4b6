"""Power loss under the whole program while one of its processes is paused at a stop point (RF-65)."""

from __future__ import annotations

import contextlib
import random
import shutil
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from chaos.order import Account, Order
from chaos.rigs.mount import FLAGS, KINDS, RigError, Volume, volume
from chaos.rigs.program import (
    ASK_S,
    BATCH,
    FIRST_ACKS,
    TOPICS,
    Traffic,
    checkpoint,
    data_of,
    program,
    settings_of_cold,
    until,
)
from ringlog.drill.checks import GuaranteeBroken, verify
from ringlog.drill.load import ACKED
from ringlog.drill.nursery import Nursery
from ringlog.drill.targets import facts_of
from ringlog.errors import RinglogError
from ringlog.testing.real_engine import TestEngine

POINTS = (
    "rotate_after_sync", "rotate_before_header", "compact_mid_read", "compact_before_register",
    "compact_after_register", "compact_before_snapshot", "compact_after_snapshot", "compact_before_unlink",
    "reclaim_after_write", "reclaim_after_change", "reclaim_mid_unlink", "relocate_after_copy",
    "relocate_after_flip", "relocate_after_drop", "log_after_write", "log_after_sync", "shards",
)  # fmt: skip
"""Stop points at which one process is paused. `shards`: cut after a start with another number of shards."""
REACH_S = 15.0
KEPT = 40
"""Number of sealed records per topic that are not deleted."""
SECONDS_A_CASE = 8.0
"""No case starts with less time left than this."""


def run(order: Order, account: Account, points: int, seconds: float) -> None:
    """Run exactly `points` cases.

    If `points` is 0, run as many as fit into the time or until the floors are reached.
    """
    cases = [(kind, point, flag) for point in POINTS for kind in KINDS for flag in FLAGS]
    order.random("engine").shuffle(cases)
    until_s = time.monotonic() + seconds
    done = 0
    while cases and (not points or done < points):
        is_enough = order.is_enough(account.counts, "cuts of the whole program")
        if points == 0 and (is_enough or time.monotonic() > until_s - SECONDS_A_CASE):
            break
        kind, point, flag = cases[done % len(cases)]
        case = f"engine/{kind}/{point}/{flag}"
        try:
            with volume(kind, order.scratch) as one:
                cut_at(one, point, flag, order.random(case), account, order.scratch)
        except RigError as e:
            account.skip(f"the program on {kind}", str(e))
        except (GuaranteeBroken, RinglogError) as e:
            account.report_finding(f"the program, cut at {point} on {kind}: {str(e)[:300]}", case, str(e))
        done += 1


def replay(order: Order, case: str) -> None:
    """Repeat `engine/KIND/POINT/FLAG`."""
    _, kind, point, flag = case.split("/")
    account = Account()
    with volume(kind, order.scratch) as one:
        cut_at(one, point, int(flag), order.random(case), account, order.scratch)
    print(dict(account.counts))


def cut_at(one: Volume, point: str, flag: int, rng: random.Random, account: Account, scratch: Path) -> None:
    """Run the program under traffic until it reaches the point. Then cut, mount, verify, start and judge."""
    with Nursery("chaos.rigs.work") as nursery:
        traffic = Traffic(nursery, scratch / f"journals-{time.monotonic_ns()}")
        _cut_and_judge(one, point, flag, rng, account, traffic)


def _cut_and_judge(
    one: Volume, point: str, flag: int, rng: random.Random, account: Account, traffic: Traffic
) -> None:
    root = one.root / "case"
    root.mkdir()
    cold = settings_of_cold(root) if point.startswith("relocate_") else {}
    try:
        if point == "shards":
            _reach_other_shards(one, root, flag, traffic)
        else:
            # A start also passes the points of rotation and log, so these cases wait for a later pass.
            first = {"rotate": 2, "log": rng.randint(20, 60)}
            pass_number = first.get(point.split("_", maxsplit=1)[0], 1)
            _reach_point(one, root, f"{point}:{pass_number}:pause", flag, traffic, cold)
        one.down()
        one.up()
        verify(data_of(root), root / "cold" if cold else "")
        _judge_again(root, traffic, cold, account)
        verify(data_of(root), root / "cold" if cold else "")
        account.count_work("cuts", 1, "RF-65", "RF-61")
        account.count_work("cuts of the whole program")
    finally:
        if not one.is_up:
            one.up()
        shutil.rmtree(root, ignore_errors=True)


def _reach_point(
    one: Volume, root: Path, stop: str, flag: int, traffic: Traffic, cold: dict[str, Any]
) -> None:
    with program(root, stop_points=stop, **cold) as host:
        traffic.start_all(host.url)
        try:
            is_reached = _paused(host)
            enough = until(lambda: is_reached() or _has_acks(traffic, FIRST_ACKS), REACH_S)
            if enough and not is_reached() and not stop.startswith("log_"):
                _provoke(host, traffic, is_reached, stop)
            if not until(is_reached, REACH_S):
                raise RigError(f"no process reached {stop}; {traffic.acked} batches were acknowledged")
            one.cut(flag)
        finally:
            with contextlib.suppress(RinglogError):
                host.power_off()
            traffic.end()


def _provoke(host: TestEngine, traffic: Traffic, is_reached: Callable[[], bool], stop: str) -> None:
    """Request checkpoints, and deletes for the reclaimer, until the point is reached or REACH_S is over."""
    deadline = time.monotonic() + REACH_S
    while not is_reached() and time.monotonic() < deadline:
        # The reclaimer rewrites segments that are mostly dead. It drops entirely dead ones without a rewrite,
        # so some records must stay alive.
        sealed = {topic: traffic.count(ACKED, topic=topic) for topic in TOPICS}
        checkpoint(host)
        if stop.startswith("reclaim_") and not is_reached():
            with contextlib.suppress(RinglogError):
                for topic in TOPICS:
                    traffic.delete_below(topic, max(sealed[topic] - KEPT, 2), round(ASK_S * 1_000))


def _reach_other_shards(one: Volume, root: Path, flag: int, traffic: Traffic) -> None:
    with program(root, shards=2) as host:
        traffic.start_all(host.url)
        traffic.need_acks("before the number of shards changed")
        traffic.end()
    with program(root, shards=3) as host:
        traffic.start_all(host.url)
        try:
            traffic.need_acks("after the number of shards changed")
            one.cut(flag)
        finally:
            with contextlib.suppress(RinglogError):
                host.power_off()
            traffic.end()


def _has_acks(traffic: Traffic, batches: int) -> bool:
    return all(traffic.count(ACKED, topic=topic) >= batches * BATCH for topic in TOPICS)


def _judge_again(root: Path, traffic: Traffic, cold: dict[str, Any], account: Account) -> None:
    if not traffic.acked:
        raise RigError("nothing was acknowledged before the cut")
    with program(root, shards=2, **cold) as host:
        account.count_work("records read after a cut", traffic.judge().survivors)
        traffic.start_all(host.url)
        traffic.need_acks("after the cut")
        account.count_work("acked batches held to", traffic.judge().acked // BATCH)


def _paused(host: TestEngine) -> Callable[[], bool]:
    """Return a function that returns whether a process of the engine is stopped."""

    def is_paused() -> bool:
        try:
            pids = [each.pid for each in host.status().processes if each.pid]
        except RinglogError:
            return False
        return any(facts_of(pid).state == "T" for pid in pids)

    return is_paused
