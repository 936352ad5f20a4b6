"""Requests about topics: which shard owns a topic, and requests to that shard or to all shards. Pure.

The home shard of a name knows the topic, or names the shard that does, as after a change of the shard count.
"""

from __future__ import annotations

from typing import Any, TypeGuard

from ringlog.access.engine_facts import covered, visible_prefixes
from ringlog.actors.gateway import events as ev
from ringlog.actors.gateway.flows import FlowContext, GatewayRequest, ResolveTopic
from ringlog.actors.gateway.requests.append_admission import Flow
from ringlog.envelope import messages as m
from ringlog.errors import InvalidRequest, NotReady, StaleEpoch, TopicNotFound
from ringlog.limits import LIST_PAGE_MAX
from ringlog.placement import home_shard


class TopicRequestFlows:
    """Flows of requests that one shard or all shards answer."""

    def __init__(self, context: FlowContext, shards: int) -> None:
        self._context, self._shards = context, shards

    def ask_home_shard(self, message: Any) -> Flow:
        """Send a request to the home shard of the name, or to the shard that the home shard names."""
        shard = home_shard(message.topic, self._shards)
        answer = yield self._context.ask(shard, message)
        if _is_redirect(answer):
            answer = yield self._context.ask(answer.shard, message)
        if _is_redirect(answer):
            raise _disagreeing(message.topic)
        if isinstance(answer, m.TopicInfo):
            self._context.cache_topic(answer)
        return answer, None

    def delete(self, request: GatewayRequest) -> Flow:
        """Delete a topic. The reply lists only those deleted routers whose names the key's prefixes cover."""
        message: m.TopicDelete = request.message
        try:
            answer, _ = yield from self.ask_topic_shard(message)
            assert isinstance(answer, m.TopicDeleted)
        except TopicNotFound:
            return m.TopicDeleted(message.topic, False), None
        finally:
            self._context.evict_topic(message.topic)
        names = covered(request.principal, answer.routers)
        return m.TopicDeleted(answer.topic, answer.deleted, names), None

    def ask_topic_shard(self, message: Any) -> Flow:
        """Send a request to the shard that owns the topic."""
        if isinstance(message, m.RecordsDelete) and message.seqs:
            raise InvalidRequest("seqs is not allowed here: use before_seq or match", topic=message.topic)
        info = yield ResolveTopic(message.topic)
        try:
            answer = yield self._context.ask(info.shard, message)
        except (TopicNotFound, StaleEpoch):
            self._context.evict_topic(message.topic)
            raise
        return answer, None

    def list_topics(self, request: GatewayRequest) -> Flow:
        """Merge the topics of all shards, for every prefix that the key covers."""
        message: m.TopicList = request.message
        size = max(1, min(message.page_size, LIST_PAGE_MAX))
        found: dict[str, m.TopicStateReply] = {}
        is_more = False
        for prefix in visible_prefixes(request.principal, message.prefix):
            for shard in range(self._shards):
                page: m.TopicListReply = yield self._context.ask(
                    shard, m.TopicList(prefix, message.after, size)
                )
                found.update((topic.topic, topic) for topic in page.topics)
                is_more = is_more or page.more
        names = sorted(found)
        return m.TopicListReply([found[name] for name in names[:size]], is_more or len(names) > size), None


class TopicResolver:
    """Flows that wait for the owner of a topic. One request to the home shard serves all that wait for it."""

    def __init__(self, context: FlowContext, shards: int) -> None:
        self._context, self._shards = context, shards
        self._waiters: dict[str, list[GatewayRequest]] = {}
        self._tickets: dict[int, tuple[str, bool]] = {}

    def expects(self, ticket: int) -> bool:
        """Return whether a reply with this ticket is for this class."""
        return ticket in self._tickets

    def wait(self, request: GatewayRequest, topic: str) -> ev.AskShard | None:
        """Let a request wait for a topic. Return the request to send, None if it was sent before."""
        waiters = self._waiters.setdefault(topic, [])
        waiters.append(request)
        return self._ask(home_shard(topic, self._shards), topic, is_home=True) if len(waiters) == 1 else None

    def redirect(self, event: ev.ShardAnswered) -> ev.AskShard | None:
        """Return the request to the shard that the home shard names; None if the reply is final."""
        topic, is_home = self._tickets[event.ticket]
        if not is_home or not _is_redirect(event.message):
            return None
        del self._tickets[event.ticket]
        return self._ask(event.message.shard, topic, is_home=False)

    def finish(self, event: ev.ShardAnswered) -> tuple[list[GatewayRequest], Any]:
        """Return the requests that waited for a topic, and the topic or the error."""
        topic, _ = self._tickets.pop(event.ticket)
        error = _disagreeing(topic) if _is_redirect(event.message) else event.error
        if error is None and isinstance(event.message, m.TopicInfo):
            self._context.cache_topic(event.message)
        return self._waiters.pop(topic), error or event.message

    def _ask(self, shard: int, topic: str, *, is_home: bool) -> ev.AskShard:
        effect = self._context.ask(shard, m.TopicResolve(topic))
        self._tickets[effect.ticket] = topic, is_home
        return effect


def _is_redirect(answer: Any) -> TypeGuard[m.TopicInfo]:
    """Return whether the home shard only named the topic's shard, as after a change of the shard count."""
    return isinstance(answer, m.TopicInfo) and not answer.topic_id


def _disagreeing(topic: str) -> NotReady:
    """Return the error for a second redirect: each shard is asked once."""
    return NotReady("the shards do not agree on the owner of this topic: retry later", topic=topic)
