"""The whole program on a volume: traffic whose acks are kept in this process, and a judge of what is read."""

from __future__ import annotations

import contextlib
import itertools
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import ringlog
from chaos.order import Broken
from ringlog.client import Record
from ringlog.envelope import messages as m
from ringlog.errors import RinglogError
from ringlog.link.shard_requests import Requester
from ringlog.testing import engine
from ringlog.testing.real_engine import TestEngine

TOPICS = ("alpha", "beta", "gamma")
"""All of class `fsync`. With two shards and with three they are spread over more than one."""
BATCH = 20
PAYLOAD_BYTES = 300
ASK_MS = 1_500
"""How long a write may take; short, since it is waited for when power is gone."""
READ_MS = 20_000
PAUSE_S = 0.02
JOIN_S = 30.0


@contextlib.contextmanager
def program(root: Path, *, shards: int = 2, stop_points: str = "", **config: Any) -> Iterator[TestEngine]:
    """The engine with its data below `root`, its limits small enough that everything happens soon."""
    settings = {
        "wal": {"shards": shards, "file_bytes": "1MiB"},
        "data": {"min_free_bytes": 0},
        "storage": {
            "enabled": True, "own_segment_bytes": "64KiB", "segment_bytes": "1MiB",
            "reclaim_interval_s": 0.2, "scrub_bytes_per_s": 0,
        },
        **config,
    }  # fmt: skip
    environ = {"RINGLOG_TEST_STOP_POINTS": stop_points} if stop_points else {}
    with engine(directory=root / "engine", environ=environ, **settings) as host:
        yield host


def data_of(root: Path) -> Path:
    """The data directory of a program that was started below `root`."""
    return root / "engine" / "data"


def settings_of_cold(root: Path) -> dict[str, Any]:
    """A cold tier beside the data, used at once."""
    (root / "cold").mkdir(exist_ok=True)
    return {"cold": {"dir": str(root / "cold"), "interval_s": 0.2, "hot_segments": 0}}


@dataclass(slots=True)
class Asked:
    """One batch: what it held, and whether its ack came."""

    payloads: list[bytes]
    is_acked: bool = False
    took_s: float = 0.0


