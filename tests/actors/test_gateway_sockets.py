"""The gateway's real sockets in this process: admission of peers, and hostile peers (RF-92 to RF-106)."""

import os
import shutil
import tempfile
import time

import pytest
import zmq

from ringlog.access.key_sources import KEYS_POLL_NS
from ringlog.actors.gateway.front_end.sockets import Listeners
from ringlog.actors.gateway.shell import GatewayShell
from ringlog.board.board import Board
from ringlog.config import LimitsConfig
from ringlog.envelope import messages as m
from ringlog.envelope.boot import ActorBoot
from ringlog.envelope.wire import PROTOCOL, decode, encode
from ringlog.errors import StartRefused, Status
from ringlog.limits import MESSAGE_BYTES_MAX
from ringlog.link.curve import new_key
from ringlog.link.futures import Pending
from ringlog.testing import ManualClock

SERVER, ANNE, EVE = new_key(), new_key(), new_key()
FRONTEND = "ringlog.actors.gateway.front_end.zmq_frontend"
DEADLINE_S = 5.0
QUIET_S = 0.4
"""Seconds for which a peer that must not be admitted may try."""


def keys_text(*keys):
    return "".join(
        f'[[keys]]\nname = "k{n}"\npublic_key = "{key.public.decode()}"\n' for n, key in enumerate(keys)
    )


class House:
    """The gateway of an engine without shards, driven pass by pass, and peers that send to it."""

    def __init__(self):
        self.dir = tempfile.mkdtemp(prefix="rl-gw-")
        self.keys_file = os.path.join(self.dir, "keys.toml")
        self.write_keys(ANNE)
        Board.create(self.dir, 4).close()
        self.clock = ManualClock()
        boot = ActorBoot(
            kind="gateway", name="gateway", engine_id="e" * 32, incarnation=3, boot_incarnation=1,
            boot_id="b", slot=2, data_dir=self.dir, shm_dir=self.dir, supervisor_pid=os.getpid(), shards=1,
            gateway_socket=f"{self.dir}/gateway.sock",
        )  # fmt: skip
        listeners = Listeners("tcp://127.0.0.1:*", SERVER, self.keys_file)
        self.shell = GatewayShell(boot, listeners, LimitsConfig(), ring_bytes=1 << 20, clock=self.clock)
        self.tcp, self.ipc = self.shell.sockets.endpoints
        self.context = zmq.Context()
        self.sockets = []

    def write_keys(self, *keys):
        with open(self.keys_file, "w") as file:
            file.write(keys_text(*keys))
        os.chmod(self.keys_file, 0o600)

    def peer(self, endpoint, key=None, server=SERVER.public, **options):
        socket = self.context.socket(zmq.DEALER)
        socket.setsockopt(zmq.LINGER, 0)
        for name, value in options.items():
            socket.setsockopt(getattr(zmq, name), value)
        if key is not None:
            socket.setsockopt(zmq.CURVE_SERVERKEY, server)
            socket.setsockopt(zmq.CURVE_PUBLICKEY, key.public)
            socket.setsockopt(zmq.CURVE_SECRETKEY, key.secret)
        socket.connect(endpoint)
        self.sockets.append(socket)
        return socket

    def until(self, is_done, seconds=DEADLINE_S):
        deadline = time.monotonic() + seconds
        while not is_done():
            if time.monotonic() > deadline:
                return False
            if not self.shell.do_work():
                zmq.zmq_poll([(socket, zmq.POLLIN) for socket in self.sockets], 2)
        return True

    def ask(self, socket, message, corr=1, seconds=DEADLINE_S):
        socket.send(encode(message, corr))
        return self.receive(socket, seconds)

    def receive(self, socket, seconds=DEADLINE_S):
        if not self.until(lambda: socket.getsockopt(zmq.EVENTS) & zmq.POLLIN, seconds):
            return None
        return decode(socket.recv_multipart()[0])

    def close(self):
        for socket in self.sockets:
            socket.close(0)
        self.context.term()
        self.shell.on_close()
        shutil.rmtree(self.dir)


