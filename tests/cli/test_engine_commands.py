"""Commands against a real engine, each in its own process as a shell runs them."""

from __future__ import annotations

import contextlib
import json
import os
import pty
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

import ringlog
from ringlog.cli.outcome import CliExit
from ringlog.limits import RECORD_BYTES_MAX
from ringlog.testing.real_engine import TestEngine, engine, wait_until
from tests.support.shell import COMMAND, Shell

pytestmark = pytest.mark.slow
# A shell starts background jobs with SIGINT ignored, and child processes inherit that.
Name = Callable[[str], str]


def test_a_topic_is_created_shown_changed_listed_and_deleted(shell: Shell, topic: str) -> None:
    (made,) = shell.ok("topic", "create", topic, "--durability", "fsync", "--ttl", "7d")
    assert (made["created"], made["config"]["ttl_ms"]) == (True, 604_800_000)
    shell.fails(CliExit.FAILED, "topic", "create", topic)
    (again,) = shell.ok("topic", "create", topic, "--exist-ok")
    assert (again["created"], again["config"]["durability"]) == (False, "fsync")
    (changed,) = shell.ok("topic", "set", topic, "--cap-records", "10")
    assert (changed["config"]["cap_records"], changed["config"]["ttl_ms"]) == (10, 604_800_000)
    (shown,) = shell.ok("topic", "show", topic)
    assert (shown["head_seq"], shown["count"]) == (0, 0)
    assert [row["topic"] for row in shell.ok("topic", "list", topic)] == [topic]
    assert shell.ok("topic", "delete", topic, "--yes") == [
        {"topic": topic, "deleted": True, "routers_removed": []}
    ]
    assert shell.run("topic", "delete", topic, "--yes").returncode == CliExit.NOT_FOUND
    assert shell.ok("topic", "list", topic) == []


def test_written_lines_are_read_back_byte_for_byte(shell: Shell, topic: str) -> None:
    lines = b"".join(b"line %d \xff\n" % n for n in range(5_000))
    (facts,) = shell.ok("write", topic, stdin=lines)
    assert (facts["records"], facts["bytes"]) == (5_000, len(lines) - 5_000)
    assert shell.run("read", topic, "--output", "raw").stdout == lines
    assert (
        shell.run("read", topic, "--from", "4999", "--output", "raw").stdout
        == b"line 4998 \xff\nline 4999 \xff\n"
    )
    assert [r["seq"] for r in shell.ok("read", topic, "--from", "10", "--limit", "3")] == [10, 11, 12]
    assert len(shell.ok("read", topic, "--from", "-1h", "-n", "7")) == 7
    assert shell.ok("read", topic, "--from", "end") == []


def test_json_lines_keep_their_keys_and_values(shell: Shell, topic: str, tmp_path: Path) -> None:
    file = tmp_path / "events"
    file.write_bytes(b'{"id": "a", "n": 18446744073709551615}\n{"id": 7}\n')
    shell.ok("write", topic, str(file), "--json-lines", "--key-field", "id", "--durability", "fsync")
    records = shell.ok("read", topic)
    assert [(r["key"], r["data"]) for r in records] == [
        ("a", {"id": "a", "n": 18446744073709551615}),
        ("7", {"id": 7}),
    ]


@pytest.mark.parametrize(
    ("flags", "wrong", "reason"),
    [
        (["--json-lines"], b"{oops\n", "not JSON"),
        (["--json-lines", "--key-field", "id"], b'{"n": 1}\n', "no field 'id'"),
        (["--lines"], b"x" * (RECORD_BYTES_MAX + 1) + b"\n", "a line is too long"),
    ],
)
def test_a_write_that_fails_behind_appended_records_says_how_many(
    shell: Shell, topic: str, tmp_path: Path, flags: list[str], wrong: bytes, reason: str
) -> None:
    """Exit code 2 means that nothing was sent: the user would write the whole repaired file again."""
    good, bad = tmp_path / "good", tmp_path / "bad"
    good.write_bytes(b'{"id": 1}\n' * 1_500)
    bad.write_bytes(b'{"id": 2}\n' * 1_000 + wrong)
    said = shell.fails(CliExit.FAILED, "write", topic, str(good), str(bad), *flags)
    assert reason in said
    assert f"file='{bad}', line=1001" in said
    assert "acknowledged=2000" in said
    assert len(shell.ok("read", topic)) == 2_000
    unread = shell.fails(CliExit.FAILED, "write", topic, str(good), str(tmp_path / "absent"))
    assert "acknowledged=1000" in unread
    assert "absent" in unread
    with_nothing_sent = CliExit.FAILED if "--lines" in flags else CliExit.USAGE
    assert "acknowledged" not in shell.fails(with_nothing_sent, "write", topic, *flags, stdin=wrong)
    assert len(shell.ok("read", topic)) == 3_000


