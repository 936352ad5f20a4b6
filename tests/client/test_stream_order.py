"""W9: one producer's records keep their order, whoever refuses which of them for the moment.

The real Stream stamps and the real Admission numbers; what lies between them is played by the test: requests
that are refused before any shard sees them, shards that refuse, answers that overtake one another, engines
that start again with frames on their way.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from actors.wal_shard.commit.admission import Admission, AdmissionLimits
from ringlog.client.write.batch import Batch
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
from ringlog.topic.state import ShardTopic

TOPIC = TopicInfo("t", 5, 1, 0, 0, False, {})
ROUNDS_MAX = 300


@dataclass
class Part:
    """Frames of a run on their way, and what became of them when somebody said so."""

    run: OutboundFrames
    start: int
    stop: int
    fate: Any = None
    has_arrived: bool = False


class Engine:
    """Links and shard in one: the host of one Stream."""

    timeout_ms = 60_000
    generation = 1

    def __init__(self) -> None:
        self.clock, self.timers, self.links = ManualClock(), Timers(), self
        self.retries = 0
        self.has_no_room = False
        """What is submitted goes nowhere."""
        self.parts: deque[Part] = deque()
        self.admission = Admission(AdmissionLimits())
        self.shard = ShardTopic(5, 1, "t", TopicConfig.parse({"durability": "ephemeral"}, "t"))
        self.appended: list[bytes] = []
        self.stream = Stream(self, "t")

    # -- what a Stream asks of its host -----------------------------------------------------------------

    def resolve(self, topic: str, *, create: bool) -> Pending[TopicInfo]:
        return resolved(TOPIC)

    def forget(self, topic: str) -> None:
        pass

    def submit(self, shard: int, run: OutboundFrames) -> None:
        """In two messages where there is enough for that, as through a gateway."""
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
        """The oldest message reaches the shard."""
        if part := self.coming:
            part.has_arrived = True
            part.fate = self.admit(bytearray(part.run.view(part.start, part.stop)))

    def is_full(self, shard: int) -> bool:
        return self.has_no_room

    def turn_away(self, **detail: Any) -> None:
        """The oldest message is refused by somebody before the shard."""
        if part := self.coming:
            part.has_arrived, part.fate = True, Throttled("too much in flight", **detail)

    def doubt(self, is_appended: int) -> None:
        """The oldest message is appended or not, and nobody can say which: its way there came to an end."""
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
        """An answer comes, not necessarily the oldest one; one run's come in the order of its frames."""
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
        """Whatever was not answered is sent again; the shard has what it has, and forgot what it refused."""
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
    """Sends records that are numbers."""

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

    def finish(self) -> None:
        """No more trouble: everything is appended in the end."""
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
    sender.finish()
    return sender


@settings(max_examples=400, deadline=None)
@given(st.lists(ACTS, max_size=60))
def test_records_are_in_the_order_of_sending_whatever_is_refused_and_by_whom(acts):
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
    # Appended, the answer lost, and then turned away by somebody who does not know that.
    [("send", 1), ("arrive",), ("restart",), ("turn_away",)],
    [("send", 3), ("arrive",), ("restart",), ("turn_away",), ("arrive",), ("send", 1), ("answer", 0),
     ("restart",)],
    # Nobody knows of the first one; the second was refused because it was not there, or appended behind it.
    [("send", 1), ("send", 1), ("doubt", 0), ("arrive",)],
    [("send", 1), ("send", 1), ("doubt", 1), ("arrive",)],
    # Answers in another order than the frames.
    [("send", 1), ("send", 1), ("turn_away",), ("turn_away",), ("answer", 1), ("answer", 0)],
    # The last frame on its way is refused when others may go again already, and new ones wait.
    [("send", 1), ("send", 1), ("turn_away",), ("arrive",), ("answer", 0), ("wait",), ("send", 1),
     ("answer", 0)],
]  # fmt: skip


@pytest.mark.parametrize("acts", TROUBLE)
def test_trouble_costs_a_second_way_and_no_order(acts):
    sender = play(acts)
    assert sender.engine.appended == [n.to_bytes(8, "big") for n in range(sender.sent)]


