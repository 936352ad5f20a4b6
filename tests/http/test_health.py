"""Probes and metrics over HTTP."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import ringlog
import ringlog.testing
from ringlog.actors.http_gateway.admin.health import ShardHealth, as_json, as_text, not_ready_reason
from ringlog.actors.http_gateway.admin.topic_metrics import select
from ringlog.actors.http_gateway.gateway import commit_times
from ringlog.board.board import Board
from ringlog.board.layout import ProcessField, ProcessState
from ringlog.client.requests.topic_requests import TopicSummary
from ringlog.testing.real_engine import TestEngine, wait_until
from ringlog.types import Durability
from tests.support.http_metrics import samples

Call = Callable[..., Any]
WINDOW_NS = 60_000_000_000
READY = ShardHealth(ProcessState.READY)
READ_ONLY = ShardHealth(ProcessState.READY, is_read_only=True)
LOST = ShardHealth(ProcessState.GIVEN_UP, down_ns=5)


@pytest.mark.parametrize("path", ["/v0/health", "/healthz"])
def test_health(call: Call, path: str) -> None:
    found = call("GET", path)
    assert found.status == 200
    assert set(found.body) == {"status", "version", "uptime_ms"}
    assert (found.body["status"], found.body["version"]) == ("ok", ringlog.__version__)
    assert found.body["uptime_ms"] > 0
    assert call("HEAD", path).status == 200


@pytest.mark.parametrize("path", ["/v0/ready", "/readyz"])
def test_ready(call: Call, path: str) -> None:
    call("PUT", "/v0/topics/ready", {})
    found = call("GET", path)
    assert found.status == 200
    assert found.body == {
        "status": "ready", "wal_replay_complete": True, "topics": found.body["topics"], "degraded_shards": []
    }  # fmt: skip
    assert found.body["topics"] >= 1


@pytest.mark.parametrize(
    ("shards", "reason"),
    [
        ([READY], ""),
        ([READY, READ_ONLY], ""),
        ([READY, LOST], ""),
        ([READ_ONLY, READ_ONLY], "read_only"),
        ([LOST, READ_ONLY], "shards_given_up"),
        ([LOST], "shards_given_up"),
        ([ShardHealth(ProcessState.RECOVERING, down_ns=5)], "shards_down"),
        ([READY, ShardHealth(ProcessState.RECOVERING, down_ns=WINDOW_NS)], ""),
        ([READY, ShardHealth(ProcessState.RECOVERING, down_ns=WINDOW_NS + 1)], "shard_down_too_long"),
    ],
)
def test_one_shard_that_serves_is_enough(shards: list[ShardHealth], reason: str) -> None:
    assert not_ready_reason(shards, WINDOW_NS) == reason


def test_metrics_as_text(call: Call) -> None:
    call("POST", "/v0/topics/counted", {"records": [{"data": 1}]})
    call("GET", "/v0/nothing")
    found = call("GET", "/v0/metrics")
    assert (found.status, found.headers["content-type"].split(";")[0]) == (200, "text/plain")
    numbers = samples(found.body)
    assert numbers["ringlog_up", ()] == 1
    assert numbers["ringlog_ready", ()] == 1
    assert numbers["ringlog_wal_records_total", ("wal_shard-00",)] >= 1
    assert numbers["ringlog_topics", ("wal_shard-00",)] >= 1
    assert numbers["ringlog_http_requests_total", ("POST /v0/topics/{}", "201")] >= 1
    assert numbers["ringlog_http_requests_total", ("-", "404")] >= 1
    assert numbers["ringlog_http_watch_sessions", ()] == 0
    assert numbers["ringlog_recovery_progress", ()] == 1


def test_metrics_as_json(call: Call) -> None:
    found = call("GET", "/v0/metrics", headers={"accept": "application/json"})
    assert found.status == 200
    assert found.body["up"] == 1
    assert found.body["uptime_ms"] > 0
    labels = [row["labels"] for row in found.body["http_requests_total"]]
    assert all(set(each) == {"route", "status"} for each in labels)


def test_topics_and_queues_have_metrics_of_their_own(call: Call) -> None:
    call("POST", "/v0/topics/measured", {"records": [{"data": 1}, {"data": 2}, {"data": 3}]})
    call("POST", "/v0/topics/measured/delete", {"before_seq": 2})
    call("PUT", "/v0/topics/measured-jobs", {"type": "queue"})
    call("POST", "/v0/topics/measured-jobs", {"records": [{"data": 1}, {"data": 2}]})
    call("POST", "/v0/topics/measured-jobs/claim", {"node": "w", "max": 1})
    found: dict[tuple[str, tuple[str, ...]], float] = {}

    def is_measured() -> bool:  # Numbers are reused for some seconds.
        found.update(samples(call("GET", "/v0/metrics").body))
        return found.get(("ringlog_topic_queue_in_flight", ("measured-jobs",))) == 1

    wait_until(is_measured, 20.0, "the metrics of the topics")
    topic = ("measured",)
    assert found["ringlog_topic_head_seq", topic] == 3
    assert found["ringlog_topic_earliest_seq", topic] == 2
    assert found["ringlog_topic_records", topic] == 2
    assert found["ringlog_topic_bytes", topic] == 2
    assert found["ringlog_topic_halted", topic] == 0
    assert found["ringlog_topic_last_write_timestamp_seconds", topic] > 1.7e9
    assert found["ringlog_topic_queue_ready", ("measured-jobs",)] == 1
    assert ("ringlog_topic_queue_ready", topic) not in found
    assert found["ringlog_topic_metrics_truncated", ()] == 0


def test_topics_that_were_written_to_last_have_metrics() -> None:
    listed = [
        TopicSummary(name, kind, 1, 0, 1, 0, 0, 0, written_us, None, {})
        for name, kind, written_us in (
            ("a", "queue", 5), ("b", "queue", 7), ("c", "log", None), ("d", "log", 6)
        )
    ]  # fmt: skip
    chosen = select(listed, topics_max=3, queues_max=1)
    assert [each.topic for each in chosen.topics] == ["a", "b", "d"]
    assert (chosen.queues, chosen.is_truncated) == (["b"], True)
    assert select(listed, topics_max=4, queues_max=2).is_truncated is False
    assert select(listed, topics_max=4, queues_max=1).is_truncated is True


def test_times_of_a_commit(tmp_path: Path) -> None:
    board = Board.create(tmp_path, 2)
    page = board.process(1)
    page.set(ProcessField.LAST_APPEND_NS, 1_500_000)
    page.set(ProcessField.LAST_SYNC_NS, 2_000_000)
    assert commit_times(page, Durability.DISK) == {"wal_append_ms": 1.5, "fsync_ms": 0.0}
    page.set(ProcessField.LAST_WAIT_NS, 3_000_000)
    found = commit_times(page, Durability.FSYNC)
    assert found == {"wal_append_ms": 1.5, "fsync_ms": 2.0, "throttle_wait_ms": 3.0}
    board.close()


def test_labels_are_escaped() -> None:
    family = ("counter", "odd", "Odd.", ("name",), [(('a"b\\c\nd',), 2.0), (("e",), 0.5)])
    text = as_text([family])
    assert samples(text) == {
        ("ringlog_odd_total", ('a"b\\c\nd',)): 2.0, ("ringlog_odd_total", ("e",)): 0.5
    }  # fmt: skip
    assert b"# TYPE ringlog_odd_total counter\n" in text
    assert as_json([family])["odd_total"][1] == {"labels": {"name": "e"}, "value": 0.5}


def test_an_engine_whose_shard_restarts_is_ready_again(http_engine: TestEngine, call: Call) -> None:
    http_engine.kill("wal_shard")
    seen: list[int] = []

    def is_ready() -> bool:
        seen.append(call("GET", "/v0/ready").status)
        return seen[-1] == 200

    wait_until(is_ready, 20.0, "the engine to be ready again")
    assert set(seen) <= {200, 503}
    assert call("GET", "/v0/health").status == 200
