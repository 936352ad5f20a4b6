"""Watches of patterns whose `next` is cancelled, or refused, while they begin to follow a new topic."""

from __future__ import annotations

import asyncio
from contextlib import nullcontext, suppress
from types import SimpleNamespace

import pytest

import ringlog.aio.watch
from ringlog.aio.watch import Watch
from ringlog.client import CaughtUp
from ringlog.client.watches.shared_reads import SharedReads
from ringlog.client.watches.watch_core import LIST_RETRY_S
from ringlog.client.watches.watch_options import watch_options
from ringlog.envelope import messages as m
from ringlog.errors import Throttled, TopicNotFound, UsageError
from ringlog.link.futures import Pending, resolved, run_steps
from ringlog.link.peer_request import PeerReply
from tests.support.fake_scheduler import FakeDeliveryHost, topic


class FakeShell:
    """Runs a session with a fake scheduler in the loop of the test."""

    checked_lock = nullcontext()
    is_closed = False

    def __init__(self, host):
        self.host = host
        self.session = SimpleNamespace(
            delivery=host.delivery, topics=SimpleNamespace(forget_all=lambda names: None)
        )
        self.guarded_session = nullcontext(self.session)

    def require_open(self):
        pass

    def now_s(self):
        return self.host.clock.monotonic_ns() / 1e9

    async def wait(self, pending, timeout=None):
        await asyncio.sleep(0)
        while not pending.is_done and timeout is None:
            await asyncio.sleep(0)
        return pending.is_done

    async def ask(self, begin):
        pending = begin(self.session)
        await self.wait(pending)
        return pending.result()

    async def run_reading(self, steps):
        try:
            return await self.ask(lambda session: run_steps(steps))
        except asyncio.CancelledError:
            steps.close()
            raise

    async def wait_for_news(self, subscription, timeout):
        return await self.wait(self.host.delivery.wait_for_work(subscription), timeout)

    def close_subscription(self, subscription):
        self.host.delivery.close_subscription(subscription)


class World:
    """A watch of all topics. The topic `t7` is empty and is created after it began."""

    def __init__(self, monkeypatch):
        self.host = FakeDeliveryHost()
        self.scheduler = self.host.fake_schedulers[0]
        self.names: list[str] = []
        self.resolving: Pending[m.TopicInfo] = resolved(topic(7))
        self.in_use = 0
        monkeypatch.setattr(ringlog.aio.watch, "list_topic_names", self.list_names)
        client = SimpleNamespace(connection=self)
        self.watch = Watch(client, FakeShell(self.host), watch_options("*"), SharedReads())

    transport = "tcp"
    is_transport_known = True

    def list_names(self, session, prefixes):
        yield resolved(None)
        return list(self.names)

    def resolve(self, name):
        return self.resolving

    def keep_topic_alive(self, name, epoch=0):
        self.in_use += 1
        return SimpleNamespace(epoch=epoch, end=self.end_use)

    def end_use(self):
        self.in_use -= 1

    def read_remote(self, request):
        reply = m.ReadReply(request.topic, 7, 1, request.after, request.after, 0, 1, True, 0)
        return resolved((reply, memoryview(b"")))

    async def open(self):
        await self.answer_while(self.watch.open())
        self.names.append("t7")
        self.watch.subscription.names_changed = True

    async def answer_while(self, call):
        task = asyncio.ensure_future(call)
        while not task.done():
            self.scheduler.answer_all()
            await asyncio.sleep(0)
        return await task


@pytest.fixture
def world(monkeypatch):
    return World(monkeypatch)


@pytest.mark.parametrize("passes", range(16))
async def test_a_new_topic_is_not_lost_by_a_cancelled_call(world, passes):
    """The cancelled call may have listed the topic, opened it, or asked its scheduler for grants."""
    await world.open()
    task = asyncio.ensure_future(world.watch.next())
    for _ in range(passes):
        await asyncio.sleep(0)
    task.cancel()
    with suppress(asyncio.CancelledError):
        await task
    assert world.in_use == len(world.watch.topics)
    event = await world.answer_while(world.watch.next())
    assert isinstance(event, CaughtUp)
    assert world.watch.topics == ["t7"]
    world.scheduler.answer_all()
    assert len(world.watch.subscription.feeds) == 1, "grants of another feed would come forever"
    world.watch.close()
    assert world.in_use == 0


@pytest.mark.parametrize("error", [Throttled("too many feeds"), UsageError("too many topics")])
async def test_a_new_topic_that_is_refused_keeps_no_call_from_other_topics(world, error):
    """The error is raised once. After a refusal the watch tries again, after a pause or a change of names."""
    await world.open()
    task = asyncio.ensure_future(world.watch.next())
    while not world.scheduler.requests:
        await asyncio.sleep(0)
    world.scheduler.requests.pop()[1].fail(error)
    with pytest.raises(type(error)):
        await task
    assert (world.watch.topics, world.in_use) == ([], 0)
    assert await world.watch.next(0) is None
    if isinstance(error, Throttled):
        world.host.advance(LIST_RETRY_S)
    else:
        world.host.delivery.scheduler_message(0, PeerReply(m.TopicsChanged()))
    assert isinstance(await world.answer_while(world.watch.next()), CaughtUp)
    world.watch.close()


async def test_a_start_that_fails_keeps_no_topic_in_use(monkeypatch, world):
    watch = Watch(
        SimpleNamespace(connection=world), FakeShell(world.host), watch_options(["t7", "t8"]), SharedReads()
    )
    missing: Pending[m.TopicInfo] = Pending()
    missing.fail(TopicNotFound("no such topic"))
    monkeypatch.setattr(world, "resolve", lambda name: resolved(topic(7)) if name == "t7" else missing)
    with pytest.raises(TopicNotFound):
        await world.answer_while(watch.open())
    assert world.in_use == 0
