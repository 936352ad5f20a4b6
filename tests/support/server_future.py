"""The future by which the HTTP server tells that a client has gone."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any


class OneSlotFuture:
    """It has room for one callback: another one replaces it, and removing any removes it. As in granian."""

    _asyncio_future_blocking = True

    def __init__(self) -> None:
        self._is_done = False
        self._callback: Callable[[Any], object] | None = None

    def add_done_callback(self, callback: Callable[[Any], object], /, *, context: Any = None) -> None:
        self._callback = callback
        if self._is_done:
            self._call()

    def remove_done_callback(self, callback: Callable[[Any], object], /) -> int:
        self._callback = None
        return 1

    def done(self) -> bool:
        return self._is_done

    def cancel(self) -> bool:
        """End it. Returns whether it was not done."""
        was_done, self._is_done = self._is_done, True
        if not was_done:
            self._call()
        return not was_done

    def set_result(self, _: None) -> None:
        """Tell that the client has gone."""
        self.cancel()

    def _call(self) -> None:
        if self._callback is not None:
            asyncio.get_running_loop().call_soon(self._callback, self)
