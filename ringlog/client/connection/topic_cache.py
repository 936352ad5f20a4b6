"""TopicCache: where the topics of one client are, and requests to their shards."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

from ringlog.client.leases.dead_letters import dead_letter_targets_of
from ringlog.envelope.messages import GroupList, GroupListReply, Message, TopicInfo, TopicPut, TopicResolve
from ringlog.errors import NotReady, ShardsChanged, StaleEpoch, TopicNotFound
from ringlog.link.futures import Pending, Steps, resolved, run_steps

if TYPE_CHECKING:
    from ringlog.client.connection.session import Session

RESOLVE_ATTEMPTS_MAX = 16
"""Most attempts to locate the shard of a topic for one request. The engine cannot restart more often with
another number of shards during one request."""


class TopicCache:
    """Cache of the topics of one session. Not thread-safe."""

    def __init__(self, session: Session) -> None:
        self._session = session
        self.generation: int = 0
        """Start of the engine from which the cached topics are."""
        self._topics: dict[str, TopicInfo] = {}
        self._resolving: dict[tuple[str, bool], Pending[TopicInfo]] = {}

    def begin_generation(self, generation: int) -> None:
        """Forget all topics, because the engine was started again."""
        self.generation = generation
        self._topics.clear()

    def ask_topic(self, info: TopicInfo, message: Message, *, attachment: Any = None) -> Pending[Any]:
        """Send a request about a topic to its shard, also if the topic moves to another shard meanwhile."""
        return run_steps(self._ask_topic_steps(info, message, attachment))

    def _ask_topic_steps(self, info: TopicInfo, message: Message, attachment: Any) -> Steps[Any]:
        for _ in range(RESOLVE_ATTEMPTS_MAX):
            # Resolve again: the engine may have been restarted since the caller got `info`.
            found: TopicInfo = yield self.resolve(info.topic)
            try:
                return (yield from self._session.ask_steps(found.shard, message, 0, attachment))
            except ShardsChanged:
                # Send the request unchanged. Its protection against duplicates also holds at the other shard.
                continue
        raise no_agreement_error(info.topic)

    def resolve(self, topic: str, *, create: bool = False) -> Pending[TopicInfo]:
        """Return the identity and settings of a topic, from the cache if possible.

        Fails with TopicNotFound, unless `create` is true: the topic is then created with default settings.
        """
        known = self._topics.get(topic)
        if known is not None and self.generation == self._session.links.generation:
            return resolved(known)
        pending = self._resolving.get((topic, create))
        if pending is None:
            pending = run_steps(self._resolve_steps(topic, create))
            self._resolving[topic, create] = pending
            pending.when_done(lambda _: self._resolved(topic, create))
        return pending

    def _resolved(self, topic: str, create: bool) -> None:
        self._resolving.pop((topic, create), None)

    def cached(self, topic: str) -> TopicInfo | None:
        """Return the cached topic; None if it was not resolved since the last start of the engine."""
        return self._topics.get(topic) if self.generation == self._session.links.generation else None

    def cache(self, info: TopicInfo) -> TopicInfo:
        """Store a shard's description of a topic in the cache."""
        self._topics[info.topic] = info
        return info

    def forget(self, topic: str) -> None:
        """Remove a topic from the cache."""
        self._topics.pop(topic, None)

    def forget_all(self, topics: Iterable[str]) -> None:
        """Remove topics from the cache. A feed of an earlier life of a topic would never get a grant."""
        for topic in topics:
            self.forget(topic)

    def _resolve_steps(self, topic: str, create: bool) -> Steps[TopicInfo]:
        yield self._session.wait_connected()
        message: Message = TopicPut(topic, {}, "create") if create else TopicResolve(topic)
        return (yield from self.ask_name_owner(topic, message))

    def ask_name_owner(self, topic: str, message: Message) -> Steps[TopicInfo]:
        """Send a request to the shard that owns a topic's name.

        This is the home shard, or another one to which the home shard refers because the number of shards
        changed. Raises NotReady if that one refers to yet another.
        """
        for _ in range(RESOLVE_ATTEMPTS_MAX):
            try:
                yield self._session.wait_connected()  # The home shard is known only after connecting.
                info: TopicInfo = yield self._session.ask(self._session.links.home_shard(topic), message)
                if not info.topic_id:
                    info = yield self._session.ask(info.shard, message)
                break
            except ShardsChanged:
                continue
        else:
            raise no_agreement_error(topic)
        if not info.topic_id:
            raise no_agreement_error(topic)
        return self.cache(info)

    def dead_letter_targets(self, topic: str) -> Pending[tuple[str, ...]]:
        """Query the dead-letter topics of a topic: the queue's own and those of its groups. Never cached."""
        return run_steps(self._dead_letter_steps(topic))

    def _dead_letter_steps(self, topic: str) -> Steps[tuple[str, ...]]:
        yield self._session.wait_connected()
        info = yield from self.ask_name_owner(topic, TopicResolve(topic))
        listed: GroupListReply = yield self.ask_topic(info, GroupList(topic))
        return dead_letter_targets_of(info.config, listed.groups)

    def ask_resolved_topic(self, topic: str, make: Any) -> Steps[Any]:
        """Send `make(info)` to a topic's shard. Resolves again and retries once if the topic is in another
        life."""
        info = yield self.resolve(topic)
        try:
            return (yield self.ask_topic(info, make(info)))
        except (TopicNotFound, StaleEpoch):
            self.forget(topic)
            info = yield self.resolve(topic)
            return (yield self.ask_topic(info, make(info)))


def no_agreement_error(topic: str) -> NotReady:
    """Return the error of a topic whose owner stays unknown."""
    return NotReady("the shards do not agree on the owner of this topic: retry later", topic=topic)