@pytest.mark.interpreted
def test_a_shard_that_does_not_look_at_what_follows_is_noticed(monkeypatch):
    """Without W9 the same trouble changes places: the test above says something."""

    opens = Admission.open

    def forgets(*args):
        intake = opens(*args)
        intake.checked.follows = None
        return intake

    monkeypatch.setattr(Admission, "open", forgets)
    for acts in TROUBLE[:3]:
        sender = play(acts)
        assert sender.engine.appended != [n.to_bytes(8, "big") for n in range(sender.sent)]


def test_what_waits_for_another_try_fails_with_the_reason_when_its_time_is_over():
    """The engine said why; a timeout would say less."""
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
def test_who_is_throttled_comes_again_no_earlier_than_told(asked_ms):
    """G-6: and then is let in, under a new number, once."""
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


def test_who_is_throttled_beyond_its_time_is_told_why():
    """G-6: within its deadline, else raised."""
    sender = Sender(Engine())
    sender.send(1)
    sender.engine.clock.advance(59.5)
    sender.engine.turn_away(reason="pressure", retry_after_ms=1_000)
    sender.engine.answer()
    error = sender.batches[0].error
    assert isinstance(error, Throttled)
    assert (error.detail["reason"], error.outcome) == ("pressure", "not_applied")


def test_who_waited_for_room_alone_is_told_that_the_intake_is_full():
    """BP-4: nothing of it was sent, so it is certain that nothing was applied."""
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


def test_what_may_have_been_appended_is_not_said_to_be_lost():
    """Sent, the engine restarted, turned away until its time is over: nobody knows what became of it."""
    sender = Sender(Engine())
    sender.send(1)
    sender.engine.restart()
    sender.engine.turn_away()
    sender.engine.clock.advance(59.995)
    sender.engine.answer()
    assert isinstance(sender.batches[0].error, Throttled)
    assert sender.batches[0].error.outcome == "unknown"


def test_what_is_in_doubt_and_given_up_does_not_hold_up_what_waits_behind_it():
    """Its time is over while it waits for its next way; the other one, also in doubt, is younger."""
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


def test_one_that_is_given_up_does_not_hold_up_the_others():
    """Its answer never comes: later ones go on, and it is not taken any more."""
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
    """The first frame as it was on its way: its shipment let the bytes go when it was given up."""
    (data, offsets) = encode_frames([(0).to_bytes(8, "big")], 1, topic_id=0)
    run = OutboundFrames("t", data, offsets, 0)
    run.stamp(topic_id=5, epoch=1, producer_id=sender.engine.stream.producer_id, first_producer_seq=1)
    return data


class Door:
    """Stands in for the connection to a gateway: answers come in the order the test likes."""

    def __init__(self) -> None:
        self.asked: list[tuple[Any, Pending[Any]]] = []

    def request(self, message: Any, deadline_ns: int, attachment: Any, *, is_patient: bool) -> Pending[Any]:
        self.asked.append((message, Pending()))
        return self.asked[-1][1]


class Kept(OutboundFrames):
    """A run that remembers its fate."""

    __slots__ = ("fates",)

    def on_entries(self, first, entries):
        self.fates += [(first, len(entries), "entries")]

    def on_failed(self, first, count, error):
        self.fates += [(first, count, type(error).__name__)]


@pytest.mark.interpreted
def test_a_refusal_that_overtakes_an_answer_is_that_of_its_own_frames():
    """A gateway refuses at once while it still waits for the shard: the frames before are not meant."""
    links = GatewayLinks.__new__(GatewayLinks)
    links._outbox, links._parts, links._is_sending = deque(), {}, False
    links._window_bytes = links._window_appends = 0
    links._peer = door = Door()
    buffer, offsets = encode_frames([b"x" * 400_000] * 5, 1, topic_id=0)
    run = Kept("t", buffer, offsets, 0)
    run.fates = []
    links.submit(0, run)
    assert [message.frames for message, _ in door.asked] == [2, 2, 1]
    door.asked[1][1].fail(Throttled("too much in flight"))
    assert run.fates == []
    entries = np.zeros((2, 8), dtype=np.uint64)
    reply = type("Reply", (), {"message": type("Appended", (), {"entries": entries.tobytes()})})
    door.asked[0][1].resolve(reply)
    assert run.fates == [(0, 2, "entries"), (2, 2, "Throttled")]
    door.asked[2][1].fail(NotReady("away"))
    assert run.fates[-1] == (4, 1, "NotReady")
    assert links._parts == {}
    assert links._window_appends == 0
