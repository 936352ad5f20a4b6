"""Exceptions of signal handlers (Ctrl-C) at any moment of a client's work.

The client never hangs, never duplicates a record, and never reports a wrong result. A thread sends real
signals at random times. They arrive in system calls, in Python code and in between.
"""

from __future__ import annotations

import gc
import random
import signal
import subprocess
import sys
import textwrap
import threading
import time
from collections import Counter, deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from itertools import count
from pathlib import Path
from types import FrameType

import pytest

import ringlog
from ringlog.errors import Interrupted, RinglogError
from ringlog.testing.children import debug_environ
from ringlog.testing.pytest_plugin import ringlog_engine, ringlog_topic
from ringlog.testing.real_engine import wait_until

__all__ = ["ringlog_engine", "ringlog_topic"]

# The garbage collector frees objects that an interrupt left incomplete, and Python warns about them. An
# exception in such a finalizer is not raised at all.
pytestmark = [
    pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning", "ignore::ResourceWarning"),
    pytest.mark.usefixtures("quick_collections"),
]

ROUNDS = 60
SIGNALS = 400
CLOSE_S = 8.0
"""Far longer than a close takes, and far shorter than the timeout of the test."""


class Hit(KeyboardInterrupt):
    """The exception of the test's signal handler.

    It has its own type, so that a real Ctrl-C still ends the tests.
    """


@pytest.fixture
def hits() -> Iterator[None]:
    """Install a handler for SIGUSR2 that raises `Hit`, as SIGINT raises KeyboardInterrupt."""

    def on_signal(_signal: int, _frame: object) -> None:
        raise Hit

    before = signal.signal(signal.SIGUSR2, on_signal)
    yield
    signal.signal(signal.SIGUSR2, before)
    gc.collect()


@contextmanager
def one_hit(delay_s: float) -> Iterator[None]:
    """Send one signal to this thread after `delay_s` seconds, or when the block ends if that is earlier."""
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
        # The signal may arrive here or in `join`. No other signal follows it.
        while thread.is_alive():
            try:
                thread.join()
            except Hit:
                continue


def test_no_interrupt_is_lost(ringlog_engine, topic, transport):
    """A handler may run where Python ignores its exception: in the finalizer of an object of pyzmq."""
    chance, fired, raised = random.Random(transport), 0, 0

    def on_signal(_signal: int, _frame: object) -> None:
        nonlocal fired
        fired += 1
        raise Hit

    def connect() -> ringlog.Client:
        return ringlog.connect(ringlog_engine.url, wait=20, transport=transport)

    before = signal.signal(signal.SIGUSR2, on_signal)
    client = connect()
    try:
        client.topics.create(topic)
        while fired < SIGNALS:
            goal = fired + 1
            try:
                with one_hit(chance.random() * 0.003):
                    while fired < goal:
                        client.topics.state(topic)
            except Hit:
                raised += 1
            try:
                client.topics.state(topic)
            except Interrupted:
                client.close()
                client = connect()
    finally:
        signal.signal(signal.SIGUSR2, before)
        client.close()
    assert raised == fired, f"{fired - raised} of {fired} interrupts were lost"


class Aim:
    """Chooses delays of signals that match the duration of calls on this machine."""

    def __init__(self, *seed: str) -> None:
        self._chance, self._longest_s = random.Random(" ".join(seed)), 0.008

    def delay_s(self) -> float:
        """Return a delay for the next call, in seconds."""
        return self._chance.random() * self._longest_s

    def hit(self) -> None:
        """Record that the signal came before the call ended: the next delay may be longer."""
        self._longest_s *= 1.1

    def missed(self) -> None:
        """Record that the call ended before the signal came: the next delay must be shorter."""
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
def test_an_interrupt_at_any_moment_is_survived_or_reported(
    ringlog_engine, topic, hits, operation, transport
) -> None:
    """After an interrupt the client continues to work, or every call raises `Interrupted`.

    An acked record is stored once, an interrupted one at most once, and `close` returns.
    """
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
    """Run the call and raise `Hit` at its `number`-th event.

    Return False if the call has fewer events.

    Events are the starts of functions and the ends of C functions: there the interpreter checks for signals.
    """
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
"""The last interrupts with their tracebacks, as a notebook keeps them. They must not keep a lock taken."""


