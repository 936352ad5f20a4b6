"""A signal's exception (Ctrl-C) at any moment of a client's work: it never hangs, never doubles, never lies.

The signals are real and come at random times, from a thread: they hit sleeping, working and in between.
"""

from __future__ import annotations

import gc
import random
import signal
import sys
import threading
import time
from collections import Counter, deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from itertools import count
from types import FrameType

import pytest

import ringlog
from ringlog.errors import Interrupted, RinglogError
from ringlog.testing.pytest_plugin import ringlog_engine, ringlog_topic
from ringlog.testing.real_engine import wait_until

__all__ = ["ringlog_engine", "ringlog_topic"]

# What an interrupt leaves half made is freed by the collector, which says so; and one that comes while it
# frees something is not raised at all.
pytestmark = pytest.mark.filterwarnings(
    "ignore::pytest.PytestUnraisableExceptionWarning", "ignore::ResourceWarning"
)

ROUNDS = 60
CLOSE_S = 8.0
"""Far beyond what a close takes, far below the test's own time."""


class Hit(KeyboardInterrupt):
    """What our signal raises; a kind of its own, so that a real Ctrl-C still ends the tests."""


@pytest.fixture
def hits() -> Iterator[None]:
    """SIGUSR2 raises Hit, as SIGINT raises KeyboardInterrupt."""

    def on_signal(_signal: int, _frame: object) -> None:
        raise Hit

    before = signal.signal(signal.SIGUSR2, on_signal)
    yield
    signal.signal(signal.SIGUSR2, before)
    gc.collect()


@contextmanager
def one_hit(delay_s: float) -> Iterator[None]:
    """One signal to this thread after `delay_s`, at the latest when the block ends."""
    begun, done = threading.Event(), threading.Event()
    target = threading.get_ident()

    def hit() -> None:
        begun.wait()
        done.wait(delay_s)
        signal.pthread_kill(target, signal.SIGUSR2)

    thread = threading.Thread(target=hit)
    thread.start()
    try:
        begun.set()
        yield
    finally:
        done.set()
        # The signal may come in here or in `join`: once it came there is no other.
        while thread.is_alive():
            try:
                thread.join()
            except Hit:
                continue


class Aim:
    """When the next signal comes: at any moment of a call, however long calls take on this machine."""

    def __init__(self, *seed: str) -> None:
        self._chance, self._longest_s = random.Random(" ".join(seed)), 0.008

    def delay_s(self) -> float:
        """For the next call."""
        return self._chance.random() * self._longest_s

    def hit(self) -> None:
        """It came before the call had ended: the next may come later."""
        self._longest_s *= 1.1

    def missed(self) -> None:
        """The call was faster: the next has to come sooner."""
        self._longest_s *= 0.9


def _create(client: ringlog.Client, topic: str, payload: bytes) -> None:
    client.topics.create(f"{topic}-{payload.decode()}")


def _append(client: ringlog.Client, topic: str, payload: bytes) -> None:
    client.append(topic, payload)


def _send(client: ringlog.Client, topic: str, payload: bytes) -> None:
    with client.producer(topic, linger_ms=0) as producer:
        producer.send(payload)
        producer.flush()


def _keyed(client: ringlog.Client, topic: str, payload: bytes) -> None:
    client.append_many(topic, [payload], idempotency_key=payload.decode())


def _read(client: ringlog.Client, topic: str, _payload: bytes) -> None:
    for _ in client.reader(topic).pages(100):
        pass


def _claim(client: ringlog.Client, topic: str, _payload: bytes) -> None:
    client.queue(f"{topic}-q").claim(wait_ms=1)


OPERATIONS: list[Callable[[ringlog.Client, str, bytes], None]] = [_create, _append, _send, _keyed, _read]


