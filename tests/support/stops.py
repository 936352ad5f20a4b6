"""Stop points in this process."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from ringlog import stop_points
from ringlog.errors import InvariantViolation


@contextmanager
def fails_at(point: str, nth: int = 1) -> Iterator[None]:
    """Let the block fail when it reaches the stop point for the nth time, as it must."""
    stop_points.configure(f"{point}:{nth}:raise")
    try:
        with pytest.raises(InvariantViolation):
            yield
    finally:
        stop_points.configure("")
