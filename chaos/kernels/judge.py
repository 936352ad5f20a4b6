"""The host's side: what guests were heard to acknowledge, against what the next one finds."""

from __future__ import annotations

import base64
import json
import zlib
from dataclasses import dataclass, field
from typing import Any

from chaos.kernels import load

Tag = tuple[int, int, int]
"""Life, frame, record."""


@dataclass(slots=True)
class Story:
    """Everything that was said of one image, over all lives on it."""

    acked: dict[tuple[int, int], tuple[str, int, int]] = field(default_factory=dict)
    """(life, frame) -> topic, first number, records."""
    highest: dict[int, int] = field(default_factory=dict)
    """Life -> the last frame that was acknowledged; absent for a life of which nothing was heard."""
    seen: dict[int, str] = field(default_factory=dict)
    """Number -> tag of records of the fsync topic that a guest showed after its recovery."""
    wrong: list[str] = field(default_factory=list)

    def hear(self, life: int, line: str) -> bool:
        """Take one line of a guest; True when it was an ack."""
        if line.startswith(("@error", "@damage", "@nomount")):
            self.wrong.append(f"life {life}: {line[1:600]}")
        words = line.split()
        if not line.startswith("@ack ") or len(words) != 5:
            return False  # the last line may be half of one
        topic, frame, first, count = words[1], int(words[2]), int(words[3]), int(words[4])
        if count != load.count_of(life, frame):
            return False
        self.acked[life, frame] = topic, first, count
        self.highest[life] = frame
        return True

    def judge(self, life: int, line: str) -> int:
        """Compare with a guest's `@state`; returns how many records it found."""
        try:
            state = json.loads(zlib.decompress(base64.b64decode(line.split()[1])))
        except (ValueError, IndexError, zlib.error) as e:
            self.wrong.append(f"life {life}: its state cannot be read: {e}")
            return 0
        found = {topic: dict(facts["records"]) for topic, facts in state.items()}
        for topic in load.TOPICS:
            facts = state.get(topic, {"records": [], "lost": [], "head": 0})
            self._judge_records(life, topic, facts)
            self._judge_acks(life, topic, found.get(topic, {}), facts["lost"])
        self._judge_seen(life, found.get("f", {}))
        return sum(map(len, found.values()))

    def _judge_records(self, life: int, topic: str, facts: dict[str, Any]) -> None:
        """Nothing made up, doubled, out of order, or half a frame."""
        tags = [_parsed(tag) for _, tag in facts["records"]]
        if None in tags:
            self.wrong.append(f"life {life}: topic {topic} holds a record that nobody wrote")
            return
        known = [tag for tag in tags if tag is not None]
        if known != sorted(set(known)):
            self.wrong.append(f"life {life}: topic {topic} is doubled or out of order")
        whole: dict[tuple[int, int], int] = {}
        for at, frame, _ in known:
            whole[at, frame] = whole.get((at, frame), 0) + 1
        for (at, frame), count in whole.items():
            if count != load.count_of(at, frame):
                self.wrong.append(f"life {life}: topic {topic} has {count} records of frame {at}.{frame}")
            if load.topic_of(frame) != topic or at >= life or frame > self.highest.get(at, -1) + 1:
                self.wrong.append(
                    f"life {life}: topic {topic} has frame {at}.{frame}, which was not sent yet"
                )

    def _judge_acks(self, life: int, topic: str, found: dict[int, str], lost: list[Any]) -> None:
        for (at, frame), (where, first, count) in self.acked.items():
            if where != topic:
                continue
            there = [found.get(first + i) for i in range(count)]
            if there == [f"{at}.{frame}.{i}" for i in range(count)]:
                continue
            is_told = any(low <= first and first + count - 1 <= high for low, high in lost)
            if topic == "f" or not is_told:
                self.wrong.append(
                    f"life {life}: acked frame {at}.{frame}, records {first}..{first + count - 1} of {topic},"
                    f" is {there}; announced as lost: {lost}"
                )
        if topic == "f" and lost:
            self.wrong.append(f"life {life}: {lost} of the fsync topic announced as lost")

    def _judge_seen(self, life: int, found: dict[int, str]) -> None:
        gone = [seq for seq, tag in self.seen.items() if found.get(seq) != tag]
        if gone:
            self.wrong.append(
                f"life {life}: records {gone[:8]} of f were shown after a recovery and are not the same"
            )
        self.seen = found


def _parsed(tag: str) -> Tag | None:
    try:
        life, frame, record = map(int, tag.split("."))
    except ValueError:
        return None
    return life, frame, record
