"""Router requests in scheduler 0, with shards of which one was given up."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from ringlog.actors.scheduler.forwarding.router_admin import FoundRouters, RouterAdmin
from ringlog.envelope import messages as m
from ringlog.errors import NotReady
from ringlog.link.futures import Steps, resolved
from ringlog.testing import ManualClock

A_TO_B = m.RouterFacts(1, "a->b", "a", 5, 1, "b", 6, 0, "", 0)


class Host:
    """A scheduler whose shards know one router, and whose last shard was given up."""

    is_loaded = True

    def __init__(self) -> None:
        self.links = SimpleNamespace(shards=2)
        self.connection = self
        self.clock = ManualClock()
        self.loads = 0
        self.cursor = 0

    def load_routers(self) -> Steps[FoundRouters]:
        self.loads += 1
        yield resolved(None)
        return FoundRouters([A_TO_B], NotReady("this shard was given up"))

    def ask(self, _shard: int, message: m.Message) -> Steps[Any]:
        yield resolved(None)
        if isinstance(message, m.ListShardRouters):
            self.cursor += 1
            return m.ShardRoutersReply(
                [m.RouterFacts(1, "a->b", "a", 5, 1, "b", 6, 0, "", self.cursor)], False
            )
        assert isinstance(message, m.TopicState)
        return SimpleNamespace(topic_id=5, head_seq=4)

    def pause(self, seconds: float) -> Any:
        self.clock.advance(seconds=seconds)
        return resolved(None)


@pytest.mark.parametrize("requests", [[0, 0], [10_000]], ids=["twice", "until settled"])
def test_looks_at_a_known_router_do_not_list_the_routers_of_all_shards(requests: list[int]) -> None:
    """Its shard is asked for its current facts anyway."""
    host = Host()
    admin = RouterAdmin(host, 1, 100)  # type: ignore[arg-type]
    answers = [admin.submit(m.RouterGet("a->b", settle_ms)).result() for settle_ms in requests]
    assert [type(answer) for answer in answers] == [m.RouterInfo] * len(requests)
    assert host.loads == 1
    assert host.cursor > 1, "the router is looked at several times"


def test_a_router_that_may_be_in_a_shard_that_was_given_up_is_not_missing() -> None:
    admin = RouterAdmin(Host(), 1, 100)  # type: ignore[arg-type]
    with pytest.raises(NotReady):
        admin.submit(m.RouterGet("c->d")).result()
