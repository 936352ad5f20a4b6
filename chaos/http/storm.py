"""A storm: gateways and shards die while clients write, claim, ack and watch over HTTP.

Writers repeat a write without an answer under the same idempotency key. Claimers forget some jobs, which
return when their lease ends. Watchers close their connection now and then in the middle of a backlog and
resume with Last-Event-ID; after the death of the gateway they make a new watch behind their last record.
"""

from __future__ import annotations

import json
import os
import random
import signal
import threading
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from itertools import count, pairwise
from typing import Any

import ringlog
from chaos.http.client import AGAIN, HEARTBEAT, Client, ClientFinding, Event
from ringlog.testing.real_engine import TestEngine, wait_until

WRITERS, CLAIMERS, WATCHERS = 4, 3, 2
LOGS, QUEUES = 2, 2
LEASE_MS = 1_000
CLAIM_MAX = 8
FORGETS = 0.15
"""Share of claims whose jobs the claimer forgets."""
LEAVES = 0.1
"""Share of events after which a watcher closes its connection."""
PAUSE_S = 0.02
KILL_PAUSE_S = 0.15, 0.6
"""Least and longest pause between a recovery and the next death."""
SHARD_SHARE, TERM_SHARE = 0.2, 0.25
DONE_S = 30.0
"""Time (s) that clients have to finish after the last death."""
FOUND_MAX = 20


@dataclass
class Job:
    """What claimers know of one job."""

    values: set[Any] = field(default_factory=set)
    acked: int = 0
    """Acks that the gateway confirmed."""
    acked_at: float = 0.0
    unsure: int = 0
    """Acks that were repeated, so that the confirmed one may be missing."""


