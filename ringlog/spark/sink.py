"""Batch and stream writers for Spark: tasks stage Arrow batches as frames; the driver commits or aborts.

Spark pickles the driver's batch writer into its tasks and back into `commit`. Each call to a stream writer
may use a new instance in another process, so state travels only in the commit messages. Records are visible
while a batch is appended: writes are exactly-once, but not isolated.
"""

from __future__ import annotations

import logging
import os
import random
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

from pyspark.sql.datasource import (
    DataSourceArrowWriter,
    DataSourceStreamArrowWriter,
    WriterCommitMessage,
)
from pyspark.sql.types import StructType

import ringlog
from ringlog import stop_points
from ringlog.client.client import Client
from ringlog.errors import ConnectionTrouble, NotReady, TopicNotFound
from ringlog.frame import raise_malloc_trim_threshold
from ringlog.limits import BATCH_RECORDS_MAX, FRAME_BYTES_MAX, RECORD_BYTES_MAX
from ringlog.link.futures import Steps
from ringlog.spark.clients import CONNECT_S, client_of, engine_of, log_id_of
from ringlog.spark.commit import (
    BatchCommitReport,
    Committer,
    UnfinishedPlan,
    WriterKey,
    abort,
    unknown_topic,
)
from ringlog.spark.errors import OptionError
from ringlog.spark.options import SinkOptions
from ringlog.spark.rows import FrameMaker, SinkLimits, check_columns
from ringlog.spark.staging import FramesWriter, StagedFile, Staging
from ringlog.spark.workers import freeze_imports

if TYPE_CHECKING:
    import pyarrow as pa

STAGING_NAME = "spark"
"""Staging directory below the data directory, unless stagingDir names another one."""
QUERY_PROPERTY = "sql.streaming.queryId"
_remote: dict[str, Client] = {}
_lock = threading.Lock()
log: logging.Logger = logging.getLogger("ringlog.spark")


class SparkTaskIdentity(NamedTuple):
    """Identity of a writer task: id of the streaming query (None for a batch write) and partition number."""

    query: str | None
    partition: int


def task_identity() -> SparkTaskIdentity:
    """Return the identity from Spark's task context; raise OptionError outside of a task."""
    from pyspark import TaskContext

    context = TaskContext.get()
    if context is None:
        raise OptionError("this writer must run in a Spark task")
    return SparkTaskIdentity(context.getLocalProperty(QUERY_PROPERTY), context.partitionId())


@dataclass(frozen=True)
class StagedRows(WriterCommitMessage):
    """Commit message of one task: the writer's key, and its staged file (None if the task had no rows)."""

    key: WriterKey
    file: StagedFile | None


def sink_client(options: SinkOptions) -> Client:
    """Return this process's client of the target engine; raise EngineNotRunning or NotConnected."""
    if options.path:
        return client_of(options.path)
    with _lock:
        client = _remote.get(options.connect)
        if client is None:
            client = _remote[options.connect] = ringlog.connect(options.connect)
    client.wait_ready(CONNECT_S)
    return client


def sink_staging(options: SinkOptions) -> Staging:
    """Return the staging directory of these options. Create it if it is missing."""
    directory = options.staging_dir or os.path.join(engine_of(options.path)[1].data_dir, STAGING_NAME)
    return Staging(directory).make()


def committer_of(options: SinkOptions) -> Committer:
    """Return the Committer for these options."""
    log = log_id_of(options.path) if options.path else ""
    return Committer(
        sink_client(options), sink_staging(options), options.create_topics, options.durability, log
    )


def recover(options: SinkOptions) -> tuple[list[BatchCommitReport], list[UnfinishedPlan]]:
    """Finish every write that a failed driver left incomplete; see Committer.recover."""
    return committer_of(options).recover()


class _StagingWriter:
    """Common part of the batch and the stream writer."""

    def __init__(
        self,
        options: SinkOptions,
        schema: StructType,
        overwrite: bool = False,
        *,
        place: Callable[[], SparkTaskIdentity] = task_identity,
    ) -> None:
        if overwrite:
            raise OptionError(
                'only appends are supported: use mode("append"), or outputMode("append") for a stream',
                hint="delete records with client.topics.delete_records",
            )
        check_columns(schema, options)
        self.options = options
        self._place = place

    def _key(self, place: SparkTaskIdentity) -> WriterKey:
        raise NotImplementedError

    def write(self, iterator: Iterator[pa.RecordBatch]) -> WriterCommitMessage:
        """Encode the rows of a task into one durable staged file. On any failure the file is deleted."""
        place = self._place()
        key = self._key(place)
        raise_malloc_trim_threshold()
        writer = sink_staging(self.options).writer(key.text)
        try:
            file = stage(iterator, writer, place.partition, self.options)
        except BaseException:
            writer.abandon()
            raise
        freeze_imports("write")
        return StagedRows(key, file)

    def _commit(self, messages: Sequence[WriterCommitMessage | None], batch: int) -> BatchCommitReport:
        key, files = collect_staged(messages)
        if key is None or not files:
            return BatchCommitReport("nothing", batch)
        raise_malloc_trim_threshold()
        done = committer_of(self.options).commit(key, batch, files)
        log.info(
            "batch %d of %s: %s, %d rows in %d frames", batch, key.text, done.outcome, done.rows, done.frames
        )
        return done

    def _abort(self, messages: Sequence[WriterCommitMessage | None]) -> None:
        key, files = collect_staged(messages)
        if key is None or not files:
            return
        try:
            abort(sink_staging(self.options), key, files)
        except (NotReady, ConnectionTrouble) as e:
            log.warning("staged files of %s remain; a later commit deletes them: %s", key.text, e)


