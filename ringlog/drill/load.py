"""Load on a real engine during faults: client processes, their journals, and the verdict.

Example:

    with Nursery("ringlog.drill.work") as nursery, Load(nursery, folder, url, ["t0", "t1"]) as load:
        load.start("produce_one", topic=0)
        mark = load.mark()
        ...  # inject a fault
        load.need(ACKED, mark, 50)
        load.judge()
"""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

import ringlog
from ringlog.drill import journal
from ringlog.drill.checks import GuaranteeBroken, require
from ringlog.drill.history import HistoryVerdict, NothingToJudge, judge
from ringlog.drill.journal import Journal, Outcome, What
from ringlog.drill.nursery import ClientProcess, Nursery
from ringlog.drill.tasks import Task, TopicCounts

END_S = 90.0
"""Time limit (s) for a client to finish its operation: longer than any operation may take."""
LOOK_S = 0.02
SLOW_S = 40.0
"""Time limit (s) for anything in an engine that must continue."""
OPERATOR = 0
"""Client number of this process."""


class Kind(NamedTuple):
    """Operations of one kind with one outcome."""

    what: What
    outcome: Outcome


ACKED, REFUSED = Kind(What.APPEND, Outcome.OK), Kind(What.APPEND, Outcome.FAIL)
UNKNOWN, READ = Kind(What.APPEND, Outcome.UNKNOWN), Kind(What.READ, Outcome.OK)


class Stuck(GuaranteeBroken):
    """An expected event did not happen in time."""


