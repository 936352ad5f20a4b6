"""A simulation of Spark for the sink: the test drives tasks and commits, and chooses the partitions.

The sink itself is real: rows go through stage(), messages through pickle, and frames into a real engine.
"""

from __future__ import annotations

import pickle
import random
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType

import pyarrow as pa

from ringlog.client.client import Client
from ringlog.errors import TopicNotFound
from ringlog.spark import sink
from ringlog.spark.commit import BatchCommitReport, Committer, WriterKey, abort
from ringlog.spark.options import SinkOptions
from ringlog.spark.staging import StagedFile, Staging
from ringlog.storage.disk import Disk
from ringlog.testing.wrapped_disk import WrappedDisk

DEALS = ("same", "more", "fewer", "shuffle")
"""Distributions of a repeated batch's rows over partitions, relative to the first attempt."""
PARTS = 3


WIDE = 10_000
"""Row size in bytes at which a few rows make a frame that is not joined before it is written."""


def rows(
    ids: Sequence[int],
    topics: Sequence[str],
    width: int = 1,
    widths: Mapping[int, int] = MappingProxyType({}),
) -> pa.RecordBatch:
    """Return one Spark batch. Row `i` goes to topic i mod n, and its value is the id with at least `width`
    bytes, or `widths[i]`."""
    values = pa.array([b"%*d" % (widths.get(i, width), i) for i in ids], pa.binary())
    return pa.RecordBatch.from_arrays(
        [pa.array([topics[i % len(topics)] for i in ids]), values], names=["topic", "value"]
    )


def deal(ids: Sequence[int], how: str, seed: int = 0) -> list[list[int]]:
    """Return the ids of each partition."""
    parts = {"same": PARTS, "more": PARTS + 2, "fewer": PARTS - 1, "shuffle": PARTS - 1}[how]
    mixed = list(ids)
    if how == "shuffle":
        random.Random(seed).shuffle(mixed)
    step = -(-len(mixed) // parts)
    return [mixed[at : at + step] for at in range(0, len(mixed), step)]


@dataclass
class World:
    """One query that writes to two topics of a real engine."""

    client: Client
    options: SinkOptions
    key: WriterKey
    topics: tuple[str, ...]
    directory: str
    disk: Disk | None = None
    width: int = 1
    """Minimum size of a row in bytes."""
    widths: dict[int, int] = field(default_factory=dict)
    """Minimum sizes of single rows in bytes."""
    staged: list[StagedFile] = field(default_factory=list)

    def task(self, ids: Sequence[int], partition: int) -> StagedFile | None:
        """Run one task. If it raises an ordinary error, it leaves no file."""
        writer = Staging(self.directory, self.disk).writer(self.key.text)
        try:
            file = sink.stage(
                iter([rows(ids, self.topics, self.width, self.widths)]), writer, partition, self.options
            )
        except Exception:
            writer.abandon()
            raise
        message = pickle.loads(pickle.dumps(sink.StagedRows(self.key, file)))
        if message.file is not None:
            self.staged.append(message.file)
        return message.file

    def stage(self, ids: Sequence[int], how: str = "same", seed: int = 0) -> list[StagedFile]:
        """Run all tasks of a batch."""
        self.staged = []
        for partition, part in enumerate(deal(ids, how, seed)):
            self.task(part, partition)
        return self.staged

    def committer(self) -> Committer:
        """Return a new committer, as the driver creates one for each call."""
        return Committer(self.client, Staging(self.directory, self.disk))

    def batch(self, number: int, ids: Sequence[int], how: str = "same", seed: int = 0) -> BatchCommitReport:
        """Stage and commit a batch."""
        return self.committer().commit(self.key, number, self.stage(ids, how, seed))

    def abort(self) -> list[str]:
        """Do what Spark does after failed tasks or a failed commit."""
        return abort(Staging(self.directory, self.disk), self.key, self.staged)

    def found(self) -> Counter[tuple[str, int]]:
        """Return how often each (topic, row) is stored."""
        return Counter(self._found())

    def _found(self) -> Iterator[tuple[str, int]]:
        for topic in self.topics:
            try:
                head = self.client.topics.state(topic).head_seq
            except TopicNotFound:
                continue
            after = 0
            while after < head:
                page = self.client.read(topic, after, limit=1000)
                yield from ((topic, int(record.data)) for record in page.records)
                after = page.records[-1].seq

    def expected(self, ids: Sequence[int]) -> Counter[tuple[str, int]]:
        """Return each of these rows once."""
        return Counter((self.topics[i % len(self.topics)], i) for i in ids)


def bury(disk: WrappedDisk) -> None:
    """Release the files and the lock of a process that died (Halted)."""
    for fd in list(disk.paths):
        disk.inner.close(fd)
    disk.paths.clear()
