"""GrantReturns: grants that readers have used, collected and sent back to the schedulers together."""

from __future__ import annotations

from collections import deque

import numpy as np

from ringlog.envelope.messages import GrantsReturned
from ringlog.envelope.messages.delivery import GRANT_RETURN_WORDS
from ringlog.link.peer import MS
from ringlog.link.protocol import DeliveryHost
from ringlog.link.subscription import ClientSubscription, ReadGrant
from ringlog.link.timers import Timer

RETURNS_PER_MESSAGE_MAX = 256
RETURN_DELAY_NS = 5 * MS
"""Longest delay of returned grants, which are sent together, if the reader requests more grants now and
then."""
RETURN_DELAY_BUSY_NS = 50 * MS
"""The same for a client whose thread is busy: a wake-up would disturb it."""


class GrantReturns:
    """Returned grants of all subscriptions of one host, until they are sent."""

    def __init__(self, host: DeliveryHost, delay_ns: int) -> None:
        """`delay_ns`: longest delay of returned grants if no reader requests more."""
        self._host = host
        self._delay_ns = delay_ns
        self._unsent: dict[int, list[int]] = {}
        """Words of rows of GrantsReturned that were not sent yet, by scheduler."""
        self._returned: deque[tuple[ClientSubscription, ReadGrant, int, bool]] = deque()
        """Returned grants that are not processed yet: at most one for each feed. See `add_unlocked`."""
        self._timer: Timer | None = None
        self._since_ns = 0
        """Time at which the first returned grant that was not sent was noted."""

    def add(
        self, subscription: ClientSubscription, grant: ReadGrant, after: int, *, is_consumed: bool
    ) -> None:
        """Return a grant: the feed was read up to `after`."""
        self._returned.append((subscription, grant, after, is_consumed))
        self.collect()

    def add_unlocked(
        self, subscription: ClientSubscription, grant: ReadGrant, after: int, *, is_consumed: bool
    ) -> bool:
        """Return a grant without the lock.

        Two lock operations for each grant would be a large part of its cost. Return False if the caller must
        call `collect` with the lock, because no timer will do it soon.
        """
        self._returned.append((subscription, grant, after, is_consumed))
        # `send` clears its timer before it reads `_returned`. If the timer is still set here, this
        # entry is read.
        return self._timer is not None and len(self._returned) < RETURNS_PER_MESSAGE_MAX

    def collect(self) -> None:
        """Process returned grants, and arrange that they are sent soon."""
        self._apply()
        if any(len(words) >= RETURNS_PER_MESSAGE_MAX * GRANT_RETURN_WORDS for words in self._unsent.values()):
            self.send()
        elif self._unsent and self._timer is None:
            self._since_ns = now_ns = self._now_ns()
            self._timer = self._host.timers.call_at(now_ns + self._delay_ns, self.send)

    @property
    def is_overdue(self) -> bool:
        """Returned grants have waited long enough. Readers that do not wait check this without the lock."""
        return self._timer is not None and self._now_ns() - self._since_ns >= RETURN_DELAY_NS

    def _apply(self) -> None:
        returned = self._returned
        while returned:
            subscription, read_grant, after, is_consumed = returned.popleft()
            state = subscription.feeds.get(read_grant.feed)
            if state is None:
                continue
            # Also backwards: a reader starts over in the topic's next life.
            state.after = after
            if state.grant is read_grant:
                state.grant = None
                if state.error is not None:
                    subscription.report_error(read_grant.feed, state, state.error, self._now_ns())
            rows = self._unsent.setdefault(state.scheduler, [])
            rows += (subscription.number, read_grant.feed, state.after, int(is_consumed))

    def send(self) -> None:
        """Send all returned grants now."""
        timer, self._timer = self._timer, None
        if timer is not None:
            timer.cancel()
        self._apply()
        returns, self._unsent = self._unsent, {}
        for number, words in returns.items():
            rows = np.array(words, dtype=np.uint64)
            peer = self._host.links.scheduler(number)
            peer.send_oneway(
                GrantsReturned(len(words) // GRANT_RETURN_WORDS), rows.tobytes()
            )  # If it is lost with the connection, the next Subscribe sends the positions.

    def send_open(self) -> None:
        """Send all returned grants now, if there are any."""
        if self._unsent or self._returned:
            self.send()

    def clear(self) -> None:
        """Drop all returned grants: no subscription is open."""
        if self._timer is not None:
            self._timer.cancel()
        self._timer = None
        self._unsent.clear()
        self._returned.clear()

    def _now_ns(self) -> int:
        return self._host.clock.monotonic_ns()
