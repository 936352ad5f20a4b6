"""Records of one producer keep their order, whichever process refuses some of their frames.

A frame that follows another one of its producer is appended directly after it, or refused (W9).

The test uses the real Stream, which stamps frames, and the real Admission, which assigns seqs. It simulates
everything in between: requests that are refused before they reach a shard, refusals by shards, reordered
replies, and restarts of the engine with frames in flight.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ringlog.actors.wal_shard.commit.admission import Admission, AdmissionLimits
from ringlog.actors.wal_shard.commit.total_bytes import TotalBytes
from ringlog.client.requests.results import FlushReport
from ringlog.client.write.batch import Batch
from ringlog.client.write.producer_core import ProducerCore
from ringlog.client.write.producer_options import ProducerOptions
from ringlog.client.write.stream import Stream
from ringlog.envelope.messages import TopicInfo
from ringlog.errors import NotReady, RequestTimeout, ShuttingDown, Throttled
from ringlog.frame import batch as frames
from ringlog.frame import layout
from ringlog.frame.codec import encode_frames
from ringlog.frame.settle_entry import S_COUNT_STATUS, entry_error
from ringlog.link.channel.outbound_frames import OutboundFrames
from ringlog.link.futures import Pending, resolved
from ringlog.link.gateway_links import GatewayLinks
from ringlog.link.timers import Timers
from ringlog.testing.clock import ManualClock
from ringlog.topic.config import TopicConfig
from ringlog.topic.directory import TopicDirectory
from ringlog.topic.state import ShardTopic

TOPIC = TopicInfo("t", 5, 1, 0, 0, False, {})
ROUNDS_MAX = 300


@dataclass
class Part:
    """Consecutive frames in flight, and their result once it is known."""

    run: OutboundFrames
    start: int
    stop: int
    fate: Any = None
    has_arrived: bool = False


class Engine:
    """A fake of the client's links and of the shard. It is the host of one Stream."""

    timeout_ms = 60_000
    generation = 1

    def __init__(self) -> None:
        self.clock, self.timers = ManualClock(), Timers()
        self.links = self.topics = self
        self.retries = 0
        self.has_no_room = False
        """If True, submitted frames are sent nowhere."""
        self.parts: deque[Part] = deque()
        self.admission = Admission(AdmissionLimits(), TotalBytes(TopicDirectory(0, 1), 0, lambda own: 0))
        self.shard = ShardTopic(5, 1, "t", TopicConfig.parse({"durability": "ephemeral"}, "t"))
        self.appended: list[bytes] = []
        self.stream = Stream(self, "t")

    # -- what a Stream asks of its host -----------------------------------------------------------------

    def resolve(self, topic: str, *, create: bool) -> Pending[TopicInfo]:
        return resolved(TOPIC)

    def forget(self, topic: str) -> None:
        pass

    def submit(self, shard: int, run: OutboundFrames) -> None:
        """Send the frames in two messages if there are enough, as a gateway connection does."""
        if self.has_no_room:
            return
        middle = run.settled + (run.count - run.settled + 1) // 2
        for start, stop in ((run.settled, middle), (middle, run.count)):
            if stop > start:
                self.parts.append(Part(run, start, stop))
        run.pushed = run.count

    # -- what happens to frames -------------------------------------------------------------------------

    @property
    def coming(self) -> Part | None:
        return next((part for part in self.parts if not part.has_arrived), None)

    def arrive(self) -> None:
        """Deliver the oldest message to the shard."""
        if part := self.coming:
            part.has_arrived = True
            part.fate = self.admit(bytearray(part.run.view(part.start, part.stop)))

    def is_full(self, shard: int) -> bool:
        return self.has_no_room

    def turn_away(self, **detail: Any) -> None:
        """Refuse the oldest message before it reaches the shard."""
        if part := self.coming:
            part.has_arrived, part.fate = True, Throttled("too many requests or bytes in flight", **detail)

    def doubt(self, is_appended: int) -> None:
        """Append the oldest message or drop it, and report an unknown outcome.

        The engine stopped in between.
        """
        if part := self.coming:
            part.has_arrived = True
            if is_appended:
                self.admit(bytearray(part.run.view(part.start, part.stop)))
            part.fate = ShuttingDown("the engine is stopping", outcome="unknown")

    def admit(self, buffer: bytearray) -> Any:
        batch = frames.scan_checked(buffer)
        intake = self.admission.open(buffer, batch)
        self.admission.admit(intake, {5: self.shard}, self.clock.now_us(), None)
        assert not frames.malformed(batch.words).any(), "what is stored says nothing of its way"
        for row in range(len(batch)):
            word = int(intake.entries[row, S_COUNT_STATUS])
            if not word >> 32:
                start = int(batch.offsets[row]) + layout.HEADER_BYTES + 8
                self.appended.append(bytes(buffer[start : start + 8]))
        return intake.entries

    def close(self) -> None:
        self.admission.is_volatile_closed = True

    def open(self) -> None:
        self.admission.is_volatile_closed = False

    def answer(self, which: int = 0) -> bool:
        """Deliver one reply, not necessarily the oldest. Replies of one run keep the order of its frames."""
        known = [p for p in self.parts if p.has_arrived and p.run.settled == p.start]
        if not known:
            return False
        part = known[which % len(known)]
        self.parts.remove(part)
        if isinstance(part.fate, Exception):
            part.run.fail_next(part.stop - part.start, part.fate)
        else:
            part.run.take_entries(part.fate)
        return True

    def restart(self) -> None:
        """Restart the shard: unanswered frames are sent again.

        The shard keeps what it appended and forgets refusals.
        """
        runs = list(dict.fromkeys(part.run for part in self.parts if not part.run.is_abandoned))
        self.parts.clear()
        self.generation += 1
        for _, producer in self.shard.producers.items():  # noqa: PERF102  not a dict
            producer.refused_to = 0
        for run in runs:
            run.rewind()
            self.stream.resend_displaced(run)

    def wait(self) -> None:
        self.clock.advance(0.05)
        self.timers.fire(self.clock.monotonic_ns())


