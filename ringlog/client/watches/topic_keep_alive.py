"""Keeps topics with `expire_unused_ms` alive while this client follows them.

A follower reads shared memory, and the topic's shard does not notice it. For a topic that expires when it is
unused, a timer of the session therefore resolves the topic several times in each period, as long as a
follower exists. Other topics cost no timer and no message.

A follower holds a KeepAliveHandle and ends it. A dropped handle ends when it is garbage collected. This
module is not compiled, because weak references to handles are made.
"""

from __future__ import annotations

import weakref
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from ringlog.envelope.messages import TopicInfo, TopicResolve
from ringlog.errors import TopicNotFound
from ringlog.limits import TOPIC_KEEPALIVES_PER_PERIOD
from ringlog.link.futures import Pending, Steps, run_steps

if TYPE_CHECKING:
    from ringlog.client.connection.session import Session

_MS_NS = 1_000_000
_RETRY_MS = 1_000
"""Longest pause in milliseconds after a failed renewal."""


class KeepAliveHandle:
    """Use of one life of a topic, until it is ended. Ending it takes no lock."""

    __slots__ = ("__weakref__", "epoch", "is_over")

    def __init__(self, epoch: int = 0) -> None:
        self.epoch: int = epoch
        """Epoch of the life; 0 = any."""
        self.is_over: bool = False

    def end(self) -> None:
        """End the use."""
        self.is_over = True


@dataclass(slots=True)
class _FollowedTopic:
    handles: list[weakref.ref[KeepAliveHandle]] = field(default_factory=list)
    period_ms: int = 0
    is_planned: bool = False
    """True while a timer is set or a request is in flight."""


class TopicKeepAlive:
    """Followed topics of one session. Call with the client's lock held, or in its loop."""

    def __init__(self, session: Session) -> None:
        self._session = session
        self._followed: dict[str, _FollowedTopic] = {}

    def acquire(self, topic: str, epoch: int) -> KeepAliveHandle:
        """Return a handle that marks the topic as in use. Returns at once and never fails."""
        handle, info = KeepAliveHandle(epoch), self._session.topics.cached(topic)
        is_known = info is not None and epoch in {0, info.epoch}
        if info is not None and is_known and not _period_of(info):
            return handle
        followed = self._followed.setdefault(topic, _FollowedTopic())
        followed.handles = [each for each in followed.handles if _is_live(each)]
        followed.handles.append(weakref.ref(handle))
        if not followed.is_planned:
            followed.is_planned = True
            if info is not None and is_known:
                self._plan(topic, followed, _period_of(info))
            else:
                self._renew(topic, followed)
        return handle

    def _plan(self, topic: str, followed: _FollowedTopic, period_ms: int) -> None:
        followed.period_ms = period_ms
        self._after(period_ms // TOPIC_KEEPALIVES_PER_PERIOD, topic, followed)

    def _after(self, pause_ms: int, topic: str, followed: _FollowedTopic) -> None:
        when_ns = self._session.clock.monotonic_ns() + pause_ms * _MS_NS
        self._session.timers.call_at(when_ns, lambda: self._renew(topic, followed))

    def _renew(self, topic: str, followed: _FollowedTopic) -> None:
        followed.handles = [each for each in followed.handles if _is_live(each)]
        if not followed.handles:
            self._followed.pop(topic, None)
            return
        run_steps(self._ask(topic)).when_done(lambda done: self._renewed(done, topic, followed))

    def _ask(self, topic: str) -> Steps[TopicInfo]:
        yield self._session.wait_connected()
        return (yield from self._session.topics.ask_name_owner(topic, TopicResolve(topic)))

    def _renewed(self, done: Pending[TopicInfo], topic: str, followed: _FollowedTopic) -> None:
        if done.error is None:
            info = done.result()
            if _period_of(info):
                self._plan(topic, followed, _period_of(info))
                return
            if any((handle := each()) is not None and handle.epoch > info.epoch for each in followed.handles):
                self._after(_RETRY_MS, topic, followed)  # The reply predates the topic's re-creation.
                return
        elif not isinstance(done.error, TopicNotFound) and not self._session.is_closed:
            pause_ms = followed.period_ms // TOPIC_KEEPALIVES_PER_PERIOD or _RETRY_MS
            self._after(min(pause_ms, _RETRY_MS), topic, followed)
            return
        # The topic does not exist or does not expire. A follower of a re-created topic calls `acquire` again.
        self._followed.pop(topic, None)


def _is_live(ref: weakref.ref[KeepAliveHandle]) -> bool:
    handle = ref()
    return handle is not None and not handle.is_over


def _period_of(info: TopicInfo) -> int:
    return int(info.config.get("expire_unused_ms", 0))
