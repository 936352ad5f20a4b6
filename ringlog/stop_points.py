"""Stop points: named places in production code where a test can kill, pause or fail a process.

While they are off, a stop point costs one comparison with None. Only `ActorBoot.test_stop_points` switches
them on. The supervisor sets it from the variable RINGLOG_TEST_STOP_POINTS.

A spec consists of `name:n:action` items, separated by commas. At the n-th pass of the point (from 1) it does:

  kill    send SIGKILL to this process
  exit    exit at once with status 1, without clean-up
  pause   send SIGSTOP to this process, which continues at SIGCONT
  raise   raise InvariantViolation, as a violated invariant does

A plan for several incarnations of a process joins their specs by `;`, the first incarnation first. Later
incarnations have no stop points (`plan_of_incarnation`).
"""

from __future__ import annotations

import os
import signal
from collections.abc import Callable

from ringlog.errors import ConfigError, ExitCode, InvariantViolation

POINTS: dict[str, str] = {
    "log_after_write": "a commit batch is written to the log and no sync has begun",
    "log_after_sync": "the sync that covers a commit batch has returned, and no reply was sent",
    "log_after_publish": "the board shows the records of a commit batch, and no producer is settled",
    "log_before_settle": "the next effect is a settlement",
    "settle_before_tail": "settle entries are written and the ring's tail has not moved",
    "rotate_after_sync": "the old WAL file is synced and the new one not in use",
    "rotate_before_header": "the new WAL file has its name and no header",
    "recovery_mid_replay": "recovery applied some frames of the log",
    "recovery_before_copy": "recovery knows which records are in doubt and has copied none",
    "recovery_after_copy": "records in doubt are copied and synced, and nothing is published",
    "board_mid_slot": "some words of a board slot are stored and its sequence is odd",
    "ring_after_publish": "a producer has published a frame and not rung the bell",
    "delete_in_hand": "a request to delete records is decoded and not applied",
    "relocate_after_copy": "a verified copy of a segment is in both tiers, and no shard knows it",
    "relocate_after_flip": "every shard directs readers to the cold copy, and the hot copy still exists",
    "relocate_after_drop": "the hot data part is gone",
    "reclaim_after_write": "new segments are complete, and no shard knows them",
    "reclaim_after_change": "shards know the new segments, and the files of the old ones still exist",
    "reclaim_mid_unlink": "some parts of a dropped segment are gone",
    "drain_mid": "an orderly stop has begun and is not complete",
    "compact_mid_read": "a checkpoint has read a part of the log and written no segment of it",
    "compact_before_register": "segments are durable, and their shard does not know them",
    "compact_after_register": "a shard knows new segments, and no snapshot contains them",
    "compact_before_snapshot": "all segments are registered, deletions marked, and no snapshot is written",
    "compact_after_snapshot": "a snapshot is durable, and its shard does not know it",
    "compact_before_unlink": "a shard has released log files, and they still exist",
    "route_after_read": "records of a source were read for its routers, and no shard received them",
    "route_after_send": "a shard was sent its part of a forwarding pass and has not replied",
    "route_after_answer": "a shard has applied its part of a pass, and the reply is not processed",
    "route_before_put": "the topics of a router exist, and its shard does not know the router",
    "route_after_put": "a router is durable, and no reply was sent",
    "dead_letter_after_append": "copies of exhausted jobs are durable, and their queue still has the jobs",
    "redrive_after_append": "copies of dead letters are durable in their queue, and they still exist",
    "sink_after_stage": "a task's staged file is durable, and the driver does not know it",
    "sink_before_plan": "the staged files of a batch are durable, and no plan names them",
    "sink_after_plan": "a plan is durable, and none of its frames was sent",
    "sink_mid_append": "one more frame of a plan is settled, others perhaps not",
    "sink_before_amend": "frames were refused permanently under their numbers and have no new ones yet",
    "sink_after_append": "every frame of a plan is settled, and the plan is not marked as done",
    "sink_after_done": "a plan is marked as done, and its files still exist",
    "sink_in_abort": "an abort has read the plan and deleted nothing",
    "supervisor_before_respawn": "an actor's death is known, and its successor is not started",
}
"""Name of each point -> what holds when it is reached."""

Action = Callable[[str], None]


def _kill(name: str) -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def _pause(name: str) -> None:
    os.kill(os.getpid(), signal.SIGSTOP)


def _exit(name: str) -> None:
    os._exit(ExitCode.CRASH)


def _raise(name: str) -> None:
    raise InvariantViolation("stop point", point=name)


ACTIONS: dict[str, Action] = {"kill": _kill, "pause": _pause, "exit": _exit, "raise": _raise}


class _Armed:
    """Armed points and their pass counts. Each point belongs to one thread of the process."""

    def __init__(self, plan: dict[str, dict[int, Action]]) -> None:
        self._plan = plan
        self._passes = dict.fromkeys(plan, 0)

    def hit(self, name: str) -> None:
        if name not in POINTS:
            raise InvariantViolation("no such stop point", point=name)
        due = self._plan.get(name)
        if due is None:
            return
        self._passes[name] += 1
        action = due.get(self._passes[name])
        if action is not None:
            action(name)


_armed: _Armed | None = None


def configure(spec: str) -> None:
    """Arm the points of `spec` instead of the current ones. An empty spec disarms all.

    Raises ConfigError, which names the wrong item and the known values.
    """
    global _armed  # noqa: PLW0603  one per process, set once at boot
    plan: dict[str, dict[int, Action]] = {}
    for piece in filter(None, (part.strip() for part in spec.split(","))):
        name, n, action = _parse(piece)
        plan.setdefault(name, {})[n] = action
    _armed = _Armed(plan) if plan else None


def plan_of_incarnation(plan: str, life: int) -> str:
    """Return the spec for incarnation number `life` of a process, from 1; "" if the plan has none for it."""
    plans = plan.split(";")
    return plans[life - 1] if life <= len(plans) else ""


def _parse(piece: str) -> tuple[str, int, Action]:
    parts = piece.split(":")
    if len(parts) != 3:
        raise ConfigError("a stop point must be name:n:action", found=piece)
    name, number, word = parts
    if name not in POINTS:
        raise ConfigError("no such stop point", found=name, known=sorted(POINTS))
    if not (number.isascii() and number.isdigit()) or int(number) < 1:
        raise ConfigError("the pass of a stop point counts from 1", found=piece)
    if word not in ACTIONS:
        raise ConfigError("no such stop point action", found=word, known=sorted(ACTIONS))
    return name, int(number), ACTIONS[word]


def hit(name: str) -> None:
    """Reach the point `name`: perform the action that is configured for this pass, if any."""
    if _armed is not None:
        _armed.hit(name)
