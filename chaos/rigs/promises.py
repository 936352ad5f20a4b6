"""What a shard was asked and what it answered, and whether what came back after a crash keeps to it.

Payloads are all different, so that a record says which frame it came with. INV-1 acked survives; INV-2
nothing is made up; INV-4 no number twice; INV-18 a frame whole or not at all; what was deleted stays so;
what was once shown of class `fsync` stays, since somebody may have acted on it (RF-42).
"""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from typing import Any

from ringlog.testing.shard_world import World

TOPICS = {"f": "fsync", "d": "disk"}


class Broken(AssertionError):
    """A promise that did not hold."""


@dataclass(slots=True)
class Frame:
    """One frame that was sent."""

    topic: str
    number: int
    """The producer's."""
    payloads: list[bytes]
    sent_ns: int
    first_seq: int = 0
    acked_ns: int = 0
    """When the settlement was seen; 0 = never."""
    is_shown: bool = False
    """A reader saw it after a start; of class `fsync` that is as good as an ack."""


@dataclass(slots=True)
class Delete:
    """Records of `f` that were asked to go."""

    seqs: frozenset[int]
    asked_ns: int
    acked_ns: int = 0


@dataclass(slots=True)
class Promises:
    """Everything asked and answered so far."""

    frames: list[Frame] = field(default_factory=list)
    deletes: list[Delete] = field(default_factory=list)
    highest: dict[str, int] = field(default_factory=dict)
    """The highest number anybody was told, by topic."""

    def sent(self, topic: str, number: int, payloads: list[bytes]) -> None:
        """Just before it goes out."""
        self.frames.append(Frame(topic, number, payloads, time.monotonic_ns()))

    def settled(self, topic: str, number: int, first_seq: int) -> None:
        """Its producer was told; raises Broken when the numbers had been given away."""
        frame = next(each for each in reversed(self.frames) if (each.topic, each.number) == (topic, number))
        is_repeat = frame.first_seq == first_seq
        if not is_repeat and first_seq <= self.highest.get(topic, 0):
            raise Broken(f"topic {topic}: frame {number} got {first_seq}, {self.highest[topic]} was in use")
        frame.first_seq = first_seq
        frame.acked_ns = frame.acked_ns or time.monotonic_ns()
        last = first_seq + len(frame.payloads) - 1
        self.highest[topic] = max(last, self.highest.get(topic, 0))

    @property
    def acked(self) -> int:
        """Frames of class `fsync` that must be there."""
        return sum(each.topic == "f" and bool(each.acked_ns or each.is_shown) for each in self.frames)

    def until(self, cut_ns: int) -> Promises:
        """What had been asked and answered at a moment of the monotonic clock."""
        found = Promises()
        for each in self.frames:
            if each.sent_ns < cut_ns:
                acked_ns = each.acked_ns if each.acked_ns < cut_ns else 0
                first_seq = each.first_seq if acked_ns else 0
                found.frames.append(
                    Frame(each.topic, each.number, each.payloads, each.sent_ns, first_seq, acked_ns)
                )
                if acked_ns:
                    last = first_seq + len(each.payloads) - 1
                    found.highest[each.topic] = max(last, found.highest.get(each.topic, 0))
        for delete in self.deletes:
            if delete.asked_ns < cut_ns:
                acked_ns = delete.acked_ns if delete.acked_ns < cut_ns else 0
                found.deletes.append(Delete(delete.seqs, delete.asked_ns, acked_ns))
        return found

    def forget_after(self, cut_ns: int) -> None:
        """Answers seen later than this moment do not count: whoever gave them was dead."""
        for frame in self.frames:
            if frame.acked_ns > cut_ns:
                frame.acked_ns = 0
                frame.first_seq = frame.first_seq if frame.is_shown else 0
        for delete in self.deletes:
            delete.acked_ns = delete.acked_ns if delete.acked_ns <= cut_ns else 0
        self.highest = {}
        for frame in self.frames:
            if frame.first_seq:
                last = frame.first_seq + len(frame.payloads) - 1
                self.highest[frame.topic] = max(last, self.highest.get(frame.topic, 0))

    # -- judging --------------------------------------------------------------------------------------

    def check(self, world: World, *, is_power_loss: bool = True) -> None:
        """Look at everything a reader can see now, and keep in mind that he saw it; raises Broken."""
        for topic, durability in TOPICS.items():
            live = world.runs[0].core.directory.find(topic)
            mine = [each for each in self.frames if each.topic == topic]
            if live is None:
                if any(each.acked_ns or each.is_shown for each in mine):
                    raise Broken(f"topic {topic} is gone")
                continue
            lost = list(live.lost)
            must_stay = durability == "fsync" or not is_power_loss
            if must_stay and durability == "fsync" and lost:
                raise Broken(f"topic {topic}: {lost} announced as lost")
            self._check_topic(topic, mine, dict(world.records(topic)), lost, must_stay=must_stay)

    def _check_topic(
        self, topic: str, mine: list[Frame], found: dict[int, bytes], lost: list[Any], *, must_stay: bool
    ) -> None:
        deleted = (
            {seq for each in self.deletes if each.acked_ns for seq in each.seqs} if topic == "f" else set()
        )
        doomed = {seq for each in self.deletes for seq in each.seqs} if topic == "f" else set()
        by_payload = {payload: seq for seq, payload in found.items()}
        if len(by_payload) != len(found):
            raise Broken(f"topic {topic}: a payload is there twice")
        again = sorted(deleted & set(found))
        if again:
            raise Broken(f"topic {topic}: records {again} were deleted and are back")
        for frame in mine:
            first_seq = _place(frame, by_payload)
            there = {first_seq + i: payload for i, payload in enumerate(frame.payloads)} if first_seq else {}
            missing = [seq for seq in there if seq not in doomed and found.get(seq) != there[seq]]
            for seq, payload in there.items():
                if found.get(seq) == payload:
                    del found[seq]
            self._check_frame(frame, first_seq, missing, set(there) - doomed, lost, must_stay=must_stay)
        if found:
            raise Broken(f"topic {topic}: records {sorted(found)} were never sent, or are not as sent")

    def _check_frame(
        self, frame: Frame, first_seq: int, missing: list[int], all_of_it: set[int], lost: list[Any],
        *, must_stay: bool,
    ) -> None:  # fmt: skip
        name = f"topic {frame.topic}: frame {frame.number} (from {first_seq})"
        is_promised = bool(frame.acked_ns or frame.is_shown)
        if not missing:
            if first_seq and all_of_it:
                frame.first_seq, frame.is_shown = first_seq, True
                last = first_seq + len(frame.payloads) - 1
                self.highest[frame.topic] = max(last, self.highest.get(frame.topic, 0))
            return
        if set(missing) != all_of_it:
            raise Broken(f"{name} came back in part, without {missing}")
        if is_promised and must_stay:
            raise Broken(f"{name} was {'acked' if frame.acked_ns else 'shown'} and is gone")
        if is_promised and not any(a <= min(missing) and max(missing) <= b for a, b in lost):
            raise Broken(f"{name} is gone and only {lost} announced")
        # Announced as lost: nobody is owed it any more, and its numbers stay used.
        frame.first_seq, frame.acked_ns, frame.is_shown = 0, 0, False


def _place(frame: Frame, by_payload: dict[bytes, int]) -> int:
    """The first number of a frame, as told or as found; 0 = it is nowhere and nobody was told one."""
    if frame.first_seq:
        return frame.first_seq
    for i, payload in enumerate(frame.payloads):
        if payload in by_payload:
            return by_payload[payload] - i
    return 0


def seen(world: World) -> dict[str, Any]:
    """Everything that a reader can see, to be compared after another start."""
    found: dict[str, Any] = {}
    for topic in world.runs[0].core.directory.by_id.values():
        found[topic.name] = (topic.head_seq, topic.earliest_seq, list(topic.lost), world.records(topic.name))
    return found
