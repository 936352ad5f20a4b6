"""Queue commands, through the real entry point."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from ringlog.cli.jobs import parse_job
from ringlog.cli.outcome import CliExit
from ringlog.client import Client
from ringlog.errors import UsageError
from ringlog.limits import RECORD_BYTES_MAX
from ringlog.testing.real_engine import wait_until
from tests.support.engines import engine_fixture
from tests.support.shell import Shell

pytestmark = pytest.mark.slow

running = engine_fixture("module", wal={"shards": 1}, delivery={"schedulers": 1})


@pytest.fixture
def queue(client: Client, ringlog_topic: Callable[[str], str]) -> str:
    name = ringlog_topic("q")
    client.topics.create(name, type="queue", dead_letter=f"{name}.dead", lease_ms=60_000)
    return name


def stats(shell: Shell, queue: str) -> tuple[int, int, int]:
    (row,) = shell.ok("queue", "stats", queue)
    assert row["queue"] == queue
    return row["ready"], row["in_flight"], row["delayed"]


def test_a_job_is_put_claimed_extended_and_acked(shell: Shell, queue: str) -> None:
    (put,) = shell.ok("put", queue, '{"n": 1}', "two", "--key", "k", "--tag", "t")
    assert put == {"queue": queue, "jobs": 2, "first_seq": 1, "last_seq": 2}
    peeked = shell.ok("peek", queue, "-n", "5")
    assert [row["data"] for row in peeked] == [{"n": 1}, {"$text": "two"}]
    (job,) = shell.ok("claim", queue, "--lease", "1h")
    assert (job["seq"], job["key"], job["tag"], job["deliveries"], job["data"]) == (1, "k", "t", 1, {"n": 1})
    assert stats(shell, queue) == (1, 1, 0)
    assert shell.ok("extend", queue, job["job"], "--lease", "2h") == [
        {"queue": queue, "extended": 1, "not_held": []}
    ]
    assert shell.ok("ack", queue, job["job"]) == [{"queue": queue, "acked": 1, "not_held": []}]
    assert stats(shell, queue) == (1, 0, 0)


def test_a_job_with_a_dedup_id_is_put_once(shell: Shell, queue: str) -> None:
    """A second put with the same dedup id reports `deduped` (W10)."""
    for deduped in (False, True):
        (put,) = shell.ok("put", queue, "x", "--dedup-id", "1", "--dedup-window", "1m")
        assert put == {"queue": queue, "jobs": 1, "first_seq": 1, "last_seq": 1, "deduped": deduped}
    assert stats(shell, queue) == (1, 0, 0)
    assert shell.run("put", queue, "x", "y", "--dedup-id", "1").returncode == CliExit.USAGE


def test_a_nacked_job_is_delivered_again(shell: Shell, queue: str) -> None:
    shell.ok("put", queue, "x")
    (first,) = shell.ok("claim", queue)
    shell.ok("nack", queue, str(first["seq"]), "--reason", "busy")
    (again,) = shell.ok("claim", queue)
    assert again["deliveries"] == 2
    (held,) = shell.ok("queue", "pending", queue)
    assert (held["seq"], held["state"], held["node"], held["reason"]) == (1, "leased", "by-hand", "busy")
    # The first lease has ended, so it settles nothing.
    done = shell.run("ack", queue, first["job"])
    assert (done.returncode, b'"not_held":[1]' in done.stdout) == (CliExit.FAILED, True)
    shell.ok("nack", queue, again["job"], "--delay", "1h")
    assert stats(shell, queue) == (0, 0, 1)
    assert shell.ok("claim", queue) == []


def test_a_job_belongs_to_the_node_that_claimed_it(shell: Shell, queue: str) -> None:
    shell.ok("put", queue, "x")
    shell.ok("claim", queue, "--node", "ann")
    assert shell.run("ack", queue, "1").returncode == CliExit.FAILED
    shell.ok("ack", queue, "1", "--node", "ann")


def test_standard_input_is_one_job_or_one_job_per_line(shell: Shell, queue: str) -> None:
    shell.ok("put", queue, stdin=b"a\nb\n")
    (put,) = shell.ok("put", queue, "--lines", stdin=b"".join(b"%d\n\n" % n for n in range(12_000)))
    assert put["jobs"] == 12_000
    done = shell.run("claim", queue, "-n", "3", "--output", "raw")
    assert done.stdout == b"a\nb\n\n0\n1\n"


def test_payload_and_key_of_a_job_are_any_bytes(shell: Shell, queue: str, client: Client) -> None:
    shell.ok("put", queue, "\udcff", "--key", "k\udcfe")
    (job,) = client.queue(queue).claim()
    assert (job.data, job.record.key) == (b"\xff", b"k\xfe")


def test_a_put_that_fails_behind_added_jobs_says_how_many(shell: Shell, queue: str) -> None:
    too_long = b"x" * (RECORD_BYTES_MAX + 1)
    said = shell.fails(CliExit.FAILED, "put", queue, "--lines", stdin=b"job\n" * 10_000 + too_long)
    assert "line=10001" in said
    assert "acknowledged=10000" in said
    assert stats(shell, queue)[0] == 10_000


def test_a_claim_with_wait_blocks_until_a_job_arrives(shell: Shell, queue: str, client: Client) -> None:
    waiting = shell.start("claim", queue, "--wait", "30s")
    wait_until(lambda: client.queue(queue).stats().waiting == 1, timeout=20, what="a claim to wait")
    client.queue(queue).put(b"x")
    out, err = waiting.communicate(timeout=30)
    assert (waiting.returncode, b'"seq":1' in out) == (0, True), err


def test_dead_letters_are_listed_shown_and_purged(shell: Shell, queue: str, client: Client) -> None:
    assert shell.ok("dead-letter", "list", queue) == []
    shell.ok("put", queue, "bad", "worse", "good")
    shell.ok("claim", queue, "-n", "2")
    shell.ok("reject", queue, "1", "2", "--reason", "no address")
    wait_until(lambda: client.queue(queue).stats().dead_lettered == 2, timeout=20, what="both were moved")
    rows = shell.ok("dead-letter", "list", queue)
    assert [(row["seq"], row["src_seq"], row["deliveries"], row["reason"]) for row in rows] == [
        (1, 1, 1, "no address"), (2, 2, 1, "no address"),
    ]  # fmt: skip
    assert len(shell.ok("dead-letter", "list", queue, "--limit", "1")) == 1
    (shown,) = shell.ok("dead-letter", "show", queue, "2")
    assert shown["data"] == {"$text": "worse"}
    assert "no such dead letter" in shell.fails(CliExit.FAILED, "dead-letter", "show", queue, "3")
    assert shell.ok("dead-letter", "purge", queue, "--yes")[0]["deleted"] == 2
    assert shell.ok("dead-letter", "list", queue) == []
    assert stats(shell, queue) == (1, 0, 0)


def test_redrive_moves_dead_letters_back_to_their_queue(shell: Shell, queue: str, client: Client) -> None:
    shell.ok("put", queue, "a", "b", "c")
    shell.ok("claim", queue, "-n", "3")
    shell.ok("reject", queue, "1", "2", "3")
    wait_until(lambda: client.queue(queue).stats().dead_lettered == 3, timeout=20, what="all were moved")
    (report,) = shell.ok("dead-letter", "redrive", queue, "2")
    assert (report["queue"], report["moved"]) == (queue, 1)
    assert [row["src_seq"] for row in shell.ok("dead-letter", "list", queue)] == [1, 3]
    assert shell.ok("dead-letter", "redrive", queue, "--limit", "1")[0]["moved"] == 1
    assert shell.ok("dead-letter", "redrive", queue)[0]["moved"] == 1
    assert sorted(job["data"]["$text"] for job in shell.ok("claim", queue, "-n", "9")) == ["a", "b", "c"]


def test_purge_refuses_a_dead_letter_topic_with_other_records(
    shell: Shell, queue: str, client: Client
) -> None:
    client.append(f"{queue}.dead", b"somebody else's")
    shell.ok("put", queue, "bad")
    shell.ok("claim", queue)
    shell.ok("reject", queue, "1")
    wait_until(lambda: client.queue(queue).stats().dead_lettered == 1, timeout=20, what="it was moved")
    assert len(shell.ok("dead-letter", "list", queue)) == 1
    assert "other records than these" in shell.fails(CliExit.FAILED, "dead-letter", "purge", queue, "-y")
    assert client.topics.state(f"{queue}.dead").count == 2


def test_a_purge_deletes_ready_and_leased_jobs(shell: Shell, queue: str) -> None:
    shell.ok("put", queue, "a", "b", "c")
    shell.ok("claim", queue)
    assert shell.ok("queue", "purge", queue, "--yes")[0]["deleted"] == 3
    assert stats(shell, queue) == (0, 0, 0)


def test_queue_stats_lists_only_queues(shell: Shell, queue: str, client: Client) -> None:
    client.topics.create(f"{queue}.log")
    names = [row["queue"] for row in shell.ok("queue", "stats")]
    assert queue in names
    assert f"{queue}.log" not in names


def test_invalid_queue_commands_are_refused(shell: Shell, queue: str, client: Client) -> None:
    client.topics.create(f"{queue}.log")
    shell.fails(CliExit.FAILED, "claim", f"{queue}.log")
    shell.fails(CliExit.NOT_FOUND, "claim", f"{queue}.absent")
    shell.fails(CliExit.FAILED, "dead-letter", "list", f"{queue}.log")
    shell.fails(CliExit.USAGE, "claim", queue, "-n", "0")
    shell.fails(CliExit.USAGE, "ack", queue)
    shell.fails(CliExit.USAGE, "ack", queue, "first")
    shell.fails(CliExit.USAGE, "put", queue, "x", "--lines")
    shell.fails(CliExit.USAGE, "peek", queue, "-n", "0")
    client.topics.create(f"{queue}.plain", type="queue")
    assert "no dead-letter topic is" in shell.fails(CliExit.FAILED, "dead-letter", "list", f"{queue}.plain")


@pytest.mark.parametrize(
    "text",
    ["", "0", "-1", "x", "1:", "1:7", "1:lease_", "1:lease_xyz", "1:lease_" + "f" * 17, str(1 << 63),
     str(1 << 64), "9" * 5_000, "\udcff", "1:lease_-1", "1_0"],
)  # fmt: skip
def test_an_invalid_job_name_is_refused(text: str) -> None:
    with pytest.raises(UsageError):
        parse_job(text)


def test_parse_job_accepts_a_seq_with_or_without_a_lease() -> None:
    assert parse_job("7") == (7, 0)
    assert parse_job("7:lease_00000a0000000001") == (7, 0xA0000000001)
    assert parse_job(f"{(1 << 63) - 1}:lease_{'f' * 16}") == ((1 << 63) - 1, (1 << 64) - 1)


def test_a_claim_in_seq_order_ignores_the_priority(shell: Shell, queue: str, client: Client) -> None:
    """`--order` accepts only the documented values."""
    client.topics.configure(queue, record_priority=True)
    shell.ok("put", queue, "plain")
    shell.ok("put", queue, "urgent", "--priority", "2")
    (first,) = shell.ok("claim", queue, "--order", "seq", "--lease", "1h")
    assert first["job"].startswith("1:")
    assert shell.run("claim", queue, "--order", "size").returncode == 2