def txn_key(app_id: str, topic: str | None) -> WriterKey:
    """Return the writer key of a txnAppId.

    Each topic is a separate output; so are rows with a topic column.
    """
    # A line break is a safe separator, because topic names cannot contain one.
    return WriterKey(f"txn/{app_id}\n{topic or ''}", legacy_text=f"txn/{app_id}")


class BatchWriter(_StagingWriter, DataSourceArrowWriter):
    """`df.write.format("ringlog").mode("append")`.

    Spark copies the driver's instance to tasks and to commit.
    """

    def __init__(
        self,
        options: SinkOptions,
        schema: StructType,
        overwrite: bool = False,
        *,
        place: Callable[[], SparkTaskIdentity] = task_identity,
    ) -> None:
        super().__init__(options, schema, overwrite, place=place)
        self.batch: int = 0
        if options.txn_app_id is None:
            self.key: WriterKey = WriterKey(f"write/{random.getrandbits(128):032x}", is_one_time=True)
        else:
            self.key = txn_key(options.txn_app_id, options.topic)
            self.batch = options.txn_version or 0
        if options.topic is not None and not options.create_topics:
            require_topic(sink_client(options), options.topic)

    def _key(self, place: SparkTaskIdentity) -> WriterKey:
        return self.key

    def commit(self, messages: list[WriterCommitMessage | None]) -> None:
        """Append the files that the tasks staged."""
        self._commit(messages, self.batch)

    def abort(self, messages: list[WriterCommitMessage | None]) -> None:
        """Delete the files that the tasks staged, unless a plan names them."""
        self._abort(messages)


class StreamWriter(_StagingWriter, DataSourceStreamArrowWriter):
    """`df.writeStream.format("ringlog")`.

    Its identity is the query id, which Spark keeps in the checkpoint.
    """

    def _key(self, place: SparkTaskIdentity) -> WriterKey:
        if not place.query:
            raise OptionError("Spark did not provide the id of the streaming query")
        return WriterKey(f"query/{place.query}")

    def commit(self, messages: list[WriterCommitMessage | None], batchId: int) -> None:  # noqa: N803
        """Append the files that this micro-batch staged, or resume the plan of an earlier attempt."""
        self._commit(messages, batchId)

    def abort(self, messages: list[WriterCommitMessage | None], batchId: int) -> None:  # noqa: N803
        """Delete the files that the tasks staged, unless a plan names them."""
        self._abort(messages)


def collect_staged(messages: Sequence[Any]) -> tuple[WriterKey | None, list[StagedFile]]:
    """Return the writer key and the staged files of the messages. The message of a failed task is None."""
    staged = [message for message in messages if isinstance(message, StagedRows)]
    keys = {message.key for message in staged}
    if len(keys) > 1:
        raise OptionError("one commit has messages of several writers", keys=sorted(key.text for key in keys))
    return (keys.pop() if keys else None), [message.file for message in staged if message.file is not None]


def require_topic(client: Client, topic: str) -> None:
    """Raise TopicNotFound, with the remedy, if the topic does not exist."""
    try:
        client.topics.state(topic, touch=False)
    except TopicNotFound:
        raise unknown_topic(topic) from None


def limits_of(client: Client) -> SinkLimits:
    """Query the limits of the client's engine. Limits that an older engine does not name are the largest."""

    def steps() -> Steps[Mapping[str, int]]:
        named: Mapping[str, int] = yield client.connection.engine_limits()
        return named

    found = client.run(steps())
    return SinkLimits(
        found.get("record_bytes", RECORD_BYTES_MAX),
        found.get("batch_records", BATCH_RECORDS_MAX),
        found.get("frame_bytes", FRAME_BYTES_MAX),
    )


def stage(
    batches: Iterator[pa.RecordBatch], writer: FramesWriter, partition: int, options: SinkOptions
) -> StagedFile | None:
    """Encode batches into the writer's file. If it raises, the caller abandons the file.

    Each topic is checked at its first row, and each frame by the engine's limits. So an unknown topic, or a
    row that the engine never accepts, fails the task. In the commit it would be too late: the rows are
    planned by then, and no later batch can be written before them.
    """
    client = sink_client(options)
    numbers: dict[str, int] = {}

    def number_of(topic: str) -> int:
        number = numbers.get(topic)
        if number is None:
            if not options.create_topics:
                require_topic(client, topic)
            number = numbers[topic] = len(numbers)
        return number

    maker = FrameMaker(options, number_of, limits_of(client))
    for batch in batches:
        for encoded in maker.add(batch):
            writer.add(encoded.pieces, encoded.size, encoded.rows)
    for encoded in maker.flush():
        writer.add(encoded.pieces, encoded.size, encoded.rows)
    file = writer.finish(partition, list(numbers))
    if file is not None:
        stop_points.hit("sink_after_stage")
    return file
