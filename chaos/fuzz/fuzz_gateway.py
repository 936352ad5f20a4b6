"""The gateway's core: every message of an authenticated client gets exactly the replies that are due."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from chaos.fuzz.fuzz_envelope import NAMES
from chaos.fuzz.fuzz_envelope import seeds as envelope_seeds
from ringlog.access.key_ring import KeyRing
from ringlog.access.keys import Principal
from ringlog.access.permissions import SCOPES
from ringlog.actors.gateway import events as ev
from ringlog.actors.gateway.core import GatewayCore, GatewayIdentity
from ringlog.contract import Reply, Tick
from ringlog.envelope.wire import PROTOCOL, EnvelopeInvalid, decode
from ringlog.errors import NotReady, TopicNotFound

MAX_LEN = 1_024
SHARE = 1.5
GOLDEN = Path(__file__).parents[2] / "tests" / "golden"
STEPS_MAX = 64
WHO = KeyRing([("who", Principal("who", SCOPES, ("t", "a")))])
IDENTITY = GatewayIdentity("e" * 32, "0", PROTOCOL, 2, 1, 1 << 20)


def check(data: bytes) -> None:
    """Handle one input: [length of the envelope, 2 bytes, little-endian][envelope][attachment]."""
    size = int.from_bytes(data[:2], "little")
    head, attached = data[2 : 2 + size], data[2 + size :]
    if head and head[0] < len(NAMES):
        name = NAMES[head[0]].encode()
        head = (
            b"\x94" + bytes([PROTOCOL, 0xA0 | len(name)]) + name + b"\x07" + head[1:]
            if len(name) < 32
            else head
        )
    try:
        envelope = decode(head)
    except EnvelopeInvalid:
        return
    core = GatewayCore(IDENTITY, WHO)
    asked = ev.ClientRequestReceived(b"c", "who", envelope.corr, envelope.message, attached or None)
    effects = core.handle([Tick(1, 1), asked])
    due = 0 if any(isinstance(effect, ev.ReturnGrants) for effect in effects) else 1
    replies = 0
    for _ in range(STEPS_MAX):
        core.check()
        replies += sum(isinstance(effect, Reply) for effect in effects)
        events = [event for effect in effects if (event := _answer(effect)) is not None]
        if not events:
            break
        effects = core.handle(events)
    if replies != due or core.requests_held:
        raise AssertionError(f"{envelope.message!r} got {replies} replies, {core.requests_held} are held")


def _answer(effect: Any) -> Any:
    """Return the answer of a shard: the topic does not exist, or the shard is not available."""
    match effect:
        case ev.AskShard():
            error = NotReady("away") if effect.ticket % 2 else TopicNotFound("no such topic")
            return ev.ShardAnswered(effect.ticket, None, error)
        case ev.PushFrames():
            return ev.FramesSettled(effect.ticket, b"", NotReady("away"))
        case _:
            return None


def seeds() -> Iterator[bytes]:
    """Yield envelopes without attachment, and appends with golden frames."""
    for seed in envelope_seeds():
        yield len(seed).to_bytes(2, "little") + seed
    append = bytes([NAMES.index("Append")]) + b"\x95\xa1t\x01\xc3\xc0\xa0"
    for path in sorted(GOLDEN.glob("**/frames/*.hex")):
        yield len(append).to_bytes(2, "little") + append + bytes.fromhex(path.read_text())
