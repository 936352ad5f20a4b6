"""The loop of a worker with real processes, on a queue in memory: when it claims, waits and stops."""

from __future__ import annotations

import asyncio
import os
import shutil
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from contextlib import asynccontextmanager, contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Self

import msgspec
import psutil
import pytest

from ringlog.client.requests.results import Settled
from ringlog.clock import SystemClock
from ringlog.errors import RequestTimeout, TopicNotFound
from ringlog.worker import pool, wire
from ringlog.worker.options import WorkerOptions
from ringlog.worker.pool import Worker

pytestmark = pytest.mark.slow

OPENS = "builtins:open"
"""Function of the jobs. A job that names a FIFO runs until the test opens that for writing."""


class MemoryQueue:
    """A queue whose claims are answered from a list: with jobs, an error, or an event to wait for first."""

    topic, node = "jobs", "worker"

    def __init__(self, *answers: Any) -> None:
        self.answers = list(answers)
        self.claims = 0
        self.returned: list[tuple[str, int]] = []
        """Operation and seq of each settled job."""
        self.acks = 0
        self.may_ack = asyncio.Event()
        self.may_ack.set()

    async def claim(self, most: int, **_: Any) -> Sequence[Any]:
        self.claims += 1
        await asyncio.sleep(0)
        while self.answers:
            answer = self.answers.pop(0)
            if isinstance(answer, asyncio.Event):
                await answer.wait()
            elif isinstance(answer, Exception):
                raise answer
            else:
                return answer
        return []

    def _settled(self, how: str, jobs: list[Any]) -> Settled:
        self.returned += [(how, each.seq) for each in jobs]
        return Settled(len(jobs), ())

    async def ack(self, jobs: list[Any]) -> Settled:
        self.acks += 1
        await self.may_ack.wait()
        return self._settled("ack", jobs)

    async def nack(self, jobs: list[Any], **_: Any) -> Settled:
        return self._settled("nack", jobs)

    async def release(self, jobs: list[Any]) -> Settled:
        return self._settled("release", jobs)


def job(seq: int, path: Path) -> Any:
    return SimpleNamespace(
        topic="jobs", seq=seq, deliveries=1, data=msgspec.json.encode(str(path)), key=None, tag=None,
        headers=(), record=SimpleNamespace(meta_json=None),
    )  # fmt: skip


@pytest.fixture
def fifo(tmp_path: Path) -> Path:
    os.mkfifo(tmp_path / "fifo")
    return tmp_path / "fifo"


@contextmanager
def let_end(fifo: Path) -> Iterator[None]:
    """End every job that opens this FIFO."""
    fd = os.open(fifo, os.O_RDWR)
    yield
    os.close(fd)


class Run:
    """One run of a worker, as a task."""

    def __init__(self, queue: MemoryQueue, target: str = OPENS, **options: Any) -> None:
        wanted = WorkerOptions(target=target, queue=queue.topic, payload="json", **options)
        setup = wire.Setup(fd=-1, parent_pid=0, target=target, payload="json", log_level="error")
        self.worker = Worker(queue, wanted, setup, SystemClock())  # type: ignore[arg-type]
        self.task = asyncio.create_task(self.worker.run())

    @classmethod
    @asynccontextmanager
    async def of(cls, queue: MemoryQueue, target: str = OPENS, **options: Any) -> AsyncIterator[Self]:
        run = cls(queue, target, **options)
        try:
            yield run
        finally:
            run.worker.stop_now()
            await asyncio.wait((run.task,))

    async def until(self, condition: Callable[[], object]) -> None:
        """Wait for the condition; fail with the error of the run if it ends before."""
        async with asyncio.timeout(30):
            while not condition():
                if self.task.done():
                    raise AssertionError("the worker ended") from self.task.exception()
                await asyncio.sleep(0.001)

    async def result(self) -> bool:
        async with asyncio.timeout(30):
            return await asyncio.shield(self.task)


async def loop_passes(count: int) -> None:
    """Let every other task of the loop run this many times."""
    for _ in range(count):
        await asyncio.sleep(0)


def test_a_worker_until_empty_waits_for_its_running_job_and_claims_no_more_meanwhile(fifo: Path) -> None:
    """A claim of such a worker does not wait in the engine, so a loop of claims would occupy a CPU."""

    async def check() -> None:
        queue = MemoryQueue([job(1, fifo)])
        async with Run.of(queue, concurrency=2, until_empty=True) as run:
            await run.until(lambda: queue.claims == 2)
            await loop_passes(300)
            # The wait has a bound, which a slow host may reach.
            assert queue.claims <= 4
            with let_end(fifo):
                assert await run.result()
            assert queue.returned == [("ack", 1)]

    asyncio.run(check())


