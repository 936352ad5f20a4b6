"""The routers' part: what leaves one airport is copied to topics of its own while processes are killed.

Each carrier has a router with a filter. What must be in its destination is computed from the source and from
the producers' acknowledgements alone: the carrier's flights from that airport, in the order of their numbers,
each once.
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
    """What came of it."""

    routers: int
    wanted: int
    """Acknowledged flights from the airport."""
    read: int
    lost: int
    doubled: int
    out_of_order: int
    others: int
    """Altered records, flights that no router had to copy, tombstones."""

    @property
    def is_good(self) -> bool:
        """Each flight from the airport is there once, in its place, and nothing else."""
        return self.wanted > 0 and not (self.lost or self.doubled or self.out_of_order or self.others)


def dest_of(topic: str) -> str:
    """Where a carrier's router leads."""
    return f"{AIRPORT.lower()}.{topic.partition('.')[2]}"


def make_routers(client: Client, topics: tuple[str, ...]) -> None:
    """One for each carrier. They begin at the head of their source: make them before anything is written."""
    for topic in topics:
        client.topics.create(dest_of(topic), durability="fsync")
        client.routers.create(f"{topic}->{dest_of(topic)}", topic, dest_of(topic), filter=AIRPORT)


def read_and_judge(url: str, directory: Path, events: Source, acked: NDArray[np.uint64]) -> Copies:
    """Wait until all is forwarded, read every destination whole, and hold it against the source."""
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
    """Ids of the acknowledged flights from the airport, by carrier, in the order of their numbers."""
    wanted: dict[str, list[int]] = {topic: [] for topic in events.topics}
    for event, topic, payload in share(directory, 0, 1):
        if acked[event] and tag_of(payload) == AIRPORT:
            wanted[topic].append(event)
    return {topic: sorted(ids, key=acked.__getitem__) for topic, ids in wanted.items()}


def judge(wanted: list[int], found: list[int], others: int) -> tuple[int, int, int, int, int, int]:
    """(wanted, read, lost, doubled, out of order, others) of one destination."""
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
