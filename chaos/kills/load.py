"""Load on an engine while it is being hurt: client processes, their journals, and the verdict."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from chaos.check import journal
from chaos.check.history import Judgement, judge
from chaos.kills.nursery import Client, Nursery
from chaos.kills.tasks import Task, TopicFacts

END_S = 90.0
"""A client must have finished what it was at by then: longer than any operation may take."""
LOOK_S = 0.02


class Stuck(AssertionError):
    """Something that had to happen did not, within its time."""


class Load:
    """Clients of one run. Make topics first; then `start`, hurt the engine, `end`, and `verdict`."""

    def __init__(self, nursery: Nursery, folder: Path, url: str, topics: list[str]) -> None:
        self.folder, self.url, self.topics = folder, url, topics
        self.complaints: list[str] = []
        """What clients ran into that they should not have noticed."""
        self.facts: list[TopicFacts] = []
        self.is_patient = False
        """Whether clients may see errors, because an outage may be longer than their patience."""
        self.errors = 0
        self.sent_again = 0
        """Frames that were refused for the moment, and that clients sent again."""
        self._nursery = nursery
        self._running: list[Client] = []
        self._next = 1
        folder.mkdir(parents=True, exist_ok=True)

    def start(self, kind: str, **more: Any) -> Client:
        """A client doing this; see Task."""
        task = Task(
            kind=kind, client=self._next, url=self.url, folder=str(self.folder), topics=self.topics, **more
        )
        self._next += 1
        client = self._nursery.start(task)
        self._running.append(client)
        return client

    def kill(self, client: Client) -> None:
        """SIGKILL a client: what it was at has no outcome."""
        client.kill()
        self._running.remove(client)

    def died(self, client: Client, timeout_s: float) -> bool:
        """Wait for a client that kills itself; False when it does not."""
        if not client.wait(timeout_s):
            return False
        self._running.remove(client)
        return True

    @property
    def rows(self) -> int:
        """Rows in all journals: grows while clients get on."""
        return journal.rows_in(self.folder)

    def wait_progress(self, rows: int, timeout_s: float = 30.0) -> None:
        """Wait until clients wrote so many rows more; raises Stuck."""
        wanted = self.rows + rows
        wait_for(lambda: self.rows >= wanted, timeout_s, "clients to get on")

    def end(self) -> None:
        """Let every client finish what it is at; notes complaints."""
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
            if not self.is_patient or client.task.kind in {"final", "watch"}:
                self.complaints += [f"{who}: {error}" for error in report.errors]
        self._running.clear()

    def abandon(self) -> None:
        """Kill every client."""
        for client in self._running:
            client.kill()
        self._running.clear()

    def verdict(self) -> Judgement:
        """Read everything once more and judge; raises NothingToJudge."""
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
    """Look until it holds; raises Stuck naming what was waited for."""
    deadline = time.monotonic() + timeout_s
    while not condition():
        if time.monotonic() > deadline:
            raise Stuck(f"waited {timeout_s:.0f} s in vain for {what}")
        time.sleep(look_s)