@pytest.fixture(scope="module")
def small_records() -> Iterator[Shell]:
    """A shell whose engine accepts records of at most 1,000 bytes."""
    with engine(wal={"shards": 1}, limits={"max_record_bytes": 1_000}) as running:
        made = Shell(running.url)
        yield made
        made.end()


@pytest.mark.parametrize("chunks", [b"", b'{"id": 2}\n' * 1_000])
def test_a_write_reports_what_the_engine_refused_before_wrong_input(
    small_records: Shell, chunks: bytes
) -> None:
    """Wrong input alone would mean that all records before it are acknowledged, or that nothing was sent."""
    topic = f"refused{len(chunks)}"
    refused = b'{"id": "' + b"x" * 1_000 + b'"}\n' + b'{"id": 1}\n' * 999
    said = small_records.fails(
        CliExit.FAILED, "write", topic, "--json-lines", stdin=refused + chunks + b"{oops\n"
    )
    assert "record_too_large" in said
    assert "failed=1000" in said
    assert "not JSON (file='-', line=" in said
    assert ("acknowledged=1000" in said) == bool(chunks)


def test_a_write_with_an_unknown_outcome_and_wrong_input_does_not_say_that_nothing_was_sent() -> None:
    with engine(wal={"shards": 1}) as running, contextlib.ExitStack() as stack:
        shell = Shell(running.url)
        stack.callback(shell.end)
        shell.ok("topic", "create", "t")
        shard = running.pid_of("wal_shard")
        os.kill(shard, signal.SIGSTOP)
        stack.callback(os.kill, shard, signal.SIGCONT)
        said = shell.fails(
            CliExit.UNKNOWN,
            "write",
            "t",
            "--json-lines",
            "--timeout",
            "1s",
            stdin=b"{}\n" * 1_000 + b"{oops\n",
        )
        assert "failed=1000" in said
        assert "not JSON" in said


def test_a_whole_file_is_one_record(shell: Shell, topic: str, tmp_path: Path) -> None:
    file = tmp_path / "blob"
    file.write_bytes(bytes(range(256)) * 10)
    shell.ok("write", topic, str(file), "--whole")
    assert shell.run("read", topic, "--output", "raw").stdout == file.read_bytes() + b"\n"


def test_a_refused_command_has_an_error_code_and_writes_no_record(shell: Shell, topic: str) -> None:
    """Invalid names, invalid settings, bad input lines and missing files are refused."""
    assert "topic_not_found" in shell.fails(CliExit.NOT_FOUND, "read", topic)
    assert "topic_not_found" in shell.fails(CliExit.NOT_FOUND, "tail", topic)
    assert "topic_not_found" in shell.fails(CliExit.NOT_FOUND, "topic", "show", topic)
    assert "invalid_request" in shell.fails(CliExit.FAILED, "write", "../x", stdin=b"x\n")
    assert "invalid_request" in shell.fails(CliExit.FAILED, "topic", "create", "a b")
    assert "durability" in shell.fails(CliExit.FAILED, "topic", "create", topic, "--durability", "eternal")
    assert "line=2" in shell.fails(CliExit.USAGE, "write", topic, "--json-lines", stdin=b"1\n{\n")
    assert "too long" in shell.fails(CliExit.FAILED, "write", topic, stdin=bytes(1_100_000))
    shell.fails(CliExit.FAILED, "write", topic, "no/such/file")


def test_a_full_topic_refuses_the_write_with_topic_full(shell: Shell, topic: str) -> None:
    shell.ok("topic", "create", topic, "--cap-records", "2", "--discard", "reject")
    shell.ok("write", topic, stdin=b"1\n2\n")
    assert "topic_full" in shell.fails(CliExit.FAILED, "write", topic, stdin=b"3\n")
    assert len(shell.ok("read", topic)) == 2


