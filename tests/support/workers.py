"""Workers as subprocesses that start like from a shell."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil

from ringlog.client.queue import Queue
from ringlog.testing.real_engine import wait_until
from tests.support.queue_jobs import counts

ROOT = Path(__file__).parent.parent.parent

MAIN = (
    # Restore the default action of SIGHUP, which is ignored if the tests run without a terminal (nohup).
    "import signal, sys; signal.signal(signal.SIGHUP, signal.SIG_DFL); "
    "from ringlog.cli import main; sys.exit(main())"
)

PROGRAM = '''
import json, os, pathlib, signal, sys, threading, time
import msgspec
from ringlog.client import msgspec_codec
from ringlog.worker import Reject, Retry, current_job

HERE = pathlib.Path(__file__).parent


class Email(msgspec.Struct):
    to: str


EMAIL = msgspec_codec(Email)
not_a_codec = 7


def note(word):
    with open(HERE / "notes", "a") as file:
        file.write(f"{word}\\n")


def deliver(email: Email):
    note(email.to)


def forks(value):
    child = os.fork()
    if not child:
        return  # And is no end of the job.
    os.waitpid(child, 0)
    note("parent of " + value)


async def later(value):
    note("awaited " + value)


def facts(value):
    job = current_job()
    note(json.dumps([type(value).__name__, job.queue, job.seq, job.deliveries, job.key.decode(), job.tag,
                     job.headers["h"].decode(), job.meta, os.getpid()]))


def do(value):
    """What the job says; what it says of its second time is done the second time."""
    first, _, then = value.partition(" then ")
    word, _, rest = (first if current_job().deliveries == 1 or not then else then).partition(" ")
    note(f"{word} {os.getpid()}")
    if word == "exit":
        os._exit(3)
    elif word == "segv":
        os.kill(os.getpid(), signal.SIGSEGV)
    elif word == "raise":
        raise ValueError(rest)
    elif word == "leave":
        sys.exit(4)
    elif word == "reject":
        raise Reject(rest)
    elif word == "retry":
        raise Retry(rest, delay_ms=1)
    elif word == "eat":
        bytearray(1 << 40)
    elif word == "wait":
        while not (HERE / rest).exists():
            time.sleep(0.005)
'''


class Workers:
    """Starts workers and keeps the files of their jobs in one directory."""

    def __init__(self, url: str, directory: Path) -> None:
        self.directory = directory
        self.environ = os.environ | {"RINGLOG_URL": url, "PYTHONPATH": str(ROOT)}
        self._started: list[subprocess.Popen[str]] = []
        (directory / "program.py").write_text(PROGRAM)

    def start(self, target: str, queue: str, *more: str) -> subprocess.Popen[str]:
        started = subprocess.Popen(
            [sys.executable, "-c", MAIN, "worker", target, "--queue", queue, *more],
            cwd=self.directory, env=self.environ, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
        )  # fmt: skip
        self._started.append(started)
        return started

    def ended(self, started: subprocess.Popen[str]) -> tuple[int, dict[str, Any], list[dict[str, Any]]]:
        """Wait for the end of a worker. Return `(exit code, printed counts, log lines)`."""
        out, err = started.communicate(timeout=40)
        lines = [json.loads(line) for line in err.splitlines() if line.startswith("{")]
        return started.returncode, json.loads(out) if out else {}, lines

    def run(self, target: str, queue: str, *more: str) -> tuple[int, dict[str, Any], list[dict[str, Any]]]:
        """Run a worker until the queue is empty."""
        return self.ended(self.start(target, queue, "--until-empty", *more))

    def stop(self, started: subprocess.Popen[str]) -> tuple[int, dict[str, Any], list[dict[str, Any]]]:
        started.send_signal(signal.SIGTERM)
        return self.ended(started)

    def notes(self) -> list[str]:
        """Return the lines that jobs wrote to the notes file."""
        path = self.directory / "notes"
        return path.read_text().splitlines() if path.exists() else []

    def noted(self, word: str) -> list[int]:
        """Return the ids of the processes that wrote this word."""
        return [int(line.split()[1]) for line in self.notes() if line.startswith(f"{word} ")]

    def end(self) -> None:
        """Kill all workers and wait for their child processes."""
        for started in self._started:
            left = psutil.Process(started.pid).children() if started.poll() is None else []
            started.kill()
            started.communicate()
            psutil.wait_procs(left, timeout=10)


def soon(condition: Callable[[], object], what: str = "the worker got on") -> None:
    """Wait until the condition is true."""
    wait_until(condition, timeout=30, what=what)


def wait_until_empty(queue: Queue) -> None:
    """Wait until no job is ready, in flight or delayed."""
    soon(lambda: counts(queue) == (0, 0, 0), "the queue is empty")


def events(log: list[dict[str, Any]]) -> Counter[str]:
    """Count the events of a log."""
    return Counter(line["event"] for line in log)