@dataclass
class Sender:
    """Sends records that contain consecutive numbers."""

    engine: Engine
    sent: int = 0
    batches: list[Batch] = field(default_factory=list)

    def send(self, count: int) -> None:
        payloads = [n.to_bytes(8, "big") for n in range(self.sent, self.sent + count)]
        self.sent += count
        batch = Batch(self.engine.stream)
        batch.expect_frames(count)
        self.engine.stream.send_parts(batch, [encode_frames(payloads, 1, topic_id=0)])
        self.batches.append(batch)

    def check_counts(self) -> None:
        """Check that the stream reports each record of a frame that is not settled, once."""
        stream = self.engine.stream
        assert stream.open_batches() == {batch for batch in self.batches if not batch.is_done}
        assert sum(batch.records for batch in stream.open_batches()) == stream.pending_records
        assert sum(stream.unfinished()) == sum(batch.missing for batch in self.batches)

    def finish(self) -> None:
        """End all trouble and check that everything is appended."""
        self.engine.open()
        for _ in range(ROUNDS_MAX):
            if all(batch.is_done for batch in self.batches):
                return
            while self.engine.coming:
                self.engine.arrive()
            while self.engine.answer():
                pass
            self.engine.wait()
        raise AssertionError("frames were never settled")


ACTS = st.one_of(
    st.tuples(st.just("send"), st.integers(1, 5)),
    st.tuples(st.just("answer"), st.integers(0, 5)),
    st.tuples(st.just("doubt"), st.integers(0, 1)),
    st.tuples(st.sampled_from(["arrive", "arrive ", "turn_away", "close", "open", "restart", "wait"])),
)


def play(acts: list[Any]) -> Sender:
    sender = Sender(Engine())
    for name, *args in acts:
        getattr(sender if name == "send" else sender.engine, name.strip())(*args)
        sender.check_counts()
    sender.finish()
    assert sender.engine.stream.unfinished() == (0, 0)
    return sender


