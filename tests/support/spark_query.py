"""A simulation of Spark for a stream reader: the test makes the calls of micro-batch execution, in its order.

Offsets pass through JSON text and an offset log, and readers and partitions through pickle. A batch that was
not committed is repeated from the log after a restart, as in Spark.
"""

from __future__ import annotations

import json

from pyspark.sql.streaming.datasource import ReadAllAvailable

from ringlog.spark.options import source_options
from ringlog.spark.schema import record_schema, select
from ringlog.spark.stream import StreamReader
from tests.support.spark_records import copied

BATCHES_MAX = 1_000
ROW = "topic epoch seq"


class Query:
    """One streaming query with its checkpoint: `ends` is the offset log, and `committed` counts the finished
    batches."""

    def __init__(self, running, topics=None, *, now=False, **options):
        self.running = running
        self.given = {"path": running.data_dir, "startingOffsets": "earliest"}
        if topics is not None:
            self.given["subscribe"] = topics
        self.initial = None
        self.ends = []
        self.committed = 0
        self.rows = []
        self.limit = None
        self.restart(now=now, **options)

    def restart(self, *, now=False, **options):
        """Start a new process, with changed options if given. `now` means the trigger availableNow."""
        self.given |= options
        parsed = source_options(self.given, streaming=True)
        self.reader = copied(StreamReader(parsed, select(parsed, ROW.split())))
        full = StreamReader(parsed, record_schema(parsed))
        assert copied(full).getDefaultReadLimit() == self.reader.getDefaultReadLimit()
        if now:
            self.reader.prepareForTriggerAvailableNow()
        self.limit = self.reader.getDefaultReadLimit()
        return self

    def once(self):
        """Use the trigger once: one batch with all records."""
        self.limit = ReadAllAvailable()
        return self

    def start_of(self, batch):
        """Return the start offset of a batch as JSON text."""
        if batch == 0:
            return json.dumps(self.reader.initialOffset())  # requested each time, as Spark does
        return self.ends[batch - 1]

    def plan(self):
        """Write the next batch into the offset log. Return False if there is nothing new."""
        if len(self.ends) > self.committed:
            return True
        start = self.start_of(len(self.ends))
        end = json.dumps(self.reader.latestOffset(json.loads(start), self.limit))
        if end == start:
            return False
        self.ends.append(end)
        return True

    def run_planned(self, cut=None):
        """Return the rows of the planned, uncommitted batch. `cut` stops after that many partitions."""
        batch = self.committed
        start, end = json.loads(self.start_of(batch)), json.loads(self.ends[batch])
        found = []
        partitions = [copied(each) for each in self.reader.partitions(start, end)]
        for partition in partitions[:cut]:
            for made in copied(self.reader).read(partition):
                made.validate(full=True)
                found += zip(*(made[name].to_pylist() for name in ROW.split()), strict=True)
        return found

    def step(self):
        """Run one micro-batch. Return its rows, or None if there is nothing new."""
        if not self.plan():
            return None
        found = self.run_planned()
        self.rows += found
        self.committed += 1
        self.reader.commit(json.loads(self.ends[-1]))
        return found

    def drain(self):
        """Run batches until there is nothing new. Return the rows of each batch."""
        found = []
        for _ in range(BATCHES_MAX):
            rows = self.step()
            if rows is None:
                return found
            found.append(rows)
        raise AssertionError("the stream does not come to an end")

    def seqs(self, topic):
        """Return the seqs read so far of a topic, in the order of reading."""
        return [seq for name, _, seq in self.rows if name == topic]

    @property
    def place(self):
        """{topic: [epoch, seq]} of the last end offset."""
        return json.loads(self.ends[-1])["topics"]
