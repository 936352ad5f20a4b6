"""The life of rings over the real sockets, with a shard whose replies the test sends."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import zmq

from ringlog.config import RunConfig
from ringlog.envelope import messages as m
from ringlog.envelope.wire import decode, encode
from ringlog.errors import InvalidRequest, NotReady, Throttled
from ringlog.limits import MIB, PID_MAX, RING_BYTES_FIRST, RING_BYTES_MIN
from ringlog.process_id import process_started_ticks
from ringlog.ring.doorbell import BellListener
from ringlog.ring.ring import RingProducer
from ringlog.supervision import rings as r
from ringlog.supervision.sockets import ShardControlLink
from ringlog.testing.clock import ManualClock

WAIT_MS = 10_000


class Shard:
    """The other end of a ShardControlLink: a ROUTER socket on the shard's endpoint. The test sends the
    replies."""

    def __init__(self, shm_dir: Path) -> None:
        self.context = zmq.Context()
        self.endpoint = f"ipc://{shm_dir}/wal_shard-00.sock"
        self.socket = self.context.socket(zmq.ROUTER)
        self.socket.setsockopt(zmq.LINGER, 0)
        self.socket.bind(self.endpoint)
        self.link = ShardControlLink(self.context, self.endpoint)

    def hear(self) -> tuple[m.Message, Callable[[m.Message], None]]:
        """Return the next message from the supervisor and a function that replies to it."""
        assert self.socket.poll(WAIT_MS), "the supervisor said nothing"
        address, data = self.socket.recv_multipart()
        envelope = decode(data)
        return envelope.message, lambda reply: self.socket.send_multipart(
            [address, encode(reply, envelope.corr)]
        )

    def is_silent(self) -> bool:
        return not self.socket.poll(50)

    def deliver(self, keeper: r.RingManager) -> None:
        """Let the ring manager process one reply."""
        assert self.link.socket.poll(WAIT_MS)
        for envelope in self.link.receive():
            keeper.handle_reply(0, envelope.corr, envelope.message)

    def close(self) -> None:
        self.link.close()
        self.socket.close()
        self.context.term()


@pytest.fixture
def keeper(tmp_path: Path, clock: ManualClock) -> Iterator[r.RingManager]:
    settings = RunConfig(ring_bytes=RING_BYTES_MIN, settle_entries=64)
    keeper = r.RingManager(str(tmp_path), engine_id="0" * 32, shards=2, settings=settings, clock=clock)
    yield keeper
    keeper.close_all()


@pytest.fixture
def shard(tmp_path: Path) -> Iterator[Shard]:
    shard = Shard(tmp_path)
    yield shard
    shard.close()


@pytest.fixture
def client() -> Iterator[subprocess.Popen[bytes]]:
    """A process that the test may kill."""
    process = subprocess.Popen([sys.executable, "-c", "import signal; signal.pause()"])
    yield process
    process.kill()
    process.wait()


def request(pid: int = 0, shard: int = 0, ring_bytes: int = 0, client: str = "c") -> m.RingOpen:
    pid = pid or os.getpid()
    return m.RingOpen(client, pid, shard, ring_bytes, process_started_ticks(pid))


def open_live(keeper: r.RingManager, shard: Shard, pid: int = 0) -> m.RingOpened:
    answers: list[m.Message] = []
    keeper.open(request(pid), answers.append)
    message, answer = shard.hear()
    assert isinstance(message, m.RingAttach)
    answer(m.RingAttached(message.ring))
    shard.deliver(keeper)
    [opened] = answers
    assert isinstance(opened, m.RingOpened)
    return opened


def files(path: Path) -> set[str]:
    return {name for name in os.listdir(path) if name.startswith("ring-")}


def test_a_ring_is_announced_only_after_its_shard_attached(
    keeper: r.RingManager, shard: Shard, tmp_path: Path
) -> None:
    answers: list[m.Message] = []
    keeper.open(request(), answers.append)
    assert answers == [], "no shard serves yet"
    keeper.shard_ready(0, shard.link)
    message, answer = shard.hear()
    assert isinstance(message, m.RingAttach)
    assert answers == []
    answer(m.RingAttached(message.ring))
    shard.deliver(keeper)
    assert answers == [m.RingOpened(message.ring, message.bell)]
    RingProducer.attach(str(tmp_path / message.ring)).close()
    assert files(tmp_path) == {message.ring, message.bell}


def test_a_closed_ring_is_drained_by_its_shard_and_then_removed(
    keeper: r.RingManager, shard: Shard, tmp_path: Path
) -> None:
    keeper.shard_ready(0, shard.link)
    opened = open_live(keeper, shard)
    keeper.close(opened.ring)
    keeper.close(opened.ring)
    message, answer = shard.hear()
    assert message == m.RingDetach(opened.ring, dead=False)
    assert shard.is_silent(), "closing twice asks once"
    assert files(tmp_path), "the shard may still read it"
    answer(m.RingDetached(opened.ring, 3))
    shard.deliver(keeper)
    assert files(tmp_path) == set()
    assert len(keeper) == 0
    keeper.close(opened.ring)


@pytest.mark.slow
def test_the_rings_of_a_killed_client_are_drained_and_removed(
    keeper: r.RingManager, shard: Shard, tmp_path: Path, client: subprocess.Popen[bytes]
) -> None:
    """The shard settles everything published before the ring is removed (R7)."""
    keeper.shard_ready(0, shard.link)
    rings = {open_live(keeper, shard, client.pid).ring for _ in range(2)}
    other = open_live(keeper, shard).ring
    [(pidfd, pid)] = [(fd, pid) for fd, pid in keeper.pidfds().items() if pid == client.pid]
    client.kill()
    client.wait()
    poller = zmq.Poller()
    poller.register(pidfd, zmq.POLLIN)
    assert poller.poll(WAIT_MS)
    keeper.client_died(pid)
    for _ in range(2):
        message, answer = shard.hear()
        assert isinstance(message, m.RingDetach)
        assert message.dead
        assert message.ring in rings
        answer(m.RingDetached(message.ring, 0))
        shard.deliver(keeper)
    assert {ring.name for ring in keeper} == {other}
    assert client.pid not in keeper.pidfds().values()


def test_a_client_without_a_pidfd_is_watched_by_its_lock(
    keeper: r.RingManager, shard: Shard, tmp_path: Path, clock: ManualClock
) -> None:
    keeper.shard_ready(0, shard.link)
    opened = open_live(keeper, shard, pid=PID_MAX)
    assert keeper.pidfds() == {}
    producer = RingProducer.attach(str(tmp_path / opened.ring))
    clock.advance(60)
    keeper.poll_producer_locks()
    assert shard.is_silent(), "it holds its lock"
    producer.close()
    keeper.poll_producer_locks()
    assert shard.is_silent(), "one look a second"
    clock.advance(1.5)
    keeper.poll_producer_locks()
    assert shard.hear()[0] == m.RingDetach(opened.ring, dead=True)


def test_the_rings_of_a_closed_client_are_removed_while_its_process_lives(
    keeper: r.RingManager, shard: Shard, tmp_path: Path, clock: ManualClock
) -> None:
    """A pidfd reports only the exit of the process, and a program may open and close clients for years
    (RF-14)."""
    keeper.shard_ready(0, shard.link)
    quick, slow = open_live(keeper, shard), open_live(keeper, shard)
    assert len(keeper.pidfds()) == 1
    RingProducer.attach(str(tmp_path / quick.ring)).close()
    producer = RingProducer.attach(str(tmp_path / slow.ring))
    keeper.poll_producer_locks()
    assert shard.hear()[0] == m.RingDetach(quick.ring, dead=True), "never seen held, and closed"
    assert shard.is_silent(), "the other one's lock is held"
    producer.close()
    clock.advance(1.5)
    keeper.poll_producer_locks()
    assert shard.hear()[0] == m.RingDetach(slow.ring, dead=True)


def test_the_ring_of_a_client_that_never_attaches_is_removed_after_30_s(
    keeper: r.RingManager, shard: Shard, clock: ManualClock
) -> None:
    keeper.shard_ready(0, shard.link)
    opened = open_live(keeper, shard, pid=PID_MAX)
    clock.advance(29)
    keeper.poll_producer_locks()
    assert shard.is_silent()
    clock.advance(2)
    keeper.poll_producer_locks()
    assert shard.hear()[0] == m.RingDetach(opened.ring, dead=True)


def test_a_new_incarnation_attaches_every_ring_and_detaches_those_of_exited_clients(
    keeper: r.RingManager, shard: Shard, tmp_path: Path
) -> None:
    """No published frame is lost, whether the shard dies before or after the client."""
    keeper.shard_ready(0, shard.link)
    stays, leaves = open_live(keeper, shard), open_live(keeper, shard)
    keeper.shard_down(0)
    keeper.close(leaves.ring)
    assert files(tmp_path) >= {leaves.ring}
    successor = ShardControlLink(shard.context, shard.endpoint)
    shard.link = successor
    keeper.shard_ready(0, successor)
    heard = [shard.hear()[0] for _ in range(3)]
    assert heard == [
        m.RingAttach(stays.ring, stays.bell, "c"),
        m.RingAttach(leaves.ring, leaves.bell, "c"),
        m.RingDetach(leaves.ring, dead=False),
    ]


def test_a_ring_that_its_shard_refuses_is_removed(
    keeper: r.RingManager, shard: Shard, tmp_path: Path
) -> None:
    keeper.shard_ready(0, shard.link)
    answers: list[m.Message] = []
    keeper.open(request(), answers.append)
    _, answer = shard.hear()
    error = m.ErrorReply(14, "ring cannot be attached", {"reason": "magic"})
    answer(error)
    shard.deliver(keeper)
    assert answers == [error]
    assert files(tmp_path) == set()


def test_a_ring_that_a_successor_refuses_is_closed_for_its_producer(
    keeper: r.RingManager, shard: Shard, tmp_path: Path
) -> None:
    """Otherwise the client would push into a file that no process reads (RF-25, RF-30)."""
    keeper.shard_ready(0, shard.link)
    opened = open_live(keeper, shard)
    producer = RingProducer.attach(str(tmp_path / opened.ring))
    bell = BellListener(str(tmp_path / opened.bell))
    keeper.shard_down(0)
    keeper.shard_ready(0, ShardControlLink(shard.context, shard.endpoint))
    shard.link = keeper.links()[0]
    _, answer = shard.hear()
    answer(m.ErrorReply(14, "ring cannot be attached", {"reason": "words"}))
    shard.deliver(keeper)
    assert producer.is_consumer_closed
    assert bell.drain() == 1
    assert files(tmp_path) == set()
    producer.close()
    bell.close()


def test_a_failed_shard_fails_pending_and_later_requests(keeper: r.RingManager, tmp_path: Path) -> None:
    """The requests fail with the reason `shard_failed`."""
    answers: list[m.Message] = []
    keeper.open(request(), answers.append)
    [ring] = keeper
    keeper.close(ring.name)
    keeper.shard_failed(0, "poison")
    assert isinstance(answers[0], m.ErrorReply)
    assert files(tmp_path) == set(), "nobody will ever drain it"
    with pytest.raises(NotReady, match="failed") as caught:
        keeper.open(request(), answers.append)
    assert caught.value.detail["reason"] == "shard_failed"
    keeper.open(request(shard=1), answers.append)
    assert len(keeper) == 1


@pytest.mark.parametrize(
    "bad",
    [
        request(shard=2), request(shard=-1), request(ring_bytes=1), request(ring_bytes=1 << 40),
        request(ring_bytes=-1), request(client="x" * 300), request(client="\ud800" * 200),
    ],
)  # fmt: skip
def test_an_invalid_request_is_refused_and_leaves_no_file(
    keeper: r.RingManager, tmp_path: Path, bad: m.RingOpen
) -> None:
    with pytest.raises(InvalidRequest):
        keeper.open(bad, lambda message: None)
    assert files(tmp_path) == set()
    assert len(keeper) == 0


def size_of_ring(keeper: r.RingManager, where: Path, asked: int) -> int:
    keeper.open(request(ring_bytes=asked), lambda message: None)
    ring = list(keeper)[-1]
    return (where / ring.name).stat().st_size


@pytest.mark.parametrize(
    ("asked", "given"),
    [(0, RING_BYTES_FIRST), (RING_BYTES_MIN, RING_BYTES_MIN), (4 * MIB, 4 * MIB), (64 * MIB, 8 * MIB)],
)
def test_a_ring_has_the_requested_size_up_to_the_configured_one(
    tmp_path: Path, clock: ManualClock, asked: int, given: int
) -> None:
    settings = RunConfig(ring_bytes=8 * MIB)
    keeper = r.RingManager(str(tmp_path), engine_id="0" * 32, shards=1, settings=settings, clock=clock)
    size = size_of_ring(keeper, tmp_path, asked)
    assert given <= size <= given + settings.settle_entries * 64 + 8_192
    keeper.close_all()


def test_a_larger_ring_takes_only_a_part_of_the_free_shared_memory(
    tmp_path: Path, clock: ManualClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = os.statvfs(tmp_path)
    free = 16 * MIB // real.f_frsize

    class Room:
        f_bavail, f_frsize = free, real.f_frsize

    keeper = r.RingManager(str(tmp_path), engine_id="0" * 32, shards=1, settings=RunConfig(), clock=clock)
    with monkeypatch.context() as patch:
        patch.setattr(r.os, "statvfs", lambda path: Room)
        assert 4 * MIB <= size_of_ring(keeper, tmp_path, 32 * MIB) < 6 * MIB
        Room.f_bavail = 0
        assert RING_BYTES_FIRST <= size_of_ring(keeper, tmp_path, 32 * MIB) < 2 * RING_BYTES_FIRST + 8_192
    keeper.close_all()


@pytest.mark.slow
def test_a_client_of_another_pid_namespace_is_not_watched_by_its_pid(
    keeper: r.RingManager, shard: Shard, client: subprocess.Popen[bytes]
) -> None:
    """Its pid may belong to another process here, whose death must not remove the ring."""
    keeper.shard_ready(0, shard.link)
    keeper.open(
        m.RingOpen("c", client.pid, 0, 0, process_started_ticks(client.pid) + 1), lambda message: None
    )
    assert keeper.pidfds() == {}
    keeper.client_died(client.pid)
    assert [ring.phase for ring in keeper] == [r.RingPhase.OPENING]


def test_the_number_of_rings_is_bounded(keeper: r.RingManager, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(r, "RINGS_PER_SHARD_MAX", 3)
    for _ in range(3):
        keeper.open(request(), lambda message: None)
    with pytest.raises(Throttled) as caught:
        keeper.open(request(), lambda message: None)
    assert caught.value.detail["retry_after_ms"] > 0
    keeper.open(request(shard=1), lambda message: None)


def test_a_full_shared_memory_gives_throttled_and_leaves_no_file(
    keeper: r.RingManager, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Allocation fails in the same way as on a full tmpfs (R6)."""

    def full(fd: int, offset: int, length: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "posix_fallocate", full)
    with pytest.raises(Throttled, match="shared memory"):
        keeper.open(request(), lambda message: None)
    assert files(tmp_path) == set()


def test_no_string_of_a_client_becomes_part_of_a_path(keeper: r.RingManager, tmp_path: Path) -> None:
    """Names of ring files consist of random hexadecimal digits."""
    keeper.open(request(client="../../etc/x\0"), lambda message: None)
    assert all(set(name) <= set("ring-.bel0123456789abcdef") for name in files(tmp_path))
