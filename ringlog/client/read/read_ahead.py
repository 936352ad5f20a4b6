"""Records that an iterator has read ahead. It never returns a record that was removed before the call.

A delete is effective for every reader when it is acked. Before each record, the iterator therefore checks
whether any record of the topic was removed or has expired. If so, it reads the rest of the page again. Over
rings the check reads one word of shared memory. Over ipc and TCP the iterator reads the page again every
READ_AHEAD_MS, which costs one round trip.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from ringlog.client.connection.read_connection import Connection
from ringlog.client.read.fetch_result import NO_WORD, Source
from ringlog.client.read.pages import Page, Record
from ringlog.clock import Clock
from ringlog.envelope.messages import Located
from ringlog.limits import READ_AHEAD_MS, READ_AHEAD_RECORDS_MAX, READ_AHEAD_RECORDS_MIN
from ringlog.payload import V

_NEVER = -1
"""Equal to no word: the check is called for each record."""


class ReadAhead:
    """Read-ahead of one iterator: the number of records to read, and which of them may still be returned."""

    def __init__(self) -> None:
        self.limit: int = READ_AHEAD_RECORDS_MAX
        """Number of records per read. Small if earlier read-ahead became stale."""
        self.is_stale: bool = False
        """True if the rest of the page was not returned. Continue after `seq`."""
        self.seq: int = 0
        """If stale: seq of the last returned record, or the seq before the page's first."""

    def records(self, page: Page[V], source: Source) -> Iterator[Record[V]]:
        """Iterate over the records of a page that was just read from `source`, until one of them may have
        been removed."""
        self.is_stale = False
        may_return = source.record_check(page.version)
        words, at = may_return.words, may_return.at
        # The page was read in this same call of the iterator, unless a tombstone was returned first.
        is_just_read = page.tombstone is None
        last: Record[V] | None = None
        for record in page.records:
            try:
                is_unchanged = is_just_read or words[at] == may_return.seen
            except ValueError:
                is_unchanged = False  # No longer mapped.
            if not is_unchanged and not may_return(record):
                self.is_stale = True
                self.seq = record.seq - 1 if last is None else last.seq
                self.limit = READ_AHEAD_RECORDS_MIN
                return
            is_just_read = False
            last = record
            yield record
        self.limit = min(2 * self.limit, READ_AHEAD_RECORDS_MAX)


class LocalRecordCheck:
    """Compares the topic's slot on the board with its state when a page was read."""

    def __init__(
        self, connection: Connection, located: Located | None, generation: int, version: int, clock: Clock
    ) -> None:
        self._connection, self._located, self._clock = connection, located, clock
        self._generation, self._version = generation, version
        self._due_us = self._ttl_us = 0
        location = None if located is None else connection.sequence_word(located)
        self.words: memoryview[int]
        self.at: int
        self.words, self.at = location or (NO_WORD, 0)
        self.seen: int = _NEVER
        self._sequence = _NEVER

    def __call__(self, record: Record[Any]) -> bool:
        """Return True if the record still exists."""
        located = self._located
        if located is None:
            return False
        if not self._is_as_seen() and not self._is_unchanged(located):
            return False
        if not self._due_us:
            return True
        now_us = self._clock.now_us()
        return now_us < self._due_us or not self._has_expired(record, now_us)

    def _is_as_seen(self) -> bool:
        """Return True if the slot was not written since the last check."""
        try:
            return self.words[self.at] == self._sequence
        except ValueError:
            return False  # No longer mapped.

    def _is_unchanged(self, located: Located) -> bool:
        """Return True if a changed slot shows no removal, and remember its new state."""
        sequence = self._connection.topic_sequence(located)
        facts = self._connection.facts(located)
        if facts is None or facts.version > self._version:
            return False
        if self._connection.generation != self._generation:
            return False
        self._due_us, self._ttl_us = facts.due_us, facts.ttl_us
        self._sequence = _NEVER if self.words is NO_WORD else sequence
        self.seen = _NEVER if facts.due_us else self._sequence
        return True

    def _has_expired(self, record: Record[Any], now_us: int) -> bool:
        expires_us = record.expires_at or 0
        return 0 < expires_us <= now_us or (self._ttl_us > 0 and record.ts < now_us - self._ttl_us)


class RemoteRecordCheck:
    """Expires after READ_AHEAD_MS. The iterator then asks the gateway whether its records are still
    current."""

    words: memoryview[int] = NO_WORD
    at: int = 0
    seen: int = _NEVER

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._until_ns = clock.monotonic_ns() + READ_AHEAD_MS * 1_000_000

    def __call__(self, record: Record[Any]) -> bool:
        """Return True until READ_AHEAD_MS have passed."""
        return self._clock.monotonic_ns() < self._until_ns
