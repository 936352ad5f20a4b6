"""H5 for consumer groups: members, shards, gateways and schedulers die while records are shared and followed.

Groups in mode queue are worked on by members that ack, give back, reject, steal and oversleep; streams are
taken over and committed; one group is told to go back from time to time, and the dead letters of another one
are sent back. In the end every record was done at least once by each group or lies among the dead letters
once, none is lost and none came back; every record that was handed out twice is counted under what explains
it, and no death but that of its holder does: leases lie in the log. Floors were looked at all the time.

Settings: `storm_s` (how long a storm lasts; storms fill the time that is left), `empty_s` (how long members
have to do everything after it). A replay runs one case by its name.
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
from chaos.leases.putting import MARKS
from chaos.leases.verdict import Death, Place, Rules
from chaos.order import Account, Order
from chaos.rigs.nursery import Client

PUTS_PER_S = 60.0
MEMBERS = 2
"""Of each group; one of them through the gateway, and that one takes over what others leave lying."""
LAST = 0
"""Client number of the one that looks when everybody has ended."""


class Groups:
    """Consumer groups, whose leases lie in the log."""

    name, prefix = "groups", "shared"
    counted = {  # noqa: RUF012  nobody changes it
        **{what: what for what in ("records", "done", "read", "commits", "takeovers", "looks", "seeks")},
        "redriven": "letters redriven",
    }

    def make(self, client: ringlog.Client, topics: list[str]) -> None:
        """See Cast."""
        for number, name in enumerate(topics):
            durability = ("fsync", "disk")[number // SHARDS]
            client.topics.create(name, durability=durability, record_priority=_has_marks(number))

    def start(self, scene: Scene) -> tuple[list[Client], list[Client]]:
        """See Cast."""
        start = scene.load.start
        putters: list[Client] = []
        members: list[Client] = []
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
        # Who looks also tells groups to go back, and must end before anything can be done with; so must who
        # sends letters back.
        return [*putters, start("groups_look"), start("groups_redrive", topic=REDRIVEN)], members

    def left(self, client: ringlog.Client, topics: list[str]) -> int:
        """See Cast; of the groups in mode queue."""
        return sum(
            group_of(client, topics, topic, kind).stats().lag
            for topic in range(len(topics))
            for kind in kinds_of(topic)
            if kind is not FOLLOW
        )

    def places(self, client: ringlog.Client, scene: Scene) -> list[Place]:
        """See Cast: read streams to their ends, look at all floors, and see whether anything is left."""
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
        """See Cast."""
        return Rules(LEASE_MS, IDLE_MS, deaths=deaths)


def _has_marks(topic: int) -> bool:
    """Do its records say when, and how urgently, they want to be handed out?"""
    return topic % SHARDS == 0


storm = partial(storms.storm, Groups())


def run(order: Order, account: Account) -> None:
    """Storms until the time is over."""
    storms.run(order, account, Groups())


def replay(order: Order, case: str) -> None:
    """One case by its name: storm."""
    storms.replay(order, case, Groups())