@pytest.mark.timeout(120)
@pytest.mark.parametrize("transport", ["ring", "ipc"])
@pytest.mark.parametrize("operation", OPERATIONS)
def test_an_interrupt_at_any_moment_is_survived_or_said(
    ringlog_engine, ringlog_topic, hits, operation, transport
) -> None:
    """CL-2: whoever was interrupted goes on with the client, or is told by type to make a new one; what was
    acked is there once, what was interrupted at most once, and closing comes back."""
    topic = ringlog_topic()
    aim = Aim(operation.__name__, transport)
    acked: list[bytes] = []
    interrupted: list[bytes] = []
    ends = Counter[str]()
    with ringlog.connect(ringlog_engine.url, wait=10) as steady:
        steady.append(topic, b"first")
        acked.append(b"first")
        for round_number in range(ROUNDS):
            payload, after = b"%d" % round_number, b"after-%d" % round_number
            client = ringlog.connect(ringlog_engine.url, transport=transport)
            try:
                with one_hit(aim.delay_s()):
                    operation(client, topic, payload)
                ends["was faster"] += 1
                aim.missed()
                acked.append(payload)
            except Hit:
                interrupted.append(payload)
                aim.hit()
                try:
                    client.append(topic, after)
                    ends["went on"] += 1
                    acked.append(after)
                except Interrupted:
                    ends["ended"] += 1
                    with pytest.raises(Interrupted) as told:
                        client.append(topic, after)
                    assert told.value.detail["by"] == "Hit"
            began = time.monotonic()
            client.close(5)
            assert time.monotonic() - began < CLOSE_S
        found = Counter(
            payload
            for page in steady.reader(topic).pages(1_000)
            for piece in page.batches
            for payload in piece.payloads()
        )
    doubled = {payload for payload, count in found.items() if count > 1}
    if operation in {_create, _read}:
        acked = [payload for payload in acked if not payload.isdigit()]
    assert not doubled
    assert not set(acked) - set(found)
    assert not set(found) - set(acked) - set(interrupted)
    assert ends["went on"] + ends["ended"], f"no signal hit anything: {ends}"


def interrupted_at(call: Callable[[], object], number: int) -> bool:
    """Run it with Hit raised where its so manieth function begins or C function ends, which is where the
    interpreter looks for signals; False when it has fewer."""
    left = number

    def on_event(frame: FrameType, event: str, _: object) -> None:
        nonlocal left
        file = frame.f_code.co_filename
        if event in {"call", "c_return"} and ("ringlog" in file or "contextlib" in file):
            left -= 1
            if left == 0:
                sys.setprofile(None)
                raise Hit(event, frame.f_code.co_qualname, frame.f_lineno)

    sys.setprofile(on_event)
    try:
        call()
    except Hit as hit:
        held.append(hit)
    finally:
        sys.setprofile(None)
    return left <= 0


held: deque[Hit] = deque(maxlen=3)
"""With their tracebacks, as a notebook keeps the last ones: what these hold must not be a lock."""


@pytest.mark.interpreted
@pytest.mark.timeout(180)
@pytest.mark.parametrize("operation", [_append, _send, _claim])
def test_a_hit_between_any_two_calls_leaves_no_lock_taken(ringlog_engine, ringlog_topic, operation) -> None:
    """CL-2: at each function that is called, once, as a signal's exception may come there."""
    topic, ends = ringlog_topic(), Counter[str]()
    with ringlog.connect(ringlog_engine.url, wait=10) as steady:
        steady.topics.create(f"{topic}-q", type="queue")
        steady.append(topic, b"first")
    for number in count(1):
        client = ringlog.connect(ringlog_engine.url)
        client.append(topic, b"warm")
        if not interrupted_at(lambda c=client: operation(c, topic, b"x"), number):
            client.close(5)
            break
        assert not client._shell.lock._is_owned(), held[-1]
        try:
            client.append(topic, b"after")
            ends["went on"] += 1
        except Interrupted as told:
            ends["ended by " + told.detail["by"]] += 1
        began = time.monotonic()
        client.close(5)
        assert time.monotonic() - began < CLOSE_S, number
    held.clear()
    assert ends["went on"] > 3
    assert ends["ended by Hit"] > 3


