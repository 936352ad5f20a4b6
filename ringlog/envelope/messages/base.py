"""What all messages are, and the answer that refuses."""

from __future__ import annotations

from typing import Any

import msgspec

from ringlog.envelope.messages.ranges import U32


class Message(msgspec.Struct, array_like=True, frozen=True, forbid_unknown_fields=False):
    """Base of all messages."""


class ErrorReply(Message, frozen=True):
    """The request was refused. `status` is an errors.Status; `detail` holds the facts."""

    status: U32
    message: str
    detail: dict[str, Any] = {}
    outcome: str = "not_applied"
