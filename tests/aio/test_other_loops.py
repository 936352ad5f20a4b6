"""ringlog.aio with other event loops: it works with uvloop and fails at once with trio."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any

import pytest

import ringlog.aio
from ringlog.errors import WrongLoop
from ringlog.testing.pytest_plugin import ringlog_engine, ringlog_topic

__all__ = ["ringlog_engine", "ringlog_topic"]

CALLS: dict[str, Callable[[ringlog.aio.Client], Awaitable[Any]]] = {
    "append": lambda client: client.append("t", b"x"),
    "read": lambda client: client.read("t"),
    "claim": lambda client: client.queue("q").claim(),
    "watch": lambda client: client.watch("t").next(1),
    "send": lambda client: client.producer("t").send(b"x"),
    "create": lambda client: client.topics.create("t"),
}


@pytest.mark.parametrize("call", CALLS)
def test_calls_without_an_asyncio_loop_fail_with_wrong_loop(call):
    """Under trio no asyncio loop runs. The test awaits a bare coroutine, which is the same situation."""
    client = ringlog.aio.connect("ringlog:///nowhere")
    with pytest.raises(WrongLoop, match=r"needs a running asyncio event loop.*trio\.to_thread"):
        CALLS[call](client).__await__().send(None)  # type: ignore[attr-defined]


@pytest.mark.timeout(60)
def test_connecting_under_trio_fails_with_wrong_loop():
    trio = pytest.importorskip("trio")

    async def main() -> None:
        async with ringlog.aio.connect("ringlog:///nowhere", wait=5):
            pass

    with pytest.raises(WrongLoop, match="under trio"):
        trio.run(main)


@pytest.mark.timeout(60)
@pytest.mark.parametrize("transport", ["ring", "ipc"])
def test_the_client_works_with_uvloop(ringlog_engine, ringlog_topic, transport):
    uvloop = pytest.importorskip("uvloop")
    topic = ringlog_topic()

    async def main() -> None:
        async with ringlog.aio.connect(ringlog_engine.url, wait=10, transport=transport) as client:
            queue = client.queue(f"{topic}-q")
            await client.topics.create(queue.topic, type="queue")
            await asyncio.gather(*(client.append(topic, b"x") for _ in range(50)))
            claimed = asyncio.create_task(queue.claim(wait_ms=20_000))
            await queue.put(b"job")
            [job] = await claimed
            await job.ack()
            with pytest.raises(TimeoutError):
                await asyncio.wait_for(queue.claim(wait_ms=20_000), 0.1)
            assert len((await client.read(topic)).records) == 50

    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(main())