@settings(max_examples=400, deadline=None)
@given(st.lists(ACTS, max_size=60))
def test_records_keep_their_order_whatever_is_refused(acts):
    sender = play(acts)
    assert sender.engine.appended == [n.to_bytes(8, "big") for n in range(sender.sent)]
    seqs = [seq for batch in sender.batches for seq in batch.result().seqs.tolist()]
    assert seqs == list(range(1, sender.sent + 1))


TROUBLE: list[list[Any]] = [
    [("send", 1), ("send", 1), ("turn_away",), ("arrive",)],
    [("send", 1), ("arrive",), ("answer", 0), ("send", 1), ("send", 1), ("close",), ("arrive",), ("open",),
     ("arrive",)],
    [("send", 4), ("turn_away",), ("arrive",), ("answer", 0), ("send", 2)],
    [("send", 1), ("send", 2), ("turn_away",), ("restart",), ("arrive",), ("send", 1)],
    # The frame is appended, its reply is lost, and the retry is refused by a process that does not know of
    # the append.
    [("send", 1), ("arrive",), ("restart",), ("turn_away",)],
    [("send", 3), ("arrive",), ("restart",), ("turn_away",), ("arrive",), ("send", 1), ("answer", 0),
     ("restart",)],
    # The outcome of the first frame is unknown. The second one is refused as out of order, or appended after
    # it.
    [("send", 1), ("send", 1), ("doubt", 0), ("arrive",)],
    [("send", 1), ("send", 1), ("doubt", 1), ("arrive",)],
    # Replies arrive in another order than the frames were sent.
    [("send", 1), ("send", 1), ("turn_away",), ("turn_away",), ("answer", 1), ("answer", 0)],
    # The last frame in flight is refused when earlier ones may be sent again and new ones wait.
    [("send", 1), ("send", 1), ("turn_away",), ("arrive",), ("answer", 0), ("wait",), ("send", 1),
     ("answer", 0)],
]  # fmt: skip


@pytest.mark.parametrize("acts", TROUBLE)
def test_refusals_cost_a_retry_and_never_the_order(acts):
    sender = play(acts)
    assert sender.engine.appended == [n.to_bytes(8, "big") for n in range(sender.sent)]


@pytest.mark.interpreted
def test_a_shard_that_ignores_the_order_of_frames_is_detected(monkeypatch):
    """This proves that the previous test can fail: without W9 the same events reorder records."""

    opens = Admission.open

    def forgets(*args):
        intake = opens(*args)
        intake.checked.follows = None
        return intake

    monkeypatch.setattr(Admission, "open", forgets)
    for acts in TROUBLE[:3]:
        sender = play(acts)
        assert sender.engine.appended != [n.to_bytes(8, "big") for n in range(sender.sent)]


def test_a_frame_that_waits_for_a_retry_fails_with_the_refusal_at_its_timeout():
    """The refusal of the engine contains more information than a timeout."""
    sender = Sender(Engine())
    sender.send(1)
    sender.engine.clock.advance(1.0)
    sender.send(1)
    sender.engine.turn_away()
    sender.engine.answer()
    sender.engine.clock.advance(59.5)
    sender.engine.timers.fire(sender.engine.clock.monotonic_ns())
    assert isinstance(sender.batches[0].error, Throttled)
    assert sender.engine.stream.pending_records == 1, "the other one is still on its way"


@pytest.mark.parametrize("asked_ms", [400, 1_000])
def test_a_throttled_frame_is_retried_no_earlier_than_requested(asked_ms):
    """The retry has a new producer number and is appended once."""
    sender = Sender(Engine())
    sender.send(1)
    sender.engine.turn_away(reason="pressure", retry_after_ms=asked_ms)
    sender.engine.answer()
    waited_ms = 0
    while not sender.engine.parts:
        sender.engine.wait()
        waited_ms += 50
    assert asked_ms <= waited_ms <= 1.25 * asked_ms + 50
    sender.finish()
    assert sender.engine.appended == [(0).to_bytes(8, "big")]
    assert sender.engine.stream.retries == 1


