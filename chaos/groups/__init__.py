"""Kills under consumer groups: members, shards, gateways and schedulers die while records are processed.

Members of groups in queue mode ack, nack, reject, steal leases, and let leases expire. Members of groups in
stream mode take over from each other and commit. One group is repeatedly moved back by a seek. The dead
letters of another one are redriven.

At the end, each group must have done every record at least once, or have it in the dead-letter topic once. No
record is lost, and no done record is delivered again. Every repeated delivery is counted under its reason.
Leases are in the log, so only the death of the holder is a valid reason. Floors are checked all the time.

Settings: `storm_s`: length of a storm; storms fill the remaining time; `empty_s`: time that members have to
finish all work after a storm. A replay runs one case by its name.
"""

from __future__ import annotations

from functools import partial
from pathlib import Path

import ringlog
from chaos.kills.scene import SHARDS, Scene
from chaos.leases import journal
from chaos.leases import storm as storms
from chaos.leases.clients import (
    AGAIN,
    FOLLOW,
    IDLE_MS,
    LEASE_MS,
    REDRIVEN,
    SHARE,
    TAKES_OVER,
    group_of,
    kinds_of,
    look_at,
    read_stream,
)
from chaos.leases.history import Death, Place, Rules
from chaos.leases.putting import MARKS
from chaos.order import Account, Order
from ringlog.drill.nursery import ClientProcess
from ringlog.types import Durability

PUTS_PER_S = 60.0
MEMBERS = 2
"""Members of each group. One of them uses the gateway and takes over idle leases of others."""
WITH_CANCELS = 0
"""Topic whose group SHARE has a member that cancels its claims."""
LAST = 0
"""Client number of the journal that is written after all clients have exited."""


class Groups:
    """The cast of class `groups`: consumer groups, whose leases are in the log."""

    name, prefix = "groups", "shared"
    counted = {  # noqa: RUF012  nobody changes it
        **{what: what for what in ("records", "done", "read", "commits", "takeovers", "looks", "seeks")},
        "redriven": "letters redriven",
    }

    def make(self, client: ringlog.Client, topics: list[str]) -> None:
        """Create the topics. Implements Cast."""
        for number, name in enumerate(topics):
            durability = (Durability.FSYNC, Durability.DISK)[number // SHARDS]
            client.topics.create(name, durability=durability, record_priority=_has_marks(number))

    def start(self, scene: Scene) -> tuple[list[ClientProcess], list[ClientProcess]]:
        """Start producers, group members, and the clients that look, seek and redrive. Implements Cast."""
        start = scene.load.start
        putters: list[ClientProcess] = []
        members: list[ClientProcess] = []
        tasks = {SHARE: "groups_share", FOLLOW: "groups_follow", AGAIN: "groups_again"}
        for topic in range(len(scene.load.topics)):
            transport = "ipc" if topic == 0 else "auto"
            hook = MARKS if _has_marks(topic) else ""
            putters.append(
                start(
                    "groups_put", topic=topic, per_s=PUTS_PER_S, batch=20, hook=hook, transport=transport
                )
            )  # fmt: skip
            for kind in kinds_of(topic):
                for n in range(1 if kind is AGAIN else MEMBERS):
                    hook, way = ("", "auto") if n else (TAKES_OVER, "ipc")
                    members.append(start(tasks[kind], topic=topic, hook=hook, transport=way))
        members.append(start("groups_cancel", topic=WITH_CANCELS))
        # `groups_look` also seeks, and `groups_redrive` returns dead letters. While they run, the groups
        # cannot finish, so both must end together with the producers.
        return [*putters, start("groups_look"), start("groups_redrive", topic=REDRIVEN)], members

    def left(self, client: ringlog.Client, topics: list[str]) -> int:
        """Return the total lag of the groups in queue mode. Implements Cast."""
        return sum(
            group_of(client, topics, topic, kind).stats().lag
            for topic in range(len(topics))
            for kind in kinds_of(topic)
            if kind is not FOLLOW
        )

    def places(self, client: ringlog.Client, scene: Scene) -> list[Place]:
        """Read streams to their ends, record all floors, and return the groups to judge. Implements Cast."""
        places = []
        notes = journal.Journal(Path(scene.load.folder, f"{LAST:05d}.journal"), LAST)
        try:
            for topic in range(len(scene.load.topics)):
                for kind in kinds_of(topic):
                    group = group_of(client, scene.load.topics, topic, kind)
                    stats = group.stats()
                    if kind is FOLLOW and stats.undelivered:
                        last = read_stream(group, topic, notes, stats.undelivered, is_auto=False)
                        notes.note(journal.Did.COMMIT, topic, [0], seqs=[last], group=kind.number)
                        group.commit()
                        stats = group.stats()
                    look_at(group, topic, kind, notes)
                    places.append(Place(topic, kind.number, kind is not FOLLOW, kind is AGAIN, stats.lag))
        finally:
            notes.close()
        return places

    def rules(self, deaths: list[Death]) -> Rules:
        """Return the rules: leases are logged, and idle leases can be taken over. Implements Cast."""
        return Rules(LEASE_MS, IDLE_MS, deaths=deaths)


def _has_marks(topic: int) -> bool:
    """Whether the records of this topic have priorities and `not_before` times."""
    return topic % SHARDS == 0


storm = partial(storms.storm, Groups())


def run(order: Order, account: Account) -> None:
    """Run storms until the time is over."""
    storms.run(order, account, Groups())


def replay(order: Order, case: str) -> None:
    """Repeat one case by its name: storm."""
    storms.replay(order, case, Groups())
