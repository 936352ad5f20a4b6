"""Raises an exception at each executed line of the gateway's core; the exception must be reported (RF-22).

The conversation with the pure core is short: names are resolved; requests are forwarded, refused and answered
with errors; a client disconnects; keys change; the gateway drains. An unexpected exception either leaves the
core or ends one request. In the second case the client gets an error, the shell gets the exception to log,
and every other request is answered as usual.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from chaos.sweeps.lines import ROOT, Line, TooFew, Tracer, Unexpected
from ringlog.access.key_ring import KeyRing
from ringlog.access.keys import Principal
from ringlog.access.permissions import SCOPES
from ringlog.actors.gateway import events as ev
from ringlog.actors.gateway.core import GatewayCore, GatewayIdentity
from ringlog.contract import DrainRequested, Reply, Tick
from ringlog.drill.checks import GuaranteeBroken
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
    """Result of the conversation."""

    answered: set[int] = field(default_factory=set)
    """Correlation ids with a reply."""
    failed: list[BaseException] = field(default_factory=list)
    """Exceptions that ended one request, as the shell receives them."""


def converse() -> Outcome:
    """Run the conversation."""
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
    """Return the answer of a shard."""
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
    """Return every line that the conversation executes, in order."""
    found: list[Line] = []
    with Tracer(0, lambda: None, found.append):
        outcome = converse()
    _require_answers(outcome)
    return found


def _require_answers(outcome: Outcome) -> None:
    """Raise GuaranteeBroken if a request has no reply."""
    if missing := sorted(set(range(1, len(MESSAGES) + 1)) - outcome.answered):
        raise GuaranteeBroken(f"the gateway gave no reply to the requests {missing} of {len(MESSAGES)}")


def run_one(nth: int) -> Line:
    """Raise an exception at the `nth` line; return the line.

    Raises GuaranteeBroken if the exception is swallowed, TooFew if fewer lines are executed.
    """

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
    raise GuaranteeBroken(f"an exception at {path.removeprefix(f'{ROOT}/')}:{line} is swallowed")
