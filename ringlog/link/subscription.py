"""ClientSubscription: the feeds of one reader at the schedulers, and the grants that it did not take yet."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field
from typing import NamedTuple

from ringlog.envelope.messages import TopicInfo
from ringlog.errors import RinglogError
from ringlog.link.futures import Pending

UNBOUNDED = (1 << 63) - 1
"""Position of a grant whose feed may be read as far as it goes."""


class LocationHint(NamedTuple):
    """Location of the next frames of a feed, if the scheduler knows it."""

    first_seq: int
    last_seq: int
    file_id: int
    offset: int
    stop: int


@dataclass(slots=True)
class ReadGrant:
    """Permission to read a feed up to `until`."""

    feed: int
    until: int
    hint: LocationHint | None
    granted_ns: int
    """Time at which the client received it."""
    is_self_granted: bool = False
    """The client made this grant itself so that the reader checks the feed. It is not returned to a
    scheduler."""
    error: RinglogError | None = None
    """Error to raise for the feed instead of reading it."""


@dataclass(slots=True)
class FeedState:
    """What a client knows of one feed."""

    topic: str
    info: TopicInfo
    scheduler: int
    after: int
    grant: ReadGrant | None = None
    error: RinglogError | None = None
    """Error for the next grant, because one is outstanding."""
    is_relocating: bool = False
    """Its scheduler does not find the topic in its slot. The client requests its location from the shard, or
    will do so."""
    must_relocate_again: bool = False
    """The scheduler reported this again during the request. The reply may come from before a restart."""


@dataclass(slots=True, eq=False)
class ClientSubscription:
    """One ready set at the schedulers. Created by Delivery.open_subscription."""

    number: int
    credit: int
    strong: bool
    names: bool
    feeds: dict[int, FeedState] = field(default_factory=dict)
    ready: deque[ReadGrant] = field(default_factory=deque)
    """Grants that the reader did not take, in the order of arrival."""
    names_changed: bool = False
    failure: RinglogError | None = None
    """Why there will be no more grants."""
    waiting: Pending[None] | None = None
    feeds_made: int = 0
    schedulers: set[int] = field(default_factory=set)
    """Schedulers that received a part of the subscription. With `names` NAMES_SCHEDULER is one of them, even
    without a feed."""

    @property
    def has_work(self) -> bool:
        """The reader has something to process without waiting."""
        return bool(self.ready) or self.names_changed or self.failure is not None

    def take_grant(self) -> ReadGrant | None:
        """Return the next grant in order of priority; None if there is none.

        The feed gets no other grant before this one is returned. Only the subscription's reader calls this;
        it needs no lock.
        """
        ready = self.ready
        while ready:
            try:
                grant = ready.popleft()
            except IndexError:
                return None  # The subscription was closed at this moment.
            if grant.feed in self.feeds:
                return grant
        return None

    def offer(self, state: FeedState, read_grant: ReadGrant) -> None:
        """Add a grant of a feed, and wake up the reader."""
        state.grant = read_grant
        self.ready.append(read_grant)
        self.wake()

    def wake(self) -> None:
        """Wake up the reader."""
        waiting, self.waiting = self.waiting, None
        if waiting is not None:
            waiting.resolve(None)

    def report_error(self, feed: int, state: FeedState, error: RinglogError, now_ns: int) -> None:
        """Report an error to the reader of a feed, after the grant that it processes now."""
        state.error = error if state.grant is not None else None
        if state.grant is None:
            self.offer(state, ReadGrant(feed, UNBOUNDED, None, now_ns, is_self_granted=True, error=error))
