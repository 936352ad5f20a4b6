"""A gateway core with its steps of a claim."""

from __future__ import annotations

from typing import Any

from ringlog.access.key_ring import KeyRing
from ringlog.access.keys import Principal
from ringlog.actors.gateway import events as ev
from ringlog.actors.gateway.core import GatewayCore, GatewayIdentity
from ringlog.contract import Reply, Tick
from ringlog.envelope import messages as m
from tests.support.lease_words import numbers

KEYS = KeyRing([("w-id", Principal("worker", frozenset({"read", "write"})))])

US = 1_700_000_000_000_000


class Driver:
    """A gateway that knows the queue `q`, and the steps of a claim."""

    def __init__(self) -> None:
        self.core = GatewayCore(GatewayIdentity("e" * 32, "0", 1, 2, 9, 4096), KEYS)
        self.feed(Tick(US, 1))

    def feed(self, *events: Any) -> list[Any]:
        effects = self.core.handle(events)
        self.core.check()
        return effects

    def claim(
        self, *runs: tuple[int, int, int, int], wait_ms: int = 0, head: int = 100
    ) -> ev.ReadFiles | Any:
        """Claim; the shard leases these runs. Return the last effect: the first read, or the reply."""
        (asked,) = self.feed(
            ev.ClientRequestReceived(b"c", "w-id", 1, m.Claim("q", "w", 9, wait_ms=wait_ms, call=8), None)
        )
        (claimed,) = self.feed(
            ev.ShardAnswered(asked.ticket, m.TopicInfo("q", 7, 3, 1, 0, False, {"type": "queue"}))
        )
        self.asked = claimed.message
        effects = self.feed(ev.ShardAnswered(claimed.ticket, m.ClaimReply("q", 7, 3, 5_000, 4, list(runs))))
        if not runs:
            return only(effects, Reply)
        locate = only(effects, ev.AskShard)
        assert locate.message == m.Locate("q", runs[0][0] - 1, 3)
        located = m.Located("q", 7, 3, 1, 0, head, 1, 1, 1, 1, False, extents=[])
        return only(self.feed(ev.ShardAnswered(locate.ticket, located)), ev.ReadFiles)

    def read(self, wanted: ev.ReadFiles, last: int, frames: int = 1, data: bytes = b"frame") -> Any:
        found = ev.FramesRead(wanted.ticket, frames, frames, last, last, data)
        return self.feed(found)

    def nacked(self, effects: list[Any]) -> tuple[list[int], list[int], list[Any]]:
        """Return the seqs and tokens that the gateway nacks, and the effects of the shard's answer."""
        asked = only(effects, ev.AskShard)
        assert isinstance(asked.message, m.Nack)
        self.taken_back, self.is_undone = asked.message.call, asked.message.undo
        answer = m.NackReply("q", 1, b"", 1, 1)
        after = self.feed(ev.ShardAnswered(asked.ticket, answer))
        return numbers(asked.message.seqs), numbers(asked.message.tokens), after


def only(effects: list[Any], kind: type) -> Any:
    (effect,) = effects
    assert isinstance(effect, kind), effect
    return effect
