"""Says what the shard published: rows of news for the schedulers, and a bell for those that sleep.

Part of the shell: no decision about a frame. Nobody waits for anybody here; a bell that is lost costs a
scheduler's own look at the news, at the latest when its back-up poll ends.

To be woken takes as long as to admit and write a frame. So where that is quick, schedulers that sleep are
woken when frames are taken, and look for the news of them: the two times are spent beside each other.
"""

from __future__ import annotations

from collections.abc import Sequence

from actors.wal_shard.commit.commit_batch import News
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
"""A scheduler that is woken ahead looks for news so long: those that take longer are not there by then."""


class SchedulerNotifier:
    """One incarnation's news. Without schedulers there are none."""

    def __init__(self, boot: ActorBoot, board: Board, schedulers: int) -> None:
        self._shm_dir = boot.shm_dir
        self._shard = boot.shard
        self._sleepers = [
            (board.process(scheduler_slot(boot.shards, n)), BellRinger(scheduler_bell(boot.shm_dir, n)))
            for n in range(schedulers)
        ]
        self._writer: NewsWriter | None = None
        self.has_unrung_news = False
        """Something was told since the bells were last rung."""
        self._taken_ns = 0
        """When the frames were taken of which nothing was told yet; 0 = there are none."""
        self._usual_ns = 0
        """How long it has been taking from there to the news."""

    def begin(self) -> None:
        """What recovery found is on the board: say so, and whatever happens from now on.

        Raises BoardError when shared memory has no room.
        """
        if self._sleepers:
            self._writer = NewsWriter(self._shm_dir, self._shard)
            self.has_unrung_news = True

    def publish_news(self, news: Sequence[News]) -> None:
        """Write what was published; heads and marks are on the board by now."""
        if self._writer is None:
            return
        rows = [
            (
                topic.slot | VOLATILE_BIT if is_volatile else topic.slot,
                topic.topic_id, topic.epoch, first_seq, last_seq, file_id, offset, stop,
            )
            for topic, first_seq, last_seq, file_id, offset, stop, is_volatile in news
            if topic.slot >= 0  # Made and deleted in one group: it never was on the board.
        ]  # fmt: skip
        self._writer.add(rows)
        self.has_unrung_news = True

    def tell_gone(self, topic: ShardTopic) -> None:
        """Have whoever watches a topic look at its slot, which is empty by now or holds another one."""
        if self._writer is not None:
            head = topic.head_seq
            self._writer.add([(topic.slot, topic.topic_id, topic.epoch, head, head, 0, 0, 0)])
            self.has_unrung_news = True

    def wake_early(self, nbytes: int, now_ns: int) -> None:
        """So many bytes of frames were taken, out of one ring: if these are few, and news usually come while
        a scheduler would look, wake those that sleep."""
        if self._writer is None or nbytes > EARLY_WAKEUP_BYTES_MAX:
            return
        if self._taken_ns:
            self._learn(now_ns)  # Of those before nothing was told: they were refused, or are held up.
        self._taken_ns = now_ns
        if self._usual_ns <= _SOON_NS:
            self._ring()

    def ring_bells(self, now_ns: int) -> None:
        """Wake the schedulers that sleep, if they were told anything; behind the acks of a turn."""
        if not self.has_unrung_news:
            return
        self.has_unrung_news = False
        if self._taken_ns:
            self._learn(now_ns)
            self._taken_ns = 0
        self._ring()

    def _learn(self, now_ns: int) -> None:
        took_ns = min(now_ns - self._taken_ns, 2 * _SOON_NS)
        self._usual_ns += (took_ns - self._usual_ns) >> 3

    def _ring(self) -> None:
        for page, bell in self._sleepers:
            # The word of one that died stays as it was: its successor looks by itself before it sleeps.
            if page.get(ProcessField.ASLEEP) and page.get(ProcessField.STATE) == ProcessState.READY:
                bell.ring()

    def close(self) -> None:
        """Unmap. Idempotent."""
        for _, bell in self._sleepers:
            bell.close()
        if self._writer is not None:
            self._writer.close()
            self._writer = None
