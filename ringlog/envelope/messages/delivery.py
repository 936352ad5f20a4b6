"""Delivery: subscriptions, turns and credit, between clients and schedulers."""

from __future__ import annotations

from ringlog.envelope.messages.base import Message
from ringlog.envelope.messages.ranges import U32, U64, Name, Place, Seq

TURN_WORDS = 8
"""Words of a row of Turns."""
TAKEN_WORDS = 4
"""Words of a row of Taken."""


class Feed(Message, frozen=True):
    """One topic of a subscription, and how far its reader is."""

    feed: U32
    """Number within the subscription, given by the client, below 2**32. The same number again moves it."""
    topic: Name
    topic_id: U64
    shard: Place
    slot: Place
    """As in TopicInfo."""
    after: Seq
    """Position up to which the reader needs no word."""


class Subscribe(Message, frozen=True):
    """Say when these topics have news (semantics 22, ZC-4, ZC-5); at most FEEDS_PER_MESSAGE_MAX feeds.

    The first one with a number makes the subscription, others add feeds to it. Turns follow (see Turns), in
    order of value, at most `credit` of them unanswered, and at most one for each feed.
    """

    subscription: U32
    """Number within the connection, given by the client, below 2**32."""
    feeds: list[Feed]
    credit: U32
    strong: bool = False
    """Count only what a device sync covers (SSE-35)."""
    names: bool = False
    """Say TopicsChanged when topics are made or removed."""


class Subscribed(Message, frozen=True):
    """Reply: news of all its feeds will be told from now on, and what they have already was."""

    subscription: U32
    scheduler: Place
    incarnation: U64


class OpenTurns(Message, frozen=True):
    """Give turns to this connection through shared memory from now on; for clients on the host."""

    wanted: bool = True
    """False: by messages again, since the ring cannot be opened. Turns in it are forgotten."""


class TurnsOpened(Message, frozen=True):
    """Reply: the ring's file in the shared-memory directory, its bell beside it; empty = by messages."""

    name: Name = ""


class Unsubscribe(Message, frozen=True):
    """End a subscription, or some of its feeds. Nothing of them is told once Unsubscribed was sent."""

    subscription: U32
    feeds: list[U32] = []
    """Empty = all, and the subscription itself."""


class Unsubscribed(Message, frozen=True):
    """Reply; also when there was no such thing."""

    subscription: U32


class Turns(Message, frozen=True):
    """Unasked, with correlation 0: these feeds may be read. Rows of 8 words in the attached part:
    [subscription, feed, until, first_seq, last_seq, file_id, offset, stop].

    Records up to `until` are published (with `strong`: durable). The rest is a hint where the first of them
    lie, as in a row of news, or zeros: what is read there has to be verified like everything that is read.
    Each turn is answered by a row of Taken.
    """

    turns: Seq


class Taken(Message, frozen=True):
    """Rows of 4 words in the attached part: [subscription, feed, after, is_consumed]. The turn of the feed is
    over and its reader is at `after`; without `is_consumed` that is no consumption (P-4). No reply, but
    SubscriptionsLost when the scheduler knows nothing of the sender. Without rows: a word of life.
    """

    turns: Seq


class SubscriptionsLost(Message, frozen=True):
    """Unasked, with correlation 0: the scheduler does not know what was said before. Subscribe anew."""


class TopicsChanged(Message, frozen=True):
    """Unasked, with correlation 0: topics were made or removed; who subscribed to patterns lists again."""