@pytest.fixture
def house():
    made = House()
    yield made
    made.close()


HELLO = m.Hello(PROTOCOL, "test")


def test_a_peer_with_a_listed_key_is_admitted(house):
    """The shard of the topic does not exist; the reply is `NOT_READY`, without details."""
    anne = house.peer(house.tcp, ANNE)
    welcome = house.ask(anne, HELLO, 7)
    assert (welcome.corr, welcome.message.engine_id, welcome.message.shard) == (7, "e" * 32, -1)
    reply = house.ask(anne, m.TopicState("t")).message
    assert reply.status == Status.NOT_READY


@pytest.mark.interpreted
def test_an_unexpected_error_of_an_awaited_result_ends_only_its_request(house, monkeypatch):
    """The error arrives while the gateway reads its own connections, outside of all requests."""
    waiting = []

    def request(*_, **__):
        waiting.append(Pending())
        return waiting[-1]

    monkeypatch.setattr(house.shell.links, "request", request)
    anne, other = house.peer(house.tcp, ANNE), house.peer(house.ipc)
    anne.send(encode(m.TopicState("t"), 8))
    assert house.until(lambda: waiting)
    waiting.pop().fail(KeyError("feed"))
    reply = house.receive(anne)
    assert (reply.corr, reply.message.status) == (8, Status.INTERNAL)
    assert "KeyError" not in reply.message.message
    assert house.ask(other, HELLO) is not None


@pytest.mark.parametrize("how", ["unknown key", "no security", "wrong server key", "plain password"])
def test_a_peer_without_a_listed_key_is_not_admitted(house, how):
    """No message of such a peer arrives (RF-105)."""
    if how == "unknown key":
        peer = house.peer(house.tcp, EVE)
    elif how == "wrong server key":
        peer = house.peer(house.tcp, ANNE, server=EVE.public)
    elif how == "plain password":
        peer = house.peer(house.tcp, PLAIN_USERNAME=b"anne", PLAIN_PASSWORD=b"x")
    else:
        peer = house.peer(house.tcp)
    assert house.ask(peer, HELLO, seconds=QUIET_S) is None
    assert house.shell.core.answered == house.shell.core.refused == 0
    assert house.ask(house.peer(house.tcp, ANNE), HELLO) is not None


def test_without_its_zap_handler_the_gateway_admits_no_peer(house):
    """The sockets refuse every peer if no handler answers."""
    assert house.ask(house.peer(house.tcp, ANNE), HELLO) is not None
    house.shell.sockets.zap.socket.unbind("inproc://zeromq.zap.01")
    assert house.ask(house.peer(house.tcp, ANNE), HELLO, seconds=QUIET_S) is None
    assert house.ask(house.peer(house.ipc), HELLO, seconds=QUIET_S) is None


def test_a_peer_of_the_local_socket_is_the_owner(house):
    """The socket file belongs to the user of the engine."""
    assert house.ask(house.peer(house.ipc), HELLO) is not None
    reply = house.ask(house.peer(house.ipc), m.Locate("t", 0)).message
    assert reply.status != Status.FORBIDDEN
    assert os.stat(house.ipc.removeprefix("ipc://")).st_uid == os.geteuid()


def test_a_revoked_key_is_refused_on_open_and_on_new_connections(house):
    """The revocation needs no restart."""
    anne = house.peer(house.tcp, ANNE)
    assert house.ask(anne, HELLO).kind == "Welcome"
    house.write_keys(EVE)
    house.clock.advance(KEYS_POLL_NS / 1e9)
    house.shell.do_work()
    house.shell.do_work()
    assert house.ask(anne, HELLO).message.status == Status.UNAUTHORIZED
    assert house.ask(house.peer(house.tcp, ANNE), HELLO, seconds=QUIET_S) is None
    assert house.ask(house.peer(house.tcp, EVE), HELLO).kind == "Welcome"


