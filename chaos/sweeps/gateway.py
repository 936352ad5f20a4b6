"""An exception at each executed line of the gateway's core is told of (RF-22).

A short conversation with the pure core: names resolved, requests forwarded, refused and answered with
errors, a client that goes, keys that change, a drain. An exception that nobody expected either comes out of
the core, or it ends one request: its client is answered with an error, the shell is given the exception to
log, and every other request is answered as if nothing had happened.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from actors.gateway import events as ev
from actors.gateway.auth import KeyRing, Principal
from actors.gateway.core import GatewayCore, GatewayIdentity
from actors.gateway.permissions import SCOPES
from chaos.order import Broken
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


@dataclass(slots=True)
class Outcome:
    """What came of the conversation."""

    answered: set[int] = field(default_factory=set)
    """The correlation numbers that had a reply."""
    failed: list[BaseException] = field(default_factory=list)
    """The exceptions that ended one request, as the shell is given them."""


def converse() -> Outcome:
    """The conversation."""
    core = GatewayCore(GatewayIdentity("e" * 32, "0", 1, 2, 9, 4096), KEYS)
    outcome = Outcome()
    now_ns = 0

    def feed(*events: Any) -> None:
        nonlocal now_ns
        now_ns += 1_000_000
        waiting = list(core.handle([Tick(now_ns // 1_000, now_ns), *events]))
        while waiting:
            effect = waiting.pop(0)
            if isinstance(effect, Reply):
                outcome.answered.add(effect.corr)
            elif isinstance(effect, ev.LogRequestFailure):
                outcome.failed.append(effect.error)
            answer = _answer(effect)
            if answer is not None:
                waiting += core.handle([answer])

    for corr, (user, message) in enumerate(MESSAGES, 1):
        feed(ev.ClientRequestReceived(CLIENT, user, corr, message))
    feed(ev.ClientDisconnected(CLIENT))
    feed(ev.KeysLoaded(KEYS))
    feed(DrainRequested())
    return outcome


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
        outcome = converse()
    _require_answers(outcome)
    return found


def _require_answers(outcome: Outcome) -> None:
    """Raises Broken when a request had no reply."""
    if missing := sorted(set(range(1, len(MESSAGES) + 1)) - outcome.answered):
        raise Broken(f"the gateway gave no reply to the requests {missing} of {len(MESSAGES)}")


def run_one(nth: int) -> Line:
    """Raise at the `nth` line; returns it. Raises Broken when it is swallowed, TooFew when there is none."""

    def strike() -> None:
        raise Unexpected("at a line")

    outcome = Outcome()
    with Tracer(nth, strike) as tracer:
        try:
            outcome = converse()
        except Unexpected:
            if tracer.struck is not None:
                return tracer.struck
    if tracer.struck is None:
        raise TooFew
    if any(isinstance(error, Unexpected) for error in outcome.failed):
        _require_answers(outcome)
        return tracer.struck
    path, line = tracer.struck
    raise Broken(f"an exception at {path.removeprefix(f'{ROOT}/')}:{line} is swallowed")
