"""Announces publications to the schedulers: rows in the news ring, and a bell that wakes sleeping schedulers.

Part of the shell; it decides nothing about frames. The shard never waits for a scheduler. If a bell is lost,
the scheduler finds the news at its next backup poll at the latest.

A wake-up takes about as long as the admission and the write of a frame. If writes are fast, the shard
therefore wakes sleeping schedulers when it drains the frames. The wake-up and the write then run in parallel.
"""

from __future__ import annotations

from collections.abc import Sequence

from ringlog.actors.wal_shard.commit.commit_batch import News
from ringlog.board.board import Board
from ringlog.board.layout import VOLATILE_BIT, ProcessField, ProcessState
from ringlog.board.news import NewsWriter
from ringlog.board.processes import scheduler_bell, scheduler_slot
from ringlog.envelope.boot import ActorBoot
from ringlog.limits import EARLY_WAKEUP_BYTES_MAX
from ringlog.ring.doorbell import BellRinger
from ringlog.spin_wait import SPIN_REPLY_NS
from ringlog.topic.state import ShardTopic

_SOON_NS = SPIN_REPLY_NS
"""Time for which a scheduler that is woken early polls for news. Writes that take longer miss this time."""


class SchedulerNotifier:
    """Writes the news of one incarnation. Without schedulers it does nothing."""

    def __init__(self, boot: ActorBoot, board: Board, schedulers: int) -> None:
        self._shm_dir = boot.shm_dir
        self._shard = boot.shard
        self._sleepers = [
            (board.process(scheduler_slot(boot.shards, n)), BellRinger(scheduler_bell(boot.shm_dir, n)))
            for n in range(schedulers)
        ]
        self._writer: NewsWriter | None = None
        self.has_unrung_news: bool = False
        """True if news were written after the last ring of the bells."""
        self._drained_ns = 0
        """Monotonic time at which frames were drained whose news are not written yet. 0 if there are none."""
        self._average_ns = 0
        """Moving average of the time from the drain of frames to their news, in nanoseconds."""

    def begin(self) -> None:
        """Create the news ring, after the recovered state is on the board.

        Raise BoardError if shared memory has no room.
        """
        if self._sleepers:
            self._writer = NewsWriter(self._shm_dir, self._shard)
            self.has_unrung_news = True

    def publish_news(self, news: Sequence[News]) -> None:
        """Write rows for published records. Their heads and marks must be on the board already."""
        if self._writer is None:
            return
        rows = [
            (
                topic.slot | VOLATILE_BIT if is_volatile else topic.slot,
                topic.topic_id, topic.epoch, first_seq, last_seq, file_id, offset, stop,
            )
            for topic, first_seq, last_seq, file_id, offset, stop, is_volatile in news
            if topic.slot >= 0  # A topic created and deleted in one batch was never on the board.
        ]  # fmt: skip
        self._writer.add(rows)
        self.has_unrung_news = True

    def announce_deletion(self, topic: ShardTopic) -> None:
        """Announce the deletion of a topic, so that its watchers read its slot again.

        The slot must be empty by now, or belong to another topic.
        """
        if self._writer is not None:
            head = topic.head_seq
            self._writer.add([(topic.slot, topic.topic_id, topic.epoch, head, head, 0, 0, 0)])
            self.has_unrung_news = True

    def wake_early(self, nbytes: int, now_ns: int) -> None:
        """Wake sleeping schedulers before the news of frames that were just drained from one ring.

        Does nothing if `nbytes` is large, or if news usually take longer than a scheduler polls after a
        wake-up.
        """
        if self._writer is None or nbytes > EARLY_WAKEUP_BYTES_MAX:
            return
        if self._drained_ns:
            self._learn(now_ns)  # The earlier frames have no news: they were refused or are delayed.
        self._drained_ns = now_ns
        if self._average_ns <= _SOON_NS:
            self._ring()

    def ring_bells(self, now_ns: int) -> None:
        """Wake sleeping schedulers if there are news. Call it after the acks of a pass of the loop."""
        if not self.has_unrung_news:
            return
        self.has_unrung_news = False
        if self._drained_ns:
            self._learn(now_ns)
            self._drained_ns = 0
        self._ring()

    def _learn(self, now_ns: int) -> None:
        took_ns = min(now_ns - self._drained_ns, 2 * _SOON_NS)
        self._average_ns += (took_ns - self._average_ns) >> 3

    def _ring(self) -> None:
        for page, bell in self._sleepers:
            # The ASLEEP word of a dead scheduler stays set. Its successor polls the news before it sleeps.
            if page.get(ProcessField.ASLEEP) and page.get(ProcessField.STATE) == ProcessState.READY:
                bell.ring()

    def close(self) -> None:
        """Close the bells and unmap the news ring. Idempotent."""
        for _, bell in self._sleepers:
            bell.close()
        if self._writer is not None:
            self._writer.close()
            self._writer = None
