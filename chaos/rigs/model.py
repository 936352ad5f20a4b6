"""What was asked of a shard and what it answered: the model of all classes that drive one without an engine.

Payloads are all different, so that a record tells which frame it came with. Moments are of any clock that
never goes back; a class that asks nothing about moments needs none.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Hashable, Iterable
from dataclasses import dataclass, field
from typing import TypeVar

from chaos.order import Broken


@dataclass(slots=True)
class SentFrame:
    """One frame and its fate."""

    topic: str
    payloads: tuple[bytes, ...]
    topic_id: int = 0
    """Of the topic's life that it was sent to; 0 = it was never sent, or topics have one life."""
    number: int = 0
    """The producer's."""
    is_fsync: bool = True
    frame: bytes = b""
    """As it was sent, where it is to be sent again."""
    first_seq: int = 0
    """Where it is; 0 = not known."""
    sent_at: int = 0
    acked_at: int = 0
    """When its producer was told; 0 = never."""
    is_shown: bool = False
    """A reader saw it after a start; of class `fsync` that is as good as an ack (RF-42)."""
    is_refused: bool = False
    """Its producer was told that it is not there."""

    def __str__(self) -> str:
        return f"frame {self.number} (from {self.first_seq})"

    @property
    def is_owed(self) -> bool:
        """Somebody may have acted on it."""
        return self.acked_at > 0 or self.is_shown

    @property
    def seqs(self) -> range:
        """Numbers of its records, when they are known."""
        return range(self.first_seq, self.first_seq + len(self.payloads))


@dataclass(slots=True)
class Removal:
    """Records that leave one life of a topic together, by a delete or because of a cap."""

    topic_id: int
    seqs: frozenset[int]
    is_durable: bool = True
    """Its ack is a promise that outlives a loss of power."""
    asked_at: int = 0
    done_at: int = 0


@dataclass(slots=True)
class TopicChange:
    """One request about a topic's existence or configuration."""

    topic: str
    exists: bool
    ttl_ms: int = 0
    asked_at: int = 0
    done_at: int = 0


