"""What can go wrong between Spark and the log, as types. All of them survive pickling: they cross processes.

OptionError      an option, or a schema, that cannot be meant; names it and what would do
EngineNotRunning no engine serves this data directory; says how to start one
JavaMissing      no Java that Spark can use; says how to get one
DataLoss         records inside the bounds were lost and nobody asked for it (failOnDataLoss)
"""

from __future__ import annotations

from ringlog.errors import NotConnected, RinglogError, StartRefused, UsageError


class OptionError(UsageError):
    """An option of the reader or writer is unknown, malformed or does not fit the others."""

    code = "option"


class SchemaError(OptionError):
    """A schema asks for a column that does not exist or has another type."""

    code = "schema"


class EngineNotRunning(NotConnected):
    """No engine runs on the data directory; the text says how to start one."""

    code = "engine_not_running"


class JavaMissing(StartRefused):
    """Neither the machine nor the extra `spark-jre` has a Java that Spark can use."""

    code = "java_missing"


class DataLoss(RinglogError):
    """Positions within the bounds of a read are gone involuntarily; detail: topic, gap_from, gap_to, reason.

    Not retriable by itself: the bounds have to be fixed anew, or the loss accepted by `failOnDataLoss`.
    """

    code = "data_loss"


class StagingLost(RinglogError):
    """The sink's memory of a writer is gone or older than what the engine has of it (SK-28).

    To number on from there would make new rows look like repeats, which the engine drops; so nothing is
    written. detail: topic, settled (the engine's highest number), staging.
    """

    code = "staging_lost"
