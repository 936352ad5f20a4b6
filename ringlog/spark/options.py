"""Options of the Spark source and sink, parsed into frozen dataclasses. Pure: no pyspark, no file access.

Spark passes option names in lower case; names are matched in any case. An unknown option fails with the most
similar known names. A Kafka option that is not supported fails with the reason.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import datetime
from typing import Any

from ringlog.limits import BATCH_RECORDS_MAX, MIB, REQUEST_BYTES_MAX
from ringlog.spark.cold_address import format_address, is_address
from ringlog.spark.errors import OptionError
from ringlog.spark.option_values import (
    EARLIEST,
    LATEST,
    RawOptions,
    TopicOffsets,
    TopicTimes,
    boolean,
    bound_of,
    byte_count,
    choice,
    comma_list,
    cursor_of,
    directory,
    directory_or_url,
    durability,
    integer,
    not_empty,
    offsets,
    regular_expression,
    tag_list,
    time_us,
    times_by_topic,
    topic_name,
)
from ringlog.spark.option_values import (
    address as engine_address,
)
from ringlog.types import Durability

__all__ = [
    "EARLIEST", "LATEST", "SinkOptions", "SourceOptions", "TopicOffsets", "TopicTimes", "as_text", "bound_of",
    "cursor_of", "schema_options", "sink_options", "source_options",
]  # fmt: skip

MAX_PARTITION_BYTES = 64 * MIB
ROWS_PER_BATCH = 8_192
ROWS_PER_BATCH_MAX = 1_000_000
PARTITIONS_MAX = 100_000
COUNT_MAX = 1 << 62
VIEWS = ("records", "frames", "segments", "topics", "gaps", "audit")
LAYOUTS = ("ringlog", "kafka")
READERS = ("jvm", "python")
"""Where frames are decoded into columns: in the JVM if the JVM reader is loaded, else in Python."""
MAX_FRAME_RECORDS = 4_096
MAX_FRAME_BYTES = 1 * MIB

SOURCE_NAMES = (
    "path", "root", "cold", "subscribe", "subscribePattern", "startingOffsets", "endingOffsets",
    "startingTimestamp", "endingTimestamp", "startingOffsetsByTimestamp", "endingOffsetsByTimestamp",
    "startingOffsetsByTimestampStrategy", "maxOffsetsPerTrigger", "maxBytesPerTrigger", "minPartitions",
    "maxPartitionBytes", "failOnDataLoss", "gapsPath", "includeHeaders", "tags", "view", "layout",
    "onCorrupt", "rowsPerBatch", "reader",
)  # fmt: skip
SINK_NAMES = (
    "path", "root", "connect", "topic", "createTopics", "txnAppId", "txnVersion", "durability",
    "maxFrameRecords", "maxFrameBytes", "stagingDir",
)  # fmt: skip

UNSUPPORTED_OPTIONS = {
    "assign": "topics have one partition each: name them with subscribe",
    "group.id": "a query stores its position in its checkpoint; this source uses no consumer group",
    "groupidprefix": "a query stores its position in its checkpoint; this source uses no consumer group",
    "minoffsetspertrigger": "a Python source can give Spark one limit, not a minimum with a delay: use "
    "maxOffsetsPerTrigger and the trigger's interval",
    "maxtriggerdelay": "it depends on minOffsetsPerTrigger, which is not supported",
    "kafkaconsumer.polltimeoutms": "records are read from mapped files, nothing is polled",
    "fetchoffset.numretries": "positions are read from shared memory, nothing is fetched",
    "fetchoffset.retryintervalms": "positions are read from shared memory, nothing is fetched",
    "maxrecordsperpartition": "partitions are cut by bytes: use maxPartitionBytes",
}
"""Unsupported options of the Kafka source, in lower case, with the reason for each."""
SPARK_OWN_OPTIONS = frozenset({"checkpointlocation"})
"""Options of a streaming write, in lower case, that are meant for Spark but also reach the sink."""
UNSUPPORTED_SINK_OPTIONS = {
    "includeheaders": "the sink writes the column headers if it exists",
    "topiccolumn": "the topic column is always named topic",
}
COLD_VIEWS = ("records", "gaps")
"""Views that can be read from a cold tier without its engine."""


@dataclass(frozen=True, slots=True)
class SourceOptions:
    """Options of a read. Times are microseconds since the epoch, sizes are bytes."""

    path: str
    """Absolute path of the data directory, or of the run directory if it is configured elsewhere. For a read
    of a cold tier without its engine: the address from `cold_address.format_address`."""
    topics: tuple[str, ...] = ()
    pattern: str | None = None
    """Python regular expression that must match the whole topic name."""
    starting: TopicOffsets = field(default_factory=lambda: TopicOffsets(EARLIEST))
    ending: TopicOffsets = field(default_factory=lambda: TopicOffsets(LATEST))
    starting_ts: TopicTimes = field(default_factory=TopicTimes)
    """Takes precedence over `starting` for topics that have a time."""
    ending_ts: TopicTimes = field(default_factory=TopicTimes)
    latest_if_too_new: bool = False
    """True for startingOffsetsByTimestampStrategy=latest."""
    max_offsets: int | None = None
    max_bytes: int | None = None
    min_partitions: int = 1
    max_partition_bytes: int = MAX_PARTITION_BYTES
    fail_on_data_loss: bool = True
    gaps_path: str | None = None
    include_headers: bool = False
    tags: tuple[str, ...] = ()
    """Exact tags, and prefixes that end in `*`. Empty: all records, including untagged ones."""
    view: str = "records"
    layout: str = "ringlog"
    quarantine: bool = False
    """True for onCorrupt=quarantine."""
    rows_per_batch: int = ROWS_PER_BATCH

    def matches(self, topic: str) -> bool:
        """Return whether the query subscribes to this topic."""
        if self.pattern is not None:
            return re.fullmatch(self.pattern, topic) is not None
        return topic in self.topics

    @property
    def named_topics(self) -> tuple[str, ...]:
        """Topics that have an offset or a time of their own. The query must subscribe to each of them."""
        parts = (self.starting, self.ending, self.starting_ts, self.ending_ts)
        return tuple(dict.fromkeys(name for part in parts for name in part.topics))


@dataclass(frozen=True, slots=True)
class SinkOptions:
    """Options of a write. Exactly one of `path` and `connect` is set."""

    path: str = ""
    connect: str = ""
    """Address of the engine, ringlog://…"""
    topic: str | None = None
    create_topics: bool = False
    txn_app_id: str | None = None
    txn_version: int | None = None
    durability: Durability | None = None
    max_frame_records: int = MAX_FRAME_RECORDS
    max_frame_bytes: int = MAX_FRAME_BYTES
    staging_dir: str | None = None


