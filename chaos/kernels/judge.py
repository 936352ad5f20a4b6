"""The checker on the host: compares the acknowledgements of guests with the state of the next guest."""

from __future__ import annotations

import base64
import json
import zlib
from dataclasses import dataclass, field

from chaos.kernels import load
from chaos.rigs.judge import POWER_LOSS, Seen, check, note_seen
from chaos.rigs.model import Model, SentFrame
from ringlog.drill.checks import GuaranteeBroken


@dataclass(slots=True)
class Story:
    """All acknowledgements and states of one image, over all lives on it.

    A record is identified by its tag.
    """

    model: Model = field(default_factory=Model)
    highest: dict[int, int] = field(default_factory=dict)
    """Last acknowledged frame by life. A life without an acknowledgement has no entry."""
    wrong: list[str] = field(default_factory=list)
    _sent: dict[tuple[int, int], SentFrame] = field(default_factory=dict)

    def __post_init__(self) -> None:
        for topic in load.TOPICS:
            self.model.change(topic, exists=True)

    def hear(self, life: int, line: str) -> bool:
        """Process one line of a guest; return True if it is an ack."""
        if line.startswith(("@error", "@damage", "@nomount")):
            self.wrong.append(f"life {life}: {line[1:600]}")
        words = line.split()
        if not line.startswith("@ack ") or len(words) != 5:
            return False  # the last line may be incomplete
        topic, frame, first, count = words[1], int(words[2]), int(words[3]), int(words[4])
        if (topic, count) != (load.topic_of(frame), load.count_of(life, frame)):
            return False
        self._send(life, frame)
        for asked in self.model.changes:  # A guest creates its topics first.
            self.model.grant(asked)
        self.highest[life] = frame
        try:
            self.model.settle(self._sent[life, frame], first)
        except GuaranteeBroken as e:
            self.wrong.append(f"life {life}: {e}")
        return True

    def _send(self, life: int, last: int) -> None:
        """Add all frames up to `last` to the model.

        A guest sends a frame after the ack of the previous frame.
        """
        for frame in range(last + 1):
            if (life, frame) not in self._sent:
                tags = tuple(f"{life}.{frame}.{i}".encode() for i in range(load.count_of(life, frame)))
                topic = load.topic_of(frame)
                sent = SentFrame(topic, tags, number=len(self._sent), is_fsync=topic == "f")
                self._sent[life, frame] = sent
                self.model.send(sent)

    def judge(self, life: int, line: str) -> int:
        """Check a guest's `@state` against the model; return the number of records in it."""
        try:
            state = json.loads(zlib.decompress(base64.b64decode(line.split()[1])))
        except (ValueError, IndexError, zlib.error) as e:
            self.wrong.append(f"life {life}: its state cannot be read: {e}")
            return 0
        for before in range(1, life):
            self._send(before, self.highest.get(before, -1) + 1 + load.UNHEARD_ACKS_MAX)
        seen = {
            topic: Seen(
                0, 0, facts["head"], 0, len(facts["records"]), 0, None, None, facts["lost"],
                {seq: tag.encode() for seq, tag in facts["records"]},
            )
            for topic, facts in state.items()
        }  # fmt: skip
        try:
            check(self.model, seen, POWER_LOSS)
            note_seen(self.model, seen)
        except GuaranteeBroken as e:
            self.wrong.append(f"life {life}: {e}")
        return sum(topic.live for topic in seen.values())
