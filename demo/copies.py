"""The router stage: flights from one airport are copied to separate topics while processes are killed.

Each carrier has a router with a filter. The expected content of its destination comes only from the source
and the producers' acks: the carrier's flights from that airport, in seq order, each once.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path

import numpy as np
import xxhash
from numpy.typing import NDArray

import ringlog
from demo.source import Source, id_of, share, tag_of
from ringlog.client import Client

AIRPORT = "JFK"
SETTLE_S = 60.0
PAGE_RECORDS = 10_000


@dataclass(frozen=True, slots=True)
class Copies:
    """Result of the router stage."""

    routers: int
    wanted: int
    """Acknowledged flights from the airport."""
    read: int
    lost: int
    doubled: int
    out_of_order: int
    others: int
    """Altered records, flights that no router should copy, and tombstones."""

    @property
    def is_good(self) -> bool:
        """Whether each flight from the airport is present once and in order, and nothing else is."""
        return self.wanted > 0 and not (self.lost or self.doubled or self.out_of_order or self.others)


def dest_of(topic: str) -> str:
    """Return the destination topic of a carrier's router."""
    return f"{AIRPORT.lower()}.{topic.partition('.')[2]}"


def make_routers(client: Client, topics: tuple[str, ...]) -> None:
    """Create one router per carrier.

    Routers start at the head of their source, so create them before any write.
    """
    for topic in topics:
        client.topics.create(dest_of(topic), durability="fsync")
        client.routers.create(f"{topic}->{dest_of(topic)}", topic, dest_of(topic), filter=AIRPORT)


def read_and_judge(url: str, directory: Path, events: Source, acked: NDArray[np.uint64]) -> Copies:
    """Wait until all records are forwarded, read all destinations, and compare them with the source."""
    wanted = wanted_of(directory, events, acked)
    parts = []
    with ringlog.connect(url, wait=20.0) as client:
        for topic in events.topics:
            client.routers.settle(f"{topic}->{dest_of(topic)}", SETTLE_S)
            found, others = [], 0
            for page in client.reader(dest_of(topic)).pages(PAGE_RECORDS):
                others += page.tombstone is not None
                for piece in page.batches:
                    for payload in piece.payloads():
                        event = id_of(payload)
                        is_known = 0 <= event < len(events)
                        if is_known and xxhash.xxh3_64_intdigest(payload) == events.digests[event]:
                            found.append(event)
                        else:
                            others += 1
            parts.append(judge(wanted[topic], found, others))
    totals = np.array(parts).reshape(-1, 6).sum(axis=0).tolist()
    return Copies(len(parts), *totals)


def wanted_of(directory: Path, events: Source, acked: NDArray[np.uint64]) -> dict[str, list[int]]:
    """Return the ids of the acknowledged flights from the airport, by carrier, in seq order."""
    wanted: dict[str, list[int]] = {topic: [] for topic in events.topics}
    for event, topic, payload in share(directory, 0, 1):
        if acked[event] and tag_of(payload) == AIRPORT:
            wanted[topic].append(event)
    return {topic: sorted(ids, key=acked.__getitem__) for topic, ids in wanted.items()}


def judge(wanted: list[int], found: list[int], others: int) -> tuple[int, int, int, int, int, int]:
    """Return (wanted, read, lost, doubled, out of order, others) of one destination."""
    place = {event: i for i, event in enumerate(wanted)}
    first = list(dict.fromkeys(event for event in found if event in place))
    strangers = [event for event in found if event not in place]
    return (
        len(wanted),
        len(found) + others,
        len(place) - len(first),
        len(found) - len(strangers) - len(first),
        sum(place[a] > place[b] for a, b in pairwise(first)),
        len(strangers) + others,
    )
