"""A client's side of opening a ring of turns: whatever goes wrong, turns are heard (promise 3, SC-1)."""

from __future__ import annotations

import pytest

from ringlog.envelope.messages import OpenTurns, TurnsOpened
from ringlog.errors import InvalidRequest, NotConnected, RequestTimeout
from ringlog.link.channel.grant_link import GrantLink
from ringlog.link.channel.grant_ring import GrantWriter
from ringlog.link.futures import Pending
from ringlog.link.peer import PeerReply
from ringlog.testing.clock import ManualClock
from tests.link.test_turn_ring import rows

# Its doubles of a peer and of who hears are none to compiled code.
pytestmark = pytest.mark.interpreted


class Asked:
    """As much of a connection as is needed to ask over it."""

    def __init__(self):
        self.is_up = True
        self.open = []

    def request(self, message, deadline_ns, *, is_patient):
        pending = Pending()
        self.open.append((message, pending))
        return pending


class Watched:
    def __init__(self):
        self.fds = set()

    def watch(self, fd):
        self.fds.add(fd)

    def unwatch(self, fd):
        self.fds.remove(fd)


class Heard:
    def __init__(self):
        self.said = []

    def scheduler_grants(self, number, rows, *, is_complete):
        self.said.append((number, [row[0] for row in rows], is_complete))


@pytest.fixture
def world(shm_dir):
    class World:
        heard, fds, peer, dir = Heard(), Watched(), Asked(), str(shm_dir)

    World.link = GrantLink(2, clock=ManualClock(), fds=World.fds, hears=World.heard)
    yield World
    World.link.drop_ring()
    assert not World.fds.fds


def test_turns_that_were_told_before_the_answer_are_heard_with_it(world):
    world.link.request_ring(world.peer, world.dir)
    writer = GrantWriter(world.dir, "turns-02-1-1", 2)
    writer.write_grants(rows(0, 2))
    ((message, pending),) = world.peer.open
    assert message == OpenTurns()
    pending.resolve(PeerReply(TurnsOpened("turns-02-1-1")))
    assert world.heard.said == [(2, [0, 10], True)]
    assert world.fds.fds == {world.link.fd}
    writer.write_grants(rows(2, 3))
    world.link.on_bell()
    assert world.heard.said[1:] == [(2, [20], True)]
    writer.close()


def test_a_slow_scheduler_is_asked_again_since_it_may_tell_us_by_a_ring_all_the_same(world):
    world.link.request_ring(world.peer, world.dir)
    world.peer.open.pop()[1].fail(RequestTimeout("no answer"))
    assert [message for message, _ in world.peer.open] == [OpenTurns()]
    world.peer.is_up = False
    world.peer.open.pop()[1].fail(NotConnected("gone"))
    assert world.peer.open == [], "the next connection asks for itself"


def test_who_is_refused_gets_messages_and_does_not_ask_on(world):
    world.link.request_ring(world.peer, world.dir)
    world.peer.open.pop()[1].fail(InvalidRequest("no"))
    assert world.peer.open == []
    world.link.request_ring(world.peer, world.dir)
    world.peer.open.pop()[1].resolve(PeerReply(TurnsOpened("")))
    assert (world.peer.open, world.link.fd, world.heard.said) == ([], -1, [])


def test_a_ring_that_cannot_be_opened_is_given_up_and_everything_looked_at(world):
    world.link.request_ring(world.peer, world.dir)
    world.peer.open.pop()[1].resolve(PeerReply(TurnsOpened("turns-02-9-9")))
    assert [message for message, _ in world.peer.open] == [OpenTurns(wanted=False)]
    world.peer.open.pop()[1].fail(RequestTimeout("no answer"))
    assert [message for message, _ in world.peer.open] == [OpenTurns(wanted=False)]
    assert world.heard.said == []
    world.peer.open.pop()[1].resolve(PeerReply(TurnsOpened("")))
    assert world.heard.said == [(2, [], False)]


def test_the_answer_to_a_connection_that_is_gone_is_nobodys(world):
    world.link.request_ring(world.peer, world.dir)
    _, pending = world.peer.open.pop()
    world.link.request_ring(world.peer, world.dir)
    pending.resolve(PeerReply(TurnsOpened("turns-02-1-1")))
    assert world.link.fd == -1
