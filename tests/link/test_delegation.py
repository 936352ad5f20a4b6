"""`delegate` does what `yield from` does."""

from __future__ import annotations

from collections.abc import Callable, Generator
from typing import Any

import pytest

from ringlog.link.futures import Pending, delegate, resolved

Delegation = Callable[[Generator[Any, Any, Any]], Generator[Any, Any, Any]]


PENDING: list[Pending[int]] = [resolved(number) for number in range(3)]
"""What steps yield; compiled code accepts nothing else."""


def by_statement(steps: Generator[Any, Any, Any]) -> Generator[Any, Any, Any]:
    return (yield from steps)


@pytest.fixture(params=[by_statement, delegate])
def delegation(request: pytest.FixtureRequest) -> Delegation:
    return request.param


def steps(seen: list[Any]) -> Generator[Any, Any, str]:
    try:
        for pending in PENDING:
            try:
                seen.append((yield pending))
            except ValueError as e:
                seen.append(str(e))
    finally:
        seen.append("ended")
    return "result"


def test_values_go_in_and_the_result_comes_out(delegation: Delegation) -> None:
    seen: list[Any] = []
    outer = delegation(steps(seen))
    assert [next(outer), outer.send("a"), outer.send("b")] == PENDING
    with pytest.raises(StopIteration) as end:
        outer.send("c")
    assert end.value.value == "result"
    assert seen == ["a", "b", "c", "ended"]


def test_the_steps_decide_about_an_error(delegation: Delegation) -> None:
    seen: list[Any] = []
    outer = delegation(steps(seen))
    next(outer)
    assert outer.throw(ValueError("wrong")) is PENDING[1]
    with pytest.raises(KeyboardInterrupt):
        outer.throw(KeyboardInterrupt())
    assert seen == ["wrong", "ended"]


def test_an_error_of_the_steps_passes(delegation: Delegation) -> None:
    def failing() -> Generator[Any, Any, None]:
        yield PENDING[0]
        raise LookupError("lost")

    outer = delegation(failing())
    next(outer)
    with pytest.raises(LookupError, match="lost"):
        outer.send(None)


def test_closing_closes_the_steps(delegation: Delegation) -> None:
    seen: list[Any] = []
    outer = delegation(steps(seen))
    next(outer)
    outer.close()
    assert seen == ["ended"]


def test_steps_may_end_at_once_or_on_an_error(delegation: Delegation) -> None:
    def catching() -> Generator[Any, Any, str]:
        try:
            yield PENDING[0]
        except ValueError:
            return "caught"
        return "never"

    outer = delegation(catching())
    next(outer)
    with pytest.raises(StopIteration) as end:
        outer.throw(ValueError())
    assert end.value.value == "caught"

    def at_once() -> Generator[Any, Any, str]:
        return "soon"
        yield PENDING[0]

    with pytest.raises(StopIteration) as end:
        next(delegation(at_once()))
    assert end.value.value == "soon"
