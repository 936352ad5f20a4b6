"""A process that runs out of descriptors stops listening before libzmq gets EMFILE, and listens again
later."""

from __future__ import annotations

import itertools
import logging
import os
import resource
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import zmq

from ringlog.envelope import messages as m
from ringlog.envelope.wire import encode
from ringlog.limits import DESCRIPTORS_RESERVED
from ringlog.logs import RepeatFilter
from ringlog.runtime.listener import CHECK_MS_RARE, AcceptGuard, Listener, count_descriptors
from ringlog.testing.clock import ManualClock

WAIT_MS = 10_000
LATER_S = 2 * CHECK_MS_RARE / 1_000
CROWD = 40

_CROWD = f"""
import resource, sys, time, zmq
from ringlog.clock import SystemClock
from ringlog.envelope import messages as m, wire
from ringlog.envelope import messages as m
from ringlog.envelope.wire import encode
from ringlog.limits import DESCRIPTORS_RESERVED
from ringlog.logs import RepeatFilter
from ringlog.runtime.listener import count_descriptors
from ringlog.runtime.router_socket import RouterSocket
endpoint, is_guarded = sys.argv[1], sys.argv[2] == "guarded"
server, clock = RouterSocket(endpoint), SystemClock()
spare = DESCRIPTORS_RESERVED + {CROWD}
_, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
limit = 0
while limit < spare or count_descriptors()[0] < spare:
    limit += 1
    resource.setrlimit(resource.RLIMIT_NOFILE, (limit, hard))
print("ready", flush=True)
while True:
    if is_guarded:
        server.guard(clock.monotonic_ns())
    for client, envelope, _ in server.receive(64):
        server.send(client, m.Pong(1, 1), envelope.corr)
    clock.sleep(0.001)
"""


@pytest.fixture
def descriptors() -> Iterator[None]:
    """Restore the descriptor limit of this process after the test."""
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    yield
    resource.setrlimit(resource.RLIMIT_NOFILE, before)


def _leave(free: int) -> None:
    """Lower the limit until `free` descriptors can be opened. Descriptors above the limit stay open."""
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    used = {int(name) for name in os.listdir("/proc/self/fd")}
    # without the descriptor of the listing itself
    used = {number for number in used if os.path.exists(f"/proc/self/fd/{number}")}
    numbers = (number for number in itertools.count() if number not in used)
    limit = next(itertools.islice(numbers, free, None))
    resource.setrlimit(resource.RLIMIT_NOFILE, (limit, hard))


def test_count_descriptors_returns_how_many_can_be_opened(descriptors: None) -> None:
    _leave(10)
    opened = [os.open("/dev/null", os.O_RDONLY) for _ in range(9)]
    assert count_descriptors()[0] == 1
    opened.append(os.open("/dev/null", os.O_RDONLY))
    with pytest.raises(OSError, match="Too many open files"):
        os.open("/dev/null", os.O_RDONLY)
    assert count_descriptors()[0] == 0
    for fd in opened:
        os.close(fd)
    assert count_descriptors()[0] == 10


def test_a_listener_pauses_without_free_descriptors_and_resumes(tmp_path: Path, descriptors: None) -> None:
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    limit = resource.getrlimit(resource.RLIMIT_NOFILE)
    with context, context.socket(zmq.ROUTER) as server, context.socket(zmq.DEALER) as old:
        listener = Listener(server, f"ipc://{tmp_path}/s")
        clock = ManualClock()
        guard = AcceptGuard([listener])
        old.connect(listener.endpoint)
        old.send(b"1")
        assert server.poll(WAIT_MS)
        address = server.recv_multipart()[0]
        guard.check_descriptors(clock.monotonic_ns())
        assert not listener.is_paused
        _leave(DESCRIPTORS_RESERVED - 1)
        guard.check_descriptors(clock.monotonic_ns() + 1)
        assert not listener.is_paused, "looked before it was time"
        clock.advance(LATER_S)
        guard.check_descriptors(clock.monotonic_ns())
        assert listener.is_paused
        server.send_multipart([address, b"2"])
        assert old.poll(WAIT_MS), "who is connected stays so"
        resource.setrlimit(resource.RLIMIT_NOFILE, limit)
        clock.advance(LATER_S)
        guard.check_descriptors(clock.monotonic_ns())
        assert not listener.is_paused
        with context.socket(zmq.DEALER) as new:
            new.connect(listener.endpoint)
            new.send(b"3")
            assert server.poll(WAIT_MS)
            assert server.recv_multipart()[1] == b"3"


def test_every_pause_and_resume_is_logged(
    tmp_path: Path, descriptors: None, caplog: pytest.LogCaptureFixture
) -> None:
    """The filter for repeated warnings must not suppress a change of state."""
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    limit, clock = resource.getrlimit(resource.RLIMIT_NOFILE), ManualClock()
    with context, context.socket(zmq.ROUTER) as server, caplog.at_level(logging.INFO):
        guard, shown = AcceptGuard([Listener(server, f"ipc://{tmp_path}/s")]), RepeatFilter()
        for _ in range(3):
            _leave(DESCRIPTORS_RESERVED - 1)
            clock.advance(LATER_S)
            guard.check_descriptors(clock.monotonic_ns())
            resource.setrlimit(resource.RLIMIT_NOFILE, limit)
            clock.advance(LATER_S)
            guard.check_descriptors(clock.monotonic_ns())
    said = [record.getMessage() for record in caplog.records if shown.filter(record)]
    assert said == ["new connections paused: too few file descriptors", "new connections resumed"] * 3


@pytest.mark.slow
@pytest.mark.parametrize("how", ["guarded", "unguarded"])
def test_many_new_connections_do_not_end_a_guarded_process(tmp_path: Path, how: str) -> None:
    """The unguarded run proves that there are enough connections: libzmq aborts a process that does not
    check."""
    endpoint = f"ipc://{tmp_path}/s"
    process = subprocess.Popen(
        [sys.executable, "-c", _CROWD, endpoint, how],
        stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True,
    )  # fmt: skip
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    clients: list[zmq.Socket[bytes]] = []
    try:
        assert process.stdout is not None
        assert process.stdout.readline() == "ready\n"
        answered = 0
        for number in range(3 * (CROWD + DESCRIPTORS_RESERVED)):
            client = context.socket(zmq.DEALER)
            clients.append(client)
            client.connect(endpoint)
            client.send(encode(m.Ping(), number))
            # Clients connect one after the other, until the server stops listening.
            if not client.poll(300):
                break
            answered += 1
        assert answered >= CROWD // 2
        if how == "guarded":
            assert process.poll() is None
        else:
            assert process.wait(WAIT_MS / 1_000) != 0
    finally:
        process.kill()
        process.wait()
        if process.stdout is not None:
            process.stdout.close()
        for client in clients:
            client.close(linger=0)
        context.term()
