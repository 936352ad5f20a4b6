"""The data source with armed stop points, because Spark gives no other way to kill one of its processes."""

from __future__ import annotations

import os

from ringlog import stop_points
from ringlog.spark.source import RinglogDataSource


class CrashingDataSource(RinglogDataSource):
    """`format("ringlog-crashing")` with the option `stopPoints`. It is armed while the file `armed`
    exists."""

    @classmethod
    def name(cls) -> str:
        """Return the name of the format."""
        return "ringlog-crashing"

    def streamWriter(self, schema, overwrite):
        """Return the sink's writer. The first process that arms itself deletes the file, so only one process
        dies."""
        options = {key.lower(): value for key, value in self.options.items()}
        spec, armed = options.pop("stoppoints"), options.pop("armed")
        self.options = options
        writer = super().streamWriter(schema, overwrite)
        kind = type(writer)

        class Armed(kind):
            """A writer that arms the stop points at its commit."""

            def commit(self, messages, batchId):  # noqa: N803  Spark names it so.
                if os.path.exists(armed):
                    os.unlink(armed)
                    stop_points.configure(spec)
                super().commit(messages, batchId)

        writer.__class__ = Armed
        return writer
