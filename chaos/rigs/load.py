"""Steady load from a process of its own: it may die of a SIGBUS, and its clock is nobody else's.

    with Load(url, ["t0", "t1"], scratch) as load:
        mark = load.mark()
        …hurt the engine…
        load.need_acks(mark, 50)
    load.judge(client)

`python -m chaos.rigs.load URL HISTORY SIZE TOPIC…` is the process: for each topic one thread that appends
numbered records one by one, and one that reads back what was acknowledged, until standard input ends.
"""

from __future__ import annotations

import os
import queue
import random
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, TextIO

import ringlog
from chaos.order import Broken, require
from chaos.rigs.history import (
    ACKED,
    READ,
    READ_ERROR,
    REFUSED,
    UNKNOWN,
    WRONG,
    History,
    Line,
    judge,
    payload_of,
)
from ringlog import hardening
from ringlog.client import Record
from ringlog.errors import RinglogError
from ringlog.testing.children import debug_environ

TIMEOUT_MS = 4_000
PACE_S = 0.002
LOOK_S = 0.01
STOP_S = 15.0
SLOW_S = 40.0
"""Nothing of an engine that is to go on takes longer."""


class Load:
    """The load of one engine, seen from outside."""

    def __init__(
        self, url: str, topics: Sequence[str], scratch: Path, *, size: int = 64, transport: str = "auto"
    ) -> None:
        self.url, self.topics = url, list(topics)
        self.history = History(scratch / f"history-{time.monotonic_ns()}")
        self.history.path.touch()
        self._err = self.history.path.with_suffix(".err")
        with self._err.open("wb") as err:
            self._process = subprocess.Popen(
                [
                    sys.executable, "-P", "-m", "chaos.rigs.load", str(os.getpid()), url,
                    str(self.history.path), str(size), transport, *topics,
                ],
                stdin=subprocess.PIPE, stdout=err, stderr=err, env=debug_environ(),
            )  # fmt: skip

    @property
    def pid(self) -> int:
        """Of its process."""
        return self._process.pid

    @property
    def is_alive(self) -> bool:
        """It has not died."""
        return self._process.poll() is None

    def mark(self) -> int:
        """This moment: a name for what begins from now on."""
        return time.monotonic_ns()

    def count(self, kind: str, since: int) -> int:
        """Operations of a kind that began after a mark."""
        return len(self.history.since(kind, since))

    def need(self, kind: str, since: int, least: int, within_s: float = 0.0, topic: str = "") -> None:
        """Wait for so many operations that began after a mark (of one topic, or of each); raises Broken."""
        for name in [topic] if topic else self.topics:
            self._need_of(name, kind, since, least, within_s or SLOW_S)

    def _need_of(self, topic: str, kind: str, since: int, least: int, within_s: float) -> None:
        deadline = time.monotonic() + within_s
        while True:
            found = [line for line in self.history.since(kind, since) if line.topic == topic]
            if len(found) >= least:
                return
            if not self.is_alive:
                # Said first: whoever reads of a pause looks for its cause in the engine.
                raise Broken(
                    f"the load died, status {self._process.returncode}: {len(found)} of {least} operations"
                    f" {kind!r} on {topic}\nlast lines: {self.history.lines[-6:]}\n{self.errors()}"
                )
            if time.monotonic() > deadline:
                raise Broken(
                    f"only {len(found)} of {least} operations {kind!r} on {topic} in {within_s:.0f} s\n"
                    f"last lines: {self.history.lines[-6:]}\n{self.errors()}"
                )
            time.sleep(LOOK_S)

    def need_work(self, since: int, least: int = 10, within_s: float = 0.0) -> None:
        """Wait for acknowledged writes and for reads that began after a mark."""
        self.need(ACKED, since, least, within_s)
        self.need(READ, since, 1, within_s)

    def need_work_of(self, topic: str, least: int) -> None:
        """Wait for writes to one topic that begin from now on."""
        self.need(ACKED, self.mark(), least, topic=topic)

    def errors(self) -> str:
        """What its process had to say."""
        return self._err.read_text(errors="replace")[-3_000:]

    def stop(self) -> None:
        """End it in good order; killed when it does not."""
        if self._process.stdin is not None:
            self._process.stdin.close()
        try:
            self._process.wait(STOP_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
            raise Broken(f"the load did not end\n{self.errors()}") from None

    def kill(self) -> None:
        """End it at once."""
        self._process.kill()
        self._process.wait()
        if self._process.stdin is not None:
            self._process.stdin.close()

    def judge(self, client: ringlog.Client) -> int:
        """Read everything back and judge it; returns how many acknowledged writes were checked."""
        lines = self.history.look()
        checked = 0
        for topic in self.topics:
            items = list(client.reader(topic))
            lost = [item for item in items if not isinstance(item, Record)]
            require(not lost, f"{topic}: losses are announced: {lost[:3]}")
            checked += judge(topic, lines, [item for item in items if isinstance(item, Record)])
        return checked

    def __enter__(self) -> Load:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._process.poll() is None:
            self.kill()
        elif self._process.stdin is not None:
            self._process.stdin.close()


# -- the process --------------------------------------------------------------------------------------


class _Writer:
    """Appends to one topic, one record at a time, and tells the reader what is there."""

    def __init__(self, client: ringlog.Client, topic: str, size: int, tell: Callable[[Line], None]) -> None:
        self._client, self._topic, self._size, self._tell = client, topic, size, tell
        self.acked: list[tuple[int, int]] = []

    def work(self, stop: threading.Event) -> None:
        number = 0
        while not stop.is_set():
            number += 1
            self._one(number)
            time.sleep(PACE_S)

    def _one(self, number: int) -> None:
        begun = time.monotonic_ns()
        kind, seq, text = ACKED, 0, ""
        try:
            done = self._client.append(self._topic, payload_of(self._topic, number, self._size))
            seq = done.first_seq
            self.acked.append((seq, number))
        except RinglogError as e:
            kind = UNKNOWN if e.outcome == "unknown" else REFUSED
            text = f"{type(e).__name__}: {e}".replace("\n", " ")
        self._tell(Line(kind, self._topic, number, seq, begun, time.monotonic_ns(), text))


def _read_back(
    client: ringlog.Client, topic: str, writer: _Writer, tell: Callable[[Line], None], stop: threading.Event
) -> None:
    chance = random.Random(topic)
    while not stop.is_set():
        time.sleep(2 * PACE_S)
        if not writer.acked:
            continue
        seq, number = chance.choice(writer.acked[-200:])
        begun = time.monotonic_ns()
        kind, text = READ, ""
        try:
            page = client.read(topic, seq - 1, limit=1)
            got = [item for item in page.records if isinstance(item, Record)]
            if len(got) != 1 or got[0].seq != seq or not got[0].data.startswith(payload_of(topic, number, 0)):
                kind, text = WRONG, f"{got!r} for {seq}, write {number}".replace("\n", " ")
        except RinglogError as e:
            kind, text = READ_ERROR, f"{type(e).__name__}: {e}".replace("\n", " ")
        tell(Line(kind, topic, number, seq, begun, time.monotonic_ns(), text))


def _teller(out: TextIO) -> tuple[Callable[[Line], None], Callable[[], None]]:
    """Lines from many threads into one file; what was told is in the file at once."""
    lines: queue.SimpleQueue[Line | None] = queue.SimpleQueue()

    def write() -> None:
        while (line := lines.get()) is not None:
            out.write(line.encode())
            if lines.empty():
                out.flush()
        out.flush()

    thread = threading.Thread(target=write)
    thread.start()

    def end() -> None:
        lines.put(None)
        thread.join()

    return lines.put, end


def _main(arguments: list[str]) -> int:
    parent, url, path, size, transport, *topics = arguments
    if not hardening.die_with_parent(int(parent)):
        return 1
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    stop = threading.Event()
    options: dict[str, Any] = {"transport": transport, "timeout_ms": TIMEOUT_MS}
    with open(path, "a") as out, ringlog.connect(url, **options) as client:
        tell, end = _teller(out)
        threads = []
        for topic in topics:
            writer = _Writer(client, topic, int(size), tell)
            threads.append(threading.Thread(target=writer.work, args=(stop,)))
            threads.append(threading.Thread(target=_read_back, args=(client, topic, writer, tell, stop)))
        for thread in threads:
            thread.start()
        sys.stdin.read()
        stop.set()
        for thread in threads:
            thread.join()
        end()
    return 0


if __name__ == "__main__":
    sys.exit(_main(sys.argv[1:]))
