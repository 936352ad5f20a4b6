"""A shard with routers that lead to its topics."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from ringlog.envelope import messages as m
from ringlog.errors import error_from_status
from ringlog.frame import encode_records, frame
from ringlog.testing.disk import SimulatedDisk
from ringlog.topic.routers import RouterFlag
from tests.support.shard_world import DATA, World

PLAIN = int(RouterFlag.PRESERVE_NODE | RouterFlag.PRESERVE_TAG)


class Routed(World):
    """A world with routers that a test drives manually."""

    def route_to(self, number: int, dest: str, *, cursor: int = 0, flags: int = PLAIN) -> int:
        """Create a router and return its number."""
        topic = self.topic(dest)
        facts = m.RouterFacts(number, f"r{number}", "source", 1, 1, dest, topic.topic_id, flags, "", cursor)
        found = self.answer(dest, m.RouterPut(facts))
        return int(found.router)

    def answer(self, dest: str, message: m.Message, attachment: bytearray | None = None) -> Any:
        found = self.ask(self.run_of(dest), message, attachment)
        if isinstance(found, m.ErrorReply):
            raise error_from_status(found.status, found.message, found.detail)
        return found

    def row(self, number: int, dest: str, start: int, stop: int, **fields: Any) -> m.RouteRow:
        return m.RouteRow(number, self.topic(dest).topic_id, start, stop, **fields)

    def forward(
        self, rows: Sequence[m.RouteRow], *payloads: Sequence[bytes], by: str = "d", hops: int = 1
    ) -> list[m.RoutedRow]:
        """Send one forward request to the shard of topic `by`, with one frame for each list of payloads."""
        attached = bytearray().join(frame(encode_records(list(each)), topic_id=0) for each in payloads)
        found: m.Routed = self.answer(by, m.Route(list(rows), len(payloads), hops), attached)
        return found.rows

    def router(self, dest: str) -> Any:
        return next(iter(self.topic(dest).routers.values()))


def world_with(*dests: str, durability: str = "disk", **options: Any) -> Routed:
    """Return a world with one shard. Router n leads to the n-th destination, counted from 1."""
    world = Routed(SimulatedDisk(DATA), **options)
    world.start()
    for number, dest in enumerate(dests, 1):
        world.put_topic(dest, durability=durability)
        world.route_to(number, dest)
    return world


def fates(rows: Sequence[m.RoutedRow]) -> list[int]:
    return [row.fate for row in rows]
