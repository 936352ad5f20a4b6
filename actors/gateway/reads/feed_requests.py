"""Requests of clients for feeds, which the gateway subscribes to for them. Pure."""

from __future__ import annotations

from collections.abc import Generator
from typing import Any

from ringlog.actors.gateway import events as ev
from ringlog.actors.gateway.flows import FlowContext, GatewayRequest, ResolveTopic
from ringlog.actors.gateway.requests.append_admission import Flow
from ringlog.envelope import messages as m
from ringlog.errors import InvalidRequest, NotReady, TopicNotFound, is_shard_failed
from ringlog.limits import CREDIT_MAX, FEEDS_PER_MESSAGE_MAX, SEQ_MAX


class FeedFlows:
    """Flows of requests for feeds."""

    def __init__(self, context: FlowContext, incarnation: int) -> None:
        self._context, self._incarnation = context, incarnation

    def subscribe(self, request: GatewayRequest) -> Flow:
        """Subscribe to feeds.

        Topics are resolved here, because ids and places from a client are not trusted.
        """
        message: m.Subscribe = request.message
        if len(message.feeds) > FEEDS_PER_MESSAGE_MAX:
            raise InvalidRequest(
                f"a message must have at most {FEEDS_PER_MESSAGE_MAX} feeds, got {len(message.feeds)}",
                found=len(message.feeds), max=FEEDS_PER_MESSAGE_MAX,
            )  # fmt: skip
        if not 1 <= message.credit <= CREDIT_MAX:
            raise InvalidRequest(
                f"credit must be 1 to {CREDIT_MAX}, got {message.credit}", found=message.credit, min=1,
                max=CREDIT_MAX,
            )  # fmt: skip
        feeds: list[tuple[int, m.TopicInfo, int]] = []
        missing: list[int] = []
        for feed in message.feeds:
            if not (0 <= feed.feed < 1 << 32 and 0 <= feed.after <= SEQ_MAX):
                raise InvalidRequest(
                    "feed or after of a feed is out of range", feed=feed.feed, after=feed.after
                )
            info = yield from self._resolve_feed(feed)
            if info is None:
                missing.append(feed.feed)
            else:
                feeds.append((feed.feed, info, feed.after))
        self._context.require_no_drain()
        yield ev.SubscribeFeeds(
            self._context.next_ticket(), request.client, request.user_id, request.principal, message, feeds,
            missing,
        )  # fmt: skip
        return m.Subscribed(message.subscription, -1, self._incarnation), None

    def _resolve_feed(self, feed: m.Feed) -> Generator[Any, Any, m.TopicInfo | None]:
        """Return the topic of a feed; None if its name is unknown or has another id, or its shard failed.

        For None the client receives a recheck grant and finds out the reason. Its other feeds are not
        affected.
        """
        try:
            info = yield ResolveTopic(feed.topic)
            if info.topic_id != feed.topic_id:
                # The cached topic may be older than the client's.
                self._context.evict_topic(feed.topic)
                info = yield ResolveTopic(feed.topic)
        except TopicNotFound:
            return None
        except NotReady as e:
            if not is_shard_failed(e):
                raise
            return None
        return info if info.topic_id == feed.topic_id else None