def test_a_frame_throttled_beyond_its_timeout_fails_with_the_reason():
    """If `retry_after_ms` ends after the deadline, the client raises the error at once."""
    sender = Sender(Engine())
    sender.send(1)
    sender.engine.clock.advance(59.5)
    sender.engine.turn_away(reason="pressure", retry_after_ms=1_000)
    sender.engine.answer()
    error = sender.batches[0].error
    assert isinstance(error, Throttled)
    assert (error.detail["reason"], error.outcome) == ("pressure", "not_applied")


def test_a_frame_that_only_waited_for_ring_space_fails_with_ingest_full():
    """No part of it was sent, so the outcome `not_applied` is certain."""
    engine = Engine()
    engine.has_no_room = True
    sender = Sender(engine)
    sender.send(1)
    engine.clock.advance(60.1)
    engine.timers.fire(engine.clock.monotonic_ns())
    error = sender.batches[0].error
    assert isinstance(error, Throttled)
    facts = {"reason": "ingest_full", "topic": "t", "retry_after_ms": 1_000, "waited_s": 60.0}
    assert facts.items() <= error.detail.items()
    assert (error.outcome, error.retriable) == ("not_applied", True)


def test_a_frame_that_may_have_been_appended_has_an_unknown_outcome():
    """The frame was sent, the engine restarted, and retries were refused until the timeout."""
    sender = Sender(Engine())
    sender.send(1)
    sender.engine.restart()
    sender.engine.turn_away()
    sender.engine.clock.advance(59.995)
    sender.engine.answer()
    assert isinstance(sender.batches[0].error, Throttled)
    assert sender.batches[0].error.outcome == "unknown"


def test_a_timed_out_frame_in_doubt_does_not_block_later_frames():
    """The first frame times out before its retry. The second one, also in doubt, has time left."""
    sender = Sender(Engine())
    sender.send(1)
    sender.engine.clock.advance(59.9)
    sender.send(1)
    sender.engine.doubt(0)
    sender.engine.answer()
    sender.engine.clock.advance(0.2)
    sender.engine.timers.fire(sender.engine.clock.monotonic_ns())
    sender.engine.doubt(0)
    sender.engine.answer()
    sender.finish()
    assert sender.batches[0].error is not None
    assert sender.batches[0].error.outcome == "unknown"
    assert sender.engine.appended == [(1).to_bytes(8, "big")]


def test_an_abandoned_frame_does_not_block_later_frames():
    """Its reply never comes.

    Later frames are appended, and the shard refuses the abandoned one if it arrives late.
    """
    sender = Sender(Engine())
    sender.send(1)
    lost = sender.engine.parts[0]
    sender.engine.clock.advance(59.0)
    sender.send(1)
    sender.engine.parts.remove(lost)
    sender.engine.arrive()
    sender.engine.answer()
    sender.engine.clock.advance(1.5)
    sender.engine.timers.fire(sender.engine.clock.monotonic_ns())
    sender.finish()
    assert isinstance(sender.batches[0].error, RequestTimeout)
    assert sender.batches[1].error is None
    late = sender.engine.admit(lost_bytes(sender))
    assert isinstance(entry_error(late[0], "t"), NotReady)
    assert sender.engine.appended == [(1).to_bytes(8, "big")]


def lost_bytes(sender: Sender) -> bytearray:
    """Rebuild the first frame as it was sent.

    The client released its bytes when it gave the frame up.
    """
    (data, offsets) = encode_frames([(0).to_bytes(8, "big")], 1, topic_id=0)
    run = OutboundFrames("t", data, offsets, 0)
    run.stamp(topic_id=5, epoch=1, producer_id=sender.engine.stream.producer_id, first_producer_seq=1)
    return data


class Door:
    """A fake connection to a gateway. The test chooses the order of replies."""

    def __init__(self) -> None:
        self.asked: list[tuple[Any, Pending[Any]]] = []

    def request(self, message: Any, deadline_ns: int, attachment: Any, *, is_patient: bool) -> Pending[Any]:
        self.asked.append((message, Pending()))
        return self.asked[-1][1]


