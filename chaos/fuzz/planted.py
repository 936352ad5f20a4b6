"""Deliberate bugs in decoders. Tests of the harness use them to check that the fuzzer finds bugs."""

from __future__ import annotations

from typing import Any


def envelopes() -> None:
    """Replace the decoder of every message kind, so that decoding raises an untyped error."""
    from ringlog.envelope import wire
    from ringlog.envelope.messages import KINDS

    spoilt: dict[str, Any] = dict.fromkeys(KINDS, object())
    wire._bodies.update(spoilt)
