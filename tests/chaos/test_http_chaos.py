"""The class `http`: its judges report each broken guarantee, and a hostile row passes."""

from __future__ import annotations

import random
from typing import Any

import pytest

from chaos import http
from chaos.http.hostile import rows_of
from chaos.http.storm import Job, Storm
from chaos.order import Account, Order

LOG, QUEUE = "t.log-0", "t.queue-0"


class NoEngine:
    """What a storm asks of an engine before it begins."""

    http_url = "http://127.0.0.1:1"


def a_storm() -> Storm:
    story = Storm(NoEngine(), random.Random(1), "t", 1.0)  # type: ignore[arg-type]
    story.acked[LOG] = {1: [0, 0, 0], 2: [0, 0, 1]}
    story.acked[QUEUE] = {1: [2, 0, 0]}
    return story


@pytest.mark.parametrize(
    ("stored", "says"),
    [
        ({1: [0, 0, 0], 2: [0, 0, 1], 3: [9, 9, 9]}, ""),
        ({1: [0, 0, 0]}, "an acked write is lost"),
        ({1: [0, 0, 1], 2: [0, 0, 0]}, "an acked write is lost"),
        ({1: [0, 0, 0], 2: [0, 0, 1], 3: [0, 0, 1]}, "a write is there twice"),
    ],
)
def test_an_acked_write_is_there_once_with_its_seq(stored: dict[int, Any], says: str) -> None:
    assert_found(a_storm(), lambda story: story.judge_log(LOG, stored), says)


@pytest.mark.parametrize(
    ("jobs", "says"),
    [
        ({1: Job({(2, 0, 0)}, acked=1)}, ""),
        ({1: Job({(2, 0, 0)}, unsure=1)}, ""),
        ({}, "was never claimed"),
        ({1: Job({(2, 0, 0)})}, "was never acked"),
        ({1: Job({(2, 0, 0)}, acked=2)}, "is acked 2 times"),
        ({1: Job({(2, 0, 0)}, acked=1), 2: Job({(2, 0, 0)}, acked=1)}, "a write is there twice"),
        ({1: Job({(2, 0, 1)}, acked=1)}, "acked as"),
    ],
)
def test_a_job_is_acked_once(jobs: dict[int, Job], says: str) -> None:
    story = a_storm()
    story.jobs[QUEUE] = jobs
    assert_found(story, lambda story: story.judge_queue(QUEUE, True), says)


@pytest.mark.parametrize(
    ("rows", "says"),
    [
        ([(1, [0, 0, 0]), (2, [0, 0, 1])], ""),
        ([(1, [0, 0, 0]), (1, [0, 0, 0]), (2, [0, 0, 1])], ""),
        ([(2, [0, 0, 1])], "missed records"),
        ([(1, [0, 0, 0])], "ended at 1 of 2"),
        ([(1, [0, 0, 0]), (2, [7, 7, 7])], "saw [7, 7, 7] at 2"),
    ],
)
def test_a_watcher_sees_every_record(rows: list[tuple[int, Any]], says: str) -> None:
    assert_found(a_storm(), lambda story: story.judge_watch(LOG, rows, True), says)


def assert_found(story: Storm, judge: Any, says: str) -> None:
    judge(story)
    assert bool(story.found) == bool(says), story.found
    assert all(says in what for what in story.found), story.found


def test_rows_are_selected_by_name() -> None:
    assert list(rows_of(["json", "gzip"], idle=1)) == ["json", "gzip"]
    assert len(rows_of([], idle=1)) == 13


@pytest.mark.slow
@pytest.mark.timeout(120)
def test_short_storms_and_two_rows_pass(account: Account, tmp_path: Any) -> None:
    http.run(Order("http", 1, 1, tmp_path, {"storm_s": 1.0, "rows": ["framing", "json"]}), account)
    assert account.findings == []
    assert account.faults == {"RF-125": 2, "RF-126": 2}
    assert account.counts["writes"] > 0
    assert account.counts["watched"] > 0
