"""What a client process is asked to do, and what it says in the end."""

from __future__ import annotations

from pathlib import Path
from typing import Literal

import msgspec

ERRORS_KEPT = 20


class Task(msgspec.Struct, kw_only=True, frozen=True):
    """One client's work on one topic of a run, or on all."""

    kind: str
    """What work.py knows: produce, produce_one, produce_frames, produce_mixed, produce_keyed, read, reread,
    watch, delete, operate, final; jobs_ and groups_ begin those of these classes."""
    client: int
    """Number of the client in the run; names its journal."""
    url: str
    folder: str
    """Where journals and reports lie."""
    topics: list[str]
    """All topics of the run."""
    topic: int = 0
    """The one it works on."""
    transport: Literal["auto", "ring", "ipc", "tcp"] = "auto"
    per_s: float = 1_000.0
    """Operations a second, at most."""
    batch: int = 50
    """Appends that are sent at once, each for itself."""
    frame: int = 1
    """Records of one frame among them: appended together or not at all."""
    record_bytes: int = 400
    """Mean size of a record."""
    page: int = 1_000
    """Records that are read at once."""
    wait_ms: int = 50
    """How long a read waits for something new; one that waits has a ring for the news."""
    timeout_s: float = 60.0
    """For one operation."""
    keep: int = 150
    """Records a deleter leaves."""
    key_from: int = 0
    """First key of a keyed writer."""
    hook: str = ""
    """Where in a push a producer kills itself, and in which: `inside:7`. The places are `before` a frame is
    written, `inside` it, `filled` (before the head moves) and `ring_after_publish`."""

    @property
    def journal_path(self) -> Path:
        return Path(self.folder, f"{self.client:05d}.journal")

    @property
    def report_path(self) -> Path:
        return Path(self.folder, f"{self.client:05d}.json")


class TopicFacts(msgspec.Struct):
    """What the engine says of a topic, and what a reader counts."""

    topic: str
    said_count: int
    said_head: int
    counted: int
    head: int


class Report(msgspec.Struct):
    """What a client says in the end."""

    ops: int = 0
    errors: list[str] = []
    """What its operations failed with; a client of ringlog should never see the death of an actor."""
    error_count: int = 0
    retries: int = 0
    """Frames that were refused for the moment and sent again: they keep their order all the same (W9)."""
    facts: list[TopicFacts] = []
    seconds: float = 0.0

    def failed(self, text: str) -> None:
        """Count an error."""
        self.error_count += 1
        if len(self.errors) < ERRORS_KEPT:
            self.errors.append(text[:300])
