"""A reader that waits for routers does not wait for the scheduler's grants, which are withheld under load."""

from __future__ import annotations

import select
from collections.abc import Callable, Iterator
from typing import Literal

import pytest

from ringlog.actors.scheduler.forwarding.forwarder import Forwarder
from ringlog.client import Client
from ringlog.clock import SystemClock
from ringlog.envelope import messages as m
from ringlog.envelope.boot import ActorBoot
from ringlog.limits import READ_CATCH_UP_MS, ROUTERS_MAX_DEFAULT
from ringlog.testing.real_engine import TestEngine
from tests.support.engines import engine_fixture

pytestmark = pytest.mark.slow

WAIT_S = 10
POLL_MS = 5
INCARNATION = 1_000


class Descriptors:
    """Waits for the descriptors of a forwarder, as the scheduler's loop does."""

    def __init__(self) -> None:
        self._poll = select.poll()

    def watch(self, fd: int) -> None:
        self._poll.register(fd, select.POLLIN)

    def unwatch(self, fd: int) -> None:
        self._poll.unregister(fd)

    def wait(self) -> list[int]:
        return [fd for fd, _ in self._poll.poll(POLL_MS)]


class UngrantedForwarder:
    """A forwarder whose subscriptions never reach a scheduler's core, so that it receives no grants."""

    def __init__(self, running: TestEngine) -> None:
        info = running.info
        boot = ActorBoot(
            kind="scheduler", name="scheduler-00", engine_id=info.engine_id, incarnation=INCARNATION,
            boot_incarnation=1, boot_id="", slot=0, data_dir=info.data_dir, shm_dir=info.shm_dir,
            supervisor_pid=running.pid, shards=info.shards,
        )  # fmt: skip
        self.clock, self.fds = SystemClock(), Descriptors()
        self.replies: list[m.Message] = []
        self.forwarder = Forwarder(
            boot, 0, schedulers=1, routers_max=ROUTERS_MAX_DEFAULT, clock=self.clock, fds=self.fds,
            reply=lambda _link, message, _corr: self.replies.append(message),
        )  # fmt: skip
        self.forwarder.begin()
        self._run_until(lambda: self.forwarder.is_loaded)

    def ask(self, message: m.Message) -> m.Message:
        self.forwarder.handle_request(b"", 0, message)
        self._run_until(lambda: bool(self.replies))
        return self.replies.pop()

    def _run_until(self, condition: Callable[[], bool]) -> None:
        deadline_ns = self.clock.monotonic_ns() + WAIT_S * 10**9
        while not condition():
            assert self.clock.monotonic_ns() < deadline_ns, "no reply"
            self.forwarder.run_turn(self.clock.monotonic_ns())
            if self.forwarder.wait_ms(self.clock.monotonic_ns(), POLL_MS):
                self.forwarder.on_wakeup(self.fds.wait())


running = engine_fixture(delivery={"schedulers": 0})


@pytest.fixture
def ungranted(running: TestEngine) -> Iterator[UngrantedForwarder]:
    found = UngrantedForwarder(running)
    try:
        yield found
    finally:
        found.forwarder.close()


@pytest.mark.parametrize("durability", ["disk", "ephemeral"])
def test_a_catch_up_forwards_without_a_grant(
    client: Client, ungranted: UngrantedForwarder, durability: Literal["disk", "ephemeral"]
) -> None:
    for name in ("source", "dest"):
        client.topics.create(name, durability=durability)
    created = ungranted.ask(m.RouterCreate("r", "source", "dest"))
    assert isinstance(created, m.RouterInfo), created
    [flow] = ungranted.forwarder.forwarding.flows.values()
    [router] = flow.routers.values()
    for number in range(3):
        client.append("source", b"%d" % number)
        began_ns = ungranted.clock.monotonic_ns()
        settled = ungranted.ask(m.RoutesSettle("dest", router.dest_id, READ_CATCH_UP_MS))
        assert isinstance(settled, m.RoutesSettled), settled
        waited_ms = (ungranted.clock.monotonic_ns() - began_ns) / 1e6
        assert waited_ms < READ_CATCH_UP_MS, "it waited until its deadline"
        assert client.read("dest", number).bytes() == [b"%d" % number]
