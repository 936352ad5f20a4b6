"""A shard whose directory takes no writes: it answers questions and refuses everything else. Pure.

Its recovery writes nothing, so it has no open file and nobody's frames are settled as new ones. It applies
all that the log says, in memory, once the log is synced. Where that sync fails, what its predecessor may have
written without being known to be durable stays in doubt until a life that may write again copies it (RD-2):
whoever sends such a frame again learns that its outcome is unknown, and everybody else that nothing was
applied.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import numpy as np

from actors.wal_shard.commit.admission import FrameIntake
from ringlog.envelope import messages as m
from ringlog.errors import Status, StorageReadOnly
from ringlog.frame import layout
from ringlog.frame.settle_entry import S_COMMIT_TS, S_COUNT_STATUS, S_FIRST_SEQ, STATUS_SHIFT

READ_ONLY_REQUESTS: tuple[type[m.Message], ...] = (
    m.Hello, m.TopicResolve, m.TopicState, m.TopicList, m.ProducerState, m.Locate, m.RoutersAsk,
)  # fmt: skip
"""Requests that change nothing, here or on the disk."""


@dataclass(slots=True)
class ReadOnlyMode:
    """Why and for which directory everything that writes is refused."""

    shard: int
    directory: str
    """Relative to the data directory."""
    in_doubt: dict[tuple[int, int], int] = field(default_factory=dict)
    """(topic, producer) -> highest number of it that may have been written and is not shown."""

    def refusal(self, words: Any = None) -> StorageReadOnly:
        """The answer to a request that would write, perhaps with frames: their (n, 10) headers."""
        is_unknown = words is not None and any(map(self._is_in_doubt, words))
        return StorageReadOnly(
            "the directory takes no writes at present", outcome="unknown" if is_unknown else "not_applied",
            directory=self.directory,
        )  # fmt: skip

    def explain(self, intake: FrameIntake) -> None:
        """Complete the entries of frames that were refused for this reason."""
        statuses = intake.entries[:, S_COUNT_STATUS] >> np.uint64(STATUS_SHIFT) & np.uint64(0xFFFF)
        for row in np.flatnonzero(statuses == int(Status.STORAGE_READ_ONLY)).tolist():
            entry = intake.entries[row]
            entry[S_FIRST_SEQ] = self._is_in_doubt(intake.batch.words[row])
            entry[S_COMMIT_TS] = self.shard

    def _is_in_doubt(self, words: Any) -> bool:
        key = int(words[layout.W_TOPIC]), int(words[layout.W_PRODUCER_ID])
        return int(words[layout.W_PRODUCER_SEQ]) <= self.in_doubt.get(key, 0)
