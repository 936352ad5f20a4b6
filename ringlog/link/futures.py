"""Work that is not finished yet, and multi-step operations written once for threads and for loops.

A Pending is resolved or failed exactly once, by whoever does the input and output. A `Steps` is a
generator that yields Pendings and returns a result: it says what has to happen in which order and knows
nothing of waiting. `start` runs one as the Pendings it yields are resolved. The synchronous client then
sleeps until the result is there, the asyncio client awaits it, and neither repeats any logic.

Nothing here locks: the owner of the connection calls it under its own lock or from its own loop.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterable
from typing import Any, Generic, TypeAlias, TypeVar, cast

T = TypeVar("T")
Steps: TypeAlias = Generator["Pending[Any]", Any, T]


class Pending(Generic[T]):
    """A result that is not there yet."""

    __slots__ = ("_callbacks", "_error", "_value", "is_done")

    def __init__(self) -> None:
        self.is_done = False
        self._value: T | None = None
        self._error: BaseException | None = None
        self._callbacks: list[Callable[[Pending[T]], None]] | None = None

    def resolve(self, value: T) -> None:
        """Give the result; a second result is ignored, since answers may come twice."""
        if not self.is_done:
            self._value = value
            self._finish()

    def fail(self, error: BaseException) -> None:
        """Give the reason why there will be no result; ignored when there is one already."""
        if not self.is_done:
            self._error = error
            self._finish()

    def _finish(self) -> None:
        self.is_done = True
        callbacks, self._callbacks = self._callbacks, None
        for callback in callbacks or ():
            callback(self)

    def when_done(self, callback: Callable[[Pending[T]], None]) -> None:
        """Call `callback(self)` once it is done, at once if it is."""
        if self.is_done:
            callback(self)
        elif self._callbacks is None:
            self._callbacks = [callback]
        else:
            self._callbacks.append(callback)

    def forward_to(self, other: Pending[T]) -> None:
        """Settle another one as this one, which is done."""
        if self._error is not None:
            other.fail(self._error)
        else:
            other.resolve(self.result())

    def start_timer(self) -> None:
        """Somebody is about to sleep until it is done, and has only looked on so far."""

    def result(self) -> T:
        """Return the result or raise the reason; only when done."""
        if self._error is not None:
            raise self._error
        return cast("T", self._value)

    @property
    def error(self) -> BaseException | None:
        """Why it failed; None while it is not done or when it did not."""
        return self._error


def resolved(value: T) -> Pending[T]:
    """Return a Pending that is done."""
    pending: Pending[T] = Pending()
    pending.resolve(value)
    return pending


def run_steps(steps: Steps[T]) -> Pending[T]:
    """Run `steps` as far as it goes now, and further whenever what it waits for is done."""
    result: Pending[T] = Pending()
    _advance(steps, result, None)
    return result


def _advance(steps: Steps[T], result: Pending[T], done: Pending[Any] | None) -> None:
    """Feed `done` to the generator; loops over what is done already, so that the stack stays flat."""
    while True:
        try:
            if done is None:
                waits_for = next(steps)
            elif done.error is not None:
                waits_for = steps.throw(done.error)
            else:
                waits_for = steps.send(done.result())
        except StopIteration as end:
            result.resolve(end.value)
            return
        except Exception as e:  # noqa: BLE001  whatever an operation raises is its result
            result.fail(e)
            return
        if not waits_for.is_done:
            waits_for.when_done(lambda ready: _advance(steps, result, ready))
            return
        done = waits_for


def gather(pendings: Iterable[Pending[T]]) -> Pending[list[T]]:
    """Wait for all, in order; fails with the first failure in that order."""

    def steps() -> Steps[list[T]]:
        results = []
        for pending in pendings:
            results.append((yield pending))  # noqa: PERF401  a comprehension cannot yield
        return results

    return run_steps(steps())
