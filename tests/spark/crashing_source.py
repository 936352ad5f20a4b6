"""The data source, armed with stop points: processes of Spark have no other way to be told to die."""

from __future__ import annotations

import os

from ringlog import stop_points
from ringlog.spark.source import RinglogDataSource


class CrashingDataSource(RinglogDataSource):
    """`format("ringlog-crashing")` with the option `stopPoints`; armed while the file `armed` is there."""

    @classmethod
    def name(cls) -> str:
        """The name of the format."""
        return "ringlog-crashing"

    def streamWriter(self, schema, overwrite):
        """The sink's own; the first process that arms itself takes the file away, so one process dies."""
        options = {key.lower(): value for key, value in self.options.items()}
        spec, armed = options.pop("stoppoints"), options.pop("armed")
        self.options = options
        writer = super().streamWriter(schema, overwrite)
        kind = type(writer)

        class Armed(kind):
            """Arms itself at its commit."""

            def commit(self, messages, batchId):  # noqa: N803  Spark names it so.
                if os.path.exists(armed):
                    os.unlink(armed)
                    stop_points.configure(spec)
                super().commit(messages, batchId)

        writer.__class__ = Armed
        return writer
