"""Requests to a shard and its replies: the model of all classes that drive a shard without an engine.

All payloads are different, so that a record identifies its frame. Times come from any monotonic clock. A
class that does not ask about times needs no clock.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Hashable, Iterable
from dataclasses import dataclass, field
from typing import TypeVar

from ringlog.drill.checks import GuaranteeBroken


@dataclass(slots=True)
class SentFrame:
    """One frame and its outcome."""

    topic: str
    payloads: tuple[bytes, ...]
    topic_id: int = 0
    """Id of the topic's life that it was sent to. 0: not sent, or topics have only one life."""
    number: int = 0
    """Producer number of the frame."""
    is_fsync: bool = True
    frame: bytes = b""
    """The encoded frame, if it may be resent."""
    first_seq: int = 0
    """Seq of its first record; 0: unknown."""
    sent_at: int = 0
    acked_at: int = 0
    """Time of the ack; 0: none."""
    is_shown: bool = False
    """A reader saw it after a start. For class `fsync` this obliges like an ack (RF-42)."""
    is_refused: bool = False
    """Its producer received a refusal: the frame was not applied."""

    def __str__(self) -> str:
        return f"frame {self.number} (from {self.first_seq})"

    @property
    def is_owed(self) -> bool:
        """Whether it must survive, because a client may have acted on it."""
        return self.acked_at > 0 or self.is_shown

    @property
    def seqs(self) -> range:
        """Seqs of its records. Valid if `first_seq` is known."""
        return range(self.first_seq, self.first_seq + len(self.payloads))


@dataclass(slots=True)
class Removal:
    """Records of one life of a topic that are removed together, by a delete or by a cap."""

    topic_id: int
    seqs: frozenset[int]
    is_durable: bool = True
    """Whether its ack promises that the removal survives a power loss."""
    asked_at: int = 0
    done_at: int = 0


@dataclass(slots=True)
class TopicChange:
    """One request to create, delete or configure a topic."""

    topic: str
    exists: bool
    ttl_ms: int = 0
    asked_at: int = 0
    done_at: int = 0


