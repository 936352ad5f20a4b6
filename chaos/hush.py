"""Silence for the warnings of faults that are made on purpose, and for no longer than they are made."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def hushed() -> Iterator[None]:
    """No log line of this process inside; afterwards as before, since tests call a class within theirs."""
    before = logging.root.manager.disable
    logging.disable(logging.CRITICAL)
    try:
        yield
    finally:
        logging.disable(before)
