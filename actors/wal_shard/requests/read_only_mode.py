"""Read-only mode of a shard whose directory is not writable: it serves reads and refuses all writes. Pure.

Recovery in this mode writes nothing, so the shard has no open log file and accepts no new frame. Recovery
syncs the existing log and applies all of it in memory. If this sync fails, the last frames of the previous
incarnation are in doubt until a writable incarnation copies them. A producer that resends such a frame gets
the outcome `unknown`. All other refused writes get the outcome `not_applied`.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import numpy as np

from ringlog.actors.wal_shard.commit.admission import FrameIntake
from ringlog.envelope import messages as m
from ringlog.errors import Status, StorageReadOnly
from ringlog.frame import layout
from ringlog.frame.settle_entry import S_COMMIT_TS, S_COUNT_STATUS, S_FIRST_SEQ, STATUS_SHIFT

READ_ONLY_REQUESTS: tuple[type[m.Message], ...] = (
    m.Hello, m.TopicResolve, m.TopicState, m.TopicList, m.ProducerState, m.Locate, m.ListShardRouters,
)  # fmt: skip
"""Requests that change neither the state of the shard nor the disk."""


@dataclass(slots=True)
class ReadOnlyMode:
    """The error for all writes of a read-only shard."""

    shard: int
    directory: str
    """The shard's log directory, relative to the data directory."""
    in_doubt: dict[tuple[int, int], int] = field(default_factory=dict)
    """(topic, producer) -> highest producer number that may have been written and is not readable."""

    def refusal(self, words: Any = None) -> StorageReadOnly:
        """Return the error for a request that would write.

        `words` contains the (n, 10) headers of its frames.
        """
        is_unknown = words is not None and any(map(self._is_in_doubt, words))
        return StorageReadOnly(
            "engine is read-only: data directory is not writable",
            outcome="unknown" if is_unknown else "not_applied", directory=self.directory,
        )  # fmt: skip

    def explain(self, intake: FrameIntake) -> None:
        """Fill in the details in the settle entries of frames that were refused with STORAGE_READ_ONLY."""
        statuses = intake.entries[:, S_COUNT_STATUS] >> np.uint64(STATUS_SHIFT) & np.uint64(0xFFFF)
        for row in np.flatnonzero(statuses == int(Status.STORAGE_READ_ONLY)).tolist():
            entry = intake.entries[row]
            entry[S_FIRST_SEQ] = self._is_in_doubt(intake.batch.words[row])
            entry[S_COMMIT_TS] = self.shard

    def _is_in_doubt(self, words: Any) -> bool:
        key = int(words[layout.W_TOPIC]), int(words[layout.W_PRODUCER_ID])
        return int(words[layout.W_PRODUCER_SEQ]) <= self.in_doubt.get(key, 0)
