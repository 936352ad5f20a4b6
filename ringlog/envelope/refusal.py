"""Conversion of an error to a reply."""

from __future__ import annotations

from ringlog.envelope.messages import ErrorReply
from ringlog.errors import Refused


def error_reply(error: Refused) -> ErrorReply:
    """Return the wire form of a refusal."""
    return ErrorReply(int(error.status), error.message, error.detail, error.outcome)