class Kept(OutboundFrames):
    """A run of frames that records its results."""

    __slots__ = ("fates",)

    def on_entries(self, first, entries):
        self.fates += [(first, len(entries), "entries")]

    def on_failed(self, first, count, error):
        self.fates += [(first, count, type(error).__name__)]


@pytest.mark.interpreted
def test_a_refusal_that_overtakes_a_reply_applies_to_its_own_frames():
    """A gateway refuses at once while earlier frames still wait for the shard."""
    links = GatewayLinks.__new__(GatewayLinks)
    links._outbox, links._parts, links._is_sending = deque(), {}, False
    links._window_bytes = links._window_appends = 0
    links._peer = door = Door()
    buffer, offsets = encode_frames([b"x" * 400_000] * 5, 1, topic_id=0)
    run = Kept("t", buffer, offsets, 0)
    run.fates = []
    links.submit(0, run)
    assert [message.frames for message, _ in door.asked] == [2, 2, 1]
    door.asked[1][1].fail(Throttled("too many requests or bytes in flight"))
    assert run.fates == []
    entries = np.zeros((2, 8), dtype=np.uint64)
    reply = type("Reply", (), {"message": type("Appended", (), {"entries": entries.tobytes()})})
    door.asked[0][1].resolve(reply)
    assert run.fates == [(0, 2, "entries"), (2, 2, "Throttled")]
    door.asked[2][1].fail(NotReady("away"))
    assert run.fates[-1] == (4, 1, "NotReady")
    assert links._parts == {}
    assert links._window_appends == 0


@pytest.mark.parametrize("records_per_frame", [1, 7])
def test_unfinished_records_of_several_shipments_are_counted_once(records_per_frame):
    """The last frame of a batch may be smaller than the others."""
    engine, parts, count = Engine(), 3, 3 * 70 - 2
    engine.has_no_room = True
    batch = Batch(engine.stream)
    batch.expect_frames(count, records_per_frame)
    payloads = [bytes(8)] * count
    engine.stream.send_parts(
        batch,
        [
            encode_frames(payloads[start : start + 70], records_per_frame, topic_id=0)
            for start in range(0, parts * 70, 70)
        ],
    )
    assert engine.stream.unfinished() == (count, 0)
    assert engine.stream.open_batches() == {batch}


class Session(Engine):
    """The engine as the session of a producer."""

    def __init__(self) -> None:
        super().__init__()
        self.producer_cores: set[ProducerCore] = set()

    def open_stream(self, topic: str, **options: Any) -> Stream:
        return self.stream

    def cached(self, topic: str) -> TopicInfo | None:
        return None


@pytest.mark.interpreted
def test_a_flush_waits_only_for_records_that_were_sent_before():
    """Each record is settled after the next one was sent, so there is always an open one."""
    session = Session()
    core = ProducerCore(session, "t", ProducerOptions())  # type: ignore[arg-type]
    core.add(bytes(8))
    flush = core.wait_settled()
    late = core.wait_settled()
    for n in range(1, 4):
        core.add(n.to_bytes(8, "big"))
        core.flush_open()
        assert flush.is_done == late.is_done == (n > 1)
        session.arrive()
        session.answer()
    assert core.report(flush) == FlushReport(3, 0, 0)
    assert core.stats().pending_records == 1


@pytest.mark.interpreted
def test_a_flush_reports_only_its_own_records_as_unfinished():
    session = Session()
    core = ProducerCore(session, "t", ProducerOptions())  # type: ignore[arg-type]
    core.add(bytes(8))
    flush = core.wait_settled()
    core.add(bytes(8))
    core.add(bytes(8))
    core.flush_open()
    core.add(bytes(8))
    assert core.report(flush) == FlushReport(0, 0, 1)
    assert core.report() == FlushReport(0, 0, 4)
    session.arrive()
    session.answer()
    assert core.report() == FlushReport(1, 0, 3)