def test_tail_follows_several_topics_until_its_limit(
    shell: Shell, ringlog_engine: TestEngine, ringlog_topic: Name
) -> None:
    first, second = ringlog_topic("one"), ringlog_topic("two")
    with ringlog.connect(ringlog_engine.url) as client:
        for topic in (first, second):
            client.topics.create(topic)
        tail = shell.start("tail", first, second, "--from", "start", "--limit", "4")
        for n in range(2):
            client.append(first, b"1%d" % n)
            client.append(second, b"2%d" % n)
        out, err = tail.communicate(timeout=30)
    assert (tail.returncode, err) == (0, b"")
    records = [json.loads(line) for line in out.splitlines()]
    assert [r["data"] for r in records if r["topic"] == first] == [10, 11]
    assert [r["data"] for r in records if r["topic"] == second] == [20, 21]


def test_tail_accepts_patterns_and_ends_after_its_last_topic_is_deleted(
    shell: Shell, ringlog_engine: TestEngine, ringlog_topic: Name
) -> None:
    """The command prints the deletion of a topic, and exits with the last topic. With a pattern it waits for
    new topics."""
    topic = ringlog_topic("ends")
    with ringlog.connect(ringlog_engine.url) as client:
        client.append(topic, b"1")
        tail = shell.start("tail", topic, "--from", "start", "--strong")
        assert tail.stdout is not None
        assert json.loads(tail.stdout.readline())["data"] == 1
        client.topics.delete(topic)
        out, err = tail.communicate(timeout=30)
        assert (tail.returncode, err) == (0, b"")
        (ended,) = [json.loads(line) for line in out.splitlines()]
        assert (ended["event"], ended["topic"], ended["head_seq"]) == ("topic-deleted", topic, 1)
        stem = ringlog_topic("wild")
        tail = shell.start("tail", f"{stem}.*", "--from", "start", "--limit", "2")
        for name in ("a", "b"):
            client.append(f"{stem}.{name}", name.encode())
        out, err = tail.communicate(timeout=30)
        assert (tail.returncode, err) == (0, b"")
        assert {json.loads(line)["topic"] for line in out.splitlines()} == {f"{stem}.a", f"{stem}.b"}
        for name in ("a", "b"):
            client.topics.delete(f"{stem}.{name}")


def test_an_interrupted_tail_ends_with_130(shell: Shell, ringlog_engine: TestEngine, topic: str) -> None:
    with ringlog.connect(ringlog_engine.url) as client:
        client.append(topic, b"1")
    tail = shell.start("tail", topic, "--from", "start")
    assert tail.stdout is not None
    assert json.loads(tail.stdout.readline())["data"] == 1
    tail.send_signal(signal.SIGINT)
    _, err = tail.communicate(timeout=30)
    assert (tail.returncode, err) == (CliExit.INTERRUPTED, b"")


def test_an_interrupted_tail_has_printed_a_whole_json_list(
    shell: Shell, ringlog_engine: TestEngine, topic: str
) -> None:
    with ringlog.connect(ringlog_engine.url) as client:
        client.append_many(topic, [b"1", b"2"])
        tail = shell.start("tail", topic, "--from", "start", "--output", "json")
        assert tail.stdout is not None
        first = tail.stdout.readline()
        tail.send_signal(signal.SIGINT)
        printed = json.loads(first + tail.stdout.read())
    assert tail.wait(30) == CliExit.INTERRUPTED
    assert [record["data"] for record in printed] == [1, 2]


def test_status_shows_every_process_and_readiness(shell: Shell, ringlog_engine: TestEngine) -> None:
    """`status --ready` prints only the readiness and its problems."""
    ringlog_engine.wait_ready()
    (found,) = shell.ok("status")
    assert found["state"] == "ready"
    assert [p["name"] for p in found["processes"]][:3] == ["wal_shard-00", "wal_shard-01", "gateway"]
    (ready,) = shell.ok("status", "--ready")
    assert ready["state"] == "ready"
    # Consumers of other tests may lag, because the tests share the engine.
    assert not [problem for problem in ready["problems"] if "consumer" not in problem]
    table = shell.run("status", "--output", "table").stdout.decode()
    assert "wal_shard-01" in table
    assert "disk free" in table


