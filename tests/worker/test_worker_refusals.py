"""`ringlog worker` against a real engine: invalid options are refused before the worker claims a job."""

from __future__ import annotations

from pathlib import Path

import pytest

import ringlog
from ringlog.cli.outcome import CliExit
from ringlog.client.queue import Queue
from tests.support.workers import Workers

pytestmark = pytest.mark.slow


@pytest.mark.parametrize(
    ("target", "more", "words"),
    [
        ("nothing.there:f", (), "module 'nothing' does not exist"),
        ("program:deliverr", (), "has no 'deliverr'; is it 'deliver'?"),
        ("program:HERE", (), "the target is not callable"),
        ("program:do", ("--payload", "program:not_a_codec"), "a codec must have the methods"),
        ("broken:f", (), "importing 'broken:f' failed: ZeroDivisionError"),
        ("wants:f", (), "No module named 'no_such_thing'"),
        ("dies:f", (), "while it imported the function, its process exited with status 9"),
        ("program", (), "name the function as package.module:function"),
        ("program:do", ("--payload", "pickle"), "payload must be raw, text, json or package.module:codec"),
        ("program:do", ("-c", "0"), "concurrency must be from 1 to"),
        ("program:do", ("-c", "2000"), "concurrency must be from 1 to"),
        ("program:do", ("--backoff", "2s", "--backoff-max", "1s"), "backoff must satisfy"),
        ("program:do", ("--memory-limit", "much"), "must be a size"),
    ],
)
def test_invalid_targets_and_options_are_refused_before_a_job_is_claimed(
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


def test_missing_queues_and_engines_have_their_own_exit_codes(
    workers: Workers, queue: Queue, tmp_path: Path
) -> None:
    assert workers.run("program:do", f"{queue.topic}.absent")[0] == CliExit.NOT_FOUND
    with ringlog.connect(workers.environ["RINGLOG_URL"], wait=10) as client:
        client.topics.create(f"{queue.topic}.log")
    assert workers.run("program:do", f"{queue.topic}.log")[0] == CliExit.FAILED
    workers.environ["RINGLOG_URL"] = f"ringlog://{tmp_path}/nowhere"
    assert workers.run("program:do", queue.topic)[0] == CliExit.NO_CONNECTION
