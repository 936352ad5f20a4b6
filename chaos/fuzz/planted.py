"""Bugs put into decoders, so that tests see the fuzzer find them. Nothing else calls these."""

from __future__ import annotations

from typing import Any


def envelopes() -> None:
    """A kind that is known and has no decoder: an error of nobody's instead of EnvelopeInvalid."""
    from ringlog.envelope import wire
    from ringlog.envelope.messages import KINDS

    spoilt: dict[str, Any] = dict.fromkeys(KINDS, object())
    wire._bodies.update(spoilt)