@pytest.mark.timeout(60)
def test_a_wait_that_was_interrupted_leaves_the_client_whole(ringlog_engine, ringlog_topic, hits) -> None:
    """Ctrl-C at a tailer that waits, as in a notebook: the next call goes on."""
    topic = ringlog_topic()
    with ringlog.connect(ringlog_engine.url, wait=10) as client:
        client.append(topic, b"1")
        tailer = client.tailer(topic)
        assert tailer.next(5) is not None
        for _ in range(5):
            with pytest.raises(Hit), one_hit(0.15):
                tailer.next(30)
        client.append(topic, b"2")
        item = tailer.next(5)
        assert item is not None
        assert item.bytes() == [b"2"]


@pytest.mark.interpreted
@pytest.mark.timeout(60)
def test_everybody_is_told_of_work_that_was_torn(ringlog_engine, ringlog_topic, hits, monkeypatch) -> None:
    """Hit in the middle of a turn: tickets fail with an unknown outcome, other threads come back."""
    client = ringlog.connect(ringlog_engine.url, wait=10)
    producer = client.producer(ringlog_topic(), linger_ms=60_000)
    ticket = producer.send(b"x")
    found: list[BaseException] = []

    def other() -> None:
        try:
            ticket.result(30)
        except RinglogError as e:
            found.append(e)

    thread = threading.Thread(target=other)
    thread.start()

    next_ns, here = client._shell.session.timers.next_ns, threading.current_thread()

    def torn() -> int:
        if threading.current_thread() is here:  # the client's own thread looks at its timers too
            raise Hit
        return next_ns()

    monkeypatch.setattr(client._shell.session.timers, "next_ns", torn)
    with pytest.raises(Hit):
        producer.send_many([b"y"])
    monkeypatch.undo()
    thread.join(20)
    assert not thread.is_alive()
    assert [type(e) for e in found] == [Interrupted]
    with pytest.raises(Interrupted):
        producer.send(b"z")
    assert not producer.close().is_complete
    client.close()


@pytest.mark.timeout(60)
def test_leaving_a_block_after_an_interrupt_raises_the_interrupt(ringlog_engine, ringlog_topic, hits) -> None:
    """Not what the torn client has to say: `except KeyboardInterrupt` must find it."""

    def interrupted_program() -> None:
        with (
            ringlog.connect(ringlog_engine.url, wait=10) as client,
            client.producer(ringlog_topic()) as producer,
        ):
            producer.send(b"x")
            with client._shell.lock:
                client._shell.mark_interrupted(Hit())
            raise Hit

    with pytest.raises(Hit):
        interrupted_program()


@pytest.mark.timeout(120)
@pytest.mark.parametrize("transport", ["ring", "ipc"])
def test_interrupted_claims_count_no_delivery(ringlog_engine, ringlog_topic, hits, transport) -> None:
    """Ctrl-C at a claim, at any moment: what it was given is ready for others at once, for the first time."""
    topic, aim, ends = ringlog_topic(), Aim(transport), Counter[str]()
    with ringlog.connect(ringlog_engine.url, wait=10) as steady:
        steady.topics.create(topic, type="queue")
        others = steady.queue(topic, node="others")
        client = ringlog.connect(ringlog_engine.url, wait=10, transport=transport)
        queue = client.queue(topic, node="w")
        for n in range(ROUNDS):
            putting = threading.Thread(target=others.put, args=(b"%d" % n,))
            jobs = []
            try:
                with one_hit(aim.delay_s()):
                    putting.start()
                    jobs = queue.claim(wait_ms=20_000, lease_ms=3_600_000)
                aim.missed()
            except Hit:
                ends["interrupted"] += 1
                aim.hit()
            while putting.is_alive():
                with suppress(Hit):
                    putting.join()
            try:
                assert [job.deliveries for job in jobs] == [1] * len(jobs)
                assert queue.ack(jobs).is_complete
            except Interrupted:
                ends["ended"] += 1
                client.close(1)
                client = ringlog.connect(ringlog_engine.url, wait=10, transport=transport)
                queue = client.queue(topic, node="w")
        # A signal may hit between the client's last line and the program's own: then nobody can help.
        kept = ends["ended"] + 2
        wait_until(lambda: others.stats().in_flight <= kept, 10, "interrupted claims to be given back")
        assert ends["interrupted"] > kept
        jobs = others.claim(ROUNDS)
        assert [job.deliveries for job in jobs] == [1] * len(jobs)
        client.close()
