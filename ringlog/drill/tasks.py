"""The task of a client process, and its report."""

from __future__ import annotations

from pathlib import Path
from typing import Literal

import msgspec

ERRORS_KEPT = 20


class Task(msgspec.Struct, kw_only=True, frozen=True):
    """Work of one client on one topic of a run, or on all topics."""

    kind: str
    """Kind of work: produce, produce_one, read, reread, delete or final (ringlog/drill/work.py), or a kind of
    the fault classes (chaos/rigs/work.py, chaos/leases)."""
    client: int
    """Number of the client in the run, which names its journal."""
    url: str
    folder: str
    """Directory of journals and reports."""
    topics: list[str]
    """All topics of the run."""
    topic: int = 0
    """Index of the client's topic."""
    transport: Literal["auto", "ring", "ipc", "tcp"] = "auto"
    per_s: float = 1_000.0
    """Maximum operations per second."""
    batch: int = 50
    """Number of appends that are sent at once. Each has its own outcome."""
    frame: int = 1
    """Records per frame. A frame is appended as a whole or not at all."""
    record_bytes: int = 400
    """Mean size of a record in bytes."""
    page: int = 1_000
    """Maximum number of records per read."""
    wait_ms: int = 50
    """How long (ms) a read waits for new records. A client whose reads wait opens an additional small
    ring."""
    timeout_s: float = 60.0
    """Timeout (s) of one operation."""
    keep: int = 150
    """Number of records that a deleter keeps."""
    key_from: int = 0
    """First key of a keyed writer."""
    hook: str = ""
    """Place in a push at which a producer kills itself, and the number of the push, such as `inside:7`.
    Places: `before` a frame is written, `inside` it, `filled` (before the head moves),
    `ring_after_publish`."""

    @property
    def journal_path(self) -> Path:
        return Path(self.folder, f"{self.client:05d}.journal")

    @property
    def report_path(self) -> Path:
        return Path(self.folder, f"{self.client:05d}.json")


class TopicCounts(msgspec.Struct):
    """Counts of a topic by the engine and by a reader."""

    topic: str
    said_count: int
    said_head: int
    counted: int
    head: int


class Report(msgspec.Struct):
    """Report of a client at its end."""

    ops: int = 0
    errors: list[str] = []
    """Texts of failed operations, at most ERRORS_KEPT. A client should never notice the death of an actor."""
    error_count: int = 0
    retries: int = 0
    """Number of frames that were refused temporarily and resent. They must keep their order (W9)."""
    facts: list[TopicCounts] = []
    seconds: float = 0.0

    def failed(self, text: str) -> None:
        """Count an error."""
        self.error_count += 1
        if len(self.errors) < ERRORS_KEPT:
            self.errors.append(text[:300])