def source_options(raw: Mapping[str, str], *, streaming: bool) -> SourceOptions:
    """Parse and validate the options of a batch or streaming read.

    Args:
        raw: options by name, as Spark passes them.
        streaming: whether they belong to a streaming read.

    Returns:
        The options.

    Raises:
        OptionError: an option is unknown, malformed, or conflicts with another one.
    """
    given = RawOptions(raw, SOURCE_NAMES, UNSUPPORTED_OPTIONS)
    view = given.parse_option("view", lambda n, t: choice(n, t, VIEWS), "records")
    _only(given, streaming, view)
    topics, pattern = _subscription(given, is_needed=view not in {"topics", "segments"})
    given.parse_option(
        "reader", lambda n, t: choice(n, t, READERS), READERS[0]
    )  # Validated only: the reader was already selected when this code runs.
    options = SourceOptions(
        path=_cold_of(given, view) if "cold" in given else _path_of(given),
        topics=topics,
        pattern=pattern,
        **_offsets_of(given, streaming),
        latest_if_too_new=given.parse_option(
            "startingOffsetsByTimestampStrategy", lambda n, t: choice(n, t, ("error", "latest")), "error"
        )
        == "latest",
        max_offsets=given.parse_option("maxOffsetsPerTrigger", _count, None),
        max_bytes=given.parse_option("maxBytesPerTrigger", lambda n, t: byte_count(n, t, 1, COUNT_MAX), None),
        min_partitions=given.parse_option("minPartitions", lambda n, t: integer(n, t, 1, PARTITIONS_MAX), 1),
        max_partition_bytes=given.parse_option(
            "maxPartitionBytes", lambda n, t: byte_count(n, t, 1, COUNT_MAX), MAX_PARTITION_BYTES
        ),
        fail_on_data_loss=given.parse_option("failOnDataLoss", boolean, True),
        gaps_path=given.parse_option("gapsPath", directory, None),
        include_headers=given.parse_option("includeHeaders", boolean, False),
        tags=given.parse_option("tags", tag_list, ()),
        view=view,
        layout=given.parse_option("layout", lambda n, t: choice(n, t, LAYOUTS), "ringlog"),
        quarantine=given.parse_option("onCorrupt", lambda n, t: choice(n, t, ("fail", "quarantine")), "fail")
        == "quarantine",
        rows_per_batch=given.parse_option(
            "rowsPerBatch", lambda n, t: integer(n, t, 1, ROWS_PER_BATCH_MAX), ROWS_PER_BATCH
        ),
    )
    _check_together(options)
    if is_address(options.path) and options.quarantine and view == "gaps":
        raise OptionError(
            "onCorrupt=quarantine with view=gaps needs the engine and cannot be combined with cold",
            option="onCorrupt",
        )
    if streaming and options.quarantine:
        raise OptionError(
            "onCorrupt=quarantine is for batches only: read the damaged range as a batch, then start after it"
        )
    return options


