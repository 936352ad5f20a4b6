"""How an error becomes a reply."""

from __future__ import annotations

from ringlog.envelope.messages import ErrorReply
from ringlog.errors import Refused


def error_reply(error: Refused) -> ErrorReply:
    """The wire form of a refusal."""
    return ErrorReply(int(error.status), error.message, error.detail, error.outcome)