@pytest.mark.parametrize("text", ["not toml [", '[[keys]]\nname = "x"'])
def test_an_invalid_keys_file_changes_nothing(house, text):
    change_keys(house, text)
    assert house.ask(house.peer(house.tcp, ANNE), HELLO).kind == "Welcome"


def test_an_empty_keys_file_admits_no_key(house):
    change_keys(house, "")
    assert house.ask(house.peer(house.tcp, ANNE), HELLO, seconds=QUIET_S) is None


def change_keys(house, text):
    with open(house.keys_file, "w") as file:
        file.write(text)
    house.clock.advance(KEYS_POLL_NS / 1e9)
    house.shell.do_work()
    house.shell.do_work()


def test_a_keys_file_that_others_may_read_is_ignored(house):
    """The previous keys stay in force."""
    house.write_keys(EVE)
    os.chmod(house.keys_file, 0o644)
    house.clock.advance(KEYS_POLL_NS / 1e9)
    house.shell.do_work()
    house.shell.do_work()
    assert house.ask(house.peer(house.tcp, EVE), HELLO, seconds=QUIET_S) is None
    assert house.ask(house.peer(house.tcp, ANNE), HELLO) is not None


@pytest.mark.parametrize(
    "parts",
    [
        [b""],
        [b"\xff" * 100],
        [b"\x94" * 10_000],
        [encode(HELLO)[:-1]],
        [encode(HELLO) + b"\0"],
        [encode(HELLO), b"a", b"b", b"c", b"d", b"e", b"f", b"g", b"h"],
        [b"x"] * 50,
        [encode(m.Append("t", 1)), b"no frame"],
        [b"\xdd\xff\xff\xff\xff"],
    ],
)
def test_malformed_messages_get_an_error_and_affect_no_other_client(house, parts):
    """The sender's connection survives as well (RF-100 to RF-102)."""
    hostile, good = house.peer(house.tcp, ANNE), house.peer(house.ipc)
    hostile.send_multipart(parts)
    assert isinstance(house.receive(hostile).message, m.ErrorReply)
    assert house.ask(good, HELLO).kind == "Welcome"
    assert house.ask(hostile, HELLO).kind == "Welcome"


def test_a_connection_that_sends_only_malformed_messages_is_ignored(house):
    """The limit is 16 malformed messages."""
    hostile, good = house.peer(house.ipc), house.peer(house.ipc)
    for _ in range(16):
        hostile.send(b"rubbish")
        assert house.receive(hostile) is not None
    assert house.ask(hostile, HELLO, seconds=QUIET_S) is None
    assert house.ask(good, HELLO).kind == "Welcome"


def test_a_part_beyond_the_limit_ends_the_connection(house, monkeypatch):
    """The gateway holds no request of it, and other clients are not affected (RF-101)."""
    hostile, good = house.peer(house.ipc), house.peer(house.ipc)
    assert house.ask(hostile, HELLO) is not None
    hostile.send_multipart([encode(m.Append("t", 1)), bytes(MESSAGE_BYTES_MAX + 1)])
    assert house.receive(hostile, QUIET_S) is None
    assert house.ask(good, HELLO).kind == "Welcome"
    assert house.shell.core.requests_held == 0


def test_a_peer_without_a_handshake_is_disconnected(house):
    """The gateway closes the connection and admits the next peer (RF-99)."""
    import socket

    host, port = house.tcp.removeprefix("tcp://").rsplit(":", 1)
    with socket.create_connection((host, int(port))) as raw:
        raw.sendall(b"GET / HTTP/1.1\r\n\r\n" * 100)
        raw.setblocking(False)

        def is_cut():
            try:
                return raw.recv(4096) == b""
            except BlockingIOError:
                return False
            except ConnectionError:
                return True

        assert house.until(is_cut)
    assert house.ask(house.peer(house.tcp, ANNE), HELLO) is not None