def sink_options(raw: Mapping[str, str]) -> SinkOptions:
    """Parse and validate the options of a write.

    Args:
        raw: options by name, as Spark passes them.

    Returns:
        The options.

    Raises:
        OptionError: an option is unknown, malformed, or conflicts with another one.
    """
    given = RawOptions(
        {key: value for key, value in raw.items() if key.lower() not in SPARK_OWN_OPTIONS},
        SINK_NAMES,
        UNSUPPORTED_SINK_OPTIONS,
    )
    has_path = "path" in given or "root" in given
    if has_path == ("connect" in given):
        raise OptionError("set exactly one of path (data directory) and connect (engine address)")
    options = SinkOptions(
        path=_path_of(given) if has_path else "",
        connect=given.parse_option("connect", engine_address, ""),
        topic=given.parse_option("topic", topic_name, None),
        create_topics=given.parse_option("createTopics", boolean, False),
        txn_app_id=given.parse_option("txnAppId", not_empty, None),
        txn_version=given.parse_option("txnVersion", lambda n, t: integer(n, t, 0, COUNT_MAX), None),
        durability=given.parse_option("durability", durability, None),
        max_frame_records=given.parse_option(
            "maxFrameRecords", lambda n, t: integer(n, t, 1, BATCH_RECORDS_MAX), MAX_FRAME_RECORDS
        ),
        max_frame_bytes=given.parse_option(
            "maxFrameBytes", lambda n, t: byte_count(n, t, 1, REQUEST_BYTES_MAX), MAX_FRAME_BYTES
        ),
        staging_dir=given.parse_option("stagingDir", directory, None),
    )
    if (options.txn_app_id is None) != (options.txn_version is None):
        raise OptionError("set both txnAppId and txnVersion, or neither")
    if options.connect and options.staging_dir is None:
        raise OptionError("connect requires stagingDir: there is no local data directory for staged files")
    return options


def schema_options(raw: Mapping[str, str]) -> SourceOptions:
    """Parse the options that decide the columns: view, layout and includeHeaders. All others are ignored."""
    names = {"view", "layout", "includeheaders"}
    given = RawOptions(
        {key: value for key, value in raw.items() if key.lower() in names}, SOURCE_NAMES, UNSUPPORTED_OPTIONS
    )
    return SourceOptions(
        path="",
        view=given.parse_option("view", lambda n, t: choice(n, t, VIEWS), "records"),
        layout=given.parse_option("layout", lambda n, t: choice(n, t, LAYOUTS), "ringlog"),
        include_headers=given.parse_option("includeHeaders", boolean, False),
    )


def as_text(options: Mapping[str, Any]) -> dict[str, str]:
    """Convert keyword arguments to Spark options.

    `min_partitions` becomes `minPartitions`. Lists, tuples and dicts become JSON, datetimes become ISO 8601.
    Options with the value None are omitted. Raises OptionError if an option is given in both spellings.
    """
    found: dict[str, str] = {}
    for key, value in options.items():
        first, *rest = key.split("_")
        name = first + "".join(word.capitalize() for word in rest)
        if name in found:
            raise OptionError(f"{name} is given in both spellings: keep one", option=name)
        if value is not None:
            found[name] = _text_of(value)
    return found


def _text_of(value: Any) -> str:
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, datetime):
        return value.isoformat()
    if isinstance(value, (list, tuple, dict)):
        return json.dumps(value, default=_text_of)
    return os.fspath(value) if isinstance(value, os.PathLike) else str(value)


STREAM_ONLY = {
    "maxOffsetsPerTrigger": "a batch has no triggers: bound it with endingOffsets",
    "maxBytesPerTrigger": "a batch has no triggers: bound it with endingOffsets",
    "gapsPath": "for a batch, read the gaps with view=gaps and the same bounds",
}
_NO_END = "a stream has no end: use trigger(availableNow=True) to stop at the current heads"
BATCH_ONLY = {
    "endingOffsets": _NO_END,
    "endingTimestamp": _NO_END,
    "endingOffsetsByTimestamp": _NO_END,
}