@dataclass(slots=True)
class Traffic:
    """Writes batches one after the other, each topic in a thread of its own, until told to end."""

    url: str
    ask_ms: int = ASK_MS
    asked: dict[str, list[Asked]] = field(default_factory=lambda: {topic: [] for topic in TOPICS})
    errors: list[str] = field(default_factory=list)
    numbers: Iterator[int] = field(default_factory=itertools.count)
    floor: dict[str, int] = field(default_factory=lambda: dict.fromkeys(TOPICS, 0))
    """Records below this number were asked to be deleted, by topic."""
    _stop: threading.Event = field(default_factory=threading.Event)
    _threads: list[threading.Thread] = field(default_factory=list)

    @property
    def acked(self) -> int:
        """Batches that were acknowledged."""
        return sum(each.is_acked for batches in self.asked.values() for each in batches)

    def acked_of(self, topic: str) -> int:
        """Batches of one topic that were acknowledged."""
        return sum(each.is_acked for each in self.asked[topic])

    def start(self) -> None:
        """Begin; `end` must follow."""
        self._stop.clear()
        self._threads = [
            threading.Thread(target=self._write, args=(topic,), name=topic, daemon=True) for topic in TOPICS
        ]
        for thread in self._threads:
            thread.start()

    def end(self) -> None:
        """Stop writing; what is on its way is waited for, which takes `ask_ms` at most."""
        self._stop.set()
        for thread in self._threads:
            thread.join(JOIN_S)

    def _write(self, topic: str) -> None:
        with ringlog.connect(self.url, timeout_ms=self.ask_ms, reconnect=False) as client:
            while not self._stop.wait(PAUSE_S):
                asked = Asked([self._payload(topic) for _ in range(BATCH)])
                self.asked[topic].append(asked)
                begun = time.monotonic()
                try:
                    client.append_many(topic, asked.payloads, durability="fsync")
                except RinglogError as e:
                    self.errors.append(f"{topic}: {type(e).__name__}: {e}"[:200])
                    # Unknown, and it stays so: what it held may be there once, or not at all.
                    if self._stop.wait(PAUSE_S * 5):
                        return
                    continue
                asked.took_s = time.monotonic() - begun
                asked.is_acked = True

    def _payload(self, topic: str) -> bytes:
        return f"{topic}:{next(self.numbers)}:".encode().ljust(PAYLOAD_BYTES, b".")

    # -- judging --------------------------------------------------------------------------------------

    def judge(self, url: str) -> int:
        """Read everything and compare; returns the records read, raises Broken."""
        read = 0
        with ringlog.connect(url, timeout_ms=READ_MS) as client:
            for topic in TOPICS:
                read += self._judge_topic(client, topic)
        return read

    def _judge_topic(self, client: ringlog.Client, topic: str) -> int:
        batches = self.asked[topic]
        if not any(each.is_acked for each in batches):
            return 0
        found: list[bytes] = []
        first_seq = 0
        # Closed by us: it holds files of the data directory, which is to be unmounted.
        with contextlib.closing(client.reader(topic)) as reader:
            items = list(reader)
        for item in items:
            if not isinstance(item, Record):
                raise Broken(f"{topic}: {item} of a topic of class fsync")
            first_seq = first_seq or item.seq
            if item.seq != first_seq + len(found):
                raise Broken(f"{topic}: record {item.seq} comes after {first_seq + len(found) - 1}")
            found.append(bytes(item.data))
        if len(set(found)) != len(found):
            raise Broken(f"{topic}: {len(found) - len(set(found))} records are doubled")
        known = {payload: i for i, each in enumerate(batches) for payload in each.payloads}
        strange = [payload for payload in found if payload not in known]
        if strange:
            raise Broken(f"{topic}: never sent: {strange[:3]}")
        order = [known[payload] for payload in found]
        if order != sorted(order):
            raise Broken(f"{topic}: batches are out of order")
        self._judge_batches(topic, set(found), first_seq)
        return len(found)

    def _judge_batches(self, topic: str, there: set[bytes], first_seq: int) -> None:
        gone = 0
        is_past_first = False
        for each in self.asked[topic]:
            missing = [payload for payload in each.payloads if payload not in there]
            if not missing:
                is_past_first = True
            elif len(missing) == len(each.payloads) and not each.is_acked:
                continue  # Never came in; or did, and was deleted with what lay around it.
            elif is_past_first or (len(missing) < len(each.payloads) and first_seq == 1):
                raise Broken(f"{topic}: {len(missing)} of a batch are gone (acked: {each.is_acked})")
            else:
                gone += len(missing)
                is_past_first = len(missing) < len(each.payloads)
        # Deletes were asked for below the floor only, and numbers are dense: so many may be missing.
        if gone > min(first_seq, self.floor[topic] or 1) - 1:
            raise Broken(f"{topic}: {gone} acked records are gone, and it begins at {first_seq}")


def delete_below(traffic: Traffic, url: str, topic: str, seq: int) -> None:
    """Delete what lies below `seq`; an error leaves open whether it was done."""
    traffic.floor[topic] = max(seq, traffic.floor[topic])
    with ringlog.connect(url, timeout_ms=traffic.ask_ms, reconnect=False) as client:
        client.topics.delete_records(topic, before_seq=seq)


def checkpoint(host: TestEngine, timeout_s: float = 1.0) -> bool:
    """Ask for a checkpoint now; False when there was no answer in time."""
    asking = Requester("compactor", f"ipc://{host.info.shm_dir}/compactor.sock")
    try:
        asking.ask(m.CheckpointNow(), m.CheckpointMade, timeout_s=timeout_s)
    except RinglogError:
        return False
    finally:
        asking.close()
    return True


def until(condition: Callable[[], bool], seconds: float, pause_s: float = 0.01) -> bool:
    """Look until it holds or the time is over; says which."""
    deadline = time.monotonic() + seconds
    while not condition():
        if time.monotonic() > deadline:
            return False
        time.sleep(pause_s)
    return True
