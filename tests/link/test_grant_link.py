"""The client's side of opening a grant ring. No failure loses a grant."""

from __future__ import annotations

import pytest

from ringlog.envelope.messages import GrantsOpened, OpenGrants
from ringlog.errors import InvalidRequest, NotConnected, RequestTimeout
from ringlog.link.channel.grant_link import GrantLink
from ringlog.link.channel.grant_ring import GrantWriter
from ringlog.link.futures import Pending
from ringlog.link.peer_request import PeerReply
from ringlog.testing.clock import ManualClock
from tests.support.grant_rows import rows

# The test uses fakes for the peer and the receiver of grants, which compiled code does not accept.
pytestmark = pytest.mark.interpreted


class Asked:
    """A fake connection with the parts that requests need."""

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

    World.link = GrantLink(2, clock=ManualClock(), fds=World.fds, listener=World.heard)
    yield World
    World.link.drop_ring()
    assert not World.fds.fds


def test_grants_written_before_the_reply_are_received_with_it(world):
    world.link.request_ring(world.peer, world.dir)
    writer = GrantWriter(world.dir, "grants-02-1-1", 2)
    writer.write_grants(rows(0, 2))
    ((message, pending),) = world.peer.open
    assert message == OpenGrants()
    pending.resolve(PeerReply(GrantsOpened("grants-02-1-1")))
    assert world.heard.said == [(2, [0, 10], True)]
    assert world.fds.fds == {world.link.fd}
    writer.write_grants(rows(2, 3))
    world.link.on_bell()
    assert world.heard.said[1:] == [(2, [20], True)]
    writer.close()


def test_a_timed_out_request_for_a_ring_is_sent_again(world):
    world.link.request_ring(world.peer, world.dir)
    world.peer.open.pop()[1].fail(RequestTimeout("no answer"))
    assert [message for message, _ in world.peer.open] == [OpenGrants()]
    world.peer.is_up = False
    world.peer.open.pop()[1].fail(NotConnected("gone"))
    assert world.peer.open == [], "the next connection asks for itself"


def test_a_refused_client_gets_grants_by_message_and_does_not_retry(world):
    world.link.request_ring(world.peer, world.dir)
    world.peer.open.pop()[1].fail(InvalidRequest("no"))
    assert world.peer.open == []
    world.link.request_ring(world.peer, world.dir)
    world.peer.open.pop()[1].resolve(PeerReply(GrantsOpened("")))
    assert (world.peer.open, world.link.fd, world.heard.said) == ([], -1, [])


def test_a_ring_that_cannot_be_opened_is_given_up_and_all_feeds_are_scanned(world):
    world.link.request_ring(world.peer, world.dir)
    world.peer.open.pop()[1].resolve(PeerReply(GrantsOpened("grants-02-9-9")))
    assert [message for message, _ in world.peer.open] == [OpenGrants(wanted=False)]
    world.peer.open.pop()[1].fail(RequestTimeout("no answer"))
    assert [message for message, _ in world.peer.open] == [OpenGrants(wanted=False)]
    assert world.heard.said == []
    world.peer.open.pop()[1].resolve(PeerReply(GrantsOpened("")))
    assert world.heard.said == [(2, [], False)]


def test_the_reply_of_an_earlier_connection_is_ignored(world):
    world.link.request_ring(world.peer, world.dir)
    _, pending = world.peer.open.pop()
    world.link.request_ring(world.peer, world.dir)
    pending.resolve(PeerReply(GrantsOpened("grants-02-1-1")))
    assert world.link.fd == -1