def _only(given: RawOptions, streaming: bool, view: str) -> None:
    """Raise OptionError for an option or view of the other kind of query (batch or streaming)."""
    for name, reason in (BATCH_ONLY if streaming else STREAM_ONLY).items():
        if name in given:
            raise OptionError(f"{name}: {reason}", option=name)
    if streaming and view != "records":
        raise OptionError(
            f"view={view} is not supported for a stream: use view=records, or a batch", option="view"
        )


def _check_together(options: SourceOptions) -> None:
    if options.max_offsets is not None and options.max_bytes is not None:
        raise OptionError(
            "set at most one of maxOffsetsPerTrigger and maxBytesPerTrigger", option="maxBytesPerTrigger"
        )
    if options.layout == "kafka" and options.view != "records":
        raise OptionError("layout=kafka requires view=records", option="layout", view=options.view)
    if options.pattern is None and options.topics:
        strangers = [name for name in options.named_topics if name not in options.topics]
        if strangers:
            raise OptionError("offsets and times must name subscribed topics only", topics=strangers)


def _subscription(given: RawOptions, is_needed: bool) -> tuple[tuple[str, ...], str | None]:
    """Return (topics, pattern).

    Views that list everything need neither; their default pattern matches all topics.
    """
    topics: tuple[str, ...] = given.parse_option("subscribe", comma_list, ())
    pattern: str | None = given.parse_option("subscribePattern", regular_expression, None)
    if topics and pattern is not None:
        raise OptionError("set exactly one of subscribe and subscribePattern", option="subscribe")
    if not topics and pattern is None:
        if is_needed:
            raise OptionError(
                "set subscribe (comma-separated topic names) or subscribePattern", option="subscribe"
            )
        pattern = ".*"
    for name in topics:
        topic_name("subscribe", name)
    return topics, pattern


def _offsets_of(given: RawOptions, streaming: bool) -> dict[str, Any]:
    start = {"earliest": EARLIEST, "latest": LATEST} if streaming else {"earliest": EARLIEST}
    default = LATEST if streaming else EARLIEST
    starting = given.parse_option(
        "startingOffsets",
        # A topic that the JSON omits starts at its earliest record, like a new topic in the Kafka source.
        lambda n, t: offsets(n, t, default=EARLIEST, allowed=start),
        TopicOffsets(default),
    )
    ending = given.parse_option(
        "endingOffsets",
        lambda n, t: offsets(n, t, default=LATEST, allowed={"latest": LATEST}),
        TopicOffsets(LATEST),
    )
    return {
        "starting": starting,
        "ending": ending,
        "starting_ts": _times_of(given, "startingTimestamp", "startingOffsetsByTimestamp"),
        "ending_ts": _times_of(given, "endingTimestamp", "endingOffsetsByTimestamp"),
    }


def _times_of(given: RawOptions, for_all: str, by_topic: str) -> TopicTimes:
    """Return one time for all topics, or one time per named topic.

    Topics without a time use their offsets.
    """
    if for_all in given and by_topic in given:
        raise OptionError(f"set at most one of {for_all} and {by_topic}", option=by_topic)
    if for_all in given:
        return TopicTimes(given.parse_option(for_all, time_us, None))
    times: TopicTimes = given.parse_option(by_topic, times_by_topic, TopicTimes())
    return times


def _cold_of(given: RawOptions, view: str) -> str:
    """Return the address of a cold tier that is read without its engine.

    It names the location of the segments, and the directory of the snapshots if that is a different one.
    """
    if view not in COLD_VIEWS:
        raise OptionError(
            f"view={view} needs the engine: with cold use view=records or view=gaps", option="cold", view=view
        )
    cold: str = given.parse_option("cold", directory_or_url, "")
    return format_address(cold, _path_of(given) if "path" in given or "root" in given else "")


def _path_of(given: RawOptions) -> str:
    """Return `path`, or its alias `root`: Spark does not pass on `path` in some statements."""
    path: str = given.parse_option("path", directory, "")
    root: str = given.parse_option("root", directory, "")
    if path and root and path != root:
        raise OptionError("path and root are aliases: set one of them", path=path, root=root)
    if not path and not root:
        raise OptionError("set path to the data directory of the engine", option="path")
    return path or root


def _count(name: str, text: str) -> int:
    return integer(name, text, 1, COUNT_MAX)
