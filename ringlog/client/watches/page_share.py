"""PageShare: a watch takes what another watch of its client has read, and shares what it reads."""

from __future__ import annotations

from ringlog.client.read.local_source import LocalSource
from ringlog.client.read.pages import Page
from ringlog.client.read.record_batches import FrameRecordBatch
from ringlog.client.watches.shared_reads import PageLimits, SharedReads
from ringlog.client.watches.watched_topic import WatchedTopic
from ringlog.link.subscription import ReadGrant


class PageShare:
    """Shared reads of one watch. Only topics that are read from files on this host are shared."""

    def __init__(self, shared: SharedReads, limits: PageLimits) -> None:
        self._shared, self._limits = shared, limits

    def sequence(self, topic: WatchedTopic, grant: ReadGrant) -> int:
        """Return the change number of the topic's slot before a read that may be shared; -1 if it will not be
        shared."""
        source, is_wanted = topic.source, grant.hint is not None and self._shared.is_useful
        return source.slot_sequence if is_wanted and isinstance(source, LocalSource) else -1

    def take_page(self, topic: WatchedTopic) -> Page | None:
        """Return the page that another watch of this client read at this position, if it is still current."""
        source, cursor = topic.source, topic.cursor
        shared_page = self._shared.get_page(topic.info.topic_id, cursor, self._limits)
        if shared_page is None or not self._is_for_all(topic) or not isinstance(source, LocalSource):
            return None
        facts = source.facts_if_current(shared_page)
        if facts is None:
            return None
        source.files.advance_past_page(shared_page)
        return Page(
            topic.info.topic, shared_page.batches, shared_page.cursor, tombstone=None,
            head_seq=facts.head_seq, earliest_seq=facts.earliest_seq,
        )  # fmt: skip

    def share_page(self, topic: WatchedTopic, page: Page) -> Page:
        """Share a page with other watches that will reach its position. Returns the page to use instead."""
        source, after = topic.source, topic.cursor
        is_wanted = self._shared.is_followed_by_several(topic.info.topic_id) and self._is_for_all(topic)
        is_wanted = is_wanted and after.epoch in {0, page.epoch}
        if not is_wanted or not isinstance(source, LocalSource):
            return page
        shared_page = source.make_shared_page(page, self._limits)
        if shared_page is None:
            return page
        self._shared.put_page(topic.info.topic_id, after.seq, shared_page)
        return Page(
            page.topic, shared_page.batches, page.cursor, tombstone=None, head_seq=page.head_seq,
            earliest_seq=page.earliest_seq,
        )  # fmt: skip

    @staticmethod
    def _is_for_all(topic: WatchedTopic) -> bool:
        """Return True if this watch omits and delays no records."""
        return not topic.filters and not topic.is_strong

    def share_frame(self, topic: WatchedTopic, grant: ReadGrant, page: Page, sequence: int) -> Page:
        """Share a page with other watches if it is the whole frame of its grant. Returns the page to use
        instead."""
        hint, source, record_batches = grant.hint, topic.source, page.batches
        if hint is None or not isinstance(source, LocalSource) or len(record_batches) != 1:
            return page
        batch = record_batches[0]
        if not isinstance(batch, FrameRecordBatch) or not batch.is_whole or page.tombstone is not None:
            return page
        view = batch.view
        is_it = (view.first_seq, view.last_seq, page.head_seq) == (
            hint.first_seq, hint.last_seq, hint.last_seq,
        )  # fmt: skip
        # Expiry depends on the clock and does not change the slot.
        if not is_it or source.slot_sequence != sequence or not source.never_expires:
            return page
        shared_frame = source.make_shared_frame(
            page.epoch, sequence, hint, view.read_only(), page.earliest_seq
        )
        self._shared.put_frame(topic.info.topic_id, shared_frame)
        return Page(
            page.topic, shared_frame.batches, page.cursor, tombstone=None, head_seq=page.head_seq,
            earliest_seq=page.earliest_seq,
        )  # fmt: skip
