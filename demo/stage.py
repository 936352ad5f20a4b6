"""The last stage: one carrier's records are deleted, capped, sealed, relocated and read again.

The expected result comes only from the source: the carrier's events without those of one airport, and of
these the newest half. Then the engine makes a checkpoint, its relocator moves every segment to a cold
directory, and the engine is restarted. A reader from the start must receive one tombstone, for the records
that the cap evicted, and then exactly the expected records. All other carriers must be complete, read from
the cold tier.
"""

from __future__ import annotations

import time
from dataclasses import asdict, dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import xxhash
from numpy.typing import NDArray

import ringlog
from demo.engine import Engine
from demo.judge import Ledger, Verdict, judge
from demo.progress import Progress
from demo.source import Source, events_of, id_of, tag_of
from ringlog.cli.maintenance import COMPACTOR, request_actor
from ringlog.client import Client
from ringlog.client.read.pages import Tombstone
from ringlog.envelope.messages import CheckpointMade, CheckpointNow

PAGE_RECORDS = 10_000
MOVE_S = 60.0
LOOK_S = 0.02


@dataclass(frozen=True, slots=True)
class Stage:
    """Result of the stage."""

    topic: str
    tag: str
    deleted: int
    evicted: int
    tombstone: Tombstone | None
    segments: int
    cold_segments: int
    verdict: Verdict
    """For the carrier's own records, compared with the expected ones; `others` includes wrong tombstones."""
    rest: Verdict
    """For all other carriers, read from the cold tier."""

    @property
    def is_good(self) -> bool:
        """Whether exactly the right records were removed and reported, and segments were relocated."""
        return self.verdict.is_good and self.rest.is_good and self.cold_segments > 0

    def facts(self) -> dict[str, Any]:
        """Return the entries for demo.json."""
        tombstone = self.tombstone
        return {
            "deleted": self.deleted,
            "evicted": self.evicted,
            "tombstone": None if tombstone is None else asdict(tombstone),
            "segments": self.segments,
            "cold_segments": self.cold_segments,
            "stage": {
                "topic": self.topic,
                "tag": self.tag,
                "left": asdict(self.verdict),
                "rest": asdict(self.rest),
            },
        }


