"""The rows of GrantsReturned: the same check in a scheduler and in the gateway, before any work for a row."""

from __future__ import annotations

from typing import Any

import numpy as np

from ringlog.envelope.messages.delivery import GRANT_RETURN_WORDS
from ringlog.errors import InvalidRequest
from ringlog.limits import GRANTS_PER_MESSAGE_MAX

_ROW_BYTES = 8 * GRANT_RETURN_WORDS


def grant_return_rows(attachment: Any) -> list[list[int]]:
    """Return the rows [subscription, feed, after, is_consumed] of an attachment; None has no rows.

    Raises InvalidRequest if it has a part of a row, or more than GRANTS_PER_MESSAGE_MAX rows.
    """
    data = attachment or b""
    if len(data) % _ROW_BYTES:
        raise InvalidRequest(
            f"attachment of GrantsReturned must be a multiple of {_ROW_BYTES} bytes, got {len(data)}",
            bytes=len(data),
        )
    if (found := len(data) // _ROW_BYTES) > GRANTS_PER_MESSAGE_MAX:
        raise InvalidRequest(
            f"GrantsReturned must have at most {GRANTS_PER_MESSAGE_MAX} rows, got {found}", found=found,
            max=GRANTS_PER_MESSAGE_MAX,
        )  # fmt: skip
    rows: list[list[int]] = np.frombuffer(data, dtype=np.uint64).reshape(-1, GRANT_RETURN_WORDS).tolist()
    return rows