@pytest.mark.interpreted
@pytest.mark.timeout(180)
@pytest.mark.parametrize("operation", [_append, _send, _claim])
def test_an_interrupt_between_calls_leaves_no_lock_taken(ringlog_engine, ringlog_topic, operation) -> None:
    """The test raises `Hit` once at each event of the operation."""
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
def test_an_interrupted_wait_leaves_the_client_usable(client, topic, hits) -> None:
    """Ctrl-C during a tailer's wait, as in a notebook: the next call works."""
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
def test_an_interrupt_inside_the_client_fails_waits(ringlog_engine, ringlog_topic, hits, monkeypatch) -> None:
    """`Hit` arrives in the middle of a pass of the client.

    Tickets fail with an unknown outcome, and other threads return.
    """
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
        if threading.current_thread() is here:  # the client's own thread reads its timers too
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
    """The error of the interrupted client must not replace it, since programs catch `KeyboardInterrupt`."""

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
def test_an_interrupted_claim_counts_no_delivery(ringlog_engine, ringlog_topic, hits, transport) -> None:
    """After Ctrl-C at any moment of a claim, its jobs are ready at once, with their first delivery."""
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
        # A signal may arrive after the claim returned and before the program stored its result. The client
        # cannot release that lease.
        kept = ends["ended"] + 2
        wait_until(lambda: others.stats().in_flight <= kept, 10, "interrupted claims to be given back")
        assert ends["interrupted"] > kept
        jobs = others.claim(ROUNDS)
        assert [job.deliveries for job in jobs] == [1] * len(jobs)
        client.close()


FIRST_USE = """
    import gc, os, sys
    import ringlog.client

    class Hit(KeyboardInterrupt):
        pass

    def use():
        client = ringlog.connect(sys.argv[1], client_id="c")
        for begin in (
            lambda: client.queue("q"), lambda: client.reader("t"), lambda: client.tailer("t"),
            lambda: client.watch("t"), lambda: client.group("t", "g"),
            lambda: client.numbered_producer("t", 7),
        ):
            begin()
        client.close(0)

    def interrupted_at(call):
        calls = 0

        def count(*_):
            nonlocal calls
            calls += 1
            if calls == call:
                sys.setprofile(None)
                raise Hit

        sys.setprofile(count)
        try:
            use()
        except Hit:
            pass
        sys.setprofile(None)
        gc.collect()
        use()

    for call in map(int, sys.argv[2:]):
        pid = os.fork()
        if pid == 0:
            interrupted_at(call)
            os._exit(0)
        print(call, os.waitpid(pid, 0)[1])
"""
FIRST_USE_CALLS = [200, 600, 2_000, 4_000, 6_000, 8_000, 10_000]


@pytest.mark.slow
def test_a_client_whose_first_use_was_interrupted_works_the_second_time(tmp_path: Path) -> None:
    """An exception during the import of a compiled module would end the process, then or at the next attempt.

    A profile hook of the interpreter raises the exception at a counted call. Signals and exceptions of other
    threads occur at such points.
    """
    program = [sys.executable, "-c", textwrap.dedent(FIRST_USE), f"ringlog://{tmp_path}"]
    done = subprocess.run(
        [*program, *map(str, FIRST_USE_CALLS)],
        capture_output=True, text=True, timeout=50, check=False, env=debug_environ(),
    )  # fmt: skip
    assert done.stdout.splitlines() == [f"{call} 0" for call in FIRST_USE_CALLS], done.stderr
