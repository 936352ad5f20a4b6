"""Exceptions of the Spark source. All of them can be pickled, because Spark passes them between processes.

OptionError      an option or a schema is invalid; the text names it and the valid values
EngineNotRunning no engine serves this data directory; the text says how to start one
JavaMissing      no Java that Spark can use; the text says how to install one
DataLoss         records within the bounds were lost, and failOnDataLoss is on
StagingLost      the sink lost the state of a writer in its staging directory
"""

from __future__ import annotations

from ringlog.errors import NotConnected, RinglogError, StartRefused, UsageError


class OptionError(UsageError):
    """An option of the reader or writer is unknown, malformed or conflicts with another one."""

    code = "option"


class SchemaError(OptionError):
    """A schema contains a column that does not exist or has another type."""

    code = "schema"


class EngineNotRunning(NotConnected):
    """No engine runs on the data directory; the text says how to start one."""

    code = "engine_not_running"


class JavaMissing(StartRefused):
    """Neither the host nor the extra `spark-jre` provides a Java that Spark can use."""

    code = "java_missing"


class DataLoss(RinglogError):
    """Positions within the bounds of a read were lost involuntarily.

    `detail` has topic, gap_from, gap_to and reason. Not retriable: fix new bounds, or accept the loss with
    `failOnDataLoss=false`.
    """

    code = "data_loss"


class StagingLost(RinglogError):
    """The sink's state of a writer is missing, older than the engine's state, or from before a restore.

    If the sink continued from there, the engine would drop new rows as duplicates, or the sink would skip
    batches that the restored log lacks. So nothing is written. `detail` has staging, and either topic and
    settled (the highest number that the engine knows), or plan_log and log (identities of the two logs).
    """

    code = "staging_lost"
