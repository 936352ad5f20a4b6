"""The loop that every actor runs: the order of its calls, and the state in the process slot."""

from __future__ import annotations

from pathlib import Path

import pytest

from ringlog.board.board import Board, ProcessSlot
from ringlog.board.layout import ProcessField, ProcessState
from ringlog.errors import ExitCode
from ringlog.runtime.duty_cycle import run_duty_cycle


class Stop:
    """A StopFlag that the test sets."""

    def __init__(self) -> None:
        self.asked = False

    def is_set(self) -> bool:
        return self.asked


class Actor:
    """Records each call and the state of the process slot at that time."""

    def __init__(self, slot: ProcessSlot, works: list[int], *, passes_to_drain: int = 0) -> None:
        self.slot, self.works, self.passes_to_drain = slot, works, passes_to_drain
        self.calls: list[tuple[str, ProcessState]] = []
        self.exit_code: ExitCode | None = None
        self.start_code: ExitCode | None = None
        self.stop: Stop | None = None
        self.may = True
        self.is_draining = False

    def note(self, call: str) -> None:
        self.calls.append((call, self.slot.state))

    def on_start(self, stop: Stop) -> None:
        self.stop = stop
        self.note("start")
        self.exit_code = self.start_code

    def do_work(self) -> int:
        self.note("work")
        if self.is_draining:
            self.passes_to_drain -= 1
            if self.passes_to_drain <= 0:
                self.exit_code = ExitCode.OK
            return 1
        assert self.stop is not None
        self.stop.asked = len(self.works) == 1
        return self.works.pop(0)

    def idle(self, work: int) -> None:
        self.note(f"idle {work}")

    def drain(self) -> bool:
        self.note("drain")
        if not self.may:
            self.may = True
            return False
        self.is_draining = True
        if not self.passes_to_drain:
            self.exit_code = ExitCode.OK
        return True

    def on_close(self) -> None:
        self.note("close")


@pytest.fixture
def slot(tmp_path: Path) -> ProcessSlot:
    found = Board.create(tmp_path, 2).process(1)
    found.set(ProcessField.STATE, ProcessState.STARTING)
    return found


def names(actor: Actor) -> list[str]:
    return [name for name, _ in actor.calls]


def test_an_actor_works_and_idles_until_it_is_stopped(slot: ProcessSlot) -> None:
    actor = Actor(slot, [3, 0])
    assert run_duty_cycle(actor, slot, Stop()) is ExitCode.OK
    assert actor.calls == [
        ("start", ProcessState.STARTING), ("work", ProcessState.READY), ("idle 3", ProcessState.READY),
        ("work", ProcessState.READY), ("idle 0", ProcessState.READY), ("drain", ProcessState.READY),
        ("close", ProcessState.DRAINING),
    ]  # fmt: skip


def test_a_draining_actor_works_until_it_ends(slot: ProcessSlot) -> None:
    actor = Actor(slot, [0], passes_to_drain=2)
    run_duty_cycle(actor, slot, Stop())
    assert names(actor)[-5:] == ["drain", "work", "idle 1", "work", "close"]


def test_an_actor_that_refuses_to_drain_continues_to_work(slot: ProcessSlot) -> None:
    actor = Actor(slot, [0, 0])
    actor.may, stop = False, Stop()
    stop.asked = True
    run_duty_cycle(actor, slot, stop)
    assert names(actor)[:4] == ["start", "drain", "work", "idle 0"]


def test_an_actor_that_ends_in_on_start_is_never_ready(slot: ProcessSlot) -> None:
    actor = Actor(slot, [])
    actor.start_code = ExitCode.READ_ONLY
    assert run_duty_cycle(actor, slot, Stop()) is ExitCode.READ_ONLY
    assert actor.calls == [("start", ProcessState.STARTING)]
    assert slot.state is ProcessState.STARTING


def test_an_exception_in_a_pass_ends_the_loop_without_on_close(slot: ProcessSlot) -> None:
    actor = Actor(slot, [])
    with pytest.raises(IndexError):
        run_duty_cycle(actor, slot, Stop())
    assert names(actor) == ["start", "work"]