def test_a_worker_until_empty_waits_for_the_reply_to_its_ack(tmp_path: Path) -> None:
    async def check() -> None:
        (tmp_path / "file").touch()
        queue = MemoryQueue([job(1, tmp_path / "file")])
        queue.may_ack.clear()
        async with Run.of(queue, concurrency=1, until_empty=True) as run:
            await run.until(lambda: queue.acks)
            await loop_passes(300)
            assert queue.claims <= 4
            queue.may_ack.set()
            assert await run.result()
            assert queue.returned == [("ack", 1)]

    asyncio.run(check())


def test_a_worker_until_empty_does_not_take_an_engine_that_is_away_for_an_empty_queue(tmp_path: Path) -> None:
    async def check() -> None:
        (tmp_path / "file").touch()
        queue = MemoryQueue(RequestTimeout("no reply"), [job(1, tmp_path / "file")])
        async with Run.of(queue, concurrency=1, until_empty=True) as run:
            assert await run.result()
            assert queue.returned == [("ack", 1)]

    asyncio.run(check())


def test_a_stop_takes_effect_while_the_engine_does_not_answer_a_claim(fifo: Path) -> None:
    """The claim may wait for the whole timeout of the client. Running jobs must have their time meanwhile."""

    async def check() -> None:
        queue = MemoryQueue([job(1, fifo)], asyncio.Event())
        async with Run.of(queue, concurrency=2) as run:
            await run.until(lambda: queue.claims == 2)
            run.worker.stop()
            with let_end(fifo):
                await run.until(lambda: queue.acks)
            assert await run.result()
            assert queue.returned == [("ack", 1)]

    asyncio.run(check())


def test_a_second_stop_takes_effect_while_the_engine_does_not_answer_a_claim(fifo: Path) -> None:
    async def check() -> None:
        queue = MemoryQueue([job(1, fifo)], asyncio.Event())
        async with Run.of(queue, concurrency=2, stop_timeout_s=1_000.0) as run:
            await run.until(lambda: queue.claims == 2)
            run.worker.stop()
            await loop_passes(10)
            run.worker.stop_now()
            assert not await run.result()
            assert queue.returned == [("nack", 1)]

    asyncio.run(check())


def test_a_second_stop_takes_effect_while_the_engine_confirms_no_outcome(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pool, "WORKER_SETTLE_S", 1_000.0)

    async def check() -> None:
        (tmp_path / "file").touch()
        queue = MemoryQueue([job(1, tmp_path / "file")])
        queue.may_ack.clear()
        async with Run.of(queue, concurrency=1) as run:
            await run.until(lambda: queue.acks)
            run.worker.stop()
            await loop_passes(10)
            run.worker.stop_now()
            assert not await run.result()

    asyncio.run(check())


def test_an_error_of_a_claim_before_the_stop_ends_the_worker() -> None:
    async def check() -> None:
        async with Run.of(MemoryQueue(TopicNotFound("no such queue")), concurrency=1) as run:
            with pytest.raises(TopicNotFound):
                await run.result()

    asyncio.run(check())


def test_a_job_of_a_process_that_ended_while_idle_returns_to_the_queue_uncounted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The process cannot be replaced here. Another worker must get the job nevertheless."""
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    (tmp_path / "shop.py").write_text("def deliver(path): ...")

    async def check() -> None:
        may_claim = asyncio.Event()
        queue = MemoryQueue(may_claim, [job(1, tmp_path)], asyncio.Event())
        async with Run.of(queue, "shop:deliver", concurrency=1) as run:
            await run.until(lambda: queue.claims)
            shutil.rmtree(tmp_path)
            (process,) = [
                each for each in psutil.Process().children() if "ringlog.worker.child" in each.cmdline()
            ]
            process.kill()
            await run.until(lambda: not process.is_running())
            may_claim.set()
            await run.until(lambda: queue.returned)
            assert queue.returned == [("release", 1)]
            run.worker.stop()
            assert await run.result()
            assert run.worker.job_counts == {"job interrupted": 1}

    asyncio.run(check())


@pytest.mark.parametrize("last_line", ["sys.stdout.close()", "sys.stdout = None", "sys.stdout = Full()"])
def test_a_job_is_done_also_if_its_output_cannot_be_written(
    last_line: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The function has returned. Running it again would do its work twice, and fail in the same way."""
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    (tmp_path / "shop.py").write_text(
        "import sys\n"
        "class Full:\n"
        "    def flush(self):\n"
        "        raise OSError('no space')\n"
        f"def deliver(path):\n    {last_line}\n"
    )

    async def check() -> None:
        queue = MemoryQueue([job(1, tmp_path)], [job(2, tmp_path)])
        async with Run.of(queue, "shop:deliver", concurrency=1, until_empty=True) as run:
            assert await run.result()
            assert queue.returned == [("ack", 1), ("ack", 2)]

    asyncio.run(check())