def test_bench_measures_a_running_engine_and_cleans_up(shell: Shell) -> None:
    (append,) = shell.ok("bench", "append", "--seconds", "0.2", "--frame-records", "10", "--producers", "1")
    assert append["records_per_s"] > 0
    assert append["machine"]["cpus"] >= 1
    done = shell.run("bench", "read", "--records", "2000", "--output", "json")
    report = json.loads(done.stdout)
    assert {row["way"] for row in report["results"]} >= {"reader, records", "tailer, bytes"}
    assert shell.ok("topic", "list", "bench-") == []


def test_serve_on_the_data_of_a_running_engine_is_refused() -> None:
    """The first engine continues (D5)."""
    with engine() as running:
        shell = Shell(running.url)
        done = shell.run("serve", "--data-dir", running.data_dir, "--set", "run.allow_root=true")
        assert done.returncode == CliExit.FAILED
        assert len([line for line in done.stderr.decode().splitlines() if not line.startswith("{")]) == 1
        assert shell.ok("status", "--ready") == [{"state": "ready", "problems": []}]


def test_serve_runs_until_sigterm_and_exits_with_0(tmp_path: Path) -> None:
    """The engine drains before it exits."""
    data = tmp_path / "data"
    shell = Shell(f"ringlog://{data}/run")
    serve = shell.start(
        "serve", "--data-dir", str(data), "--set", "run.allow_root=true", "--set", "wal.shards=1"
    )
    try:
        wait_until((data / "run" / "engine.json").exists, 20, "the engine to be ready")
        shell.ok("write", "kept", "--durability", "fsync", stdin=b"1\n")
    finally:
        serve.send_signal(signal.SIGTERM)
        out, _ = serve.communicate(timeout=30)
    assert serve.returncode == 0
    assert b"is ready" in out
    shell.fails(CliExit.NO_CONNECTION, "status")


def test_records_are_deleted_by_seq_and_by_tag(shell: Shell, topic: str) -> None:
    """The selections exclude each other, and one of them is required."""
    with ringlog.connect(shell.environ["RINGLOG_URL"]) as client:
        for n in range(1, 7):
            client.append(topic, b"%d" % n, tag="a/even" if n % 2 == 0 else "odd")
    (done,) = shell.ok("delete", topic, "--before-seq", "3", "--yes")
    assert (done["deleted"], done["earliest_seq"], done["count"]) == (2, 3, 4)
    assert shell.ok("delete", topic, "--prefix", "a/", "--yes")[0]["deleted"] == 2
    assert shell.ok("delete", topic, "--tag", "od", "-y")[0]["deleted"] == 0
    assert shell.ok("delete", topic, "--levels", "a/#", "-y")[0]["deleted"] == 0
    assert [record["seq"] for record in shell.ok("read", topic)] == [3, 5]
    assert shell.ok("topic", "show", topic)[0]["earliest_seq"] == 3
    assert "say what to delete" in shell.fails(CliExit.USAGE, "delete", topic)
    assert "exclude" in shell.fails(CliExit.USAGE, "delete", topic, "--tag", "a", "--prefix", "b")
    assert "exclude" in shell.fails(CliExit.USAGE, "delete", topic, "--tag", "a", "--levels", "b")
    shell.fails(CliExit.NOT_FOUND, "delete", f"{topic}.absent", "--before-seq", "3", "-y")


def test_records_are_selected_by_tag_levels(shell: Shell, topic: str) -> None:
    """read, tail and delete accept `--levels`."""
    with ringlog.connect(shell.environ["RINGLOG_URL"]) as client:
        for tag in ("eu/fr/orders", "eu/de/orders", "eu/de/stock", "us/ny/orders", "eu"):
            client.append(topic, b"x", tag=tag)
    assert [record["seq"] for record in shell.ok("read", topic, "--levels", "eu/+/orders")] == [1, 2]
    tailed = shell.ok("tail", topic, "--from", "start", "--levels", "eu/#", "--limit", "4")
    assert [record["seq"] for record in tailed] == [1, 2, 3, 5]
    assert "exclude" in shell.fails(CliExit.USAGE, "read", topic, "--tag", "eu", "--levels", "eu/#")
    assert shell.ok("delete", topic, "--levels", "+/+/orders", "--yes")[0]["deleted"] == 3
    assert [record["seq"] for record in shell.ok("read", topic)] == [3, 5]


