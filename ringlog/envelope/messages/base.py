"""The base class of all messages, and the reply that refuses a request."""

from __future__ import annotations

from typing import Any

import msgspec

from ringlog.envelope.messages.ranges import U32


class Message(msgspec.Struct, array_like=True, frozen=True, forbid_unknown_fields=False):
    """Base class of all messages."""


class ErrorReply(Message, frozen=True):
    """Reply of any component to any request: the request was refused.

    `status` is an errors.Status. `detail` has the facts of the error. `outcome` is `not_applied` (the request
    never takes effect) or `unknown`.
    """

    status: U32
    message: str
    detail: dict[str, Any] = {}
    outcome: str = "not_applied"
