"""Fails every allocation of six operations once (RF-18).

The interpreter's allocators fail the k-th request after the start of the operation, for every k. The
operation succeeds, fails visibly, or its process ends with the error. In each case a later start must find
all of the operation or nothing of it (judge.py).

Runs are made in forked children, several in each. An extension that does not check for failed allocations can
crash its process. Such a crash is counted, but the disk in memory is lost with the process, so the run is
neither judged nor counted as a run.
"""

from __future__ import annotations

import contextlib
import os
import signal
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from chaos.processes import forked
from chaos.rigs.judge import KILL, check, observe, require_same
from chaos.sweeps.calls import begin
from chaos.sweeps.house import VISIBLE, FaultyEngine, Image
from chaos.sweeps.judge import ENDS_EACH, Known, end_each
from chaos.sweeps.workloads import BY_NAME
from ringlog.drill.checks import GuaranteeBroken
from ringlog.envelope import messages as m
from ringlog.frame import encode_records, frame

BATCH = 40
"""Number of runs in one child."""
ALLOCATIONS_MAX = 50_000
WINDOW = 60
"""Number of consecutive allocations that fail while the allocations are counted."""
PROBE_S = 20
BATCH_S = 60
"""Time limit (s) of a batch. A longer batch hangs, which is a finding."""


@dataclass(frozen=True, slots=True)
class Operation:
    """An operation during which memory fails. `prepare` returns the call."""

    name: str
    image: str
    prepare: Callable[[FaultyEngine], Callable[[], Any]]
    starts: bool = False


def _append(house: FaultyEngine) -> Callable[[], Any]:
    return lambda: house.append("f", 2, 1)


def _take_in(house: FaultyEngine) -> Callable[[], Any]:
    """Prepare the shard's part of an append: the frames are in the ring already."""
    sent, run = house.frame("f", [house.payload()]), house.world.runs[0]
    house.model.send(sent)
    event = run.frames(3, bytearray(sent.frame))
    return lambda: house.shard(lambda: run.step(event))


def _delete(house: FaultyEngine) -> Callable[[], Any]:
    return lambda: house.delete("f", {2, 5, 17})


def _recover(house: FaultyEngine) -> Callable[[], Any]:
    return house.start


def _read(house: FaultyEngine) -> Callable[[], Any]:
    def read() -> None:
        located = house.world.request(m.Locate("f", 0))
        assert located.extents
        house.world.records("f")

    return read


def _encode(house: FaultyEngine) -> Callable[[], Any]:
    payloads = [b"one", b"two" * 40, b""]

    def encode() -> None:
        records = encode_records(payloads)
        made = frame(records, topic_id=house.world.topic("f").topic_id, producer_id=1, producer_seq=1)
        if len(made) % 8:
            raise GuaranteeBroken("half a frame")

    return encode


OPERATIONS = (
    Operation("append", "commit", _append),
    Operation("take_in", "commit", _take_in),
    Operation("delete", "deletes", _delete),
    Operation("recovery", "recovery", _recover, starts=True),
    Operation("read", "deletes", _read),
    Operation("encode", "commit", _encode),
)
CHANGES_NOTHING = ("read", "encode")
BY_OPERATION = {operation.name: operation for operation in OPERATIONS}


@contextlib.contextmanager
def _no_memory(start: int, stop: int) -> Iterator[None]:
    import _testcapi

    _testcapi.set_nomemory(start, stop)
    try:
        yield
    finally:
        _testcapi.remove_mem_hooks()


def _begin(operation: Operation, image: Image) -> tuple[FaultyEngine, Callable[[], Any]]:
    house = begin(BY_NAME["recovery" if operation.starts else "commit"], image)
    return house, operation.prepare(house)


def run_one(
    operation: Operation, image: Image, nth: int, stop: int | None = None, known: Known | None = None
) -> str:
    """Fail the `nth` allocation and judge with each end; return "raised", "failed" (visibly) or "passed".

    Raises GuaranteeBroken.
    """
    house, call = _begin(operation, image)
    before = observe(house.world) if operation.name in CHANGES_NOTHING else None
    failed, outcome = house.model.failed, "passed"
    try:
        with _no_memory(nth, nth + 1 if stop is None else stop):
            call()
    except VISIBLE:
        outcome = "failed"
    except GuaranteeBroken:
        raise
    except Exception:  # noqa: BLE001  what it is does not matter: the process ends with it
        outcome = "raised"
    if house.model.failed != failed:
        outcome = "failed"
    if outcome == "raised":
        house.world.runs.clear()
    elif 0 in house.world.runs:
        check(house.model, observe(house.world), KILL)
    if before is not None:
        require_same(before, observe(begun(house).world), f"{operation.name} changes something")
    end_each(house, nth, known)
    return outcome