def test_a_client_that_does_not_read_fills_only_its_own_bounded_buffer(house, monkeypatch):
    """Beyond the buffer and its reserve the client counts as disconnected (RF-93).

    Another client receives every reply meanwhile.
    """
    monkeypatch.setattr(f"{FRONTEND}.GATEWAY_OUTBOX_BYTES_MAX", 40_000)
    monkeypatch.setattr(f"{FRONTEND}.GATEWAY_OUTBOX_RESERVE_BYTES", 10_000)
    router = house.shell.sockets.frontends[1]
    slow = house.peer(house.ipc, RCVHWM=1, SNDHWM=0, RCVBUF=4096)
    good = house.peer(house.ipc)
    held_most = 0
    for corr in range(40):
        for _ in range(500):
            slow.send(encode(HELLO, corr))
        assert house.ask(good, HELLO, corr).corr == corr
        held_most = max(held_most, sum(router._outbox_bytes.values()))
        if router.undelivered:
            break
    assert router.undelivered > 0
    assert held_most <= 50_000
    assert house.ask(good, HELLO).kind == "Welcome"


def test_a_client_that_reads_late_gets_a_reply_to_every_request(house, monkeypatch):
    """Beyond the buffer, acks are kept. Records become `not_ready`, and grants `SubscriptionsLost`."""
    monkeypatch.setattr(f"{FRONTEND}.GATEWAY_OUTBOX_BYTES_MAX", 1 << 20)
    router, slow = house.shell.sockets.frontends[1], house.peer(house.ipc, RCVHWM=1, RCVBUF=4096)
    for corr in range(1, 201):
        slow.send(encode(m.Ping(), corr))
    received = []
    deadline = time.monotonic() + DEADLINE_S
    while len(received) < 200:
        house.shell.sockets.zap.serve()
        received += router.receive(200)
        assert time.monotonic() < deadline
    page, acked = bytes(64 << 10), m.Appended("t", 7, 1, False, b"")
    for request in received:
        is_append = request.envelope.corr % 2
        reply = (acked, None) if is_append else (m.Pong(1, 1), page)
        assert router.send(request.client, reply[0], request.envelope.corr, reply[1])
    assert router.send(received[0].client, m.Grants(1_024), 0, page)
    assert sum(router._outbox_bytes.values()) < (1 << 20) + 200 * 1_000
    replies = [house.receive(slow) for _ in range(201)]
    assert [reply.corr for reply in replies] == [*range(1, 201), 0]
    assert all(reply.message == acked for reply in replies if reply.corr % 2)
    refusals = [reply.message for reply in replies if reply.kind == "ErrorReply"]
    assert len(refusals) == router.undelivered - 1 > 0
    assert {(each.status, each.outcome) for each in refusals} == {(Status.NOT_READY, "unknown")}
    assert replies[-1].kind == "SubscriptionsLost"
    assert house.ask(slow, HELLO).kind == "Welcome"
    assert not router.has_backlog


def test_two_connections_with_one_routing_id_stay_separate(house):
    """A connection cannot take over another one with its routing id (RF-96)."""
    first = house.peer(house.ipc, ROUTING_ID=b"same")
    assert house.ask(first, HELLO, 1).corr == 1
    second = house.peer(house.ipc, ROUTING_ID=b"same")
    house.ask(second, HELLO, 2, seconds=QUIET_S)
    assert house.ask(first, HELLO, 3).corr == 3


def test_an_address_in_use_is_refused_at_the_start(house):
    boot = house.shell._boot
    with pytest.raises(StartRefused, match="listen"):
        GatewayShell(
            boot,
            Listeners(house.tcp, SERVER, house.keys_file),
            LimitsConfig(),
            ring_bytes=1 << 20,
            clock=house.clock,
        )
