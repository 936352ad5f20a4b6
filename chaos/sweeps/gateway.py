"""An exception at each executed line of the gateway's core comes out of it (RF-22).

A short conversation with the pure core: names resolved, requests forwarded, refused and answered with
errors, a client that goes, keys that change, a drain. A reply that was made of an exception nobody expected
would be a lie about what happened.
"""

from __future__ import annotations

from typing import Any

from actors.gateway import events as ev
from actors.gateway.auth import KeyRing, Principal
from actors.gateway.core import Gateway, Identity
from actors.gateway.rights import SCOPES
from chaos.sweeps.house import Broken
from chaos.sweeps.lines import ROOT, Line, TooFew, Tracer, Unexpected
from ringlog.contract import DrainRequested, Reply, Tick
from ringlog.envelope import messages as m
from ringlog.errors import NotReady, TopicNotFound

KEYS = KeyRing([("a", Principal("alice", frozenset({"read"}), ("a.",))), ("b", Principal("bob", SCOPES))])
MESSAGES: tuple[tuple[str, m.Message], ...] = (
    ("b", m.Hello(1, "chaos")), ("b", m.Ping()), ("", m.Ping()), ("a", m.TopicState("secret")),
    ("b", m.TopicPut("t", {})), ("b", m.TopicState("t")), ("a", m.TopicState("a.t")),
    ("b", m.TopicState("gone")), ("b", m.RecordsDelete("t", 3, None, b"")), ("b", m.Read("t", 0)),
    ("b", m.TopicDelete("t")), ("b", m.EngineStop()),
)  # fmt: skip
CLIENT = b"chaos"


def converse() -> int:
    """The conversation; returns how many replies there were."""
    core = Gateway(Identity("e" * 32, "0", 1, 2, 9, 4096), KEYS)
    replies = 0
    now_ns = 0

    def feed(*events: Any) -> None:
        nonlocal replies, now_ns
        now_ns += 1_000_000
        waiting = list(core.handle([Tick(now_ns // 1_000, now_ns), *events]))
        while waiting:
            effect = waiting.pop(0)
            replies += isinstance(effect, Reply)
            answer = _answer(effect)
            if answer is not None:
                waiting += core.handle([answer])

    for corr, (user, message) in enumerate(MESSAGES, 1):
        feed(ev.Asked(CLIENT, user, corr, message))
    feed(ev.ClientGone(CLIENT))
    feed(ev.KeysLoaded(KEYS))
    feed(DrainRequested())
    return replies


def _answer(effect: Any) -> Any:
    """What a shard would say."""
    if isinstance(effect, ev.ReadFiles):
        return ev.FramesRead(effect.ticket, 0, 0, 0, 0)
    if not isinstance(effect, ev.AskShard):
        return None
    message: Any = effect.message
    topic = getattr(message, "topic", "")
    if topic == "gone":
        return ev.ShardAnswered(effect.ticket, None, TopicNotFound("no such topic", topic=topic))
    if isinstance(message, m.TopicResolve | m.TopicPut):
        return ev.ShardAnswered(effect.ticket, m.TopicInfo(topic, 7, 1, 1, 0, False, {}))
    if isinstance(message, m.TopicDelete):
        return ev.ShardAnswered(effect.ticket, m.TopicDeleted(topic, True))
    return ev.ShardAnswered(effect.ticket, None, NotReady("shard is not there"))


def lines_of() -> list[Line]:
    """Every line that the conversation executes."""
    found: list[Line] = []
    with Tracer(0, lambda: None, found.append):
        replies = converse()
    if replies < len(MESSAGES):
        raise Broken(f"the gateway gave {replies} replies to {len(MESSAGES)} requests")
    return found


def run_one(nth: int) -> Line:
    """Raise at the `nth` line; returns it. Raises Broken when it is swallowed, TooFew when there is none."""

    def strike() -> None:
        raise Unexpected("at a line")

    with Tracer(nth, strike) as tracer:
        try:
            converse()
        except Unexpected:
            if tracer.struck is not None:
                return tracer.struck
    if tracer.struck is None:
        raise TooFew
    path, line = tracer.struck
    raise Broken(f"an exception at {path.removeprefix(f'{ROOT}/')}:{line} is swallowed")