@dataclass(slots=True)
class Model:
    """Everything asked and answered so far, in the order in which it was asked."""

    now: Callable[[], int] = lambda: 1
    frames: list[SentFrame] = field(default_factory=list)
    removals: list[Removal] = field(default_factory=list)
    changes: list[TopicChange] = field(default_factory=list)
    highest: dict[tuple[str, int], int] = field(default_factory=dict)
    """The highest number that anybody was told, by topic and life."""
    made: int = 0
    """Payloads."""
    failed: int = 0
    """Operations that failed visibly."""

    def payload(self, size: int) -> bytes:
        """Another one each time."""
        self.made += 1
        return f"{self.made:08d}:".encode().ljust(max(size, 9), b".")

    # -- what happens ---------------------------------------------------------------------------------

    def send(self, *frames: SentFrame) -> None:
        """Just before they go out."""
        for frame in frames:
            frame.sent_at = self.now()
            self.frames.append(frame)

    def settle(self, frame: SentFrame, first_seq: int) -> None:
        """The producer of a frame was told; raises Broken when the numbers had been given away."""
        used = self.highest.get((frame.topic, frame.topic_id), 0)
        if first_seq != frame.first_seq and first_seq <= used:
            raise Broken(f"topic {frame.topic}: {frame} got {first_seq}, and {used} was in use")
        frame.first_seq, frame.acked_at = first_seq, frame.acked_at or self.now()
        self._is_used(frame)
        if frame.is_fsync and self.may_exist(frame.topic) != {True}:
            for each in self.changes:
                if each.topic == frame.topic and each.exists and not each.done_at:
                    self.grant(each)  # Else there were no topic that takes records.

    def _is_used(self, frame: SentFrame) -> None:
        life = frame.topic, frame.topic_id
        self.highest[life] = max(frame.seqs[-1], self.highest.get(life, 0))

    def remove(self, topic_id: int, seqs: Iterable[int], *, is_durable: bool = True) -> Removal:
        """Just before records are asked to leave; `grant` what this returns."""
        self.removals.append(Removal(topic_id, frozenset(seqs), is_durable, self.now()))
        return self.removals[-1]

    def change(self, topic: str, *, exists: bool, ttl_ms: int = 0) -> TopicChange:
        """Just before a topic is asked to be so; `grant` what this returns, or `withdraw` it."""
        self.changes.append(TopicChange(topic, exists, ttl_ms, self.now()))
        return self.changes[-1]

    def grant(self, asked: Removal | TopicChange) -> None:
        """It was answered: done."""
        asked.done_at = self.now()

    def withdraw(self, asked: TopicChange) -> None:
        """It was answered: certainly not done."""
        self.changes.remove(asked)

    def show(self, frame: SentFrame, first_seq: int) -> None:
        """Somebody was shown a whole frame."""
        frame.first_seq, frame.is_shown = first_seq, True
        self._is_used(frame)

    def forgive(self) -> None:
        """The disk lied: nothing that was answered is owed."""
        for frame in self.frames:
            frame.first_seq = frame.acked_at = 0
        for asked in self.asked:
            asked.done_at = 0

    def lose(self, frame: SentFrame) -> None:
        """It was announced as lost: nobody is owed it any more, and its numbers stay used."""
        frame.first_seq, frame.acked_at, frame.is_shown = 0, 0, False

    # -- moments --------------------------------------------------------------------------------------

    def until(self, moment: int, *, knows_places: bool = False) -> Model:
        """What had been asked and answered before a moment. `knows_places`: a frame lies where it came to lie
        in the end, whether or not its producer was told by then."""
        found = Model(
            self.now,
            removals=[_answered(each, moment) for each in self.removals if each.asked_at < moment],
            changes=[_answered(each, moment) for each in self.changes if each.asked_at < moment],
        )
        for each in self.frames:
            if each.sent_at < moment:
                is_acked = 0 < each.acked_at < moment
                there = copy.copy(each)
                there.acked_at = each.acked_at if is_acked else 0
                there.first_seq = each.first_seq if is_acked or knows_places else 0
                found.frames.append(there)
                if is_acked:
                    found._is_used(there)
        return found

    def forget_after(self, moment: int) -> None:
        """Answers that came later than this do not count: whoever gave them was dead."""
        for frame in self.frames:
            if frame.acked_at > moment:
                frame.acked_at = 0
                frame.first_seq = frame.first_seq if frame.is_shown else 0
        for each in self.asked:
            each.done_at = each.done_at if each.done_at <= moment else 0
        self.highest.clear()
        for frame in self.frames:
            if frame.first_seq:
                self._is_used(frame)

    def copy(self) -> Model:
        """An independent one."""
        found = copy.copy(self)
        found.frames = [copy.copy(each) for each in self.frames]
        found.removals = [copy.copy(each) for each in self.removals]
        found.changes = [copy.copy(each) for each in self.changes]
        found.highest = dict(self.highest)
        return found

    # -- what is true ---------------------------------------------------------------------------------

    @property
    def acked(self) -> int:
        """Frames whose producers were told."""
        return sum(each.acked_at > 0 for each in self.frames)

    @property
    def owed(self) -> int:
        """Frames of class `fsync` that must be there."""
        return sum(each.is_fsync and each.is_owed for each in self.frames)

    @property
    def granted(self) -> int:
        """Removals that were answered."""
        return sum(each.done_at > 0 for each in self.removals)

    @property
    def asked(self) -> list[Removal | TopicChange]:
        """Requests that were answered, or not."""
        return [*self.removals, *self.changes]

    @property
    def topics(self) -> list[str]:
        """Every topic that anybody asked for."""
        return list(dict.fromkeys(each.topic for each in self.changes))

    def gone(self, topic_id: int, *, is_power_loss: bool) -> tuple[set[int], set[int]]:
        """Numbers of one life of a topic that must be gone, and those that may be."""
        must: set[int] = set()
        may: set[int] = set()
        for each in self.removals:
            if each.topic_id == topic_id:
                is_promised = each.done_at and (each.is_durable or not is_power_loss)
                (must if is_promised else may).update(each.seqs)
        return must, may - must

    def may_exist(self, topic: str) -> set[bool]:
        """Whether a topic may be there: by the last granted change, or by one that was asked for after it."""
        may = {False}
        for each in self.changes:
            if each.topic == topic:
                may = {each.exists} if each.done_at else may | {each.exists}
        return may

    def may_have_ttl(self, topic: str) -> set[int]:
        """The same for its configuration."""
        may: set[int] = set()
        for each in self.changes:
            if each.topic == topic and each.exists:
                may = {each.ttl_ms} if each.done_at else may | {each.ttl_ms}
        return may

    def told(self) -> Hashable:
        """Equal for two models by which everything is judged alike."""
        frames = [
            (one.topic, one.topic_id, one.number, one.first_seq, one.is_owed, one.is_refused, *one.payloads)
            for one in self.frames
        ]
        removals = [
            (one.topic_id, *sorted(one.seqs), one.is_durable, one.done_at > 0) for one in self.removals
        ]
        changes = [(one.topic, one.exists, one.ttl_ms, one.done_at > 0) for one in self.changes]
        return tuple(frames), tuple(removals), tuple(changes)


_Asked = TypeVar("_Asked", Removal, TopicChange)


def _answered(asked: _Asked, moment: int) -> _Asked:
    found = copy.copy(asked)
    found.done_at = asked.done_at if asked.done_at < moment else 0
    return found
