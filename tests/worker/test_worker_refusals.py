"""`ringlog worker` against a real engine: what cannot be run is said before any job is taken."""

from __future__ import annotations

from pathlib import Path

import pytest

import ringlog
from ringlog.cli.outcome import CliExit
from ringlog.client.queue import Queue
from tests.worker.conftest import Workers

pytestmark = pytest.mark.slow


@pytest.mark.parametrize(
    ("target", "more", "words"),
    [
        ("nothing.there:f", (), "there is no module 'nothing'"),
        ("program:deliverr", (), "has no 'deliverr'; is it 'deliver'?"),
        ("program:HERE", (), "it is not a function"),
        ("program:do", ("--payload", "program:not_a_codec"), "a codec has encode and decode"),
        ("broken:f", (), "importing 'broken:f' failed: ZeroDivisionError"),
        ("wants:f", (), "No module named 'no_such_thing'"),
        ("dies:f", (), "while it imported the function, its process exited with status 9"),
        ("program", (), "name the function as package.module:function"),
        ("program:do", ("--payload", "pickle"), "a payload is raw, text, json or package.module:codec"),
        ("program:do", ("-c", "0"), "concurrency out of range"),
        ("program:do", ("-c", "2000"), "concurrency out of range"),
        ("program:do", ("--backoff", "2s", "--backoff-max", "1s"), "back-off"),
        ("program:do", ("--memory-limit", "much"), "must be a size"),
    ],
)
def test_what_cannot_be_run_is_said_before_any_job_is_taken(
    workers: Workers, queue: Queue, target: str, more: tuple[str, ...], words: str
) -> None:
    (workers.directory / "broken.py").write_text("1 / 0\n")
    (workers.directory / "wants.py").write_text("import no_such_thing\n")
    (workers.directory / "dies.py").write_text("import os\nos._exit(9)\n")
    queue.put(b"job")
    started = workers.start(target, queue.topic, *more)
    out, err = started.communicate(timeout=40)
    assert (started.returncode, out) == (CliExit.USAGE, "")
    assert words in err.splitlines()[-1]
    assert (queue.stats().ready, queue.peek()[0].data) == (1, b"job")


def test_queues_and_engines_that_are_not_there_have_their_exit_codes(
    workers: Workers, queue: Queue, tmp_path: Path
) -> None:
    assert workers.run("program:do", f"{queue.topic}.absent")[0] == CliExit.NOT_FOUND
    with ringlog.connect(workers.environ["RINGLOG_URL"], wait=10) as client:
        client.topics.create(f"{queue.topic}.log")
    assert workers.run("program:do", f"{queue.topic}.log")[0] == CliExit.FAILED
    workers.environ["RINGLOG_URL"] = f"ringlog://{tmp_path}/nowhere"
    assert workers.run("program:do", queue.topic)[0] == CliExit.NO_CONNECTION
