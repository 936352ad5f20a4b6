"""Results that are not available yet, and multi-step operations that threads and event loops share.

The code that performs the I/O resolves or fails a Pending exactly once. A `Steps` is a generator that yields
Pendings and returns a result. It states the order of the steps and never waits. `run_steps` continues it
whenever the Pending that it yielded is done. The synchronous client then sleeps until the result is
available, and the asyncio client awaits it. Both use the same logic.

Nothing here locks: the owner of the connection calls it under its own lock or from its own loop.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterable, Sequence
from typing import Any, Generic, TypeAlias, TypeVar, cast

T = TypeVar("T")
Steps: TypeAlias = Generator["Pending[Any]", Any, T]


class Pending(Generic[T]):
    """A result that is not available yet."""

    __slots__ = ("_callbacks", "_error", "_value", "is_done")

    def __init__(self) -> None:
        self.is_done: bool = False
        self._value: T | None = None
        self._error: BaseException | None = None
        self._callbacks: list[Callable[[Pending[T]], None]] | None = None

    def resolve(self, value: T) -> None:
        """Set the result. If there is one already, it stays, because a reply may arrive twice."""
        if not self.is_done:
            self._value = value
            self._finish()

    def fail(self, error: BaseException) -> None:
        """Set the error. If there is a result or an error already, it stays."""
        if not self.is_done:
            self._error = error
            self._finish()

    def _finish(self) -> None:
        self.is_done = True
        callbacks, self._callbacks = self._callbacks, None
        for callback in callbacks or ():
            callback(self)

    def when_done(self, callback: Callable[[Pending[T]], None]) -> None:
        """Call `callback(self)` when it is done; at once if it is done already."""
        if self.is_done:
            callback(self)
        elif self._callbacks is None:
            self._callbacks = [callback]
        else:
            self._callbacks.append(callback)

    def forward_to(self, other: Pending[T]) -> None:
        """Resolve or fail `other` with the outcome of this one, which must be done."""
        if self._error is not None:
            other.fail(self._error)
        else:
            other.resolve(self.result())

    def start_timer(self) -> None:
        """Start the timeout of the operation: the caller spun until now and is about to sleep.

        The base class has no timeout and does nothing.
        """

    def result(self) -> T:
        """Return the result or raise the error. Call it only when `is_done`."""
        if self._error is not None:
            raise self._error
        return cast("T", self._value)

    @property
    def error(self) -> BaseException | None:
        """The error; None if it is not done or succeeded."""
        return self._error


def resolved(value: T) -> Pending[T]:
    """Return a Pending with this result."""
    pending: Pending[T] = Pending()
    pending.resolve(value)
    return pending


def run_steps(steps: Steps[T]) -> Pending[T]:
    """Run `steps` until it yields a Pending that is not done, and continue when that is done.

    Return its result.
    """
    result: Pending[T] = Pending()
    _advance(steps, result, None)
    return result


def _advance(steps: Steps[T], result: Pending[T], done: Pending[Any] | None) -> None:
    """Send `done` to the generator. A loop continues while results are available, to keep the stack flat."""
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


def delegate(steps: Steps[T]) -> Steps[T]:
    """Do what `yield from steps` does.

    Compiled code uses this for a generator of interpreted code: what mypyc makes of `yield from` passes an
    exception on with a call of `throw` that Python deprecates since 3.12.
    """
    error: BaseException | None = None
    value: Any = None
    while True:
        try:
            waits_for = steps.send(value) if error is None else steps.throw(error)
        except StopIteration as end:
            result: T = end.value
            return result
        error = value = None
        try:
            value = yield waits_for
        except GeneratorExit:
            steps.close()
            raise
        except BaseException as e:  # noqa: BLE001  the steps decide about every error
            error = e


def first_result(pendings: Sequence[Pending[T]]) -> Pending[T]:
    """Wait for the first that succeeds. If none does, the result fails with the last failure."""
    result: Pending[T] = Pending()
    left = len(pendings)

    def note(done: Pending[T]) -> None:
        nonlocal left
        left -= 1
        if done.error is None or not left:
            done.forward_to(result)

    for pending in pendings:
        pending.when_done(note)
    return result


def gather(pendings: Iterable[Pending[T]]) -> Pending[list[T]]:
    """Wait for all, in order. The result fails with the first failure in that order."""

    def steps() -> Steps[list[T]]:
        results = []
        for pending in pendings:
            results.append((yield pending))  # noqa: PERF401  a comprehension cannot yield
        return results

    return run_steps(steps())