@dataclass(frozen=True, slots=True)
class _Wanted:
    """Expected rest of the carrier: ids and their seqs in order; counts of deleted and evicted events."""

    ids: list[int]
    seqs: list[int]
    doomed: int
    evicted: int

    @classmethod
    def of(cls, directory: Path, topic: str, tag: str, acked: NDArray[np.uint64]) -> _Wanted:
        alive, doomed = [], 0
        for event, payload in events_of(directory, topic):
            if tag_of(payload) == tag:
                doomed += 1
            elif acked[event]:
                alive.append((int(acked[event]), event))
        alive.sort()
        left = alive[len(alive) // 2 :]
        return cls([event for _, event in left], [seq for seq, _ in left], doomed, len(alive) - len(left))


def run(
    directory: Path,
    engine: Engine,
    events: Source,
    acked: NDArray[np.uint64],
    producers: int,
    progress: Progress,
) -> Stage:
    """Run the stage on a running engine. The engine still runs when this returns."""
    topic = _carrier(events)
    tag = _rarest_tag(directory, topic)
    wanted = _Wanted.of(directory, topic, tag, acked)
    cold = directory / "cold"
    cold.mkdir(mode=0o700)
    progress.say(f"{topic}: deleting tag {tag}, keeping the newest {len(wanted.ids):,}")
    with ringlog.connect(engine.url, wait=20.0) as client:
        deletion = client.topics.delete_records(topic, match=tag)
        client.topics.configure(topic, cap_records=len(wanted.ids), discard="old")
        deleted, evicted = deletion.deleted, deletion.count - client.topics.state(topic).count
    engine.stop()
    engine.start(f"cold.dir={cold}", "cold.hot_segments=0", "cold.interval_s=0.2")
    progress.say("checkpoint; relocation to the cold directory")
    request_actor(engine.shm_dir, COMPACTOR, CheckpointNow(), CheckpointMade, timeout_s=MOVE_S)
    segments, cold_segments = _await_relocation(engine.data_dir, cold)
    engine.stop()
    engine.start()
    progress.say("reading everything again, from the cold tier")
    with ringlog.connect(engine.url, wait=20.0) as client:
        verdict, tombstone = _judge_left(client, events, topic, wanted, evicted, deleted)
        rest = _judge_rest(client, events, topic, acked, producers)
    return Stage(topic, tag, deleted, evicted, tombstone, segments, cold_segments, verdict, rest)


def _carrier(events: Source) -> str:
    """Return the topic with the median number of events."""
    counts = sorted((count, topic) for topic, count in events.expected().items())
    return counts[len(counts) // 2][1]


def _rarest_tag(directory: Path, topic: str) -> str:
    tags = [tag_of(payload) for _, payload in events_of(directory, topic)]
    return min(set(tags), key=lambda tag: (tags.count(tag), tag))


def _await_relocation(data_dir: Path, cold: Path) -> tuple[int, int]:
    """Wait until all segments are only in the cold directory, or a timeout; return (all, relocated)."""
    deadline = time.monotonic() + MOVE_S
    while True:
        stems = {path.relative_to(data_dir).with_suffix("") for path in data_dir.glob("[tp]*/**/*.idx")}
        moved = [
            stem for stem in stems
            if (cold / f"{stem}.data").exists() and not (data_dir / f"{stem}.data").exists()
        ]  # fmt: skip
        if (stems and len(moved) == len(stems)) or time.monotonic() > deadline:
            return len(stems), len(moved)
        time.sleep(LOOK_S)


def _judge_left(
    client: Client, events: Source, topic: str, wanted: _Wanted, evicted: int, deleted: int
) -> tuple[Verdict, Tombstone | None]:
    """Read the carrier from the start and compare it with the expected records."""
    found: list[tuple[int, int]] = []
    tombstones: list[Tombstone] = []
    altered = 0
    for page in client.reader(topic).pages(PAGE_RECORDS):
        tombstones += [page.tombstone] if page.tombstone is not None else []
        for piece in page.batches:
            for i, payload in enumerate(piece.payloads()):
                event = id_of(payload)
                is_known = (
                    0 <= event < len(events) and xxhash.xxh3_64_intdigest(payload) == events.digests[event]
                )
                altered += not is_known
                found.append((piece.seq_at(i), event))
    expected = set(zip(wanted.seqs, wanted.ids, strict=True))
    seqs = [seq for seq, _ in found]
    wrong = altered + (deleted != wanted.doomed) + (evicted != wanted.evicted) + len(set(found) - expected)
    wrong += _wrong_tombstones(tombstones, topic, wanted)
    verdict = Verdict(
        acked=len(expected),
        read=len(found),
        lost=len(expected - set(found)),
        doubled=len(found) - len(set(found)),
        out_of_order=sum(a >= b for a, b in pairwise(seqs)),
        moved=0,
        others=wrong,
    )
    return verdict, tombstones[0] if tombstones else None


def _wrong_tombstones(tombstones: list[Tombstone], topic: str, wanted: _Wanted) -> int:
    """Check for exactly one tombstone: reason cap, from 1, ending before the first remaining record."""
    if len(tombstones) != 1:
        return 1 + len(tombstones)
    (found,) = tombstones
    is_right = (
        found.topic == topic
        and found.reason == "cap"
        and found.gap_from == 1
        and found.gap_to < wanted.seqs[0]
    )
    return 0 if is_right else 1


def _judge_rest(
    client: Client, events: Source, topic: str, acked: NDArray[np.uint64], producers: int
) -> Verdict:
    ledger = Ledger(events, producers)
    others = np.asarray(events.topic_of != events.topics.index(topic))
    for other in events.topics:
        for page in client.reader(other).pages(PAGE_RECORDS) if other != topic else ():
            if page.tombstone is not None:
                ledger.announce()
            for piece in page.batches:
                ledger.take(other, piece.seq_at(0), piece.payloads())
    return judge(np.where(others, acked, 0).astype(np.uint64), ledger.seen, ledger.seqs, ledger.counts)
