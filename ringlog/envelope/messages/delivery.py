"""Delivery: subscriptions, grants and credit, between clients and schedulers.

A grant is the permission to read one feed up to a position.
"""

from __future__ import annotations

from ringlog.envelope.messages.base import Message
from ringlog.envelope.messages.ranges import U32, U64, Name, Place, Seq

GRANT_WORDS = 8
"""Number of words of a row of Grants."""
GRANT_RETURN_WORDS = 4
"""Number of words of a row of GrantsReturned."""


class Feed(Message, frozen=True):
    """One topic of a subscription, and the position of its reader. Part of Subscribe."""

    feed: U32
    """Number within the subscription, chosen by the client, below 2**32. If the number is in use, its feed is
    moved to `after`."""
    topic: Name
    topic_id: U64
    shard: Place
    slot: Place
    """As in TopicInfo."""
    after: Seq
    """Position of the reader. Grants cover only records above it."""


class Subscribe(Message, frozen=True):
    """Client to scheduler or gateway, gateway to scheduler: request grants for topics. Reply: Subscribed.

    One message has at most FEEDS_PER_MESSAGE_MAX feeds. The first message with a number creates the
    subscription; later messages add feeds to it. The scheduler then sends grants (see Grants) in order of
    priority. At most `credit` grants are unanswered, and at most one for each feed.
    """

    subscription: U32
    """Number within the connection, chosen by the client, below 2**32."""
    feeds: list[Feed]
    credit: U32
    strong: bool = False
    """Grants cover only records that a device sync covers."""
    names: bool = False
    """The scheduler sends TopicsChanged when topics are created or deleted."""


class Subscribed(Message, frozen=True):
    """Reply to Subscribe: from now on grants follow for every feed, also for records that exist already."""

    subscription: U32
    scheduler: Place
    incarnation: U64


class OpenGrants(Message, frozen=True):
    """Client on the host to scheduler: send grants of this connection through shared memory.

    Reply: GrantsOpened.
    """

    wanted: bool = True
    """False: send grants as messages again, because the client cannot open the ring. Grants in the ring are
    dropped."""


class GrantsOpened(Message, frozen=True):
    """Reply to OpenGrants: file name of the grant ring in the shared-memory directory.

    Its bell is next to it. "" = grants come as messages.
    """

    name: Name = ""


class Unsubscribe(Message, frozen=True):
    """Client to scheduler or gateway, gateway to scheduler: end a subscription or some feeds. Reply:
    Unsubscribed.

    No grant for these feeds follows the reply.
    """

    subscription: U32
    feeds: list[U32] = []
    """Empty = all feeds and the subscription itself."""


class Unsubscribed(Message, frozen=True):
    """Reply to Unsubscribe, also if the subscription or feed did not exist."""

    subscription: U32


class Grants(Message, frozen=True):
    """Scheduler or gateway to client, unsolicited, correlation id 0: grants to read these feeds.

    The attachment has rows of 8 words: [subscription, feed, until, first_seq, last_seq, file_id, offset,
    stop]. Records up to `until` are published (with `strong`: durable). The other words are a hint where the
    first of these records are, as in a row of the news ring, or zeros. The reader verifies what it reads
    there, as always.

    The client returns each grant with a row of GrantsReturned.
    """

    grants: Seq


class GrantsReturned(Message, frozen=True):
    """Client to scheduler or gateway, gateway to scheduler: return grants. No reply.

    The attachment has at most 4,096 rows of 4 words: [subscription, feed, after, is_consumed]. A row ends the
    grant of the feed; the reader is at `after`. Without `is_consumed` the reader consumed no record. A
    message without rows is a heartbeat.

    If the scheduler does not know the sender, it sends SubscriptionsLost.
    """

    grants: Seq


class SubscriptionsLost(Message, frozen=True):
    """Scheduler or gateway to client, unsolicited, correlation id 0: the sender lost its subscriptions.

    The client sends Subscribe again for all of them.
    """


class TopicsChanged(Message, frozen=True):
    """Scheduler or gateway to client, unsolicited, correlation id 0: topics were created or deleted.

    A client that subscribed to patterns lists the topics again.
    """