@dataclass(slots=True)
class Model:
    """All requests and replies so far, in the order of the requests."""

    now: Callable[[], int] = lambda: 1
    frames: list[SentFrame] = field(default_factory=list)
    removals: list[Removal] = field(default_factory=list)
    changes: list[TopicChange] = field(default_factory=list)
    highest: dict[tuple[str, int], int] = field(default_factory=dict)
    """The greatest acked or observed seq, by topic name and id of its life."""
    made: int = 0
    """Number of payloads."""
    failed: int = 0
    """Number of operations that failed with an error."""

    def payload(self, size: int) -> bytes:
        """Return a new payload, different from all others."""
        self.made += 1
        return f"{self.made:08d}:".encode().ljust(max(size, 9), b".")

    # -- what happens ---------------------------------------------------------------------------------

    def send(self, *frames: SentFrame) -> None:
        """Record frames. Call it just before they are sent."""
        for frame in frames:
            frame.sent_at = self.now()
            self.frames.append(frame)

    def settle(self, frame: SentFrame, first_seq: int) -> None:
        """Record the ack of a frame. Raises GuaranteeBroken if its seqs were in use."""
        used = self.highest.get((frame.topic, frame.topic_id), 0)
        if first_seq != frame.first_seq and first_seq <= used:
            raise GuaranteeBroken(f"topic {frame.topic}: {frame} got {first_seq}, and {used} was in use")
        frame.first_seq, frame.acked_at = first_seq, frame.acked_at or self.now()
        self._is_used(frame)
        if frame.is_fsync and self.may_exist(frame.topic) != {True}:
            for each in self.changes:
                if each.topic == frame.topic and each.exists and not each.done_at:
                    self.grant(each)  # The ack proves that the topic exists.

    def _is_used(self, frame: SentFrame) -> None:
        life = frame.topic, frame.topic_id
        self.highest[life] = max(frame.seqs[-1], self.highest.get(life, 0))

    def remove(self, topic_id: int, seqs: Iterable[int], *, is_durable: bool = True) -> Removal:
        """Record a removal. Call it just before the request, and `grant` the result after the reply."""
        self.removals.append(Removal(topic_id, frozenset(seqs), is_durable, self.now()))
        return self.removals[-1]

    def change(self, topic: str, *, exists: bool, ttl_ms: int = 0) -> TopicChange:
        """Record a change of a topic.

        Call it just before the request; then `grant` or `withdraw` the result.
        """
        self.changes.append(TopicChange(topic, exists, ttl_ms, self.now()))
        return self.changes[-1]

    def grant(self, asked: Removal | TopicChange) -> None:
        """Record that the request was done."""
        asked.done_at = self.now()

    def withdraw(self, asked: TopicChange) -> None:
        """Record that the request was certainly not done."""
        self.changes.remove(asked)

    def mark_seen(self, frame: SentFrame, first_seq: int) -> None:
        """Record that a reader saw the whole frame."""
        frame.first_seq, frame.is_shown = first_seq, True
        self._is_used(frame)

    def forget_acks(self) -> None:
        """Forget all acks and replies, because the disk lied about its syncs."""
        for frame in self.frames:
            frame.first_seq = frame.acked_at = 0
        for asked in self.asked:
            asked.done_at = 0

    def mark_lost(self, frame: SentFrame) -> None:
        """Record that the loss of a frame was announced. It is no longer owed, and its seqs stay used."""
        frame.first_seq, frame.acked_at, frame.is_shown = 0, 0, False

    # -- moments --------------------------------------------------------------------------------------

    def until(self, moment: int, *, knows_places: bool = False) -> Model:
        """Return the requests and replies before a moment.

        With `knows_places` a frame has its final seq, even if it was not acked by then.
        """
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

    def copy(self) -> Model:
        """Return an independent copy."""
        found = copy.copy(self)
        found.frames = [copy.copy(each) for each in self.frames]
        found.removals = [copy.copy(each) for each in self.removals]
        found.changes = [copy.copy(each) for each in self.changes]
        found.highest = dict(self.highest)
        return found

    # -- what is true ---------------------------------------------------------------------------------

    @property
    def acked(self) -> int:
        """Number of acked frames."""
        return sum(each.acked_at > 0 for each in self.frames)

    @property
    def owed(self) -> int:
        """Number of frames of class `fsync` that must exist."""
        return sum(each.is_fsync and each.is_owed for each in self.frames)

    @property
    def granted(self) -> int:
        """Number of granted removals."""
        return sum(each.done_at > 0 for each in self.removals)

    @property
    def asked(self) -> list[Removal | TopicChange]:
        """All removals and changes, granted or not."""
        return [*self.removals, *self.changes]

    @property
    def topics(self) -> list[str]:
        """Names of all requested topics."""
        return list(dict.fromkeys(each.topic for each in self.changes))

    def gone(self, topic_id: int, *, is_power_loss: bool) -> tuple[set[int], set[int]]:
        """Return the seqs of one life of a topic that must be removed, and those that may be."""
        must: set[int] = set()
        may: set[int] = set()
        for each in self.removals:
            if each.topic_id == topic_id:
                is_promised = each.done_at and (each.is_durable or not is_power_loss)
                (must if is_promised else may).update(each.seqs)
        return must, may - must

    def may_exist(self, topic: str) -> set[bool]:
        """Return whether a topic may exist: by its last granted change, or by a later pending one."""
        may = {False}
        for each in self.changes:
            if each.topic == topic:
                may = {each.exists} if each.done_at else may | {each.exists}
        return may

    def may_have_ttl(self, topic: str) -> set[int]:
        """Return the possible TTLs of a topic, by the same rule."""
        may: set[int] = set()
        for each in self.changes:
            if each.topic == topic and each.exists:
                may = {each.ttl_ms} if each.done_at else may | {each.ttl_ms}
        return may

    def told(self) -> Hashable:
        """Return a key that is equal for two models that judge everything alike."""
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
