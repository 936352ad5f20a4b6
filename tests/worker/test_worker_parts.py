"""Parts of a worker that need no engine: outcomes of jobs, function names, messages, refused options."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ringlog.errors import FrameInvalid, UsageError
from ringlog.limits import NACK_DELAY_MS_MAX, WORKER_REASON_CHARS_MAX
from ringlog.testing.clock import ManualClock
from ringlog.worker import CurrentJob, Reject, Retry, current_job, wire
from ringlog.worker.child import JobRunner
from ringlog.worker.options import WorkerOptions
from ringlog.worker.process_exit import KillReason, ProcessExited
from ringlog.worker.settlement import (
    CUT_OFF,
    FAILED,
    REJECTED,
    WorkerBackoff,
    settlement_of_exit,
    settlement_of_outcome,
)
from ringlog.worker.target import CODECS, check_name, load_codec, load_function

BACKOFF = WorkerBackoff(100, 1_000)
JOB = CurrentJob(queue="q", seq=7, deliveries=1, data=b'{"n": 1}', headers={"h": b"v"}, meta_json=b"{}")


def test_fates() -> None:
    assert settlement_of_outcome(wire.JobDone(1.5), 1, BACKOFF).is_done
    rejected = settlement_of_outcome(wire.JobRejected(1.0, "no"), 1, BACKOFF)
    assert (rejected.event, rejected.is_rejected, rejected.reason) == (REJECTED, True, "no")
    delays = [
        settlement_of_outcome(wire.JobFailed(1.0, "e"), n, BACKOFF).delay_ms for n in (1, 2, 3, 4, 5, 99)
    ]
    assert delays == [100, 200, 400, 800, 1_000, 1_000]
    assert settlement_of_outcome(wire.JobFailed(1.0, "e", delay_ms=0), 5, BACKOFF).delay_ms == 0
    assert (
        settlement_of_outcome(wire.JobFailed(1.0, "e", delay_ms=1 << 60), 5, BACKOFF).delay_ms
        == NACK_DELAY_MS_MAX
    )


@pytest.mark.parametrize(
    ("status", "cause", "event", "delay_ms", "words"),
    [
        (3, None, FAILED, 200, "its process exited with status 3"),
        (-11, None, FAILED, 200, "its process was killed by SIGSEGV"),
        (-200, None, FAILED, 200, "its process exited with status -200"),
        (-9, KillReason.TIME_LIMIT, FAILED, 200, "it ran longer than its time limit"),
        (-9, KillReason.STOPPED, CUT_OFF, 0, "it was still running when the worker had to stop"),
    ],
)
def test_exits_of_processes_are_mapped_to_settlements(
    status: int, cause: KillReason | None, event: str, delay_ms: int, words: str
) -> None:
    fate = settlement_of_exit(ProcessExited(status, cause), 2, 3.0, BACKOFF)
    assert (fate.event, fate.delay_ms, fate.reason, fate.is_done, fate.is_rejected) == (
        event, delay_ms, words, False, False,
    )  # fmt: skip


def run(function, payload: str = "json") -> wire.Outcome:
    return JobRunner(function, load_codec(payload), ManualClock()).run(JOB)


def test_every_result_of_a_function_is_an_outcome_with_a_reason() -> None:
    def rejects(value: object) -> None:
        raise Reject("bad")

    def retries(value: object) -> None:
        raise Retry("busy", delay_ms=5)

    def fails(value: object) -> None:
        raise KeyError("k")

    seen = []
    assert isinstance(run(lambda value: seen.append((value, current_job()))), wire.JobDone)
    assert seen == [({"n": 1}, JOB)]
    assert run(rejects) == wire.JobRejected(0.0, "bad")
    assert run(retries) == wire.JobFailed(0.0, "busy", delay_ms=5)
    failed = run(fails)
    assert isinstance(failed, wire.JobFailed)
    assert (failed.reason, failed.is_last) == ("KeyError: 'k'", False)
    assert "in fails" in failed.trace
    with pytest.raises(UsageError):
        current_job()


@pytest.mark.parametrize("error", [SystemExit(1), KeyboardInterrupt(), MemoryError(), GeneratorExit()])
def test_errors_that_leave_a_process_in_doubt_end_it(error: BaseException) -> None:
    def fails(value: object) -> None:
        raise error

    outcome = run(fails)
    assert isinstance(outcome, wire.JobFailed)
    assert outcome.is_last


def test_a_payload_that_cannot_be_decoded_is_rejected_without_a_call() -> None:
    called = []
    runner = JobRunner(called.append, CODECS["json"], ManualClock())
    outcome = runner.run(msgspec.structs.replace(JOB, data=b"{"))
    assert isinstance(outcome, wire.JobRejected)
    assert outcome.reason.startswith("the payload cannot be decoded: DecodeError")
    assert not called


@given(st.text(max_size=3 * WORKER_REASON_CHARS_MAX))
def test_reasons_are_truncated_at_the_front(text: str) -> None:
    short = wire.shortened(text)
    assert len(short) <= WORKER_REASON_CHARS_MAX + 1
    kept = text.encode(errors="backslashreplace").decode()
    assert kept.endswith(short.removeprefix("…") if short != text else text)


@pytest.mark.parametrize(
    "said",
    [wire.Ready(), wire.CannotStart("r", "t"), wire.JobDone(1.0), wire.JobFailed(1.0, "r", "t", 5, True)],
)
def test_messages_can_be_encoded_and_decoded(said: wire.ProcessMessage) -> None:
    packed = wire.encode_message(said)
    assert wire.length_of(packed[: wire.HEAD_BYTES]) == len(packed) - wire.HEAD_BYTES
    assert wire.decode_process_message(packed[wire.HEAD_BYTES :]) == said
    work = wire.encode_message(wire.RunJob(JOB))
    assert wire.decode_run_job(work[wire.HEAD_BYTES :]).job == JOB


@given(st.binary(max_size=64))
def test_malformed_messages_are_refused(noise: bytes) -> None:
    try:
        wire.decode_process_message(noise)
    except FrameInvalid:
        return
    assert noise[:1] >= b"\x80", "a map with a type we know"


def test_message_lengths_are_bounded() -> None:
    with pytest.raises(FrameInvalid):
        wire.length_of((wire.MESSAGE_BYTES_MAX + 1).to_bytes(wire.HEAD_BYTES, "little"))


@pytest.mark.parametrize("name", ["", "a", "a:", ":b", "a b:c", "a:b c", "a..b:c", "a:b:c", "./a:b"])
def test_invalid_function_names_are_refused(name: str) -> None:
    with pytest.raises(UsageError):
        check_name(name)


def test_valid_function_names_are_accepted() -> None:
    for name in ("a:b", "a.b.c:d", "a:B.c"):
        check_name(name)
    assert load_function("os.path:join").__name__ == "join"
    assert load_function("collections:OrderedDict.fromkeys") is not None


@pytest.mark.parametrize(
    "wrong",
    [
        {"concurrency": 0}, {"concurrency": 1 << 20}, {"max_jobs_per_process": -1}, {"lease_ms": 1},
        {"backoff": WorkerBackoff(5, 4)}, {"backoff": WorkerBackoff(-1, 4)}, {"payload": "pickle"},
        {"target": "x"},
    ],
)  # fmt: skip
def test_options_that_make_no_sense(wrong: dict) -> None:
    WorkerOptions(target="a:b", queue="q")
    with pytest.raises(UsageError):
        WorkerOptions(**{"target": "a:b", "queue": "q", **wrong})


@pytest.mark.parametrize("wrong", [-1, 1.5, True, "5"])
def test_an_impossible_retry_delay_is_refused(wrong: Any) -> None:
    assert Retry("x").delay_ms is None
    assert Retry("x", delay_ms=1 << 70).delay_ms == NACK_DELAY_MS_MAX
    with pytest.raises(UsageError, match="delay_ms"):
        Retry("x", delay_ms=wrong)


def test_a_payload_too_large_for_the_memory_limit_is_a_failure_and_no_damage() -> None:
    class Hungry:
        def decode(self, data: bytes) -> Any:
            raise MemoryError

    job = CurrentJob(queue="q", seq=1, deliveries=1, data=b"x")
    outcome = JobRunner(lambda value: None, Hungry(), ManualClock()).run(job)
    assert isinstance(outcome, wire.JobFailed)
    assert outcome.is_last


class Unspeakable(Exception):
    def __str__(self) -> str:
        raise RuntimeError("no text")


@pytest.mark.parametrize("error", [Unspeakable(), ValueError("\udcff"), ValueError("x" * 20_000_000)])
def test_an_error_with_any_text_becomes_a_bounded_message(error: Exception) -> None:
    def fails(value: object) -> None:
        raise error

    outcome = run(fails)
    assert isinstance(outcome, wire.JobFailed)
    assert len(wire.encode_message(outcome)) < 20 * WORKER_REASON_CHARS_MAX
    assert type(error).__name__ in outcome.reason or len(str(error)) > WORKER_REASON_CHARS_MAX


def _generates(value: object) -> object:
    yield value


async def _generates_later(value: object) -> object:
    yield value


class _Later:
    async def __call__(self, value: object) -> object:
        return _generates(value)


@pytest.mark.parametrize(
    "function", [_generates, _generates_later, _Later(), lambda value: _generates([value])]
)
def test_a_job_function_that_returns_a_generator_fails(function) -> None:
    """Calling a generator function executes none of its body."""
    outcome = run(function)
    assert isinstance(outcome, wire.JobFailed)
    assert "calling a generator runs none of it" in outcome.reason


def test_a_generator_function_is_refused_when_a_worker_starts(monkeypatch) -> None:
    for function in (_generates, _generates_later):
        monkeypatch.setattr("os.path.join", function)
        with pytest.raises(UsageError, match="calling a generator runs none of it"):
            load_function("os.path:join")