def test_read_since_a_time(shell: Shell, topic: str) -> None:
    shell.ok("write", topic, "--lines", stdin=b"1\n2\n")
    assert len(shell.ok("read", topic, "--since", "15m")) == 2
    assert shell.ok("read", topic, "--since", "2999-01-01T00:00:00Z") == []
    assert "exclude" in shell.fails(CliExit.USAGE, "read", topic, "--since", "15m", "--from", "2")


def test_a_destructive_command_asks_for_confirmation_on_a_terminal(shell: Shell, topic: str) -> None:
    shell.ok("write", topic, stdin=b"1\n2\n")
    question = f"Delete topic {topic} and its 2 records? [y/N] ".encode()
    code, shown = on_a_terminal(shell, b"n\n", "topic", "delete", topic)
    assert (code, question in shown, b"not confirmed" in shown) == (CliExit.USAGE, True, True), shown
    assert len(shell.ok("read", topic)) == 2
    code, shown = on_a_terminal(shell, b"y\n", "topic", "delete", topic)
    assert (code, question in shown) == (CliExit.DONE, True), shown
    shell.fails(CliExit.NOT_FOUND, "topic", "show", topic)


def test_a_start_seq_is_inclusive_and_a_cursor_exclusive(
    shell: Shell, ringlog_engine: TestEngine, topic: str
) -> None:
    with ringlog.connect(ringlog_engine.url, wait=10) as client:
        client.topics.create(topic)
        client.append_many(topic, [b"%d" % n for n in range(1, 6)])
        epoch = client.topics.state(topic).epoch
        group = client.group(topic, "g", mode="queue")
        group.stats()
        for start, first in ((2, 2), (ringlog.client.Cursor(epoch, 2), 3)):
            expected = list(range(first, 6))
            assert [record.seq for record in client.reader(topic, start)] == expected
            with client.tailer(topic, start, follow=False) as tailer:
                assert next(iter(tailer)).first_seq == first
            with client.watch({topic: start}) as watch:
                assert watch.next(20).records[0].seq == first
            assert group.seek(start) == first
            text, limit = str(start), str(len(expected))
            assert [record["seq"] for record in shell.ok("read", topic, "--from", text)] == expected
            tailed = shell.ok("tail", topic, "--from", text, "--limit", limit)
            assert [record["seq"] for record in tailed] == expected
            assert shell.ok("group", "seek", topic, "g", text, "--yes")[0]["first_seq"] == first


def test_the_hints_that_serve_prints_work_in_a_shell(tmp_path: Path) -> None:
    data = tmp_path / "with a space"
    shell = Shell(f"ringlog://{data}/run")
    arguments = ["serve", "--data-dir", str(data), "--set", "run.allow_root=true", "--set", "wal.shards=1"]
    serve = shell.start(*arguments)
    shown = []
    try:
        assert serve.stdout is not None
        while not shown or "ringlog tail" not in shown[-1]:
            shown.append(serve.stdout.readline().decode())
            assert shown[-1], "".join(shown)
        first = next(n for n, line in enumerate(shown) if line.startswith("  try "))
        hints = [line[len("  try ") :].strip() for line in shown[first:]]
        assert [hint.split()[0] for hint in hints] == ["export", "echo", "ringlog"]
        # The printed tail command does not end. Here it ends after one record.
        script = "\n".join([*hints[:-1], f"{hints[-1]} --limit 1"])
        environ = {name: value for name, value in os.environ.items() if not name.startswith("RINGLOG_")}
        environ |= {"PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}"}
        pasted = subprocess.run(
            ["bash", "-euc", script], capture_output=True, text=True, timeout=40, check=False, env=environ
        )
    finally:
        serve.send_signal(signal.SIGTERM)
        serve.communicate(timeout=30)
    assert pasted.returncode == 0, pasted.stderr
    assert json.loads(pasted.stdout.splitlines()[-1])["data"] == {"$text": "hello"}


def on_a_terminal(shell: Shell, answer: bytes, *arguments: str) -> tuple[int, bytes]:
    """Run a command on a terminal. Return its exit code and the terminal's output."""
    ours, its = pty.openpty()
    try:
        started = subprocess.Popen(
            [*COMMAND, *arguments], stdin=its, stdout=its, stderr=its, env=shell.environ
        )
        os.close(its)
        os.write(ours, answer)
        shown = b""
        with contextlib.suppress(OSError):  # EIO: the other end is closed
            while data := os.read(ours, 4_096):
                shown += data
        return started.wait(30), shown
    finally:
        os.close(ours)