class Storm:
    """One storm on its own topics."""

    def __init__(
        self, running: TestEngine, dice: random.Random, name: str, seconds: float, gateways: int = 1
    ) -> None:
        self._engine, self._dice, self._seconds = running, dice, seconds
        self._gateways = gateways
        """Number of gateway processes."""
        self._url = running.http_url
        self.counts: Counter[str] = Counter()
        self._lock = threading.Lock()
        self._logs = [f"{name}.log-{n}" for n in range(LOGS)]
        self._queues = [f"{name}.queue-{n}" for n in range(QUEUES)]
        self._is_over, self._is_written, self._is_empty = (threading.Event() for _ in range(3))
        self.acked: dict[str, dict[int, Any]] = {topic: {} for topic in (*self._logs, *self._queues)}
        """By topic: the data of each acknowledged record by its seq."""
        self.jobs: dict[str, dict[int, Job]] = {topic: {} for topic in self._queues}
        """By queue: what claimers saw of each job by its seq."""
        self._watched: list[dict[str, list[tuple[int, Any]]]] = []
        self.found: list[str] = []
        """Broken guarantees."""
        self._shard_deaths = self._recoveries = 0
        """Shards that were killed, and those of them that are back."""

    def run(self) -> list[str]:
        """Run the storm and judge it. Returns the findings."""
        client = self._client()
        for topic in self._logs:
            client.ask("PUT", f"/v0/topics/{topic}", {})
        for topic in self._queues:
            client.ask("PUT", f"/v0/topics/{topic}", {"type": "queue", "lease_ms": LEASE_MS})
        writers = [self._thread(self._write, n, random.Random(self._dice.random())) for n in range(WRITERS)]
        claimers = [self._thread(self._claim, n, random.Random(self._dice.random())) for n in range(CLAIMERS)]
        watchers = [self._thread(self._watch, n, random.Random(self._dice.random())) for n in range(WATCHERS)]
        try:
            self._kill()
        finally:
            self._is_over.set()
            self._join(writers, "writers")
            self._is_written.set()
            self._wait_empty(client)
            self._is_empty.set()
            self._join(claimers + watchers, "claimers and watchers")
        client.close()
        self._judge()
        return self.found[:FOUND_MAX]

    def _client(self) -> Client:
        return Client(self._url, self.counts, self._lock)

    def _thread(self, act: Callable[..., None], *arguments: Any) -> threading.Thread:
        def guarded() -> None:
            try:
                act(*arguments)
            except ClientFinding as e:
                self._says(str(e))
            except Exception as e:  # noqa: BLE001  A thread must not end silently.
                self._says(f"a client failed with {e!r}")

        thread = threading.Thread(target=guarded, daemon=True)
        thread.start()
        return thread

    def _join(self, threads: list[threading.Thread], what: str) -> None:
        until = time.monotonic() + DONE_S
        for thread in threads:
            thread.join(max(until - time.monotonic(), 0.0))
        if any(thread.is_alive() for thread in threads):
            self._says(f"{what} were not done {DONE_S:g} s after the last death")

    def _says(self, what: str) -> None:
        with self._lock:
            self.found.append(what)

    # -- deaths -------------------------------------------------------------------------------------

    def _kill(self) -> None:
        until = time.monotonic() + self._seconds
        while time.monotonic() < until:
            time.sleep(self._dice.uniform(*KILL_PAUSE_S))
            draw = self._dice.random()
            if draw < SHARD_SHARE:
                self._shard_deaths += 1
                self._engine.kill("wal_shard", shard=self._dice.randrange(2))
                self._count("shard kills")
            elif draw < SHARD_SHARE + TERM_SHARE:
                self._stop_gateway(self._dice.randrange(self._gateways))
                self._count("stops")
            else:
                self._engine.kill("http_gateway", shard=self._dice.randrange(self._gateways))
                self._count("kills")
            for kind in ("wal_shard", "http_gateway"):
                self._engine.wait_ready(kind)
            self._recoveries = self._shard_deaths

    def _stop_gateway(self, number: int) -> None:
        pid = self._engine.pid_of("http_gateway", number)
        os.kill(pid, signal.SIGTERM)
        wait_until(
            lambda: self._engine.pid_of("http_gateway", number) != pid, DONE_S, "a new gateway after SIGTERM"
        )

    def _count(self, what: str, times: int = 1) -> None:
        with self._lock:
            self.counts[what] += times

    # -- clients ------------------------------------------------------------------------------------

    def _write(self, writer: int, dice: random.Random) -> None:
        client = self._client()
        topic = [*self._logs, *self._queues][writer % (LOGS + QUEUES)]
        for number in count():
            if self._is_over.is_set():
                break
            rows = [[writer, number, row] for row in range(dice.randint(1, 3))]
            body = {"records": [{"data": row} for row in rows], "idempotency_key": f"{writer}/{number}"}
            answer = client.ask("POST", f"/v0/topics/{topic}", body)
            seqs = answer.body["seqs"]
            if len(seqs) != len(rows):
                raise ClientFinding(f"a write of {len(rows)} records to {topic} got the seqs {seqs}")
            with self._lock:
                self.counts["jobs" if topic in self.jobs else "records"] += len(rows)
                self.counts["writes"] += 1
                self.counts["writes repeated"] += answer.body["deduped"]
                for seq, row in zip(seqs, rows, strict=True):
                    if seq in self.acked[topic]:
                        self.found.append(f"seq {seq} of {topic} was acked for two records")
                    self.acked[topic][seq] = row
            time.sleep(PAUSE_S / 4)
        client.close()

    def _claim(self, claimer: int, dice: random.Random) -> None:
        client, node = self._client(), f"node-{claimer}"
        while not self._is_empty.is_set():
            topic = dice.choice(self._queues)
            begun = time.monotonic()
            body = {"node": node, "max": CLAIM_MAX, "lease_ms": LEASE_MS, "wait_ms": dice.choice((0, 200))}
            claimed = client.ask("POST", f"/v0/topics/{topic}/claim", body).body["claimed"]
            self._note_claim(topic, claimed, begun)
            if not claimed:
                time.sleep(PAUSE_S)
            elif dice.random() > FORGETS:
                self._ack(client, topic, node, claimed)
            else:
                self._count("jobs forgotten", len(claimed))
        client.close()

    def _note_claim(self, topic: str, claimed: list[Any], begun: float) -> None:
        with self._lock:
            for each in claimed:
                job = self.jobs[topic].setdefault(each["$seq"], Job())
                job.values.add(tuple(each["data"]))
                if job.acked and job.acked_at < begun:
                    self.found.append(f"job {each['$seq']} of {topic} was claimed after its ack")

    def _ack(self, client: Client, topic: str, node: str, claimed: list[Any]) -> None:
        seqs = [each["$seq"] for each in claimed]
        body = {"node": node, "seqs": seqs, "lease_ids": [each["lease_id"] for each in claimed]}
        path = f"/v0/topics/{topic}/ack"
        # The first attempt alone: after it, a missing confirmation may be that of a lost answer.
        recoveries = self._recoveries
        answer = client.once("POST", path, body)
        is_first = answer is not None and answer.status == 200
        if not is_first:
            if answer is not None and answer.status not in AGAIN:
                raise ClientFinding(f"POST {path} got {answer.status}: {answer.body}")
            answer = client.ask("POST", path, body)
        assert answer is not None
        # The gateway itself repeats what a dead shard did not answer.
        is_sure = is_first and self._shard_deaths == recoveries
        skipped, at = set(answer.body["skipped"]), time.monotonic()
        if answer.body["acked"] + len(skipped) != len(seqs):
            raise ClientFinding(f"an ack of {len(seqs)} jobs of {topic} says {answer.body}")
        with self._lock:
            for seq in seqs:
                job = self.jobs[topic][seq]
                if seq not in skipped:
                    job.acked, job.acked_at = job.acked + 1, at
                    self.counts["acks"] += 1
                elif not is_sure:
                    job.unsure += 1

    def _watch(self, watcher: int, dice: random.Random) -> None:
        client = self._client()
        topics = self._logs if watcher % 2 else self._logs[:1]
        seen: dict[str, list[tuple[int, Any]]] = {topic: [] for topic in topics}
        self._watched.append(seen)
        path, last_event_id = "", ""
        while not self._has_all(seen):
            if not path:
                # Written after the gateway has died: the new session begins behind the last record.
                starts = {topic: {"from_seq": rows[-1][0] if rows else 0} for topic, rows in seen.items()}
                answer = client.ask(
                    "POST", "/v0/watch", {"topics": starts, "limit": 20, "heartbeat_ms": 1_000}
                )
                path, last_event_id = answer.body["stream_url"], ""
            try:
                for event in client.events(path, last_event_id):
                    last_event_id = event.id or last_event_id
                    self._take(event, seen)
                    if self._has_all(seen):
                        break
                    if event.kind != HEARTBEAT and dice.random() < LEAVES:
                        time.sleep(5 * PAUSE_S)  # Events arrive that this connection never reads.
                        self._count("watchers that left")
                        break
            except LookupError:
                path = ""
            time.sleep(PAUSE_S)
        client.close()

    def _take(self, event: Event, seen: dict[str, list[tuple[int, Any]]]) -> None:
        if event.kind == "error":
            if event.data["code"] not in AGAIN:
                raise ClientFinding(f"a watch ended with {event.data}")
        elif event.kind == "record":
            rows = [(each["$seq"], each["data"]) for each in event.data["records"]]
            seen[event.data["topic"]] += rows
            self._count("watched", len(rows))
        elif event.kind not in {"caught-up", HEARTBEAT}:
            raise ClientFinding(f"a watch got an event {event.kind}: {event.data}")

    def _has_all(self, seen: dict[str, list[tuple[int, Any]]]) -> bool:
        """Whether all is written and watched. After 15 s the judge says what is missing."""
        if not self._is_written.is_set():
            return False
        if self.found:
            return True
        return all(rows and rows[-1][0] >= max(self.acked[topic], default=0) for topic, rows in seen.items())

    def _wait_empty(self, client: Client) -> None:
        until = time.monotonic() + DONE_S
        while time.monotonic() < until and not self.found:
            states = [client.ask("GET", f"/v0/topics/{topic}").body for topic in self._queues]
            if not any(state["count"] for state in states):
                return
            time.sleep(PAUSE_S)
        if not self.found:
            self._says(f"the queues were not empty after {DONE_S:g} s: {[s['queue'] for s in states]}")

    # -- judgement ----------------------------------------------------------------------------------

    def _judge(self) -> None:
        is_whole = not self.found  # A client that failed has not done the rest of its work.
        with ringlog.connect(self._engine.url) as client:
            for topic in self._logs:
                self.judge_log(topic, _stored(client, topic))
        for topic in self._queues:
            self.judge_queue(topic, is_whole)
        for seen in self._watched:
            for topic, rows in seen.items():
                self.judge_watch(topic, rows, is_whole)

    def judge_log(self, topic: str, stored: dict[int, Any]) -> None:
        """Check that each acknowledged record is there at its seq, and none twice."""
        times = Counter(tuple(row) for row in stored.values())
        for row, found in times.items():
            if found > 1:
                self._says(f"a write is there twice: {list(row)} in {topic}")
        for seq, row in self.acked[topic].items():
            if stored.get(seq) != row:
                self._says(f"an acked write is lost: {row} at seq {seq} of {topic}, found {stored.get(seq)}")

    def judge_queue(self, topic: str, is_whole: bool) -> None:
        """Check the jobs of a queue. `is_whole`: all clients have done their work."""
        jobs, places = self.jobs[topic], dict[Any, int]()
        for seq, job in jobs.items():
            for value in job.values:
                if places.setdefault(value, seq) != seq:
                    self._says(f"a write is there twice: job {value} of {topic} at {places[value]} and {seq}")
            if len(job.values) > 1:
                self._says(f"job {seq} of {topic} has the values {sorted(job.values)}")
            if job.acked > 1:
                self._says(f"job {seq} of {topic} is acked {job.acked} times")
        for seq, row in self.acked[topic].items() if is_whole else ():
            found = jobs.get(seq)
            if found is None:
                self._says(f"a job is lost: {row} at seq {seq} of {topic} was never claimed")
            elif not found.acked and not found.unsure:
                self._says(f"a job is lost: {row} at seq {seq} of {topic} was never acked")
            elif found.values != {tuple(row)}:
                self._says(f"job {seq} of {topic} is {sorted(found.values)}, acked as {row}")

    def judge_watch(self, topic: str, rows: list[tuple[int, Any]], is_whole: bool) -> None:
        """Check that a watcher saw every record of a topic."""
        seqs = [seq for seq, _ in rows]
        highest = 0
        for seq in seqs:
            if seq > highest + 1:
                self._says(f"a watcher missed records of {topic}: {seq} came after {highest}")
            highest = max(highest, seq)
        self.counts["watched again"] += sum(second <= first for first, second in pairwise(seqs))
        if is_whole and highest < max(self.acked[topic], default=0):
            self._says(f"a watcher of {topic} ended at {highest} of {max(self.acked[topic])}")
        for seq, data in rows:
            if self.acked[topic].get(seq, data) != data:
                self._says(f"a watcher of {topic} saw {data} at {seq}, acked as {self.acked[topic][seq]}")


def _stored(client: ringlog.Client, topic: str) -> dict[int, Any]:
    found: dict[int, Any] = {}
    after = 0
    while True:
        page = client.read(topic, after, limit=1_000)
        for record in page.records:
            found[record.seq] = json.loads(record.data or b"null")
            after = record.seq
        if not page.records:
            return found