class Load:
    """The clients of one run. Create the topics, `start` clients, inject faults, then `end` and `verdict`."""

    def __init__(self, nursery: Nursery, folder: Path, url: str, topics: list[str]) -> None:
        self.folder: Path = folder
        self.url: str = url
        self.topics: list[str] = topics
        self.complaints: list[str] = []
        """Errors that clients reported although they should not have noticed the fault."""
        self.facts: list[TopicCounts] = []
        self.tolerates_errors = False
        """Whether clients may report errors, because an outage may be longer than their timeout."""
        self.errors: int = 0
        self.sent_again: int = 0
        """Number of frames that were refused temporarily and resent by clients."""
        self._nursery = nursery
        self._running: list[ClientProcess] = []
        self._next = OPERATOR + 1
        self._operator: Journal | None = None
        folder.mkdir(parents=True, exist_ok=True)

    def __enter__(self) -> Load:
        return self

    def __exit__(self, *_: object) -> None:
        self.abandon()

    def start(self, kind: str, **more: Any) -> ClientProcess:
        """Start a client; for the arguments see Task."""
        task = Task(
            kind=kind, client=self._next, url=self.url, folder=str(self.folder), topics=self.topics, **more
        )
        self._next += 1
        client = self._nursery.start(task)
        self._running.append(client)
        return client

    def kill(self, client: ClientProcess) -> None:
        """SIGKILL a client. Its pending operation has no outcome."""
        client.kill()
        self._running.remove(client)

    def died(self, client: ClientProcess, timeout_s: float) -> bool:
        """Wait for a client that kills itself. Returns False if it is still alive after `timeout_s`."""
        if not client.wait(timeout_s):
            return False
        self._running.remove(client)
        return True

    @property
    def rows(self) -> int:
        """Number of rows in all journals. It grows while clients make progress."""
        return journal.rows_in(self.folder)

    def wait_progress(self, rows: int, timeout_s: float = 30.0) -> None:
        """Wait until clients wrote this number of further rows. Raises Stuck."""
        wanted = self.rows + rows
        wait_for(lambda: self.rows >= wanted, timeout_s, "clients to make progress")

    # -- looking ----------------------------------------------------------------------------------------

    @property
    def is_alive(self) -> bool:
        """Whether no client has died."""
        return not any(client.wait(0.0) for client in self._running)

    def mark(self) -> int:
        """Return the current time as a mark, to select operations that begin later."""
        return time.monotonic_ns()

    def count(self, kind: Kind, since: int = 0, topic: str = "") -> int:
        """Count operations of a kind that began after a mark, of one topic or of all.

        A read counts only if it returned a record.
        """
        return len(self.took_s(kind, since, topic))

    def took_s(self, kind: Kind, since: int = 0, topic: str = "") -> list[float]:
        """Return the duration (s) of each of these operations."""
        rows = journal.load(self.folder, since_ns=since)
        begun = rows[rows["what"] == kind.what]
        if topic:
            begun = begun[begun["topic"] == self.topics.index(topic)]
        if kind.what == What.READ:
            begun = begun[np.isin(begun["op"], rows["op"][rows["what"] == What.RECORD])]
        ended = rows[(rows["what"] == What.RETURN) & (rows["outcome"] == kind.outcome)]
        _, first, last = np.intersect1d(begun["op"], ended["op"], return_indices=True)
        found: list[float] = ((ended["at_ns"][last] - begun["at_ns"][first]) / 1e9).tolist()
        return found

    def need(
        self, kind: Kind, since: int | None = None, least: int = 1, within_s: float = 0.0, topic: str = ""
    ) -> None:
        """Wait for `least` operations that begin after the mark (default: now), on one topic or on each.

        Raises Stuck on timeout, and GuaranteeBroken at once if a client has died.
        """
        mark, seconds = self.mark() if since is None else since, within_s or SLOW_S
        for name in [topic] if topic else self.topics:
            deadline = time.monotonic() + seconds
            while (found := self.count(kind, mark, name)) < least:
                story = f"{found} of {least} operations {kind.what.name} {kind.outcome.name} on {name}"
                # Check this first. Otherwise a dead load would look like a pause of the engine.
                require(self.is_alive, f"the load died: {story}")
                if time.monotonic() > deadline:
                    raise Stuck(f"only {story} in {seconds:.0f} s")
                time.sleep(LOOK_S)

    def need_work(self, since: int | None = None, least: int = 10, within_s: float = 0.0) -> None:
        """Wait for acknowledged writes, and for a read, that begin after a mark (default: now)."""
        self.need(ACKED, since, least, within_s)
        self.need(READ, since, 1, within_s)

    # -- what this process does itself --------------------------------------------------------------------

    def delete_below(self, topic: str, seq: int, timeout_ms: int) -> None:
        """Delete records. After an error the outcome is unknown."""
        if self._operator is None:
            self._operator = Journal(self.folder / f"{OPERATOR:05d}.journal", OPERATOR)
        number = self.topics.index(topic)
        ops = self._operator.begin(What.DELETE, number, seq=seq)
        with ringlog.connect(self.url, timeout_ms=timeout_ms, reconnect=False) as client:
            client.topics.delete_records(topic, before_seq=seq)
        self._operator.end(number, ops, Outcome.OK)

    # -- the end ------------------------------------------------------------------------------------------

    def end(self) -> None:
        """Let every client finish its operation and exit. Collects complaints."""
        for client in self._running:
            client.ask_to_end()
        self._collect()

    def _collect(self) -> None:
        deadline = time.monotonic() + END_S
        for client in self._running:
            who = f"client {client.task.client} ({client.task.kind} {self.topics[client.task.topic]})"
            if not client.wait(max(deadline - time.monotonic(), 0.1)):
                self.complaints.append(f"{who} did not finish within {END_S:.0f} s")
                client.kill()
                continue
            report = client.report()
            if report is None:
                self.complaints.append(f"{who} ended without a report")
                continue
            self.errors += report.error_count
            self.sent_again += report.retries
            self.facts += report.facts
            if not self.tolerates_errors or client.task.kind in {"final", "watch"}:
                self.complaints += [f"{who}: {error}" for error in report.errors]
        self._running.clear()

    def abandon(self) -> None:
        """Kill every client."""
        for client in self._running:
            client.kill()
        self._running.clear()
        if self._operator is not None:
            self._operator.close()
            self._operator = None

    def judge(self) -> HistoryVerdict:
        """End the load, read everything, and judge. Raises GuaranteeBroken for any fault."""
        self.end()
        try:
            found = self.verdict()
        except NothingToJudge as e:
            raise GuaranteeBroken(str(e)) from e
        wrong = [*found.stories, *self.complaints]
        require(not found.wrong and not wrong, lambda: "\n".join([str(found.wrong), *wrong]))
        return found

    def verdict(self) -> HistoryVerdict:
        """Read everything once more and judge. Raises NothingToJudge."""
        self.start("final")
        self._collect()
        found = judge(journal.load(self.folder), self.topics)
        for fact in self.facts:
            if (fact.said_count, fact.said_head) != (fact.counted, fact.head):
                self.complaints.append(
                    f"accounting of {fact.topic}: the engine says {fact.said_count} records to"
                    f" {fact.said_head}, a recount {fact.counted} to {fact.head}"
                )
        return found


def wait_for(condition: Callable[[], bool], timeout_s: float, what: str, look_s: float = LOOK_S) -> None:
    """Poll until the condition holds. Raises Stuck with `what`."""
    deadline = time.monotonic() + timeout_s
    while not condition():
        if time.monotonic() > deadline:
            raise Stuck(f"timeout after {timeout_s:.0f} s: waited for {what}")
        time.sleep(look_s)
