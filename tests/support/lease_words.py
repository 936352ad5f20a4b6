"""Numbers of jobs and leases, as the messages of queues and groups carry them."""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np

from ringlog.envelope import messages as m


def words(numbers: Iterable[int]) -> bytes:
    return np.array(list(numbers), dtype="<u8").tobytes()


def numbers(data: bytes) -> list[int]:
    return np.frombuffer(data, dtype="<u8").tolist()


def held(claimed: m.ClaimReply) -> dict[int, int]:
    """Return number of each claimed job -> its lease token."""
    return {first + n: token + n for first, count, _, token in claimed.runs for n in range(count)}