def begun(house: FaultyEngine) -> FaultyEngine:
    """Return the house with a running shard."""
    if 0 not in house.world.runs:
        house.world.kill()
        house.start()
    return house


def allocations_of(operation: Operation, image: Image) -> int:
    """Return about how many allocations the operation makes: failures after them have no effect.

    WINDOW allocations fail, not all from k on. Without any memory some loops of the interpreter never end.
    """
    low, high = 0, 64
    while not _survives(operation, image, high):
        low, high = high, high * 2
        if high > ALLOCATIONS_MAX:
            raise GuaranteeBroken(f"{operation.name} still fails after {ALLOCATIONS_MAX} allocations")
    while low < high:
        middle = (low + high) // 2
        if _survives(operation, image, middle):
            high = middle
        else:
            low = middle + 1
    return low


def _survives(operation: Operation, image: Image, start: int) -> bool:
    def child(out: int) -> None:
        house, call = _begin(operation, image)
        failed = house.model.failed
        with _no_memory(start, start + WINDOW):
            call()
        os.write(out, b"y" if house.model.failed == failed else b"n")

    data, _ = _in_child(child, PROBE_S)
    return data == b"y"


def _in_child(work: Callable[[int], None], seconds: int) -> tuple[bytes, int]:
    """Run `work` in a forked child; return its output and its wait status."""

    def bounded(writing: int) -> None:
        signal.signal(signal.SIGALRM, signal.SIG_DFL)
        signal.alarm(seconds)
        work(writing)

    pid, reading = forked(bounded)
    found = bytearray()
    with open(reading, "rb", buffering=0) as source:
        while piece := source.read(1 << 16):
            found += piece
    return bytes(found), os.waitpid(pid, 0)[1]


@dataclass(slots=True)
class Tally:
    """Results of some runs."""

    runs: int = 0
    raised: int = 0
    failed: int = 0
    interpreter_deaths: int = 0


def run_batch(
    operation: Operation, image: Image, numbers: list[int], tally: Tally, found: Callable[[str, str], None],
    known: Known | None = None,
) -> None:  # fmt: skip
    """Run these numbers in children; call `found(what, case)` for each broken guarantee.

    Results that one child judged are known to the next children.
    """
    known = known or Known()
    left = list(numbers)
    while left:
        batch = left

        def child(out: int, batch: list[int] = batch) -> None:
            for nth in batch:
                try:
                    line = run_one(operation, image, nth, known=known)
                    line += "".join(f" {key.hex()}" for key in known.take_fresh())
                except Exception as e:  # noqa: BLE001  told to the parent, which reports it
                    line = f"broken {type(e).__name__}: {e}".replace("\n", " ")[:400]
                os.write(out, f"{line}\n".encode())

        data, status = _in_child(child, BATCH_S)
        lines = data.decode().splitlines()
        for nth, line in zip(left, lines, strict=False):
            word, *keys = line.split(" ")
            tally.runs += ENDS_EACH
            tally.raised += word == "raised"
            tally.failed += word == "failed"
            if word != "broken":
                known.adopt(*map(bytes.fromhex, keys))
            else:
                found(f"{operation.name}, allocation {nth}: {line}", f"allocation:{operation.name}:{nth}")
        left = left[len(lines) :]
        if left:
            if os.WIFSIGNALED(status) and os.WTERMSIG(status) == signal.SIGALRM:
                found(
                    f"{operation.name} hangs at allocation {left[0]}",
                    f"allocation:{operation.name}:{left[0]}",
                )
            elif not os.WIFSIGNALED(status) or os.WTERMSIG(status) not in {signal.SIGSEGV, signal.SIGABRT}:
                raise GuaranteeBroken(
                    f"a child ended with wait status {status} in {operation.name} at {left[0]}"
                )
            else:
                tally.interpreter_deaths += 1
            left = left[1:]
